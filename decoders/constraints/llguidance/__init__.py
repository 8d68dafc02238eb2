"""llguidance (Microsoft, Rust): an Earley parser over a lexer of regular expressions. Recursion, any context-free grammar.

It compiles in about a millisecond and computes masks on demand, on the host. This package adapts it to the contract: a text's end is
tracked here, because llguidance stops by itself and then counts tokens differently; and a limit that is hit in the middle of a text
does not end the text.
"""

from .backend import LLGuidance, LLGuidanceGrammar

__all__ = ["LLGuidance", "LLGuidanceGrammar"]
