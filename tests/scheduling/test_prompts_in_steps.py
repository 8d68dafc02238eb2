"""Two rows or more are decoded in the very passes that read the prompt of the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from decoders.enabling import graphs_compiled
from decoders.engine.decode.lane import Lane
from decoders.engine.model import mixed
from decoders.engine.model.blocks import PassInput
from decoders.engine.model.compiled.forward_pass import ForwardPass
from decoders.engine.model.compiled.tiers import Tiers
from decoders.strategies import PromptLookup, Speculative, TokenRecycling

from .conftest import scheduler_of, text_of, write_alone


@pytest.fixture
def pieces(in_pieces: Callable[[int, int], Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Rows, nodes and prompt tokens of every mixed pass."""
    assert in_pieces(4, 1).engine.forward_pass.tiers._can_mix  # the check makes such a pass, once for an engine
    made: list[tuple[int, int, int]] = []
    plain = mixed.forward

    def noted(target: Any, given: Any, piece: Any) -> Any:
        made.append((*given.nodes.shape, piece.tokens.shape[1]))
        return plain(target, given, piece)

    monkeypatch.setattr(mixed, "forward", noted)
    return made


@pytest.fixture
def running(in_pieces: Callable[[int, int], Any]) -> tuple[Lane, list[Any]]:
    """A lane and two requests that it decodes."""
    calls = [in_pieces(4, 40), in_pieces(9, 40)]
    lane = Lane(calls[0].engine, calls[0].request, 3)
    members = [lane.offer(call.request) for call in calls]
    for _ in range(2):
        lane.advance(1.0)
    assert all(member.generated[0] for member in members)
    return lane, members


def test_rows_go_on_while_a_prompt_is_read(
    running: tuple[Lane, list[Any]], in_pieces: Callable[[int, int], Any], pieces: list[Any], llama: PreTrainedModel
) -> None:
    lane, members = running
    late = lane.offer(in_pieces(30, 5).request)
    before = [len(member.generated[0]) for member in members]
    for _ in range(4):
        lane.advance(1e-9)
    assert pieces == [(2, 1, 8), (2, 1, 8), (2, 1, 8), (2, 1, 5)]  # the last token is the first that is decoded
    assert [len(member.generated[0]) for member in members] == [count + 4 for count in before]
    assert not late.generated[0]
    assert late.report.timings.prefill > 0 and late.report.prefill_steps == 0
    while lane.seats:
        lane.advance(1e-9)
    lane.close()
    for member, length, new in ((members[0], 4, 40), (members[1], 9, 40), (late, 30, 5)):
        assert member.generated[0] == write_alone(llama, text_of(length, length), max_new_tokens=new)


def test_prompts_take_turns_wherever_they_are_in_the_pool(
    in_pieces: Callable[[int, int], Any], pieces: list[Any], llama: PreTrainedModel
) -> None:
    calls = [in_pieces(length, new) for length, new in ((4, 30), (9, 30), (40, 6), (33, 6))]
    lane = Lane(calls[0].engine, calls[0].request, 4)
    members = [lane.offer(call.request) for call in calls[:2]]
    lane.advance(1.0)
    members += [lane.offer(call.request) for call in calls[2:]]
    while lane.seats:
        lane.advance(1e-9)
    lane.close()
    assert [count for _, _, count in pieces] == [8, 8, 8, 8, 8, 8, 8, 8, 7]
    for member, call in zip(members, calls, strict=True):
        length = len(call.request.prompts[0])
        assert member.generated[0] == write_alone(
            llama, text_of(length, length), max_new_tokens=call.request.new_tokens
        )


def test_one_row_waits_for_prompts(in_pieces: Callable[[int, int], Any], pieces: list[Any]) -> None:
    """Alone it has nothing to gain: a pass of one row has the bits of a call of its own."""
    first, late = in_pieces(4, 12), in_pieces(30, 3)
    lane = Lane(first.engine, first.request, 3)
    lane.offer(first.request)
    lane.advance(1e-9)
    lane.offer(late.request)
    lane.advance(1e-9)
    assert not pieces
    lane.close()


