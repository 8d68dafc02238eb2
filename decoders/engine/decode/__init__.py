"""The decoding room: requests, batches and their steps. In the engine it alone imports ``model``."""
