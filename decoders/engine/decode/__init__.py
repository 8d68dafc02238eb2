"""Decoding: requests, batches and their steps. It imports the sibling package ``model``, never the other way round."""
