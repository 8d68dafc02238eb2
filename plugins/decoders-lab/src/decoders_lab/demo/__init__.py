"""How the demo models of hf-decoders were trained: their shapes and tokenizer, batches, two legs of training, and figures."""
