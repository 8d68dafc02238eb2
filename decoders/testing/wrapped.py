"""A strategy around another one, for tests that want to see or to change what passes between it and the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..settings import Configured
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy


class Wrapped(Strategy):
    """Is to the loop what `inner` is: all that it says of itself is the same but for `rests`, and every hook is passed on."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.settings = inner, inner.settings
        said = (*Configured.__annotations__, *Strategy.__annotations__)
        vars(self).update({name: getattr(inner, name) for name in said})
        self.rests = False  # it is there to be asked in every step, whatever steps cost on this machine

    def settings_in_force(self) -> dict[str, Any]:
        return self.inner.settings_in_force()

    @property
    def observes(self) -> bool:
        return self.inner.observes

    @property
    def reads_prompt(self) -> bool:
        return self.inner.reads_prompt

    @property
    def reads_layers(self) -> bool:
        return self.inner.reads_layers

    def layers_of(self, count: int) -> tuple[int, ...]:
        return self.inner.layers_of(count)

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        return self.inner.layers_for(config, count)

    @property
    def rebatches(self) -> bool:
        return self.inner.rebatches

    def keeps_rows(self, state: Any) -> bool:
        return self.inner.keeps_rows(state)

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        return self.inner.rebatch(state, rows, context)

    def start(self, context: Context) -> Any:
        return self.inner.start(context)

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        self.inner.prefill(state, chunk)

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return self.inner.propose(state, sequences)

    def observe(self, state: Any, step: Step) -> None:
        self.inner.observe(state, step)

    @property
    def limits(self) -> bool:
        return self.inner.limits

    def limit(self, state: Any, tokens: int) -> None:
        self.inner.limit(state, tokens)

    def details(self, state: Any) -> Mapping[str, Any]:
        return self.inner.details(state)

    def finish(self, state: Any) -> None:
        self.inner.finish(state)
