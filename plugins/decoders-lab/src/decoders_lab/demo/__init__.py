"""The training of the demo models of hf-decoders: shapes, tokenizer, batches, two stages of training, and figures."""
