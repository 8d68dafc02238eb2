"""Compiled grammars as files: a line that says what it is, then what :meth:`CompiledGrammar.dump` gave. Nothing in them is run.

A file is named after all that its content follows from, so another version of the language or vocabulary has another
file. Tables are kept. Of llguidance there is nothing to keep: it compiles in a millisecond, and cannot write what it has.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

from ..common.files import write_whole
from ..errors import GrammarError
from .base import Backend, CompiledGrammar, Language, Policy
from .vocabulary import Vocabulary

#: Raised when the files or the automata in them change their meaning. Files of another version are made anew.
VERSION = 2
_KIND = "compiled grammar of hf-decoders"
SUFFIX = ".grammar"


def path_of(directory: Path, language: Language, vocabulary: Vocabulary, policy: Policy, backend: Backend) -> Path:
    """Where `language`, compiled for `vocabulary` by `backend`, is kept."""
    content = [backend.name, policy, vocabulary.fingerprint, language.regex, language.lark]
    return directory / (hashlib.sha256(json.dumps(content).encode()).hexdigest() + SUFFIX)


def write(grammar: CompiledGrammar, path: Path) -> bool:
    """Keeps `grammar` as `path`, whole or not at all; returns whether it has a form that can be kept.

    A file that cannot be written is a warning: the grammar is there all the same.
    """
    content = grammar.dump()
    if content is None:
        return False
    head = {"kind": _KIND, "version": VERSION, "key": path.stem, "sha256": hashlib.sha256(content).hexdigest()}
    try:
        write_whole(path, json.dumps(head).encode() + b"\n" + content)
    except OSError as error:
        warnings.warn(f"compiled grammar not kept as {path}: {error}", stacklevel=2)
        return False
    return True


def read(
    path: Path, language: Language, vocabulary: Vocabulary, policy: Policy, backend: Backend
) -> CompiledGrammar | None:
    """The grammar kept as `path`; None if there is none of this version. A file that is damaged or something else warns."""
    try:
        with path.open("rb") as file:
            line = file.readline(4096)
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"compiled grammar {path} cannot be read, compiling anew: {error}", stacklevel=2)
        return None
    try:
        head = json.loads(line)
        if not isinstance(head, dict) or head.get("kind") != _KIND:
            raise ValueError("it is no compiled grammar")
        if head.get("version") != VERSION:
            return None
        if head.get("key") != path.stem:
            raise ValueError("it was made for something else")
        if head.get("sha256") != hashlib.sha256(content).hexdigest():
            raise ValueError("it is damaged")
        return backend.restore(content, language, vocabulary, policy)
    except (ValueError, GrammarError) as error:
        warnings.warn(f"compiled grammar {path} is ignored, compiling anew: {error}", stacklevel=2)
        return None
