"""What is replayed where the host is needed between steps, and what is compiled beside decoding and then recorded anew."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import decoders
from decoders.common import devices, host_reads
from decoders.costs import StepCosts, node_budget
from decoders.engine.decode import core
from decoders.engine.decode.batch import Batch
from decoders.engine.decode.calibration import REPEATS_IN_CALL
from decoders.engine.decode.grammar.device_guide import DeviceGuide
from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.engine.decode.proposer import Proposer
from decoders.engine.decode.sessions import KEPT_SESSIONS
from decoders.engine.model import blocks, ranks
from decoders.engine.model.compiled import background, functions, tiers
from decoders.engine.model.compiled.background import BackgroundCompile
from decoders.engine.model.recordings import PLAIN_RUNS, WARM_UP_STEPS, Recordings
from decoders.engine.model.target import Target
from decoders.hf import wrapper
from decoders.report import Report, surroundings
from decoders.strategies import PromptLookup, Staged, Threshold
from decoders.strategies.merged import Merged
from decoders.strategy import Draft, Sequences, Step, Strategy
from decoders.testing import decode, prompts, tape, tiny_model
from decoders.testing.tape import host_read
from decoders.tree import Topology

from ...tape_recorder import TapeRecorder
from ..pretended_cuda import OnDevice, moved, pretended_cuda


class OnHost(Strategy):
    """A third party's that does not promise ``on_device``; keeps every step that it is shown."""

    name = "on_host"
    summary = "Two draft tokens, always the same."

    def start(self, context: Any) -> list[Step]:
        return []

    def propose(self, state: list[Step], sequences: Sequences) -> Draft:
        return Draft.chain(torch.full((len(sequences.length), 2), 5))

    def observe(self, state: list[Step], step: Step) -> None:
        state.append(step)


class Alone(OnHost):
    observes = False


@pytest.fixture
def target(device: TapeRecorder) -> PreTrainedModel:
    return decoders.enable(tiny_model("llama"))


@functools.cache
def plain(rows: int, new: int) -> torch.Tensor:
    return tiny_model("llama").generate(**prompts(rows), max_new_tokens=new, do_sample=False, pad_token_id=0)


def run(target: PreTrainedModel, strategy: Any, rows: int = 1, new: int = 10, **options: Any) -> Report:
    """A greedy call, whose tokens are plain decoding's."""
    out = decode(target, prompts(rows), strategy, max_new_tokens=new, **options)
    assert torch.equal(out.sequences, plain(rows, new))
    return out.report


def ready_at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on passes and draws are worth compiling, and whoever begins waits; gives the names of what was begun."""
    begun: list[str] = []

    class AtOnce(BackgroundCompile):
        def __init__(self, name: str, work: Callable[[], object]) -> None:
            begun.append(name)
            super().__init__(name, work)
            self._over.wait()

    monkeypatch.setattr(tiers, "worth_compiling", lambda spent, expected: True)
    for module in (tiers, functions):
        monkeypatch.setattr(module, "BackgroundCompile", AtOnce)
    return begun


def test_the_steps_of_a_strategy_on_the_host_are_replays(target: PreTrainedModel, device: TapeRecorder) -> None:
    first, second = (run(target, Alone(), rows) for rows in (3, 3))
    assert first.replayed_steps == first.steps - PLAIN_RUNS and second.replayed_steps == second.steps
    recorded = device.recorded
    run(target, OnHost(), 3)
    assert device.recorded == recorded  # by any strategy whose blocks are of that size


@pytest.mark.parametrize("strategy", ["prompt_lookup+suffix", "auto", Threshold()], ids=str)
def test_what_needs_the_host_is_replayed(target: PreTrainedModel, device: TapeRecorder, strategy: Any) -> None:
    given: dict[str, Any] = dict(decoders_config={"memory": False})
    if not isinstance(strategy, str):
        given["assistant_model"] = tiny_model("llama", 1)
    run(target, strategy, 2, 16, **given)
    report = run(target, strategy, 2, 16, **given)
    assert report.replayed_steps > report.steps // 2


class Listing(OnHost):
    """A third party's, which works with lists."""

    observes = False

    def propose(self, state: list[Step], sequences: Sequences) -> Draft:
        last = [tokens[-1:] for tokens in sequences.read().tokens_from(0)]
        return Draft.listed([row * 3 for row in last], [[-1, 0, 1, 0]] * len(last), 2)


