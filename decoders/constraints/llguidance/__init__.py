"""llguidance (Microsoft, Rust): an Earley parser over a lexer of regular expressions, for any context-free grammar.

llguidance compiles in about a millisecond and computes masks on demand, on the host. This package adapts it to the interface of a
backend. The package tracks the end of a text, because llguidance stops by itself and afterwards counts tokens differently. If a limit
is hit within a text, the package raises an error, while llguidance would end the text.
"""

from .backend import LLGuidance, LLGuidanceGrammar

__all__ = ["LLGuidance", "LLGuidanceGrammar"]
