"""Runs each task of the :mod:`.workshop` (compiling a grammar, validating a text) in a forked process. The process is killed when
nobody waits for its result any more, or when it exceeds its limits.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from ..constraints import Vocabulary, compiled, regex
from ..errors import GrammarError

#: Limits of a forked process: processor seconds in addition to its task's own limit, and MiB in addition to its memory at the start.
SPARE_SECONDS, MEGABYTES = 1, 1024
#: Added to the niceness of the workshop's processes, so that decoding has priority.
NICE = 5
#: Seconds between two calls of a :data:`Check`, while a thread waits for a result.
PATIENCE = 0.05

#: A function that raises if nobody waits for the result any more.
Check = Callable[[], None]


def exchanged(control: socket.socket, content: bytes, check: Check) -> bytes | None:
    """Sends a pickled task to the workshop and returns the pickled result; None if the forked process was killed. control: the
    server's end of the workshop's socket. check: called while waiting; an error that it raises ends the wait.
    """
    mine, theirs = Pipe()
    with mine, tempfile.TemporaryFile() as task:
        task.write(content)
        task.seek(0)
        with theirs, contextlib.suppress(OSError):  # the workshop has ended
            socket.send_fds(control, [b"."], [theirs.fileno(), task.fileno()])
        while not mine.poll(PATIENCE):
            check()
        with contextlib.suppress(EOFError, OSError):  # the fork was killed before or during its answer
            return mine.recv_bytes()
    return None


class _Pickler(pickle.Pickler):
    """Pickles values without the vocabulary, which both processes have. Exceptions are pickled as class, ``args`` and attributes,
    because their constructor may take other arguments than ``args``.
    """

    def persistent_id(self, value: Any) -> Any:
        return ("vocabulary", value.spelled) if isinstance(value, Vocabulary) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Exception):
            return _remade, (type(value), value.args, vars(value))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, vocabulary: Vocabulary) -> None:
        super().__init__(io.BytesIO(content))
        self._vocabulary = vocabulary

    def persistent_load(self, name: Any) -> Vocabulary:
        return self._vocabulary.spelling(name[1])


def _remade(kind: type[Exception], arguments: tuple[Any, ...], held: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *arguments)
    vars(error).update(held)
    return error


def pickled(value: Any) -> bytes:
    """`value`, pickled without the vocabulary."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpickled(content: bytes, vocabulary: Vocabulary) -> Any:
    """The value that :func:`pickled` converted to `content`. vocabulary: takes the place of the vocabulary that was not pickled."""
    return _Unpickler(content, vocabulary).load()


# The functions below run in the workshop's process.


def work(descriptor: int) -> None:
    """Forks a process for every task that arrives over the socket `descriptor`, until the socket is closed."""
    os.nice(NICE)
    given, backend = pickle.load(sys.stdin.buffer)
    vocabulary = Vocabulary(*given)
    for pattern in ("a", "[a-z]{5000}"):  # builds the tables that every grammar needs, once for all forks
        with contextlib.suppress(GrammarError):
            compiled(regex(pattern), vocabulary, backend)
    gc.collect()
    gc.freeze()
    running: dict[Any, Any] = {}  # the forked process of each task, by the connection for its result (the client)
    with socket.socket(fileno=descriptor) as control:
        while True:
            ends: dict[Any, Any] = {process.sentinel: client for client, process in running.items()}
            for ready in wait([control, *running, *ends]):
                if ready is control:
                    word, descriptors, *_ = socket.recv_fds(control, 1, 2)
                    if not word:
                        for process in running.values():
                            _kill(process.pid)
                        return
                    client, task = Connection(descriptors[0]), descriptors[1]
                    others = [control, *running]
                    running[client] = get_context("fork").Process(
                        target=_answer, args=(client, task, others, vocabulary)
                    )
                    running[client].start()
                    os.close(task)
                # A process has ended, or a client has hung up: clients send nothing, so a client is readable only after it hung up.
                elif (process := running.pop(client := ends.get(ready, ready), None)) is not None:
                    _kill(process.pid)
                    process.join()
                    client.close()


def _answer(client: Connection, task: int, others: list[Any], vocabulary: Vocabulary) -> None:
    os.setpgid(0, 0)  # a process group, so that its children are killed as well
    for each in others:
        each.close()
    with open(task, "rb") as file:
        function, seconds = unpickled(file.read(), vocabulary)
    _limit(math.ceil(seconds + SPARE_SECONDS))
    try:
        content = pickled(function(vocabulary))
    except MemoryError:
        return
    except Exception as error:
        try:
            content = pickled(error)
        except Exception:  # an exception of a plugin may refuse to be pickled
            content = pickled(RuntimeError(repr(error)))
    client.send_bytes(content)


def _limit(seconds: int) -> None:
    """Limits this process's processor time, and the memory that it may allocate in addition to its present size."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # the file exists on Linux only
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + (MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the process may not have its own group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
