"""EAGLE-3 heads: the network beside the target, and the files it comes in."""
