"""Runs each piece of work in a forked process, and kills it when nobody waits for the result or it exceeds its limits. See
:mod:`.workshop`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..constraints import Auto, Vocabulary, compiled, regex
from ..errors import GrammarError

#: Limits of a piece of work: processor seconds beyond those it is given, and MiB beyond the workshop's own memory.
SPARE_SECONDS, MEGABYTES = 1, 1024
#: Added to the niceness of work, so that decoding goes first.
NICE = 5
#: Seconds between two checks whether a waiting thread should stop waiting.
PATIENCE = 0.05
_SIZE = 8  # the prefix of a message: its length

#: A function that raises if nobody waits for the result any more.
Check = Callable[[], None]


def exchanged(connection: socket.socket, content: bytes, check: Check) -> bytes | None:
    """Sends a message and returns the answer; None if the other side closed. check: called while waiting; an error that it raises
    ends the wait.
    """
    connection.settimeout(PATIENCE)
    left, answer, size = memoryview(len(content).to_bytes(_SIZE) + content), bytearray(), math.inf
    while len(answer) < size:
        try:
            if left:
                left = left[connection.send(left) :]
                continue
            piece = connection.recv(1 << 20)
        except TimeoutError:
            check()
            continue
        if not piece:
            return None
        answer += piece
        if size == math.inf and len(answer) >= _SIZE:
            size = _SIZE + int.from_bytes(answer[:_SIZE])
    return bytes(answer[_SIZE:])


class _Pickler(pickle.Pickler):
    """Pickles without the vocabulary, which both sides have, and pickles exceptions by their attributes, whatever their constructor
    takes.
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
    """`value` as a message, without the vocabulary."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpickled(content: bytes, vocabulary: Vocabulary) -> Any:
    """The value in a message of :func:`pickled`."""
    return _Unpickler(content, vocabulary).load()


# The following runs in the workshop's process.


@dataclass(frozen=True)
class _Forked:
    """A piece of work: its process, our end of its socket, and a pipe that closes when the process ends."""

    pid: int
    job: int
    life: int


def work(descriptor: int) -> None:
    """Forks a process for every descriptor that arrives over the socket `descriptor`, until the socket is closed."""
    os.nice(NICE)
    vocabulary = Vocabulary(*pickle.load(sys.stdin.buffer))
    for pattern in (
        "a",
        "[a-z]{5000}",
    ):  # tables of the vocabulary that every grammar needs are built once, before the forks
        with contextlib.suppress(GrammarError):
            compiled(regex(pattern), vocabulary, Auto())
    gc.collect()
    gc.freeze()
    poll, running = select.poll(), dict[int, _Forked]()
    with socket.socket(fileno=descriptor) as control:
        poll.register(control, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == descriptor:
                    word, jobs, *_ = socket.recv_fds(control, 1, 1)
                    if not word:
                        for each in {*running.values()}:
                            _kill(each.pid)
                        return
                    begun = _forked(jobs[0], vocabulary, [descriptor, *running])
                    running |= {begun.job: begun, begun.life: begun}
                    poll.register(begun.job, 0)  # the client hung up
                    poll.register(begun.life, 0)  # the process has ended
                elif (over := running.get(ready)) is not None:
                    _kill(over.pid)
                    os.waitpid(over.pid, 0)
                    for end in (over.job, over.life):
                        del running[end]
                        poll.unregister(end)
                        os.close(end)


def _forked(job: int, vocabulary: Vocabulary, others: list[int]) -> _Forked:
    life, alive = os.pipe()
    pid = os.fork()
    if pid:
        os.close(alive)
        return _Forked(pid, job, life)
    try:
        os.setpgid(0, 0)  # a process group, so that its children are killed as well
        for each in (*others, life):
            os.close(each)
        with socket.socket(fileno=job) as connection:
            _answer(connection, vocabulary)
    finally:
        os._exit(0)


def _answer(connection: socket.socket, vocabulary: Vocabulary) -> None:
    with connection.makefile("rb") as file:
        task = unpickled(file.read(int.from_bytes(file.read(_SIZE))), vocabulary)
    _limit(math.ceil(getattr(task, "seconds", 1) + SPARE_SECONDS))
    try:
        content = pickled(task(vocabulary))
    except MemoryError:
        return
    except Exception as error:
        try:
            content = pickled(error)
        except Exception:  # such as an exception class of a plugin
            content = pickled(RuntimeError(repr(error)))
    connection.sendall(len(content).to_bytes(_SIZE) + content)


def _limit(seconds: int) -> None:
    """Limits this process's processor time, and the memory beyond its present size."""
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
