"""Structural tags: free text in which grammars begin after markers, for models that think before they answer or call tools.

A text is in one of a few phases: free text, or text of a grammar.
"""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers

__all__ = ["After", "Calls", "Tagged", "TaggedGrammar", "Thinking", "ThinkingMarkers", "after", "tagged"]
