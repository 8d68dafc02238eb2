"""A strategy around another one, for tests that want to see or to change what passes between it and the loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy


class Wrapped(Strategy):
    """Is to the loop what `inner` is: the same name, settings and needs. Every hook is passed on."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.settings = inner, inner.settings
        self.name, self.exact, self.on_device = inner.name, inner.exact, inner.on_device
        self.needs_assistant, self.needs_grammar = inner.needs_assistant, inner.needs_grammar
        self.timed, self.rows_apart = inner.timed, inner.rows_apart
        self.hidden_layers, self.prompt_logits = inner.hidden_layers, inner.prompt_logits

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

    def finish(self, state: Any) -> None:
        self.inner.finish(state)
