"""The check that every grammar backend must pass: its masks, steps and rollbacks agree with the language.

The languages are small regular languages and a recursive language (:mod:`.languages`). One vocabulary has a token per byte, the other
also has longer tokens. On random walks, :mod:`.grammar_checks` compares matchers with an automaton that shares no code with backends.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from ..constraints import Backend, CompiledGrammar, Language, Policy
from ..errors import GrammarError
from ..registry.kinds import BACKEND
from .checks import check_registrable
from .grammar_checks import (
    Check,
    GrammarCase,
    check_advance,
    check_apart,
    check_ends,
    check_forced,
    check_masks,
    check_rollback,
    check_special_tokens,
    check_tables,
    check_tree,
)
from .languages import Reference, byte_vocabulary, references

NOTATIONS = ("regex", "lark")
CHECKS: tuple[Check, ...] = (
    check_special_tokens, check_rollback, check_apart, check_advance, check_masks, check_tree, check_ends, check_forced,
    check_tables,
)  # fmt: skip


def check_backend(
    backend: Backend | type[Backend], *, policies: Sequence[Policy] = ("full", "canonical"), seed: int = 0
) -> None:
    """Compiles every language in every notation that the backend reads, and runs all checks on each compiled grammar.

    Raises:
        AssertionError: a check failed. The message names the check, the language and the reason.
    """
    check_registrable(BACKEND, backend if isinstance(backend, type) else type(backend))
    backend = backend() if isinstance(backend, type) else backend
    notations = [notation for notation in NOTATIONS if _reads(backend, notation)]
    assert notations, f"{backend!r} compiles neither a plain regex nor a plain lark grammar"
    for reference in references():
        for notation in notations:
            text = getattr(reference.language, notation)
            if text is None:
                continue
            language = Language(f"{reference.language.name} ({notation})", **{notation: text})
            for policy in policies:
                try:
                    grammar = backend.compile(language, reference.vocabulary, policy)
                except GrammarError as error:
                    raise AssertionError(f"{backend!r} refuses {language.name}: {error}") from error
                check_grammar(grammar, reference, seed=seed)


def check_grammar(
    grammar: CompiledGrammar, reference: Reference, *, checks: Iterable[Check] | None = None, seed: int = 0
) -> None:
    """Runs `checks` (by default all checks) on a compiled grammar.

    Raises:
        AssertionError: a check failed. The message names the check and the reason.
    """
    for check in CHECKS if checks is None else checks:
        try:
            check(GrammarCase(grammar, reference, random.Random(seed)))
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            name = (
                f"{grammar.backend}, {grammar.language.name}, {len(grammar.vocabulary)} tokens, policy {grammar.policy}"
            )
            raise AssertionError(f"{name} fails {check.__name__}: {reason}") from error


def _reads(backend: Backend, notation: str) -> bool:
    """Whether the backend compiles a language that is given in `notation` only."""
    languages = {"regex": Language("a", regex="a"), "lark": Language("a", lark='start: "a"\n')}
    try:
        backend.compile(languages[notation], byte_vocabulary())
    except GrammarError:
        return False
    return True
