"""Many requests at a time: a queue, a thread that decodes, and what a caller holds of a request."""
