"""The shared loop: propose, forward, verify, commit, observe. Start reading at ``loop.py`` and ``core.py``.

What is here is a step and what it works on: rows, slots, blocks, masks, verification. How it is compiled and recorded, what becomes of
the weights, who drafts, how requests become rows, and where they stand in their grammars are packages of their own.
"""
