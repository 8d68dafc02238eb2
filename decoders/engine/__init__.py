"""The shared loop: propose, forward, verify, commit, observe. Start reading at ``decode/step.py``."""