class Costs(TorchFunctionMode):
    """What the steps of a call make the host do: reads of tensors in the loop's hooks, and copies by where they go."""

    def __init__(self, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        pinned, copy, here = device.pinned, device.copy, set()

        def noted(like: torch.Tensor) -> torch.Tensor:
            buffer = pinned(like)
            here.add(buffer.data_ptr())
            return buffer

        def copied(target: torch.Tensor, source: torch.Tensor) -> None:
            self.counts["to the host" if target.data_ptr() in here else "into the recording"] += 1
            copy(target, source)

        def moved(*given: Any) -> list[torch.Tensor]:
            self.counts["to the device"] += 1
            return devices.moved_together(*given)

        def read(draft: Draft) -> Any:
            assert draft.on_host  # where nothing waits
            with torch._C.DisableTorchFunction():
                return plain_read(draft)

        plain_read = Draft.read
        monkeypatch.setattr(Draft, "read", read)
        monkeypatch.setattr(device, "pinned", noted)
        monkeypatch.setattr(device, "copy", copied)
        monkeypatch.setattr(blocks, "moved_together", moved)
        for owner, hook in ((Proposer, "propose"), (Batch, "mask"), (Batch, "settle"), (Proposer, "observe")):
            monkeypatch.setattr(owner, hook, self._watched(getattr(owner, hook)))

    def _watched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with self:
                return hook(*args)

        return watched

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts["reads in hooks"] += host_read(func, args, kwargs or {}) is not None
        return func(*args, **(kwargs or {}))


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "strategy, copies",
    # A draft that is merged on the device is not one buffer.
    [("suffix", 1), ("auto", 1), (Listing(), 1), ("prompt_lookup+suffix", 5)],
    ids=lambda given: getattr(given, "name", given),
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_a_strategy_on_the_host_is_one_launch_one_copy_each_way_and_one_wait(
    target: PreTrainedModel,
    device: TapeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    copies: int,
    rows: int,
) -> None:
    given: dict[str, Any] = dict(decoders_config={"memory": False})
    if strategy == "auto":
        given["strategy_config"] = {"candidates": ["suffix"]}
        # Auto sizes its drafts by time. On a busy machine it would come to a size first in the last call, which is then recorded.
        ticks = itertools.count(step=1e-3)
        monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        monkeypatch.setattr(surroundings, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    costs = Costs(device, monkeypatch)
    for _ in range(2):
        run(target, strategy, rows, 24, **given)
    costs.counts.clear()
    replayed, waited = device.replayed, device.waited
    report = run(target, strategy, rows, 24, **given)
    steps, counts = report.steps, costs.counts
    assert report.replayed_steps >= steps - 1 > 5 and device.replayed - replayed <= steps + 1  # and the prompt's end
    assert device.waited - waited == counts["to the host"] == steps
    assert counts["to the device"] <= steps and counts["into the recording"] <= copies * steps
    assert counts["reads in hooks"] <= rows  # the prompts, once


@pytest.mark.parametrize("strategy", ["autoregressive", Listing()], ids=["plain", "trees"])
@pytest.mark.parametrize("backend", ["llguidance", "table"])
def test_guides_are_shown_drafts_where_they_walk_them(
    device: TapeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    byte_tokenizer: Callable[..., Any],
    strategy: Any,
    backend: str,
) -> None:
    """A matcher on the host reads nothing from the device, and what is walked on the device is there."""
    tokenizer = byte_tokenizer(["<pad>", "<end>"], pad_token="<pad>", eos_token="<end>")
    target = decoders.enable(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    on_device: dict[int, torch.Tensor] = {}  # kept, so that no other tensor gets their addresses
    shown: Counter[bool] = Counter()
    of = blocks.Blocks.of

    def made(self: blocks.Blocks, *given: Any) -> Any:
        tokens, tree = of(self, *given)
        on_device.update({tensor.data_ptr(): tensor for tensor in (tokens, tree.parents)})
        return tokens, tree

    def block(guided: Callable[..., Any], self: Any, tokens: torch.Tensor, shape: Any, *given: Any) -> Any:
        tensors = [tokens] if isinstance(shape, Topology) else [tokens, shape.parents]
        shown.update(tensor.data_ptr() in on_device for tensor in tensors)
        return guided(self, tokens, shape, *given)

    monkeypatch.setattr(blocks.Blocks, "of", made)
    for guide in (HostGuide, DeviceGuide):
        monkeypatch.setattr(guide, "block", functools.partialmethod(functools.partial(block, guide.block)))
    grammar = decoders.regex("[a-c]{9}", backend=backend)
    call: dict[str, Any] = dict(max_new_tokens=12, grammar=grammar, eos_token_id=1)
    out = [decode(target, prompts(2), name, **call).sequences for name in (strategy, "autoregressive")]
    assert torch.equal(*out) and set(shown) == {backend == "table"}


@pytest.mark.parametrize(
    "strategy, backend",
    [("suffix", None), ("auto", None), ("autoregressive", "llguidance"), ("prompt_lookup+suffix", "table")],
)
def test_what_is_on_the_host_is_there_whatever_the_default_device_is(
    device: TapeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    byte_tokenizer: Callable[..., Any],
    strategy: str,
    backend: Any,
) -> None:
    """As after ``torch.set_default_device("cuda")`` with a model on CUDA; what no device is named for has no data here."""
    tokenizer = byte_tokenizer(["<pad>", "<end>"], pad_token="<pad>", eos_token="<end>")
    target = decoders.enable(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    call: dict[str, Any] = dict(max_new_tokens=12, eos_token_id=1, decoders_config={"memory": False})
    if backend is not None:
        call["grammar"] = decoders.regex("[a-c]{9}", backend=backend)
    expected = decode(target, prompts(2), "autoregressive", **call).sequences
    loop = wrapper.decode

    def elsewhere(*given: Any) -> Any:
        with torch.device("meta"):
            return loop(*given)

    monkeypatch.setattr(wrapper, "decode", elsewhere)
    assert all(torch.equal(decode(target, prompts(2), strategy, **call).sequences, expected) for _ in range(2))


@pytest.mark.parametrize("hook", ["propose", "observe"])
def test_steps_that_read_lists_are_not_recorded(target: PreTrainedModel, hook: str) -> None:
    """They would be the lists of the one step that is recorded."""
    read: list[Any] = []

    class Reads(OnHost):
        on_device = True

        def propose(self, state: list[Step], sequences: Sequences) -> Draft:
            if hook == "propose":
                read.append(sequences.read())
            return Draft.chain(sequences.last.expand(-1, 2))

        def observe(self, state: list[Step], step: Step) -> None:
            if hook == "observe":
                read.append(step.read())

    with pytest.warns(UserWarning, match="could not be captured"):
        report = run(target, Reads(), 2, 16)
    assert len(read) == report.steps  # in each of them


@pytest.mark.parametrize("strategy", ["autoregressive", Alone()], ids=["steps", "parts"])
def test_what_failed_to_be_recorded_once_is_recorded_a_little_later_and_reported(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    record, failed = device.record, [0]

    def short_of_memory(body: Any) -> Any:
        failed[0] += 1
        if failed[0] == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(body)

    run(target, "autoregressive", new=1)  # reads the prompt
    monkeypatch.setattr(device, "record", short_of_memory)
    with pytest.warns(UserWarning, match="not permitted"):
        report = run(target, strategy, new=24)
    assert failed[0] > 1 and report.unrecorded == "operation not permitted when stream is capturing"
    assert report.steps > report.replayed_steps >= report.steps - WARM_UP_STEPS - 4
    assert "unrecorded" in str(report)
    again = run(target, strategy, new=24)
    assert again.unrecorded == "" and again.replayed_steps == again.steps


class Counting(OnHost):
    """Counts its steps on the device, and shows the count at the end."""

    on_device = True
    counted: ClassVar[list[int]] = [0]

    def __init__(self, token: int = 5) -> None:
        super().__init__()
        self.token = token

    def start(self, context: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(1, dtype=torch.int64)

    def propose(self, state: torch.Tensor, sequences: Sequences) -> Draft:  # type: ignore[override]
        return Draft.chain(torch.full_like(sequences.last, self.token).expand(-1, 2))

    def observe(self, state: torch.Tensor, step: Step) -> None:  # type: ignore[override]
        state.add_(1)

    def finish(self, state: torch.Tensor) -> None:  # type: ignore[override]
        self.counted[0] = int(state)


@pytest.mark.parametrize("earlier", [0, 1], ids=["recorded by this call", "recorded by an earlier call"])
def test_after_an_error_of_a_callback_the_call_has_the_state_and_the_counts_of_its_replays(
    target: PreTrainedModel, earlier: int
) -> None:
    class Breaks(BaseStreamer):
        left = 7

        def put(self, value: torch.Tensor) -> None:
            self.left -= 1
            if not self.left:
                raise ConnectionError("the client is gone")

        def end(self) -> None: ...

    strategy = Counting()
    for _ in range(2 * earlier):
        run(target, strategy, new=24)
    with pytest.raises(ConnectionError) as caught:
        run(target, strategy, new=24, streamer=Breaks())
    report = caught.value.partial.report  # type: ignore[attr-defined]
    assert report.steps > WARM_UP_STEPS and report.replayed_steps == report.steps - (not earlier) * WARM_UP_STEPS
    assert strategy.counted[0] - report.steps in (0, 1)  # another one may be under way
    assert run(target, strategy, new=24).replayed_steps


def test_passes_of_a_recording_that_was_broken_off_are_not_counted(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(after_the_body: bool) -> tuple[int, int]:
        def broken_off(body: Any) -> Any:
            if after_the_body:
                record(body)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(device, "record", broken_off)
            with pytest.raises(KeyboardInterrupt) as caught:
                run(target, "speculative", new=24, assistant_model=tiny_model("llama", 1))
        report = caught.value.partial.report  # type: ignore[attr-defined]
        return report.steps, report.stages[0].passes

    record = device.record
    run(target, "autoregressive", new=1)  # reads the prompt
    assert passes(after_the_body=True) == passes(after_the_body=False)


@pytest.mark.parametrize("merged", [False, True], ids=["attributes", "parts"])
def test_strategies_that_say_the_same_of_themselves_and_draft_otherwise_have_recordings_of_their_own(
    target: PreTrainedModel, device: TapeRecorder, merged: bool
) -> None:
    def of(token: int) -> Strategy:
        return Merged((Counting(token), PromptLookup())) if merged else Counting(token)

    text, prompt = plain(1, 24)[0], prompts(1)["input_ids"].shape[1]
    right = int(text[prompt + 12])
    assert repr(of(right)) == repr(of(99))
    drafted = {}
    for token in (99, right):
        fresh = decode(decoders.enable(tiny_model("llama")), prompts(1), of(token), max_new_tokens=24).report
        drafted[token] = fresh.accepted
        for _ in range(3):
            report = run(target, of(token), new=24)
        assert report.replayed_steps == report.steps and report.accepted == drafted[token]
    recorded = device.recorded
    assert drafted[99] != drafted[right] and run(target, of(99), new=24).replayed_steps and device.recorded == recorded


def test_keys_and_values_are_moved_where_a_path_is_not_in_its_slots(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees of one size have recordings of their own."""
    moves: list[int] = []
    move = core.move_slots
    monkeypatch.setattr(core, "move_slots", lambda *given: moves.append(0) or move(*given))
    text = plain(2, 24)[:, -24:]

    class Branches(Alone):
        """The right tokens, as a chain or as the second branch."""

        def start(self, context: Any) -> list[Step]:
            self.turn = 0
            return []

        def propose(self, state: list[Step], sequences: Sequences) -> Draft:
            self.turn += 1
            right = torch.stack(
                [row[at : at + 3] for row, at in zip(padded, (sequences.length - prompt).tolist(), strict=True)]
            )
            if self.turn % 2:
                return Draft.chain(right)
            return Draft(torch.cat([torch.full_like(right, 5), right], 1)[:, :7], Topology.branches(2, 3))

    for strategy in ("autoregressive", "prompt_lookup", Alone()):
        run(target, strategy, 2, 16)
    assert not moves
    padded, prompt = torch.nn.functional.pad(text, (0, 8), value=3), prompts(2)["attention_mask"].sum(1)
    report = run(target, Branches(), 2, 24)
    assert moves and report.accepted > 8 and report.replayed_steps


def test_lists_stay_those_of_their_step(target: PreTrainedModel) -> None:
    shown: list[tuple[Sequences, list[int], list[list[int]]]] = []

    class Later(OnHost):
        def note(self, sequences: Sequences) -> None:
            lengths, tokens = sequences.length.tolist(), sequences.tokens.tolist()
            shown.append((sequences, lengths, [text[:length] for text, length in zip(tokens, lengths, strict=True)]))

        def propose(self, state: list[Step], sequences: Sequences) -> Draft:
            self.note(sequences)
            return Draft.chain(sequences.last.expand(-1, 2))

        def observe(self, state: list[Step], step: Step) -> None:
            self.note(step.sequences)

    report = run(target, Later(), 2, 12)
    assert len(shown) == 2 * report.steps > 8
    for sequences, lengths, texts in shown:
        read = sequences.read()
        assert read.lengths == lengths
        for first in (0, min(lengths) - 1, max(lengths) + 1):
            assert read.tokens_from(first) == [text[first:] for text in texts]


def test_scores_of_a_draft_on_the_host_are_brought_to_the_device(
    device: TapeRecorder,
) -> None:
    class Scored(OnHost):
        observes = False

        def propose(self, state: list[Step], sequences: Sequences) -> Draft:
            draft = Draft.listed([[5, 6]] * len(sequences.length))
            return replace(draft, scores=torch.zeros(*draft.tokens.shape, model.config.vocab_size))

    def call() -> list[list[int]]:
        out = decode(
            model, inputs, Scored(), max_new_tokens=6, do_sample=True, top_k=0, seed=1, verifier="rejection", **own
        )
        return out.sequences.tolist()

    own: dict[str, Any] = dict(decoders_config={"compile": False, "attention": "sdpa"})
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2)
    expected = call()
    with pretended_cuda():
        model = decoders.enable(moved(tiny_model("llama")))
        inputs = {name: OnDevice(value) for name, value in inputs.items()}
        assert call() == expected


@pytest.mark.parametrize("parents", [None, [[-1, 0, 1, 0], [-1, 0, 0, -1]]], ids=["chains", "trees"])
@pytest.mark.parametrize("tokens", [[[7, 8, 9], [5, 6, -1]], [[], []]], ids=["drafted", "nothing"])
def test_a_block_is_one_buffer_on_the_device(tokens: list[list[int]], parents: Any) -> None:
    draft = Draft.listed(tokens, parents if tokens[0] else None, 2)
    here, there = (blocks.Blocks(2, torch.device(name), static=True).of(draft) for name in ("cpu", "meta"))
    tensors = [there[0], *vars(there[1]).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"} and len(here[1]) == len(there[1]) == 4
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
    plain = blocks.Blocks(2, torch.device("cpu"), static=True).of(replace(draft, on_host=False))
    assert torch.equal(here[0], plain[0])
    assert all(map(torch.equal, vars(here[1]).values(), vars(plain[1]).values()))


def test_what_a_strategy_was_shown_is_not_overwritten_by_later_steps(target: PreTrainedModel) -> None:
    shown: list[Step] = []

    class Keeps(OnHost):
        def start(self, context: Any) -> list[Step]:
            return shown

    run(target, Keeps(), 1, 12)
    text = [token for step in shown for token in step.chosen.gather(1, step.accepted[:, None])[0].tolist()]
    assert len(shown) > PLAIN_RUNS and len({step.logits.data_ptr() for step in shown}) == len(shown)
    for step in shown:  # each still holds the logits of its own choices
        assert torch.equal(step.logits.argmax(-1), step.chosen)
    assert text[-1] == plain(1, 12)[0, -1]


def test_the_passes_of_a_draft_model_are_replayed(target: PreTrainedModel, device: TapeRecorder) -> None:
    helped = dict(assistant_model=tiny_model("llama", 1))
    run(target, Threshold(), 1, 12, **helped)
    before = device.replayed
    report = run(target, Threshold(), 1, 12, **helped)
    assert device.replayed - before >= report.steps + report.stages[0].passes


@pytest.mark.parametrize(
    "options",
    [dict(logits_processor=[lambda ids, scores: scores]), dict(verifier="rejection", do_sample=True, seed=1, top_k=0)],
)
def test_where_something_decides_on_the_host_the_forward_pass_is_replayed(
    target: PreTrainedModel, device: TapeRecorder, options: dict[str, Any]
) -> None:
    outs = [decode(target, prompts(2), PromptLookup(), max_new_tokens=12, **options) for _ in range(2)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[1].report.replayed_steps == outs[1].report.steps


def test_logits_that_are_kept_are_those_of_their_steps(target: PreTrainedModel) -> None:
    given = dict(max_new_tokens=10, output_logits=True, return_dict_in_generate=True, do_sample=False)
    expected = tiny_model("llama").generate(**prompts(2), **given)
    out = decode(target, prompts(2), "autoregressive", max_new_tokens=10, output_logits=True)
    assert out.report.replayed_steps > 0
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(out.logits, expected.logits, strict=True))


def test_prompts_are_replayed_by_buckets_of_chunks(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = Target.prefill

    def noted(self: Target, tokens: torch.Tensor, *args: Any) -> None:
        read.append(tokens.shape[1])
        prefill(self, tokens, *args)

    target.generate.engine()  # which is checked
    monkeypatch.setattr(Target, "prefill", noted)
    for length in range(40, 62, 2):
        ids = torch.arange(length)[None] % 90 + length  # none begins like another
        out = target.generate(input_ids=ids, strategy="autoregressive", max_new_tokens=3, do_sample=False)
        assert torch.equal(out, tiny_model("llama").generate(input_ids=ids, max_new_tokens=3, do_sample=False))
    assert read == [64] * len(read) and len(read) <= (PLAIN_RUNS + 1) * KEPT_SESSIONS < 11


def test_nothing_is_compiled_in_the_foreground(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "worth_compiling", lambda spent, expected: True)
    compiled: list[threading.Thread] = []
    work = tiers.RegionalForward.compile
    monkeypatch.setattr(
        tiers.RegionalForward, "compile", lambda *args: compiled.append(threading.current_thread()) or work(*args)
    )
    reports = [run(target, strategy, rows) for rows in (1, 3) for strategy in ("autoregressive", "suffix")]
    for job in list(background._running):  # the calls may end before it has begun
        job.wait(60)
    assert compiled and (threading.current_thread() in compiled) != background.threads_may_compile()
    assert all(report.timings.compile == 0 for report in reports)


@pytest.mark.parametrize(
    "strategy, at",
    [("autoregressive", 1), ("autoregressive", WARM_UP_STEPS), (Alone(), 1), (Alone(), PLAIN_RUNS)],
    ids=["in a step", "in a recording", "on the host", "in a part's recording"],
)
def test_running_out_of_memory_leaves_the_model_usable(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, strategy: Any, at: int
) -> None:
    run(target, "prompt_lookup", 3)
    sessions = target.generate.engine().sessions
    assert sessions.nbytes and sessions.recorded_nbytes
    forward, passes = Target.forward, itertools.count()

    def full(self: Target, *args: Any) -> Any:
        if next(passes) >= at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args)

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a recording that failed
        patched.setattr(Target, "forward", full)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(target, strategy, 1)
    notes = " ".join(caught.value.__notes__)
    assert (
        getattr(strategy, "name", strategy) in notes
        and "MiB of recordings were dropped" in notes
        and "fewer rows" in notes
    )
    written = caught.value.partial.sequences
    assert torch.equal(written, plain(1, 10)[:, : written.shape[1]])
    assert sessions.recorded_nbytes == 0 and len(sessions._free) == 1
    for _ in range(2):
        report = run(target, strategy, 1)
    assert report.replayed_steps and report.recorded_memory == sessions.recorded_nbytes > 0


def test_what_is_never_to_be_compiled_is_recorded_all_the_same(target: PreTrainedModel) -> None:
    report = run(target, "autoregressive", decoders_config={"compile": False})
    assert (report.replayed_steps, report.compiled_steps) == (report.steps - WARM_UP_STEPS, 0)


def test_what_is_to_be_compiled_at_once_is_compiled_before_the_first_step(target: PreTrainedModel) -> None:
    report = run(target, "autoregressive", decoders_config={"compile": True})
    assert report.compiled_steps == report.steps and report.compilations >= 2  # the pass, and drawing


@pytest.mark.parametrize("strategy", ["autoregressive", "suffix"])
def test_a_tier_that_becomes_ready_is_recorded_anew_and_used_by_the_next_call(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    # Drafts are whole, whatever a step costs at the moment: trees and chains are recorded apart.
    monkeypatch.setenv("DECODERS_PRUNE", "0")
    # Sessions take turns, and suffix remembers: its later calls are too short to be recorded.
    before = [run(target, strategy) for _ in range(6)]
    assert not any(report.compiled_steps for report in before) and before[0].replayed_steps > 0
    begun, recorded = ready_at_once(monkeypatch), device.recorded
    second = run(target, strategy)
    assert begun == ["the forward pass"] and second.compiled_steps == 0 and device.recorded == recorded
    assert run(target, strategy).compiled_steps > 0
    # What it remembers makes the later calls of suffix too short to be recorded.
    assert device.recorded > recorded or strategy == "suffix"
    for _ in range(3):  # drawing is compiled as well, and sessions take turns
        run(target, strategy)
    recorded = device.recorded
    last = run(target, strategy)
    assert last.compiled_steps == last.replayed_steps == last.steps and device.recorded == recorded


def test_a_part_is_replayed_in_the_tier_in_which_it_was_recorded(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_pass, recordings, factor = target.generate.engine().forward_pass, Recordings(device), [2]
    monkeypatch.setattr(forward_pass.tiers, "tier", lambda rows, plan=None: tiers.Tier(factor[0] == 3))

    def part() -> list[float]:
        return forward_pass.replayed(
            recordings, "part", lambda x: x * factor[0], (torch.ones(1),), 1, copy=True
        ).tolist()

    assert [part() for _ in range(PLAIN_RUNS + 2)] == [[2]] * (PLAIN_RUNS + 2) and recordings.replays > 0
    factor[0] = 3
    assert part() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_ends_in_the_tier_in_which_it_began(
    device: TapeRecorder, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    target = decoders.enable(tiny_model("llama").to(dtype))
    due = iter([False] * 4)
    ready_at_once(monkeypatch)
    monkeypatch.setattr(tiers, "worth_compiling", lambda spent, expected: next(due, True))
    first, second = (decode(target, prompts(1), "autoregressive", max_new_tokens=12).report for _ in range(2))
    assert (first.compiled_steps, second.compiled_steps) == (0, second.steps)


def test_the_time_of_replays_makes_passes_worth_compiling(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    monkeypatch.setattr(tiers, "worth_compiling", lambda seconds, expected: bool(spent.append(seconds)))
    run(target, "autoregressive", 1, 20)
    with_replays = max(spent)
    begun = len(spent)
    assert run(target, "autoregressive", 1, 20).replayed_steps == 20
    assert max(spent[begun:]) > with_replays


def test_costs_are_measured_of_replays(target: PreTrainedModel, device: TapeRecorder) -> None:
    engine = target.generate.engine()
    curve = engine.calibration.measured(None, [1], [8], False)
    assert [point.nodes for point in curve.points] == [4, 8, 32, 64]
    assert device.recorded == 4 and device.replayed >= 4 * 2 * (REPEATS_IN_CALL - 1)
    flat = curve.model_copy(update={"points": tuple([p.model_copy(update={"seconds": 1.0}) for p in curve.points])})
    assert node_budget(lambda: StepCosts(flat, 1, 8), None, 8) == 128  # twice the largest block


@pytest.mark.slow
def test_a_draft_model_reports_what_it_did_in_its_own_call(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(model: PreTrainedModel, first: int) -> Any:
        ids = torch.arange(first, first + 9)[None]
        given = dict(
            max_new_tokens=16, do_sample=False, assistant_model=tiny_model("llama", 1), return_dict_in_generate=True
        )
        stage = model.generate(input_ids=ids, strategy=Staged(), **given).report.stages[0]
        return stage.passes, stage.tokens, stage.drafted, stage.accepted, stage.accepted_lengths

    replayed = [figures(target, first) for first in (3, 40, 70, 3)]
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: False)
    fresh = [figures(decoders.enable(tiny_model("llama")), first) for first in (3, 40, 70, 3)]
    assert [tokens for _, tokens, *_ in replayed] == [tokens for _, tokens, *_ in fresh]


def test_parts_that_cannot_be_recorded_run_as_they_are(device: TapeRecorder) -> None:
    recordings, x = Recordings(device), torch.zeros(2)

    def waits(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    for _ in range(PLAIN_RUNS):
        recordings.run(lambda: "key", waits, (x,))
    with pytest.warns(UserWarning, match="could not be captured") as said:
        assert recordings.run(lambda: "key", waits, (x + 1,)).tolist() == [3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recordings.run(lambda: "key", waits, (x + 2,)).tolist() == [6, 6]
    assert len(said) == 1 and recordings.replays == 0


def test_a_tier_that_changes_while_it_is_recorded_is_not_kept(device: TapeRecorder) -> None:
    recordings, x, tier = Recordings(device), torch.ones(2), [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        tier[0] += len(recordings) == 0 and recordings._runs.total() > PLAIN_RUNS and recordings.recorded == 0
        return x * 2

    for _ in range(PLAIN_RUNS + 1):
        assert recordings.run(lambda: tier[0], function, (x,)).tolist() == [2, 2]
    assert tier == [1] and recordings.recorded == 1 and len(recordings) == recordings.replays == 0


def test_the_arguments_of_a_replay_are_copied_in_and_nothing_else_is_written_to(device: TapeRecorder) -> None:
    recordings = Recordings(device)
    first, outputs = torch.ones(2), []
    for _ in range(PLAIN_RUNS + 1):
        outputs.append(recordings.run(lambda: "double", lambda x: x * 2, (first,)))
    assert recordings.run(lambda: "double", lambda x: x * 2, (torch.full((2,), 5.0),)).tolist() == [10, 10]
    assert first.tolist() == [1, 1] and outputs[-1].tolist() == [10, 10]  # whoever keeps it copies it
    assert recordings.run(lambda: "double", lambda x: x * 2, (torch.ones(3),)).tolist() == [2, 2, 2]
    assert recordings.recorded == 1 and recordings.replays == 2


@pytest.mark.parametrize(
    "strategy",
    ["prompt_lookup", pytest.param("suffix", marks=pytest.mark.slow), Threshold()],
    ids=["device", "host", "draft"],
)
def test_a_scheduler_replays_steps_and_prompts(target: PreTrainedModel, device: TapeRecorder, strategy: Any) -> None:
    model, steps = tiny_model("llama"), 0
    given: dict[str, Any] = dict(max_new_tokens=9, do_sample=False, decoders_config={"memory": False})
    if isinstance(strategy, Threshold):
        given["assistant_model"] = tiny_model("llama", 1)
    with decoders.Scheduler(target, strategy=strategy, rows=3, slots=256) as scheduler:
        for turn in range(3):
            texts = [torch.arange(3 + 7 * row)[None] % 60 + row + turn + 1 for row in range(5)]
            generations = [scheduler.submit(text[0].tolist(), **given) for text in texts]
            for text, generation in zip(texts, generations, strict=True):
                expected = model.generate(input_ids=text, max_new_tokens=9, do_sample=False)
                assert torch.equal(generation.result(60), expected)
                steps += generation.report.replayed_steps  # type: ignore[union-attr]
    assert steps > 15 and device.replayed > 3 * device.recorded


def test_a_scheduler_that_runs_out_of_memory_frees_what_no_request_uses(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(target, "prompt_lookup", 3)
    sessions, forward, full = target.generate.engine().sessions, Target.forward, threading.Event()

    def limited(self: Target, *args: Any) -> Any:
        if full.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args)

    monkeypatch.setattr(Target, "forward", limited)
    given: dict[str, Any] = dict(max_new_tokens=9, do_sample=False)
    with decoders.Scheduler(target, rows=2, slots=64) as scheduler:
        expected = scheduler.submit([5, 6, 7], **given).result(60)
        scheduler.submit([5, 6, 7], strategy="prompt_lookup", **given).result(60)
        assert sessions.nbytes and sessions.recorded_nbytes
        full.set()
        generations = [scheduler.submit([5, 6, 7], **given) for _ in range(2)]
        for generation in generations:
            with pytest.raises(torch.OutOfMemoryError) as caught:
                generation.result(60)
            assert any("MiB of recordings were dropped" in note for note in caught.value.__notes__)
        assert sessions.recorded_nbytes == 0 and not scheduler._lanes.used
        full.clear()
        assert torch.equal(scheduler.submit([5, 6, 7], **given).result(60), expected)


def test_a_replay_may_overwrite_what_later_recordings_hold(
    target: PreTrainedModel, device: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs share a pool: what one needs in between may lie where a later one's results are."""
    recorded: weakref.WeakSet[Any] = weakref.WeakSet()
    begin, replay, overwritten, numbers = tape.Tape.__init__, tape.Tape.replay, 0, itertools.count()

    def noted(own: Any) -> None:
        begin(own)
        recorded.add(own)
        own.number = next(numbers)

    def replayed(own: Any) -> None:
        nonlocal overwritten
        replay(own)
        with torch.inference_mode():
            for other in [other for other in recorded if other.number > own.number]:
                for result in [each for *_, results in other._operations for _, each in results]:
                    result.fill_(77)
                    overwritten += 1

    monkeypatch.setattr(tape.Tape, "__init__", noted)
    monkeypatch.setattr(tape.Tape, "replay", replayed)
    for _ in range(2):
        run(target, "auto", 2, 16, decoders_config={"memory": False})
        run(target, Threshold(), 2, 16, assistant_model=tiny_model("llama", 1))
    assert overwritten
