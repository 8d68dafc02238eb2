"""Compiles grammars and validates finished texts in processes that can be killed.

Compiling a client's grammar may take exponential time and memory, in code that cannot be interrupted or that holds the GIL and
slows down decoding. So a separate process, the workshop, holds the compilers and the vocabulary, and forks a process for every
task. The forked process is killed as soon as nobody waits for its result. On systems without fork (Windows) the calling thread
runs the task, within the bounds of :mod:`decoders.constraints`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..constraints import Backend, CompiledGrammar, Lark, Spec, Vocabulary, compiled, mask_words, unpack
from ..errors import GrammarError
from .bodies import Part
from .forks import MEGABYTES, SPARE_SECONDS, Check, exchanged, pickled, unpickled, work
from .grammars import Calling, spec_of

log = logging.getLogger("decoders.server")

#: Greatest number of cached grammars, and their greatest total size in bytes.
KEPT, KEPT_BYTES = 64, 128 << 20
#: Processes that were told to end. Python warns if a Popen object is deleted before its process has ended.
_ending: list[subprocess.Popen[bytes]] = []
Wanted = Calling | Part


def _compile(wanted: Wanted, backend: Backend, seconds: float, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles a request's grammar. seconds: greatest processor time, in seconds."""
    spec = wanted.spec if isinstance(wanted, Calling) else spec_of(wanted)
    assert isinstance(spec, Spec), "free text was requested, which has no grammar"
    grammar = spec.compiled(vocabulary, lambda part: compiled(part, vocabulary, backend, seconds=seconds).grammar)
    if isinstance(spec, Lark):
        _try(grammar)
    return grammar


#: Greatest number of tokens in each text generated to try a grammar.
TRIED = 48


def _try(grammar: CompiledGrammar) -> None:
    """Generates two random texts to find very ambiguous grammars, whose token masks take seconds: all rows would wait for them.

    Raises:
        GrammarError: a matcher of the grammar exceeded its time limit.
    """
    mask = torch.empty(mask_words(len(grammar.vocabulary)), dtype=torch.int32)
    for seed in (0, 1):
        matcher, chance = grammar.start(), random.Random(seed)
        for _ in range(TRIED):
            matcher.fill_mask(mask)
            allowed = unpack(mask, len(grammar.vocabulary)).nonzero()[:, 0].tolist()
            going_on = [token for token in allowed if token not in grammar.vocabulary.stops]
            if not going_on:
                break
            matcher.advance([chance.choice(going_on)])


def apply(function: Callable[[str], Any], text: str, vocabulary: Vocabulary) -> None:
    """Calls `function`, which validates a finished text, in a fork."""
    function(text)


@dataclass(frozen=True)
class _Remote:
    """Validates a text in a fork of the workshop. Does nothing in threads that must not wait, such as the decoding thread."""

    whole: Callable[[str], None]
    workshop: Workshop

    def __call__(self, text: str) -> None:
        if (check := _waiting.get()) is not None:
            self.workshop._done(partial(apply, self.whole, text), check)


#: The function that is called while this thread waits for a validation; None in threads that must not wait.
_waiting: ContextVar[Check | None] = ContextVar("waiting", default=None)


def broken_rule(grammar: CompiledGrammar, tokens: Sequence[int], check: Check) -> str | None:
    """The rule that a finished text breaks; None if it is valid. check: see :meth:`Workshop.prepared`."""
    token = _waiting.set(check)
    try:
        grammar.judge(tokens)
    except GrammarError as error:
        return str(error)
    finally:
        _waiting.reset(token)
    return None


class Workshop:
    """Compiles and caches grammars for one vocabulary. Thread-safe.

    Args:
        vocabulary: the model's vocabulary.
        backend: the grammar backend.
        seconds: processor seconds that compiling one grammar may take.
    """

    def __init__(self, vocabulary: Vocabulary, backend: Backend, seconds: float) -> None:
        self.vocabulary, self.backend, self.seconds = vocabulary, backend, seconds
        self._lock = threading.Lock()
        self._known: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._hang_up: Callable[[], object] = lambda: None

    def known(self, wanted: Wanted) -> bool:
        """Whether the grammar is cached, so that :meth:`prepared` need not compile."""
        return _name(wanted) in self._known

    def prepared(self, wanted: Wanted, check: Check) -> CompiledGrammar:
        """The compiled grammar of `wanted` (function calls or a response format), from the cache if possible. :func:`broken_rule`
        validates its finished texts; the decoding thread does not.

        Args:
            check: called while the grammar is compiled; an error that it raises ends the compilation.

        Raises:
            GrammarError, Refusal: `wanted` is invalid, or compiling exceeds the limits.
        """
        name = _name(wanted)
        with self._lock:
            if name in self._known:
                self._known.move_to_end(name)
                return self._known[name]
        task = partial(_compile, wanted, self.backend, self.seconds)
        grammar: CompiledGrammar = self._done(task, check, self.seconds)
        for part in grammar.parts:
            if (whole := part.language.whole) is not None:
                part.language = replace(part.language, whole=_Remote(whole, self))
        with self._lock:
            self._known[name] = grammar
            size = sum(each.nbytes for each in self._known.values())
            while len(self._known) > KEPT or (len(self._known) > 1 and size > KEPT_BYTES):
                size -= self._known.popitem(last=False)[1].nbytes
        return grammar

    def begin(self) -> None:
        """Starts the workshop's process unless it runs. Tasks wait until the process is ready, some seconds later."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if self._process is not None:
                log.error(
                    "the process that compiles grammars has ended with %s; another one is begun",
                    self._process.returncode,
                )
            mine, theirs = socket.socketpair()
            paths = [path or os.getcwd() for path in sys.path]
            threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
            with theirs, tempfile.TemporaryFile() as file:
                own = self.vocabulary
                pickle.dump(((own.tokens, own.stops, None, own.rules, own.special), self.backend), file)
                file.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"from {work.__module__} import work; work({theirs.fileno()})"],
                    stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | threads, start_new_session=True,
                )  # fmt: skip
            self._hang_up()  # closes the socket of a process that has ended
            _ending[:] = [process for process in _ending if process.poll() is None]
            self._control = mine
            self._hang_up = weakref.finalize(self, _end, mine, self._process)

    def _done(self, task: Callable[[Vocabulary], Any], check: Check, seconds: float = 1.0) -> Any:
        """Runs `task` in a fork, and returns its result or raises its error. seconds: limit of the fork's processor time, to which
        :data:`SPARE_SECONDS` are added.
        """
        if not hasattr(os, "fork"):
            return task(self.vocabulary)
        content = pickled((task, seconds))
        answer: bytes | None = None
        for _ in range(2):  # once more if the workshop's process has ended
            self.begin()
            assert self._control is not None and self._process is not None
            answer = exchanged(self._control, content, check)
            if answer is not None or self._process.poll() is None:
                break
        if answer is None:
            bounds = f"{seconds + SPARE_SECONDS:g} s of processor time or {MEGABYTES} MB of memory"
            raise GrammarError(f"the grammar takes more than {bounds} to compile, or to validate a text: simplify it")
        result = unpickled(answer, self.vocabulary)
        if isinstance(result, Exception):
            raise result
        return result


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Closes the socket `control` of the workshop's `process`, which then ends."""
    control.close()
    _ending.append(process)


def _name(wanted: Wanted) -> str:
    """The cache key of `wanted`. Equal values may have different keys, because they may be pickled differently."""
    return hashlib.sha256(pickle.dumps(wanted)).hexdigest()
