"""llguidance (Microsoft, Rust): an Earley parser over a lexer of regular expressions, for any context-free grammar.

It compiles in about a millisecond and computes masks on demand, on the host. This package adapts llguidance to the contract of a
backend: it tracks the end of a text, because llguidance stops by itself and then counts tokens differently; and a limit that is hit
within a text raises an error, where llguidance would end the text.
"""

from .backend import LLGuidance, LLGuidanceGrammar

__all__ = ["LLGuidance", "LLGuidanceGrammar"]
