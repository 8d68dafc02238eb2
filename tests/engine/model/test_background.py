"""A compilation beside decoding: picked up when ready, survived when it fails, left behind when the process ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

import pytest
import torch

from decoders.common import devices
from decoders.engine.model import torch_compat
from decoders.engine.model.compiled import background
from decoders.engine.model.compiled.background import SWITCH_INTERVAL, BackgroundCompile, compiling, worth_compiling
from decoders.engine.model.recordings import Recorder

WAIT = 240.0

pytestmark = pytest.mark.usefixtures("in_a_thread")


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is done in a thread on every build of torch: none of these tests traces beside another thread."""
    monkeypatch.setattr("decoders.engine.model.compiled.background.threads_may_compile", lambda: True)


def test_result_is_ready_after_the_work_and_not_before():
    gate = threading.Event()
    job = BackgroundCompile("the step", lambda: gate.wait(WAIT))
    assert not job.poll()
    gate.set()
    assert job.wait(WAIT)
    assert job.poll()
    assert not job.failed


def test_failure_is_one_warning_of_the_thread_that_asks():
    def work():
        raise RuntimeError("no compiler here")

    job = BackgroundCompile("the step", work)
    with pytest.warns(UserWarning, match="the step could not be compiled.*no compiler here"):
        assert not job.wait(WAIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not job.poll()


def test_nobody_waits_for_a_whole_device_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, begun = [], threading.Event()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: waits.append("a kernel was timed"), raising=False)

    def times_a_kernel() -> None:
        begun.set()
        torch._C._cuda_synchronize()

    with compiling():
        thread = threading.Thread(target=times_a_kernel)
        with devices.RECORDING:
            thread.start()
            assert begun.wait(WAIT)
            thread.join(0.02)
            assert not waits
        thread.join(WAIT)
    torch._C._cuda_synchronize()  # as torch has it again
    assert len(waits) == 2 and devices.RECORDING.acquire(blocking=False)
    devices.RECORDING.release()


def test_who_waits_for_a_device_goes_on_where_the_recording_thread_waits_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: waits.append("a kernel was timed"), raising=False)
    with torch_compat.device_waits_behind(devices.RECORDING, seconds=0.01), devices.RECORDING:
        thread = threading.Thread(target=lambda: torch._C._cuda_synchronize())
        thread.start()
        thread.join(10)
        assert waits
    assert devices.RECORDING.acquire(blocking=False)
    devices.RECORDING.release()


def test_a_step_is_recorded_while_nobody_may_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of what CUDA has is left out; the lock is free again even where recording fails."""

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *given, **options: self

    for name in ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "set_stream", "current_blas_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: Anything())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())

    def taken() -> bool:
        free: list[bool] = []

        def look() -> None:
            free.append(devices.RECORDING.acquire(blocking=False))
            if free[0]:
                devices.RECORDING.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(WAIT)
        return free == [False]

    recorder = Recorder(torch.device("cuda"))
    assert recorder.record(taken)[1]
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: 1 / 0)
    assert devices.RECORDING.acquire(blocking=False)
    devices.RECORDING.release()


def test_a_thread_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(background._running)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="start"):
        BackgroundCompile("the step", lambda: None)
    assert background._running == before


def test_two_compilations_take_turns():
    inside, most = [], []
    gate = threading.Event()

    def work():
        inside.append(1)
        most.append(len(inside))
        gate.wait(WAIT)
        inside.pop()

    jobs = [BackgroundCompile(f"job {i}", work) for i in range(3)]
    gate.set()
    assert all(job.wait(WAIT) for job in jobs)
    assert most == [1, 1, 1]


@pytest.mark.parametrize("inference", [False, True])
def test_thread_works_in_the_modes_of_the_one_that_started_it(inference):
    seen = []
    with torch.inference_mode(inference), torch.no_grad():
        job = BackgroundCompile(
            "modes",
            lambda: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads())),
        )
    assert job.wait(WAIT)
    assert seen == [(inference, False, torch.get_num_threads())]


def test_interpreter_switches_threads_often_while_compiling_and_as_before_afterwards():
    usual, during = sys.getswitchinterval(), []
    assert BackgroundCompile("interval", lambda: during.append(sys.getswitchinterval())).wait(WAIT)
    assert during[0] == pytest.approx(SWITCH_INTERVAL)
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["time.sleep(600)", "spin()"])
def test_process_ends_while_compiling(work):
    script = f"""
import time, sys, torch
from decoders.engine.model.compiled import background
from decoders.engine.model.compiled.background import BackgroundCompile
background.threads_may_compile = lambda: True
def spin():
    while True:
        torch.ones(8) + 1
job = BackgroundCompile("the step", lambda: {work})
time.sleep(0.2)
assert not job.poll()
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=WAIT, capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr == ""


def test_compiling_begins_when_as_much_was_spent_without_it():
    assert not worth_compiling(spent=2.0, expected=10.0)
    assert worth_compiling(spent=10.0, expected=10.0)


def test_modules_that_other_threads_call_are_not_traced() -> None:
    """torch.fx takes the place of every module's call while it traces; a step that runs meanwhile must not notice."""
    inside, go_on = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(20)
        return x + 1

    job = BackgroundCompile("a trace", lambda: torch.fx.symbolic_trace(traced))
    layer = torch.nn.Linear(2, 2)
    try:
        assert inside.wait(20)
        assert layer(torch.ones(1, 2)).shape == (1, 2)
    finally:
        go_on.set()
    assert job.wait(20)


@pytest.mark.slow
def test_a_model_can_be_trained_after_another_thread_has_compiled() -> None:
    """The first backward of the process comes after the compilation; torch 2.11 built for CUDA crashes there without a GPU."""
    script = """
    import torch
    from decoders.engine.model.compiled.background import BackgroundCompile
    job = BackgroundCompile("a function", lambda: torch.compile(lambda x: (x * x).sum(), dynamic=True)(torch.ones(9)))
    assert job.wait()
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_torch_built_for_cuda_compiles_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.engine.model.compiled.background.threads_may_compile", lambda: False)
    threads: list[threading.Thread] = []
    job = BackgroundCompile("a function", lambda: threads.append(threading.current_thread()))
    assert job.ready and threads == [threading.current_thread()]


def test_ctrl_c_where_the_caller_compiles_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoders.engine.model.compiled.background.threads_may_compile", lambda: False)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BackgroundCompile("the step", interrupted)
