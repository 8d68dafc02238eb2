"""Structural tags: free text in which grammars begin after markers, for models that think before they answer or call tools."""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers

__all__ = ["After", "Calls", "Tagged", "TaggedGrammar", "Thinking", "ThinkingMarkers", "after", "tagged"]
