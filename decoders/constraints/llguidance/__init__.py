"""llguidance (Microsoft, Rust): an Earley parser over a lexer of regular expressions, for any context-free grammar.

It compiles in about a millisecond and computes masks on demand, on the host. This package tracks the end of a text, because
llguidance stops by itself and then counts tokens differently, and raises an error where llguidance would end a text because it has
hit a limit.
"""

from .backend import LLGuidance, LLGuidanceGrammar

__all__ = ["LLGuidance", "LLGuidanceGrammar"]
