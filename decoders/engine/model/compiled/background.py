"""Compilation in the background: a thread compiles a function while the loop runs it uncompiled."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....common import devices
from ....common.announce import announced
from ..threads import set_threads, torchs_own
from ..torch_compat import device_waits_behind, spare_compiler_warnings, traced_by_one_thread

_log = logging.getLogger("decoders")

#: Switch interval of the interpreter during compilation, in seconds. Every operator of a decoding step releases the interpreter's lock
#: and waits for it again. With Python's default of 0.005 s, a step of 300 operators would take 1.5 s.
SWITCH_INTERVAL = 2e-5

#: Held by the thread that compiles. Dynamo and inductor keep process-wide state, so only one compilation runs at a time.
_turn = threading.Lock()

_running: set[BackgroundCompile] = set()


class _ProcessEnds(BaseException):
    """Raised in a compiling thread when the interpreter shuts down."""


class BackgroundCompile:
    """Runs `work`, which compiles something, in a daemon thread.

    After a failure, :meth:`poll` gives one warning in the thread that calls it. A process that ends does not wait for a running
    compilation. If :func:`threads_may_compile` is False, `work` runs in the calling thread.

    Attributes:
        name: name of the compiled code, for the warning.
        seconds: duration of the compilation, without the wait for other compilations.
        ready: whether the compilation has succeeded.
        failed: whether the compilation has failed.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.seconds = name, 0.0
        self.ready = self.failed = False
        self._work = work
        self._error: BaseException | None = None
        self._modes = torch.is_inference_mode_enabled(), torchs_own()
        # The work uses the caller's tensors, so it runs on the caller's stream: the tensors are then used and freed in the right order.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._over = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"compile {name}", daemon=True)
        _running.add(self)
        if threads_may_compile():
            try:
                self._thread.start()
            except BaseException:  # for example, the system has too many threads
                _running.discard(self)
                raise
        else:
            threads = torch.get_num_threads()
            with announced(f"compiling {name}, which this call waits for"):
                self._run()
            set_threads(threads)

    def poll(self) -> bool:
        """Whether the compiled code can be used from now on. Call this method between two steps."""
        if self.failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} could not be compiled, decoding goes on uncompiled: {self._error}", stacklevel=2
            )
        return self.ready

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the compilation has ended, at most `timeout` seconds; returns the result of :meth:`poll`."""
        with announced(f"compiling {self.name}, which this call waits for"):
            self._over.wait(timeout)
        return self.poll()

    def _run(self) -> None:
        inference, threads = self._modes
        # Graphs have guards on inference mode, and are compiled for a number of threads. A new thread has torch's defaults for both.
        torch.set_num_threads(threads)
        started = time.perf_counter()
        try:
            with (
                compiling() as started,
                torch.cuda.stream(self._stream),
                torch.inference_mode(inference),
                torch.no_grad(),
            ):
                self._work()
            self.ready = True
        except BaseException as error:
            self._error, self.failed = error, True
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise  # Ctrl-C while the calling thread compiles
        finally:
            self.seconds = time.perf_counter() - started
            if self.ready:
                _log.info("compiled %s in %.1f s, for the calls that begin from now on", self.name, self.seconds)
            _running.discard(self)
            self._over.set()


@functools.cache
def threads_may_compile() -> bool:
    """Whether background threads may compile: not with torch built for CUDA on a machine without a GPU.

    On such a machine, tracing replaces CUDA's device guard. With torch 2.11 the process then crashes when another thread traces, or
    calls its first ``backward``; a few lines of torch reproduce the crash. torch 2.13 built for the CPU is not affected.
    """
    return not torch.backends.cuda.is_built() or torch.cuda.is_available()


@contextmanager
def compiling() -> Iterator[float]:
    """Waits for this thread's turn to compile, and yields the start time. Within this context, Python switches threads often."""
    spare_compiler_warnings()
    with _turn:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, SWITCH_INTERVAL))
        try:
            with traced_by_one_thread(), device_waits_behind(devices.RECORDING):
                yield time.perf_counter()
        finally:
            sys.setswitchinterval(usual)


def worth_compiling(spent: float, expected: float) -> bool:
    """Whether uncompiled steps have taken as long as compiling will take. With this rule, short processes never compile.

    spent: seconds of uncompiled steps so far; expected: seconds that compiling will take.
    """
    return spent >= expected


@atexit.register
def _end_threads() -> None:
    """Stops compiling threads before the interpreter ends, because ending a thread within a torch operator would abort the process."""
    threads = [compile._thread for compile in list(_running) if compile._thread.is_alive()]
    for thread in threads:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_ProcessEnds))
    if threads:
        threads[0].join(0.5)
        # Without freeze, the interpreter would collect unfinished graphs for a second or two. With Triton (from 3.9 on) freeze is left
        # out, because Triton prints all objects that were not freed.
        if "triton" not in sys.modules:
            gc.freeze()