def test_one_that_leaves_while_its_prompt_is_read_hurts_nobody(
    running: tuple[Lane, list[Any]], in_pieces: Callable[[int, int], Any], pieces: list[Any], llama: PreTrainedModel
) -> None:
    lane, members = running
    late = lane.offer(in_pieces(30, 5).request)
    lane.advance(1e-9)
    lane.remove(late)
    again = lane.offer(in_pieces(30, 5).request)
    while lane.seats:
        lane.advance(1e-9)
    lane.close()
    for member, length, new in ((members[0], 4, 40), (members[1], 9, 40), (again, 30, 5)):
        assert member.generated[0] == write_alone(llama, text_of(length, length), max_new_tokens=new)
    assert sum(count for _, _, count in pieces) > 29  # what was read of the first was read again, or kept


@pytest.mark.parametrize(
    ("strategy", "mixes"),
    [
        ("autoregressive", True),
        (PromptLookup(branches=2), True),
        (Speculative(length=3), True),
        (TokenRecycling(prompt_logits=True), False),
    ],
    ids=str,
)
def test_drafts_are_verified_in_such_passes_unless_the_strategy_reads_prompts(
    llama: PreTrainedModel, draft: PreTrainedModel, pieces: list[Any], strategy: Any, mixes: bool
) -> None:
    assistant = {"assistant_model": draft} if getattr(strategy, "needs_assistant", False) else {}
    prompts = [(2 * text_of(n, length), 12 + 3 * n) for n, length in enumerate((5, 17, 40, 23, 60, 9))]
    settings = {"compile": False, "prune": False}  # or it would depend on times whether there are drafts
    with scheduler_of(llama, strategy=strategy, decoders_config=settings, **assistant) as scheduler:
        generations = [scheduler.submit(ids, max_new_tokens=new) for ids, new in prompts]
        got = [g.result(280)[0, len(ids) :].tolist() for g, (ids, _) in zip(generations, prompts, strict=True)]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in prompts]
    assert bool(pieces) == mixes
    if isinstance(strategy, Speculative):
        assert any(nodes > 1 for _, nodes, _ in pieces)


def test_compiled_steps_get_a_graph_that_reads_once_prompts_have_taken_long_enough(
    running: tuple[Lane, list[Any]], in_pieces: Callable[[int, int], Any], pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Where steps are compiled, a prompt is read by passes of its own until the mixed graph is there."""
    begun: list[bool] = []
    monkeypatch.setattr(Tiers, "compiles", lambda self, several: True)
    monkeypatch.setattr(Tiers, "_begin", lambda self, kind: begun.append(kind.mixed))
    monkeypatch.setattr("decoders.engine.model.compiled.tiers.FORWARD_SECONDS", 0.0)
    lane, _ = running
    lane.offer(in_pieces(30, 5).request)
    lane.advance(1e-9)
    assert begun and not pieces
    lane.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["autoregressive", "suffix"])
def test_no_pass_is_compiled_once_the_first_step_was_made(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Whatever sizes, strides and views rows and prompts bring with them."""
    kinds: set[str] = set()
    made: list[int] = []
    plain, mixed_pass = Tiers.compile_for, ForwardPass._mixed

    def counted(self: Tiers, rows: int, report: Any) -> None:
        plain(self, rows, report)
        made.append(graphs_compiled())

    def noted(self: ForwardPass, given: PassInput, *rest: Any) -> Any:
        kinds.add("single" if given.nodes.shape[1] == 1 else "drafts")
        return mixed_pass(self, given, *rest)

    monkeypatch.setattr(Tiers, "compile_for", counted)
    monkeypatch.setattr(ForwardPass, "_mixed", noted)
    prompts = [(2 * text_of(n, length), 12 + 3 * n) for n, length in enumerate((5, 17, 40, 23, 60, 9, 30, 2, 14, 70))]
    settings = {"compile": True, "prune": False}
    with scheduler_of(llama, rows=4, strategy=strategy, decoders_config=settings) as scheduler:
        generations = [scheduler.submit(ids, max_new_tokens=new) for ids, new in prompts]
        got = [g.result(280)[0, len(ids) :].tolist() for g, (ids, _) in zip(generations, prompts, strict=True)]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in prompts]
    assert graphs_compiled() == made[0]
    assert ("drafts" in kinds) == (strategy == "suffix")
