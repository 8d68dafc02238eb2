"""Checks that the chunk size of prefill does not change drafts, that no state leaks from call to call, and that `finish` is called."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..enabling import forget
from ..strategy import Strategy
from . import memory
from .conditions import Conditions, run, run_alike
from .exactness import assert_same_tokens, prompts
from .models import VOCAB
from .spy import Spy, SpyLog, spied

#: Seeds of prompts that this process has not decoded before, so that no strategy remembers the prompts.
_seeds = itertools.count(10_000)


def check_calls_share_no_state(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A repeated call drafts the same tokens in the same steps, whatever was decoded in between.

    The repeated call changes no value in the strategy's classes and modules. The drafts of a `timed` strategy, which depend on the
    clock, may differ. The prompts are new in this process, so no strategy remembers them from earlier checks.
    """
    name = conditions.models[0]
    inputs, others = prompts(2, seed=next(_seeds)), prompts(3, length=31, vocab=VOCAB, seed=next(_seeds))
    options: dict[str, Any] = dict(decoders_config={"compile": conditions.compile, "reuse": False})
    spy = spied(strategy)

    def call(model: PreTrainedModel, text: Any) -> tuple[Any, list[SpyLog]]:
        out = run(model, name, spy, text, conditions, **options)
        return out, spy.seen

    with conditions.enabled(name) as model:
        first, drafted = call(model, inputs)
        call(model, others)
        before = memory.of_code(strategy)
        again, drafted_again = call(model, inputs)
        changed = memory.difference(before, memory.of_code(strategy))
        assert_same_tokens(model, inputs, first.sequences, again.sequences, "the second of two equal calls")
    reason = f" ({changed})" if changed else ", or a hook reads tokens beyond a row's length"
    for number, (old, new) in enumerate(zip(drafted, drafted_again, strict=False) if not strategy.timed else ()):
        assert _drafts(old) == _drafts(new), (
            f"the first of two equal calls drafts {_drafts(old)} in step {number + 1}, the second {_drafts(new)}: state leaks "
            f"from call to call{reason}"
        )
    same = again.report.steps == first.report.steps and again.report.accepted == first.report.accepted
    assert same or strategy.timed, (
        f"the first of two equal calls took {first.report.steps} steps, the second {again.report.steps}: state leaks from call to call"
    )
    assert changed is None, (
        f"a second call changed values that outlive calls: {changed}; state leaks from call to call: keep it in "
        "the state that start returns"
    )


def _drafts(seen: SpyLog) -> list[list[int]]:
    """The draft tokens of each unfinished row in a logged step."""
    return [tokens for tokens, ended in zip(seen.draft.tokens.tolist(), seen.finished, strict=True) if not ended]


class _Stop(Exception):
    """Raised by a streamer to end its call."""


class _Interrupted:
    """A streamer that raises at its third `put`. The first `put` is for the prompt."""

    def __init__(self) -> None:
        self.puts = 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts > 2:
            raise _Stop

    def end(self) -> None: ...


def check_prompt_chunks(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A strategy that reads prompts drafts the same tokens with every chunk size of prefill, even after prompts of a single token."""
    if not strategy.reads_prompt:
        return
    name = conditions.models[0]
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        for rows, length in ((1, 24), (3, 24), (1, 1)):
            inputs = prompts(rows, max(length, 3))
            if length == 1:
                inputs = {key: value[:, -1:] for key, value in inputs.items()}
            drafts: list[Any] = []
            for chunk in (5, 512):
                spy, what = spied(strategy), f"prompts read {chunk} tokens at once"
                loop = {"compile": False, "prefill_chunk": chunk}
                run_alike(model, name, spy, inputs, eager, what, max_new_tokens=12, decoders_config=loop)
                drafts.append([seen.draft.tokens.tolist() for seen in spy.seen] if isinstance(spy, Spy) else None)
            assert drafts[0] == drafts[1] or strategy.timed, (
                f"drafts {drafts[0]} if prompts are read in chunks of 5 tokens, and {drafts[1]} if they are read whole: prefill must "
                "not depend on where a chunk ends"
            )


def check_finish(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """`finish` is called once per call, even if the call fails, and does not raise an error."""
    if type(strategy).finish is Strategy.finish:
        return
    name, inputs = conditions.models[0], prompts(1)
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        spy = Spy(strategy)
        run(model, name, spy, inputs, eager, max_new_tokens=6)
        assert spy.finished == 1, f"finish came {spy.finished} times in one call"
        try:
            run(model, name, spy, inputs, eager, max_new_tokens=12, streamer=_Interrupted())
        except _Stop as error:
            notes = [note for note in getattr(error, "__notes__", []) if "finish of" in note]
            assert not notes, f"after a call that has failed: {notes[0]}"
        assert spy.finished == 2, f"finish came {spy.finished - 1} times in a call that has failed"


def check_memory(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """The tokens stay the same if the strategy remembers what it learned in earlier calls."""
    name, loop = conditions.models[0], {"compile": False, "memory": True}
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        forget(model)
        for seed in (0, 1, 0):
            inputs = prompts(2, seed=seed)
            what = "with the memory of earlier calls"
            run_alike(model, name, strategy, inputs, eager, what, max_new_tokens=16, decoders_config=loop)
        forget(model)
