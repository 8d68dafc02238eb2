"""The function calls that an answer may contain: the answer's grammar, and parsing the calls in its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .call_formats import CallFormat, ParsedAnswer
from .calls import Called, CallSpec
from .schemas.kinds import Kinds
from .specs import Spec
from .tags import Calls


@dataclass(frozen=True)
class FunctionCalls:
    """The function calls that an answer may contain; created by :meth:`of`. Can be pickled, for processes that compile grammars.

    Attributes:
        functions: the functions that may be called.
        format: how the model writes calls.
        required: whether the answer must be a call; otherwise it may be text.
        several: whether the answer may contain more than one call.
    """

    functions: tuple[Called, ...]
    format: CallFormat
    required: bool
    several: bool

    @staticmethod
    def of(
        functions: Iterable[tuple[str, dict[str, Any] | None, bool | None]], format: CallFormat, *, required: bool = False,
        several: bool = True,
    ) -> FunctionCalls:  # fmt: skip
        """Describes the function calls that an answer may contain.

        Args:
            functions: for each function its name, the JSON schema of its parameters (None: no parameters), and `strict` as in
                :class:`~decoders.constraints.calls.Called`.
            format, required, several: see the attributes.
        """
        return FunctionCalls(tuple(Called.of(*each) for each in functions), format, required, several)

    def spec(self, text: Spec | None = None) -> Spec:
        """The specification of the answer, for ``grammar=``.

        Args:
            text: the specification of an answer that is not a call; None: free text. Ignored if the answer must be a call (`required`).
        """
        several = self.several and self.format.between is not None
        if self.required or (self.format.trigger and text is None):
            return Calls(self.functions, self.format, self.required, several)
        return CallSpec(self.functions, self.format, alone=False, several=several, text=text)

    def read(self, text: str, ended: bool = True, known: dict[int, Any] | None = None) -> ParsedAnswer:
        """Parses a growing answer: the text in front of the calls, and the calls.

        Args:
            ended: whether the answer is complete. Otherwise text that may become a call is held back.
            known: a dict, empty at first. All reads of one answer share it, so that no text is parsed twice.
        """
        written = self.format.read(text, self._kinds, ended, known)
        return written if self.several else replace(written, calls=written.calls[:1])

    @cached_property
    def _kinds(self) -> dict[str, Kinds]:
        return {each.name: each.kinds for each in self.functions}
