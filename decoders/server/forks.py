"""Work in processes that are forked for it, and killed when nobody waits for it or it takes too much. See :mod:`.workshop`."""

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

from ..constraints import Auto, Regex, Vocabulary, compiled
from ..errors import GrammarError

#: What a piece of work may use besides the seconds it is given: of a processor, and MiB beyond what the workshop itself has.
SPARE_SECONDS, MEGABYTES = 1, 1024
#: Lowers the priority of work: steps of those who decode come first.
NICE = 5
#: Seconds after which whoever waits looks whether it still has to.
PATIENCE = 0.05
_SIZE = 8  # bytes in front of a message, which say how long it is

#: Raises where nobody waits any more.
Check = Callable[[], None]


def exchanged(connection: socket.socket, content: bytes, check: Check) -> bytes | None:
    """The answer to a message; None if there is none. check: called while it is waited for; what it raises ends the wait."""
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
    """Leaves the vocabulary out, which both sides have, and takes exceptions by what they hold, whatever makes them."""

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
    """A message of `value`, without the vocabulary that both sides have."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpickled(content: bytes, vocabulary: Vocabulary) -> Any:
    """What :func:`pickled` made a message of."""
    return _Unpickler(content, vocabulary).load()


# What the process does.


@dataclass(frozen=True)
class _Forked:
    """A piece of work: its process, the end of the socket that is its own, and a pipe that ends with it."""

    pid: int
    job: int
    life: int


def work(descriptor: int) -> None:
    """Forks for every descriptor that comes over the socket `descriptor`, until that is closed."""
    os.nice(NICE)
    vocabulary = Vocabulary(*pickle.load(sys.stdin.buffer))
    for pattern in ("a", "[a-z]{5000}"):  # what every grammar needs of the vocabulary is made once
        with contextlib.suppress(GrammarError):
            compiled(Regex(pattern), vocabulary, Auto())
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
                    poll.register(begun.job, 0)  # nobody waits for it any more
                    poll.register(begun.life, 0)  # it has ended
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
        os.setpgid(0, 0)  # killed with what it begins
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
        except Exception:  # of a plugin, say
            content = pickled(RuntimeError(repr(error)))
    connection.sendall(len(content).to_bytes(_SIZE) + content)


def _limit(seconds: int) -> None:
    """Bounds this process's time on a processor, and its memory beyond what it has."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no such file but on Linux
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + (MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may have no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
