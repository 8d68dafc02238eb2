"""The decoding room: who is decoded, what is proposed, verified and kept. It alone imports ``model``."""
