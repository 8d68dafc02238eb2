"""Structural tags: free text with grammars in it, each from a begin marker on, as models think before they answer and call tools.

A text is in one of a few phases: free text, or text of a grammar. ``markers`` finds begin markers in free text, ``phases`` goes from
one phase to the next, ``grammar`` is the compiled form, ``specs`` are the specifications, ``calls`` calls of functions, ``thinking``
knows how models mark their thoughts.
"""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers, begun, known_markers

__all__ = [
    "After",
    "Calls",
    "Tagged",
    "TaggedGrammar",
    "Thinking",
    "ThinkingMarkers",
    "after",
    "begun",
    "known_markers",
    "tagged",
]
