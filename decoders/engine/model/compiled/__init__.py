"""How passes and functions are compiled: beside decoding, by region and size, in tiers."""
