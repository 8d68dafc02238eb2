"""Recorded steps on a device that notes operations and runs them again: keys, reuse, late results, capacity, errors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoders.engine.decode.core import StepOutput
from decoders.engine.model import recordings as recorders
from decoders.engine.model.recordings import RecordedCapacity, Recorder, Recording, Recordings
from decoders.engine.model.static_inputs import StaticInputs, find_tensors
from decoders.testing.tape import HostReadError, RecordingError, Tape
from decoders.tree import Topology

from ...tape_recorder import TapeRecorder


@dataclass
class Counter:
    """A state: what is written next, and how far each row may go."""

    next: Tensor
    limit: Tensor
    settings: tuple[int, ...] = (1,)


class Toy:
    """The tensors of a session, and a step that appends `state.next` to them until a row is full."""

    def __init__(self, rows: int = 2, slots: int = 16) -> None:
        self.tokens = torch.zeros(rows, slots, dtype=torch.int64)
        self.length = torch.zeros(rows, dtype=torch.int64)
        self.bodies = 0

    def begin(self, *limits: int, first: int = 1) -> Counter:
        self.tokens.zero_()
        self.length.zero_()
        return Counter(torch.full((len(limits), 1), first), torch.tensor(limits))

    def step(self, state: Counter) -> StepOutput:
        self.bodies += 1
        going = self.length < state.limit
        new = torch.where(going[:, None], state.next, -1)
        self.tokens.scatter_(1, self.length[:, None].clamp(max=self.tokens.shape[1] - 1), new)
        self.length.add_(going.long())
        state.next.add_(1)
        summary = torch.stack([going.long(), 0 * self.length, 0 * self.length, (self.length >= state.limit).long()])
        return StepOutput(new, new, new, new, summary, new, None, new)


def run(step: Recording) -> list[list[int]]:
    """All new tokens of every row, as the loop would read them."""
    texts: list[list[int]] = []
    for summary, new in step.steps():
        texts = texts or [[] for _ in new]
        for text, emitted, token in zip(texts, summary[0], new, strict=True):
            text += token[:emitted]
        if all(summary[3]):
            break
    return texts


FITS = RecordedCapacity(2, 0, 16)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_is_recorded_once_and_replayed_by_later_calls(late: bool) -> None:
    toy, recorder = Toy(), TapeRecorder(late)
    recordings = Recordings(recorder)
    state = toy.begin(3, 5)
    assert recordings.reuse("key", FITS, state) is None
    first = recordings.record("key", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    assert toy.length.tolist() == [0, 0] and state.next.tolist() == [[1], [1]]  # recording changed nothing
    assert run(first) == [[1, 2, 3], [1, 2, 3, 4, 5]]
    recorder.settle()
    for limits, begin in (((2, 4), 7), ((6, 1), 40)):
        again = recordings.reuse("key", FITS, toy.begin(*limits, first=begin))
        assert again is first
        assert run(again) == [list(range(begin, begin + limit)) for limit in limits]
        recorder.settle()
    assert toy.bodies == recorder.recorded == recordings.recorded == 1 and recordings.reused == 2


def test_results_are_read_one_step_late_and_never_before_they_have_arrived() -> None:
    toy, recorder = Toy(), TapeRecorder(late=True)
    state = toy.begin(4, 4)
    step = Recordings(recorder).record("key", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    for count, (_summary, new) in enumerate(itertools.islice(step.steps(), 4), start=1):
        assert new == [[count], [count]]
        assert recorder.replayed == count + 1 and recorder.waited == count  # the next one is under way
        assert toy.length.tolist() == [count, count]  # and has not begun: the device is slow


def test_the_step_under_way_when_all_rows_have_ended_changes_nothing() -> None:
    toy, recorder = Toy(), TapeRecorder(late=True)
    state = toy.begin(2, 3)
    step = Recordings(recorder).record("key", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    assert run(step) == [[1, 2], [1, 2, 3]]
    before = toy.length.clone()
    recorder.settle()
    assert recorder.replayed == step.replays == 4 and torch.equal(toy.length, before)


def test_steps_that_are_called_off_leave_nothing_under_way() -> None:
    toy, recorder = Toy(), TapeRecorder(late=True)
    state = toy.begin(9, 9)
    step = Recordings(recorder).record("key", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    several, one = iter([True, True, True, False]), iter([True, False])
    assert [new for _, new in step.steps(lambda: next(several))] == [[[1], [1]], [[2], [2]], [[3], [3]]]
    assert recorder.replayed == 3 and toy.length.tolist() == [3, 3]
    assert [new for _, new in step.steps(lambda: next(one))] == [[[4], [4]]]


def test_a_call_that_reaches_further_is_recorded_anew() -> None:
    recorder = TapeRecorder()
    recordings = Recordings(recorder)
    small, large = Toy(slots=16), Toy(slots=64)
    state = small.begin(1, 1)
    first = recordings.record("key", RecordedCapacity(2, 4, 16), state, lambda: small.step(state))
    for needed in (RecordedCapacity(2, 4, 17), RecordedCapacity(2, 5, 16), RecordedCapacity(1, 4, 16)):
        assert recordings.reuse("key", needed, small.begin(1, 1)) is None
    state = large.begin(40, 20)
    second = recordings.record("key", RecordedCapacity(2, 8, 64), state, lambda: large.step(state))
    assert second is not first and len(recordings) == 1 and recorder.recorded == 2
    assert [len(text) for text in run(second)] == [40, 20]
    assert recordings.reuse("key", RecordedCapacity(2, 5, 17), large.begin(1, 1)) is second


def test_a_state_of_another_shape_or_with_other_settings_is_recorded_anew() -> None:
    toy, recordings = Toy(), Recordings(TapeRecorder())
    state = toy.begin(2, 2)
    recordings.record("key", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    assert recordings.reuse("key", FITS, replace(toy.begin(2, 2), settings=(2,))) is None
    assert recordings.reuse("key", FITS, replace(toy.begin(2, 2), next=torch.ones(2, 2))) is None
    assert recordings.reuse("key", FITS, toy.begin(2, 2)) is not None


def test_the_least_recently_used_recording_goes_first() -> None:
    toy, recordings = Toy(), Recordings(TapeRecorder(), most=2)
    for key in "ab":
        state = toy.begin(1, 1)
        recordings.record(key, RecordedCapacity(2, 1, 16), state, lambda state=state: toy.step(state))
    assert recordings.reuse("a", FITS, toy.begin(1, 1)) is not None
    state = toy.begin(1, 1)
    recordings.record("c", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state))
    kept = [key for key in "abc" if recordings.reuse(key, FITS, toy.begin(1, 1)) is not None]
    assert kept == ["a", "c"] and len(recordings) == 2
    recordings.clear()
    assert len(recordings) == 0


def test_recordings_go_where_their_results_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, x = Recordings(TapeRecorder()), torch.ones(100)
    for key in "abc":
        recordings.record(key, None, x, lambda: x * 2)
    assert len(recordings) == 3 and recordings.nbytes == 3 * 2 * x.nbytes
    monkeypatch.setattr(recorders, "MOST_BYTES", 5 * x.nbytes)
    recordings.record("d", None, x, lambda: x * 2)
    assert len(recordings) == 2
    monkeypatch.setattr(recorders, "MOST_BYTES", 0)
    assert recordings.record("e", None, x, lambda: x * 2) is not None and len(recordings) == 1


def test_a_step_that_cannot_be_recorded_is_warned_of_once_and_not_tried_again_at_once() -> None:
    toy, recorder = Toy(), TapeRecorder()
    recordings = Recordings(recorder)

    def waits() -> StepOutput:
        out = toy.step(state)
        if int(out.summary[0, 0]) > 0:
            out.new.add_(1)
        return out

    state = toy.begin(3, 3)
    with pytest.warns(UserWarning, match="could not be captured.*__int__.* waits for the device") as said:
        assert recordings.record("key", RecordedCapacity(2, 1, 16), state, waits) is None
    assert len(said) == 1 and toy.length.tolist() == [0, 0] and state.next.tolist() == [[1], [1]]
    assert waits().new.tolist() == [[2], [2]]  # steps one by one go on where they were
    tried = toy.bodies
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recordings.record("key", RecordedCapacity(2, 1, 16), state, waits) is None
        assert toy.bodies == tried
        assert recordings.record("other", RecordedCapacity(2, 1, 16), state, waits) is None
    assert recordings.record("good", RecordedCapacity(2, 1, 16), state, lambda: toy.step(state)) is not None


def test_the_warning_names_the_first_of_several_errors() -> None:
    class Failing(TapeRecorder):
        def record(self, body: Any) -> Any:
            try:
                return super().record(body)
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    def body() -> StepOutput:
        raise ValueError("what was wrong")

    with pytest.warns(UserWarning, match="what was wrong"):
        assert Recordings(Failing()).record("key", FITS, None, body) is None


def test_a_tape_replays_writes_reads_and_views_but_no_python() -> None:
    place, total, turn = torch.zeros(3), torch.zeros(()), itertools.count()

    def body() -> Tensor:
        place[1:].add_(place[:2].sum() + next(turn))
        total.copy_(place.view(3, 1).sum())
        return (total * 2).clone()

    tape = Tape()
    with tape:
        out = body()
    place.copy_(torch.tensor([1.0, 0.0, 0.0]))
    tape.replay()
    assert place.tolist() == [1, 1, 1] and out.item() == 6
    tape.replay()
    assert place.tolist() == [1, 3, 3] and out.item() == 14 and next(turn) == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: x.nonzero(),
        lambda x: list(range(3))[x.sum().long()], lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x.tolist(),
        lambda x: torch.equal(x, x), lambda x: x.numpy(),
    ],
)  # fmt: skip
def test_a_tape_refuses_what_a_cuda_graph_cannot_hold(body: Any) -> None:
    with pytest.raises((RecordingError, HostReadError)):
        TapeRecorder().record(lambda: body(torch.ones(2)))


def test_a_tape_does_not_hold_the_memory_that_it_reads() -> None:
    tape, x = Tape(), torch.ones(2)
    with tape:
        y = (x + 1)[:1] * 2
    x.add_(1)
    tape.replay()
    assert y.item() == 6
    del x
    with pytest.raises(RecordingError, match="memory that was freed"):
        tape.replay()


def test_what_a_state_holds_is_found_and_overwritten() -> None:
    module = nn.Linear(2, 2)

    def state(value: float) -> dict[str, Any]:
        base = torch.full((4,), value)
        return {
            "list": [base, (torch.tensor([value]),)], "view": base[1:3], "repeated": torch.tensor([value]).expand(5),
            "counter": Counter(torch.full((1, 1), int(value)), torch.tensor([3])), "module": module, "name": "x",
        }  # fmt: skip

    own, other = state(1.0), state(2.0)
    inputs = StaticInputs(own)
    addresses = {path: tensor.data_ptr() for path, tensor in inputs.tensors.items()}
    assert inputs.load(other)
    tensors, _ = find_tensors(own)
    assert {path: tensor.data_ptr() for path, tensor in tensors.items()} == addresses
    assert all(torch.equal(tensor, find_tensors(other)[0][path]) for path, tensor in tensors.items())
    assert not any("module" in path for path in tensors)  # weights are the model's, not the call's


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1], [2]), ([1], [True]), ({"a": 1}, {"b": 1}), ((1,), [1]), (lambda: 1, lambda: 1),
        (torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2).double()), (torch.ones(1), 1.0),
        (nn.Identity(), nn.Identity()), (object(), object()), (Counter(torch.ones(1), torch.ones(1)), None),
    ],
)  # fmt: skip
def test_states_that_differ_in_more_than_values_do_not_fit(first: Any, second: Any) -> None:
    assert StaticInputs(first).load(first) and not StaticInputs([torch.zeros(1), first]).load([torch.ones(1), second])


def test_a_state_whose_weights_have_moved_does_not_fit() -> None:
    module, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    for part, moved in ((module, module.weight), ([weight], weight)):
        inputs = StaticInputs(part)
        assert inputs.load(part) and inputs.settled
        moved.data = moved.data.clone()
        assert not inputs.load(part)


def test_a_recording_keeps_tensors_that_a_cache_drops() -> None:
    tree, others = Topology.branches(2, 3), [Topology.chain(length) for length in range(100)]
    kept = weakref.ref(tree.tensors(1, torch.device("cpu")))
    step = Recordings(TapeRecorder()).record("key", FITS, [], lambda: tree.tensors(1, torch.device("cpu")).parents + 1)
    for other in others:
        other.tensors(1, torch.device("cpu"))
    gc.collect()
    assert kept() is not None
    del step
    gc.collect()
    assert kept() is None


def test_nothing_is_copied_from_a_state_that_does_not_fit() -> None:
    own = [torch.zeros(1), 1]
    assert not StaticInputs(own).load([torch.ones(1), 2]) and own[0].item() == 0


class FakeCuda:
    """``torch.cuda`` as far as recording needs it: notes the order of calls, and fails like it."""

    def __init__(self, broken: bool = False) -> None:
        self.log: list[str] = []
        self.broken, self.current_device, self.stream_set = broken, "cuda:0", "main"
        self.pools: dict[str, weakref.WeakSet[Any]] = {}
        self.CUDAGraph = type("CUDAGraph", (), {})
        self.handles = threading.local()
        self.initialized = False  # torch's allocator for CUDA, which this does not pretend

    def is_initialized(self) -> bool:
        return self.initialized

    def device(self, device: Any) -> Any:
        log = self.log

        class Guard:
            def __enter__(self) -> None:
                log.append(f"device {device}")

            def __exit__(self, *error: Any) -> None:
                log.append("device back")

        return Guard()

    def Stream(self, device: Any) -> Any:
        self.log.append(f"new stream on {device}")
        outer = self

        class Side:
            def wait_stream(self, stream: Any) -> None:
                outer.log.append(f"wait for {stream}")

        return Side()

    def graph_pool_handle(self) -> str:
        return f"pool {len(self.pools)}"

    def current_stream(self, device: Any) -> str:
        return f"current of {device}"

    def current_blas_handle(self) -> int:
        self.handles.here = 1
        return 1

    def set_stream(self, stream: Any) -> None:
        self.log.append(f"set {stream}")

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        if pool in self.pools and not self.pools[pool]:  # which still has memory in use
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pools.setdefault(pool, weakref.WeakSet())
        self.log.append(f"capture {capture_error_mode}")
        try:
            yield
        finally:
            self.log.append("end")
            if self.broken:
                raise RuntimeError("capture was invalidated")
            self.pools[pool].add(graph)


def test_cuda_records_on_the_models_device_and_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    recorder = Recorder("cuda:1")
    with recorder.active():
        kept = recorder.record(lambda: cuda.log.append("body") or "output")
        assert kept[1] == "output"
        recorder.record(lambda: cuda.log.append("body"))
    once = ["wait for current of cuda:1", "capture thread_local", "body", "end", "set current of cuda:1"]
    assert cuda.log == ["device cuda:1", "new stream on cuda:1", *once, *once, "device back"]


def test_a_thread_that_has_multiplied_nothing_yet_may_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes cuBLAS's handle at a thread's first product, which fails within a recording; earlier threads ran the step."""
    cuda, pools = FakeCuda(), []
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    recordings = Recordings(Recorder("cuda:1"))

    def body() -> Tensor:
        if not hasattr(cuda.handles, "here"):
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)")
        pools.append(threading.get_ident())
        return x

    x = torch.ones(2)
    cuda.current_blas_handle()
    for key in "abc":  # each in a thread that ends; all into one pool
        thread = threading.Thread(target=recordings.record, args=(key, None, None, body))
        thread.start()
        thread.join()
    assert len(pools) == len(recordings) == 3 and recordings.unrecorded == "" and len(cuda.pools) == 1


