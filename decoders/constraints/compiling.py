"""The cache of compiled grammars, by specification, vocabulary, backend and policy: in memory, and on request on disk."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..common.files import write_whole
from ..errors import GrammarError
from .base import Backend, CompiledGrammar, Language, Policy
from .patterns.limits import deadline
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .specs import Spec


#: Greatest number of grammars in memory, and of bytes that they take together; the least recently used grammar is evicted first.
KEPT = 64
KEPT_BYTES = 128 << 20

Source = Literal["compiled", "memory", "disk"]


@dataclass(frozen=True)
class Compilation:
    """A compiled grammar, and how it was obtained.

    Attributes:
        seconds: time until the grammar was ready, including waiting for another thread that compiles it.
        source: whether the grammar was compiled now ("compiled") or before ("memory"), or read from a file ("disk").
    """

    grammar: CompiledGrammar
    seconds: float
    source: Source


class Cache:
    """Grammars in memory. Thread-safe: one thread compiles a grammar while others that need it wait."""

    def __init__(self, size: int = KEPT) -> None:
        self.size = size
        self._entries: OrderedDict[tuple[object, ...], _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drops all grammars; running calls keep the grammars that they use."""
        with self._lock:
            self._entries.clear()

    def compiled(
        self, spec: Spec, vocabulary: Vocabulary, backend: Backend, directory: Path | str | None = None,
        seconds: float | None = None,
    ) -> Compilation:  # fmt: skip
        """The language of `spec` for `vocabulary`, compiled by `backend`.

        Args:
            directory: where compiled grammars are stored for later processes; None: nowhere.
            seconds: CPU time that compiling may take; None: :data:`~decoders.constraints.patterns.limits.SECONDS`.

        Raises:
            GrammarError: the backend cannot express `spec`, or cannot compile it in time; nothing is cached.
        """
        begin = time.perf_counter()
        folder = None if directory is None else Path(directory)
        # The label does not change the language, but messages and reports show it.
        key = (spec.key, spec.label, vocabulary.fingerprint, type(backend), spec.policy)
        with self._lock:
            known = key in self._entries
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
        source: Source = "memory"
        if not known:
            try:
                with deadline(seconds):
                    grammar, source = _made(spec, vocabulary, backend, folder)
            except BaseException as error:
                with self._lock:
                    if self._entries.get(key) is entry:
                        del self._entries[key]
                entry.grammar.set_exception(error)
                raise
            entry.grammar.set_result(grammar)
            self._bound(entry)
        grammar = entry.grammar.result()
        if folder is not None and folder not in entry.folders:
            entry.folders.add(folder)
            path = stored_path(folder, grammar.language, vocabulary, spec.policy, backend)
            if source == "compiled" or not path.exists():
                store(grammar, path)
        return Compilation(grammar, time.perf_counter() - begin, source)

    def _bound(self, newest: _Entry) -> None:
        """Evicts the least recently used grammars, except `newest` and unfinished ones, until at most :data:`KEPT_BYTES` are left."""
        with self._lock:
            there = {key: entry for key, entry in self._entries.items() if entry.nbytes}
            size = sum(entry.nbytes for entry in there.values())
            for key, entry in there.items():
                if size <= KEPT_BYTES:
                    break
                if entry is not newest:
                    size -= entry.nbytes
                    del self._entries[key]


@dataclass
class _Entry:
    """A grammar, compiled or being compiled, and the folders in which it has been stored."""

    grammar: Future[CompiledGrammar] = field(default_factory=Future)
    folders: set[Path] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        there = self.grammar.done() and self.grammar.exception() is None
        return self.grammar.result().nbytes if there else 0


def _made(
    spec: Spec, vocabulary: Vocabulary, backend: Backend, directory: Path | None
) -> tuple[CompiledGrammar, Source]:
    language = spec.language()
    vocabulary = vocabulary.spelling(language.special)
    if directory is not None:
        path = stored_path(directory, language, vocabulary, spec.policy, backend)
        grammar = restored(path, language, vocabulary, spec.policy, backend)
        if grammar is not None:
            return grammar, "disk"
    return backend.compile(language, vocabulary, spec.policy), "compiled"


_shared = Cache()
#: :meth:`Cache.compiled` and :meth:`Cache.clear` of the process's cache.
compiled, forget = _shared.compiled, _shared.clear


# A file consists of a header line and the result of :meth:`CompiledGrammar.dump`. Nothing in a file is executed. The file's name is a
# hash of all that the content depends on, so a changed language or vocabulary has another file. Only tables are stored: llguidance
# compiles in a millisecond and cannot serialize its state.

#: Increased when the format of the files or of the automata in them changes. Files of other versions are replaced.
VERSION = 2
_KIND = "compiled grammar of hf-decoders"
SUFFIX = ".grammar"


def stored_path(directory: Path, language: Language, vocabulary: Vocabulary, policy: Policy, backend: Backend) -> Path:
    """The file of `language`, compiled for `vocabulary` by `backend`."""
    content = [backend.name, policy, vocabulary.fingerprint, language.regex, language.lark]
    return directory / (hashlib.sha256(json.dumps(content).encode()).hexdigest() + SUFFIX)


def store(grammar: CompiledGrammar, path: Path) -> bool:
    """Stores `grammar` as `path`, atomically; returns whether it was stored. Only warns if the file cannot be written."""
    content = grammar.dump()
    if content is None:
        return False
    head = {"kind": _KIND, "version": VERSION, "key": path.stem, "sha256": hashlib.sha256(content).hexdigest()}
    try:
        write_whole(path, json.dumps(head).encode() + b"\n" + content)
    except OSError as error:
        warnings.warn(f"the compiled grammar could not be saved as {path}: {error}", stacklevel=2)
        return False
    return True


def restored(
    path: Path, language: Language, vocabulary: Vocabulary, policy: Policy, backend: Backend
) -> CompiledGrammar | None:
    """The grammar stored as `path`; None if there is no file of this version, or (with a warning) if the file cannot be used."""
    try:
        with path.open("rb") as file:
            line = file.readline(4096)
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"the compiled grammar {path} cannot be read and is compiled again: {error}", stacklevel=2)
        return None
    try:
        head = json.loads(line)
        if not isinstance(head, dict) or head.get("kind") != _KIND:
            raise ValueError("the file is not a compiled grammar")
        if head.get("version") != VERSION:
            return None
        if head.get("key") != path.stem:
            raise ValueError("the file is for another grammar, vocabulary or policy")
        if head.get("sha256") != hashlib.sha256(content).hexdigest():
            raise ValueError("it is damaged")
        return backend.restore(content, language, vocabulary, policy)
    except (ValueError, GrammarError) as error:
        warnings.warn(f"the compiled grammar {path} cannot be used and is compiled again: {error}", stacklevel=2)
        return None
