"""The grammars of a call: compiles ``grammar=`` to a grammar per row, and reports whether every text conforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..constraints import MISSPELT, Compilation, CompiledGrammar, Spec, Thinking, Vocabulary, as_specs, compiled
from ..engine.model.layout import number_of_logits
from ..errors import GrammarError, UnsupportedError
from ..registry.resolve import resolve_backend, resolve_grammar
from ..report import GrammarUse
from ..settings import RuntimeSettings

#: Greatest number of cached vocabularies. A tokenizer to which tokens were added needs a new vocabulary.
KEPT = 8


@dataclass(frozen=True)
class Grammars:
    """Each row's grammar and report, None for a row without a grammar; empty tuples without ``grammar=`` and ``thinking=``."""

    rows: tuple[CompiledGrammar | None, ...] = ()
    uses: tuple[GrammarUse | None, ...] = ()

    @staticmethod
    def of(
        given: Any, rows: int, per_prompt: int, tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel,
        stops: Sequence[int], runtime: RuntimeSettings, thinking: Any = None, prompts: Sequence[Tensor] = (),
    ) -> Grammars:  # fmt: skip
        """Compiles the grammars of a call.

        Args:
            given: the value of ``grammar=``, see :func:`~decoders.constraints.coerce.as_specs`.
            rows: number of rows of the batch.
            per_prompt: number of adjacent rows that have the same prompt.
            thinking: the value of ``thinking=``.
            prompts: token ids per row; a prompt may end within a thinking block.

        Raises:
            GrammarError, SettingsError, UnknownNameError, UnsupportedError: a grammar is invalid, unknown or for another vocabulary.
        """
        if given is None and thinking is None:
            return Grammars()
        size, budget = number_of_logits(model), Thinking.of(thinking) if thinking is not None else None
        grammars: list[CompiledGrammar | None] = []
        uses: list[GrammarUse | None] = []
        vocabulary: Vocabulary | None = None
        for row, wanted in enumerate(as_specs(given, rows // per_prompt, per_prompt, resolve_grammar)):
            if budget is not None:
                vocabulary = vocabulary or vocabulary_of(tokenizer, size, stops)
                wanted = budget.around(wanted, prompts[row].tolist(), vocabulary, tokenizer)
            if wanted is None:
                grammars.append(None)
                uses.append(None)
                continue
            compilations: list[Compilation] = []
            if isinstance(wanted, CompiledGrammar):
                grammar = wanted
                _check_fit(grammar, size, stops, tokenizer)
            else:
                vocabulary = vocabulary or vocabulary_of(tokenizer, size, stops)
                grammar = wanted.compiled(vocabulary, _compiler(vocabulary, runtime, compilations))
            language, sources = grammar.language, [each.source for each in compilations]
            source = next((kind for kind in ("compiled", "disk", "memory") if kind in sources), "given")
            grammars.append(grammar)
            for warning in language.warnings:
                if MISSPELT in warning:
                    warnings.warn(warning, stacklevel=2)
            uses.append(GrammarUse(
                language.name, grammar.backend, grammar.policy, source, sum(each.seconds for each in compilations),
                grammar.nbytes, language.warnings,
            ))  # fmt: skip
        return Grammars(tuple(grammars), tuple(uses))

    @property
    def any(self) -> bool:
        """Whether at least one row has a grammar."""
        return any(grammar is not None for grammar in self.rows)

    def judge(self, texts: Sequence[Sequence[int]]) -> list[GrammarUse | None]:
        """Adds to every row's report whether the row's text is complete and valid, and returns the reports. texts: token ids of each
        row, stop tokens included.

        Some schemas have conditions that no grammar expresses. If a complete text breaks such a condition, a warning is issued.
        """
        for row, (grammar, use) in enumerate(zip(self.rows, self.uses, strict=True)):
            if grammar is None or use is None:
                continue
            matcher = grammar.start()
            use.complete = matcher.advance(texts[row]) == len(texts[row]) and matcher.accepting
            if use.complete:
                try:
                    grammar.judge(texts[row])
                except GrammarError as error:
                    use.invalid = str(error)
                    warnings.warn(f"row {row}: {error}", stacklevel=2)
        return list(self.uses)


def _compiler(
    vocabulary: Vocabulary, runtime: RuntimeSettings, compilations: list[Compilation]
) -> Callable[[Spec], CompiledGrammar]:
    """A function that compiles a specification and appends the compilation to `compilations`."""

    def compile(spec: Spec) -> CompiledGrammar:
        backend = resolve_backend(spec.backend or runtime.constraint_backend)
        result = compiled(spec, vocabulary, backend, runtime.constraint_cache, runtime.constraint_seconds)
        compilations.append(result)
        return result.grammar

    return compile


def vocabulary_of(tokenizer: PreTrainedTokenizerBase | None, size: int, stops: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model whose logits have `size` entries.

    Raises:
        UnsupportedError: there is no tokenizer or no stop token, or the bytes of the tokens are unknown.
    """
    if tokenizer is None:
        raise UnsupportedError("grammar= and thinking= need a tokenizer: pass tokenizer= to enable() or generate()")
    if not stops:
        raise UnsupportedError(
            "grammar= needs a token that ends the text: set eos_token_id in the call or the generation config"
        )
    added = tuple((token, each.content, each.special) for token, each in tokenizer.added_tokens_decoder.items())
    state = (len(tokenizer), tuple(tokenizer.all_special_ids), added)  # in the cache's key: a tokenizer can change
    return _vocabulary(tokenizer, size, tuple(stops), state)


@lru_cache(KEPT)
def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, stops: tuple[int, ...], state: tuple) -> Vocabulary:
    return Vocabulary.of(tokenizer, size, stops)


def _check_fit(
    grammar: CompiledGrammar, size: int, stops: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raises UnsupportedError or GrammarError if `grammar` was compiled for another vocabulary."""
    name, own = grammar.language.name, grammar.vocabulary
    if len(own) != size or set(own.stops) != set(stops):
        raise UnsupportedError(
            f"the compiled grammar {name!r} is for {len(own)} tokens and stop tokens {list(own.stops)}; this call has {size} tokens "
            f"and stop tokens {sorted(stops)}: compile the grammar for this call's tokens, or give its specification"
        )
    if tokenizer is None:
        return
    with suppress(UnsupportedError):  # unknown bytes cannot be compared
        tokens = vocabulary_of(tokenizer, size, stops).tokens
        if own.tokens == tokens:
            return
        pairs = zip(own.tokens, tokens, strict=True)
        others = ((token, *pair) for token, pair in enumerate(pairs) if pair[0] != pair[1] and None not in pair)
        if (other := next(others, None)) is not None:
            raise GrammarError(
                "the compiled grammar {!r} is for another tokenizer: token {} is {!r} there and {!r} here. Give its "
                "specification instead".format(name, *other)
            )
