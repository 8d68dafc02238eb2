"""llguidance (Microsoft, Rust): an Earley parser over a lexer of regular expressions. Recursion, any context-free grammar.

Compiles in about a millisecond and makes masks as they are asked for, on the host. What it does not do as the contract
wants is done here: a text's end is kept apart from it, since it stops on its own and then counts tokens otherwise; a
limit that is hit in the middle of a text does not end the text, as llguidance would have it.
"""

from .grammar import LLGuidance, LLGuidanceGrammar

__all__ = ["LLGuidance", "LLGuidanceGrammar"]
