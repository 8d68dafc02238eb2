"""Steps recorded once and replayed with one launch."""