def test_after_a_failed_recording_cuda_goes_on_with_a_new_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(broken=True)
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    recordings = Recordings(Recorder("cuda:1"))

    def body() -> StepOutput:
        raise ValueError("reads the host")

    with pytest.warns(UserWarning, match="reads the host"):
        assert recordings.record("key", FITS, None, body) is None
    assert cuda.log[-2:] == ["set current of cuda:1", "device back"]
    recordings.record("other", FITS, None, body)
    assert cuda.log.count("new stream on cuda:1") == 2


def test_when_the_last_graph_of_a_pool_is_gone_another_pool_is_recorded_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspace lives in it on: torch begins no recording with the handle of such a pool."""
    cuda = FakeCuda()
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    recordings = Recordings(Recorder("cuda:1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for key in "ab":
                assert recordings.record(key, None, None, lambda: None) is not None
            recordings.drop("a")
            assert recordings.record("c", None, None, lambda: None) is not None  # the pool of b
            recordings.clear()
    assert len(cuda.pools) == 3 and recordings.unrecorded == ""
    assert cuda.log.count("new stream on cuda:1") == 1  # and one workspace, which torch keeps for every stream


def test_no_two_recorders_record_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives the same few streams again and again, and frees a stream's workspace with the first of its graphs."""
    cuda = FakeCuda()
    made = [cuda.Stream("cuda:1") for _ in range(3)]
    streams = itertools.cycle(made[number] for number in (0, 0, 1, 1, 0, 2))
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    monkeypatch.setattr(cuda, "Stream", lambda device: next(streams))
    used: list[Any] = []
    monkeypatch.setattr(cuda, "graph", lambda graph, stream, **_: used.append(stream) or contextlib.nullcontext())
    first, second, third = (Recorder("cuda:1") for _ in range(3))
    for recorder in (first, second, first, third):
        recorder.record(lambda: None)
    assert used[0] is used[2] and len(set(used)) == 3
    del first, recorder
    Recorder("cuda:1").record(lambda: None)
    assert used[-1] is used[0]  # whose recorder is gone


