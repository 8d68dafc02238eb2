"""Structural tags: free text in which grammars begin after markers, for models that think before they answer or call tools.

A text consists of phases: free text, or text that a grammar restricts. ``markers`` finds begin markers in free text, and ``phases``
determines the next phase. ``tagged`` has the compiled grammar, ``specs`` and ``calls`` (function calls) have specifications, and
``thinking`` finds the markers of models' thoughts.
"""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers

__all__ = ["After", "Calls", "Tagged", "TaggedGrammar", "Thinking", "ThinkingMarkers", "after", "tagged"]
