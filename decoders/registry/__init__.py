"""Who provides what under which name, and what a user's word for it stands for. Its face is ``decoders.plugins``."""
