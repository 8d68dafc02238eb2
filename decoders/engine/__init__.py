"""The shared loop: propose, forward, verify, commit, observe. Start reading at ``loop.py`` and ``core.py``."""
