"""Structural tags: free text in which grammars begin after markers, for models that think before they answer or call tools.

A text is in one of a few phases: free text, or text of a grammar. ``markers`` finds begin markers in free text, ``phases`` goes from
one phase to the next, ``tagged`` is the compiled form, ``specs`` has the specifications, ``calls`` function calls, and ``thinking``
the markers of models' thoughts.
"""

from .calls import Calls
from .specs import After, Tagged, after, tagged
from .tagged import TaggedGrammar
from .thinking import Thinking, ThinkingMarkers

__all__ = ["After", "Calls", "Tagged", "TaggedGrammar", "Thinking", "ThinkingMarkers", "after", "tagged"]