def test_the_allocator_is_told_of_a_recording_that_cuda_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, told = FakeCuda(broken=True), []
    monkeypatch.setattr(recorders.torch, "cuda", cuda)
    cuda.initialized = True
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: told.append((name, *given)), raising=False)
    with pytest.raises(RuntimeError, match="invalidated"):
        Recorder("cuda:1").record(lambda: None)
    assert told == [("_cuda_endAllocateToPool", 1, "pool 0"), ("_cuda_releasePool", 1, "pool 0")]


def test_a_recording_that_failed_is_tried_again_after_ever_more_steps() -> None:
    """What failed may have been the moment's: memory was short, another thread waited for the device."""
    recordings, tries, broken = Recordings(TapeRecorder()), [0], [True]

    def body() -> Tensor:
        tries[0] += 1
        return (x * 2).view(int(x.sum()) if broken[0] else -1)

    def tried() -> int:
        assert recordings.record("key", None, x, body) is None
        return tries[0]

    x = torch.ones(2)
    with pytest.warns(UserWarning, match="could not be captured") as said:
        counts = [tried() for _ in range(16)]
    assert counts == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4] and len(said) == 1
    assert "waits for the device" in recordings.unrecorded
    broken[0] = False
    assert [recordings.record("key", None, x, body) is not None for _ in range(15)] == [False] * 14 + [True]
