"""What a strategy learns from prompts and from earlier calls, and that it hears of the end of every call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..generate import forget
from ..strategy import Strategy
from .conditions import Conditions, run
from .exactness import assert_same_tokens, prompts, reference
from .spy import Spy, spied


class _Stop(Exception):
    """Ends a call from outside."""


class _Interrupted:
    """A streamer that ends the call with its second text."""

    def __init__(self) -> None:
        self.puts = 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts > 2:
            raise _Stop

    def end(self) -> None: ...


def check_prompt_chunks(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """One that reads prompts drafts the same whatever the stretches are in which it gets them, and for prompts of one token, which
    it is not shown at all.
    """
    if not strategy.reads_prompt:
        return
    name = conditions.models[0]
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        for rows, length in ((1, 24), (3, 24), (1, 1)):
            inputs = prompts(rows, max(length, 3))
            if length == 1:
                inputs = {key: value[:, -1:] for key, value in inputs.items()}
            expected = reference(model, inputs, max_new_tokens=12)
            drafts: list[Any] = []
            for chunk in (5, 512):
                spy = spied(strategy)
                loop = {"compile": False, "prefill_chunk": chunk}
                out = run(model, name, spy, inputs, eager, max_new_tokens=12, decoders_config=loop)
                if strategy.exact:
                    assert_same_tokens(
                        model, inputs, expected.sequences, out.sequences, f"prompts read {chunk} tokens at once"
                    )
                drafts.append([seen.draft.tokens.tolist() for seen in spy.seen] if isinstance(spy, Spy) else None)
            assert drafts[0] == drafts[1] or strategy.timed, (
                f"drafts {drafts[0]} where prompts are read 5 tokens at once, and {drafts[1]} where they are read whole: prefill must "
                "not depend on where a stretch ends"
            )


def check_finish(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """It is told of a call's end once, of one that has failed as well, and has no error of its own then."""
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
    """What it keeps between calls changes no token."""
    name, loop = conditions.models[0], {"compile": False, "memory": True}
    eager = replace(conditions, compile=False)
    with conditions.enabled(name) as model:
        forget(model)
        for seed in (0, 1, 0):
            inputs = prompts(2, seed=seed)
            expected = reference(model, inputs, max_new_tokens=16)
            out = run(model, name, strategy, inputs, eager, max_new_tokens=16, decoders_config=loop)
            if strategy.exact:
                assert_same_tokens(
                    model, inputs, expected.sequences, out.sequences, "with what earlier calls have left"
                )
        forget(model)
