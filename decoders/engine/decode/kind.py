"""The kind of a request's steps: what the steps depend on besides tensors. Each field and setting of requests is classified here.

Recordings are looked up by kind, requests share steps if their kinds agree, and processes that share a model compare kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from ...sampling.processors import SamplingPlan
from ...strategy import Strategy
from ...verifiers.verifier import Verifier


class Use(Enum):
    """How steps depend on a field or setting of a request."""

    KIND = "steps with another value are of another kind"
    INPUT = "steps, or the prefill, read the value"
    HOST = "if it has a value, every step needs the host"
    APART = "steps do not depend on it, or it is compared elsewhere"


REQUEST = {
    "strategy": Use.KIND, "verifier": Use.KIND, "plan": Use.KIND, "rope_table": Use.KIND,
    "prompts": Use.INPUT, "new_tokens": Use.INPUT, "stopping.tokens": Use.INPUT, "sampling.values": Use.INPUT,
    "sampling.sequences": Use.INPUT, "sampling.seed": Use.INPUT, "grammars": Use.INPUT,
    "processors": Use.HOST, "stopping.criteria": Use.HOST, "returned.logits": Use.HOST, "returned.top_logprobs": Use.HOST,
    # Objects that are compared by identity, values known only at run time, and observers of a call.
    "models.model": Use.APART, "models.tokenizer": Use.APART, "models.assistant_model": Use.APART,
    "models.draft_models": Use.APART, "resolve": Use.APART, "origin": Use.APART, "padded_prompt": Use.APART,
    "stopping.pad_token": Use.APART, "returned.on_step": Use.APART, "returned.observers": Use.APART,
    "salts": Use.APART, "given": Use.APART, "multimodal": Use.APART, "begun": Use.APART,
    "runtime": Use.APART,  # RUNTIME lists the settings
}  # fmt: skip
RUNTIME = {
    "compile": Use.KIND, "prune": Use.KIND, "memory": Use.KIND, "draft_weights": Use.KIND,
    "reuse": Use.INPUT, "prefill_chunk": Use.INPUT, "slots": Use.INPUT,
    "trace": Use.HOST,
    # Settings that belong to the engine, or that were read when the request was made.
    "weights": Use.APART, "kv_cache": Use.APART, "attention": Use.APART, "exact_products": Use.APART, "strategy": Use.APART,
    "verifier": Use.APART, "cost_cache": Use.APART, "constraint_backend": Use.APART, "constraint_cache": Use.APART,
    "constraint_seconds": Use.APART,
}  # fmt: skip


@dataclass(frozen=True)
class StepKind:
    """The kind of a request's steps. It is equal in all processes that get the same request.

    Attributes:
        parts: names and values of the fields and settings with :attr:`Use.KIND`, except the plan.
        plan: the operations on logits.
        host: names of the fields and settings that need the host in every step, and "keep_scores" if the plan keeps scores.
    """

    parts: tuple[tuple[str, object], ...]
    plan: SamplingPlan
    host: tuple[str, ...]

    @property
    def shared(self) -> StepKind:
        """The part of the kind that must be equal for requests to share steps. Grammars and criteria may differ by row."""
        host = tuple(name for name in self.host if name == "processors")
        return replace(self, plan=replace(self.plan, masked=False), host=host)


def kind_of(request: Any) -> StepKind:
    parts = tuple((name, _part(value)) for name, value in _used(request, Use.KIND) if name != "plan")
    host = [name for name, value in _used(request, Use.HOST) if value is not None and value is not False]
    return StepKind(parts, request.plan, (*host, *["keep_scores"] * request.plan.keep_scores))


def inputs_of(request: Any) -> list[object]:
    """Returns the values of the fields and settings with :attr:`Use.INPUT`: each prompt's ids, then a dict of all other values.

    The dict's ``repr`` is equal in all processes that get the same request.
    """
    values = dict(_used(request, Use.INPUT)) | {"grammars": [grammar is None for grammar in request.grammars]}
    tensors = values.pop("prompts")
    return [*tensors, values]


def _used(request: Any, use: Use) -> Iterator[tuple[str, Any]]:
    for names, owner in ((REQUEST, request), (RUNTIME, request.runtime)):
        for name, own in names.items():
            if own is use:
                yield name, attrgetter(name)(owner)


def _part(value: Any) -> object:
    return ByAttributes(value) if isinstance(value, Strategy | Verifier) else value


class ByAttributes:
    """Wraps a strategy or a verifier, so that ``==`` compares all its attributes, and all attributes of the strategies inside it.

    Comparing the ``repr`` of strategies is not enough, because a ``repr`` shows only the settings.
    """

    __slots__ = ("attributes", "shown")

    def __init__(self, value: Strategy | Verifier) -> None:
        self.shown, self.attributes = (type(value), value.name, repr(value)), dict(vars(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByAttributes):
            return False
        return self.shown == other.shown and _alike(self.attributes, other.attributes)

    def __hash__(self) -> int:
        return hash(self.shown)

    def __repr__(self) -> str:
        return repr(self.shown)


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Strategy):
        return ByAttributes(one) == ByAttributes(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(own, other[name]) for name, own in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        return bool(one == other)
    except Exception:  # values whose comparison returns no single bool, such as tensors, count as different
        return False
