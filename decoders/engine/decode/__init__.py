"""Decoding: requests, batches and their steps. This package imports the sibling package ``model``, never the other way round."""
