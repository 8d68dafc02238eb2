"""Structural tags: free text in which grammars begin after markers, for models that think before they answer or call tools.

A text consists of phases: free text, and text of a grammar. ``markers`` finds begin markers in free text, ``phases`` determines the
next phase, ``tagged`` is the compiled grammar, ``specs`` and ``calls`` (function calls) are specifications, and ``thinking`` finds the
markers of models' thoughts.
"""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers

__all__ = ["After", "Calls", "Tagged", "TaggedGrammar", "Thinking", "ThinkingMarkers", "after", "tagged"]
