"""Compiling beside decoding: a thread makes the graph while the loop goes on with the uncompiled function."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..threads import set_threads, torchs_own
from ..torch_compat import traced_by_one_thread

#: Seconds for which a thread may hold the interpreter's lock while something compiles (Python's default is 0.005).
#: Every operator of a decoding step gives the lock up and waits for it again: a step of 300 operators would take 1.5 s.
SWITCH_INTERVAL = 2e-5

#: Dynamo and inductor keep process-wide state: one compilation at a time.
_turn = threading.Lock()

_running: weakref.WeakSet[BackgroundCompile] = weakref.WeakSet()


class _ProcessEnds(BaseException):
    """Raised in a compiling thread when the interpreter shuts down."""


class BackgroundCompile:
    """Runs `work`, which compiles something, in a daemon thread: ``ready`` when it has succeeded.

    A failure is one warning, given by :meth:`poll` in the thread that asks. Nothing waits for the thread: a process that ends
    while compiling ends at once. Where :func:`threads_may_compile` says no, the caller compiles and waits.

    Attributes:
        name: what is compiled, for the warning.
        seconds: what the compilation took, once it is over, its turn not waited for.
        ready: the graph is there.
        failed: it will never be.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.seconds = name, 0.0
        self.ready = self.failed = False
        self._work = work
        self._error: BaseException | None = None
        self._modes = torch.is_inference_mode_enabled(), torchs_own()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self._over = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"compile {name}", daemon=True)
        _running.add(self)
        if threads_may_compile():
            self._thread.start()
        else:
            threads = torch.get_num_threads()
            self._run()
            set_threads(threads)

    def poll(self) -> bool:
        """Whether the graph can be used from now on; to be asked between two steps."""
        if self.failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} could not be compiled, decoding goes on uncompiled: {self._error}", stacklevel=2
            )
        return self.ready

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, or `timeout` seconds; as :meth:`poll`."""
        self._over.wait(timeout)
        return self.poll()

    def _run(self) -> None:
        inference, threads = self._modes
        # Graphs are guarded by the mode, and made for as many threads as there may be; a new thread starts with defaults.
        torch.set_num_threads(threads)
        started = time.perf_counter()
        try:
            with (
                compiling() as started,
                torch.cuda.device(self._device),
                torch.inference_mode(inference),
                torch.no_grad(),
            ):
                self._work()
            self.ready = True
        except BaseException as error:
            self._error, self.failed = error, True
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise  # Ctrl-C, where the caller compiles
        finally:
            self.seconds = time.perf_counter() - started
            _running.discard(self)
            self._over.set()


@functools.cache
def threads_may_compile() -> bool:
    """Whether a thread beside the caller's may compile: not with torch built for CUDA where there is no GPU.

    Tracing there puts a device guard in CUDA's place. With torch 2.11 (2.13 for the CPU is sound) the process then crashes when
    another thread traces, or calls its first ``backward``: lines of torch alone show it.
    """
    return not torch.backends.cuda.is_built() or torch.cuda.is_available()


@contextmanager
def compiling() -> Iterator[float]:
    """Waits for this thread's turn to compile, during which other threads get the interpreter more often; gives the time it began."""
    with _turn:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, SWITCH_INTERVAL))
        try:
            with traced_by_one_thread():
                yield time.perf_counter()
        finally:
            sys.setswitchinterval(usual)


def worth_compiling(spent: float, expected: float) -> bool:
    """Whether to begin compiling: once uncompiled steps have taken the seconds that compiling is expected to.

    Processes that end before have paid nothing.
    """
    return spent >= expected


@atexit.register
def _end_threads() -> None:
    """Stops compiling threads before the interpreter ends: a thread that ends in the middle of a torch operator would abort
    the process. A thread that waits for g++ is left alone."""
    threads = [compile._thread for compile in list(_running) if compile._thread.is_alive()]
    for thread in threads:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_ProcessEnds))
    if threads:
        threads[0].join(0.5)
        # Or the interpreter would walk through half-made graphs for a second or two. Triton, from 3.9 on, lists on stderr what the
        # walk has not freed.
        if "triton" not in sys.modules:
            gc.freeze()
