"""Compiling passes and functions: in the background, by region, in tiers."""
