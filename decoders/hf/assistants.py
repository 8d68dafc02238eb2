"""Draft models of an enabled model: loads each once, compares its vocabulary with the target's, and creates its :class:`Engine`."""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..common.checkpoints import absent, load_model
from ..drafters import OtherVocabulary
from ..engine.decode.engine import Engine
from ..engine.model.layout import number_of_logits, refuse_unfit
from ..engine.model.weights.quantization import Precision, Scheme, scheme_of
from ..engine.model.weights.state import values_of
from ..errors import UnsupportedError
from ..settings import Attention, RuntimeSettings
from .attached import base_of
from .tokenizers import PADDED_PART, PADDING, check_tokenizer
from .translation import TokenMap, token_map, translated

log = logging.getLogger("decoders")

#: A comparison of vocabularies is logged if it takes longer than this number of seconds.
SLOW = 2.0


class Assistants:
    """The draft models of one enabled model. When a draft model is freed, its engine is freed, too."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase | None]] = {}
        self._translations: weakref.WeakKeyDictionary[PreTrainedModel, tuple[TokenMap, object, PreTrainedModel]]
        self._translations = weakref.WeakKeyDictionary()
        self._maps: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Any, TokenMap]] = weakref.WeakKeyDictionary()
        self._engines: weakref.WeakKeyDictionary[PreTrainedModel, Engine] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple:
        return Assistants, ()  # a copy begins without engines

    def release(self) -> None:
        """Frees the engines of all draft models, and the models that were loaded from paths."""
        for engine in list(self._engines.values()):
            engine.release()
        self._engines.clear()
        self._translations.clear()
        self._maps.clear()
        self._loaded.clear()

    def forget(self) -> None:
        """Makes the engines of all draft models forget earlier calls: cached texts and what strategies have learned."""
        for engine in list(self._engines.values()):
            engine.forget()

    def engine(self, model: PreTrainedModel, attention: Attention, precision: Precision) -> Engine:
        """The engine of a draft model, created once, and again after the model, `attention` or `precision` has changed.

        Raises:
            UnsupportedError: the loop does not support the draft model's architecture.
        """
        known = self._engines.get(model)
        if known is None or not known.refresh(model, attention, precision):
            refuse_unfit(model)
            precision.check(model.device, weights="draft_weights")
            known = self._engines[model] = Engine(model, attention, precision=precision)
        return known

    def tokens(
        self, model: PreTrainedModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
    ) -> TokenMap:  # fmt: skip
        """The map between the tokens of a draft model and of the target, cached. tokenizer: the target's; other: the draft model's.

        Raises:
            UnsupportedError: the bytes of tokens of one of the models are unknown.
        """
        kept = self._maps.get(model)
        if kept is None or kept[0] is not tokenizer or kept[1] is not other:
            begin = time.perf_counter()
            kept = self._maps[model] = tokenizer, other, token_map(model, target, tokenizer, other)
            if (seconds := time.perf_counter() - begin) > SLOW:
                log.info(
                    "comparing %d tokens of the target with %d of the draft model took %.1f s, once for a draft model: %.0f %% of the "
                    "target's are shared", len(kept[2].own), len(kept[2].other), seconds, 100 * kept[2].shared,
                )  # fmt: skip
        return kept[2]

    def translated(
        self, model: PreTrainedModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None,
        other: PreTrainedTokenizerBase | None, difference: UnsupportedError,
    ) -> PreTrainedModel:  # fmt: skip
        """A copy of the draft model with the target's vocabulary, cached until a tokenizer or the draft's embedding or head changes.

        tokenizer: the target's tokenizer. other: the draft model's tokenizer.

        Raises:
            UnsupportedError: a tokenizer is missing (the error is `difference`), or the vocabularies share too few tokens.
        """
        if tokenizer is None or other is None:
            raise difference
        ends: tuple[nn.Module | None, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
        weights = values_of(weight for end in ends if end is not None for weight in end.parameters())
        kept = self._translations.get(model)
        try:
            tokens = self.tokens(model, target, tokenizer, other)
            if kept is not None and kept[0] is tokens and kept[1] == weights:
                return kept[2]
            twin = translated(model, target, tokens)
        except UnsupportedError as error:
            raise UnsupportedError(f"{difference}: {error}") from difference
        self._translations[model] = tokens, weights, twin
        return twin

    def load(self, path: str, target: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        """The draft model at `path`, in the target's dtype and on the target's device, and its tokenizer (None if there is none). The
        model stays loaded for later calls.

        Raises:
            UnsupportedError: the model cannot be loaded.
        """
        kept = self._loaded.get(path)
        if kept is None or (kept[0].dtype, kept[0].device) != (target.dtype, target.device):
            try:
                model = load_model(path, target.dtype).to(target.device)  # type: ignore[arg-type]
            except (OSError, ValueError) as error:
                raise UnsupportedError(f"draft model {path!r} cannot be loaded: {absent(path) or error}") from error
            try:
                tokenizer = AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError):
                tokenizer = None  # without a tokenizer, only the sizes of the vocabularies are compared
            self._loaded[path] = model, tokenizer
        return self._loaded[path]


@dataclass(frozen=True)
class CallAssistants:
    """The draft models that one call may use (:class:`~decoders.engine.decode.request.DraftModels`).

    Attributes:
        kept: all draft models of the target, also of other calls.
        target: the enabled model.
        engine, tokenizer: the target's engine and tokenizer.
        assistant_tokenizer: the tokenizer of a draft model that is passed as an object, or that lies in a folder without a tokenizer.
        runtime: settings of the call.
    """

    kept: Assistants
    target: PreTrainedModel
    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    assistant_tokenizer: PreTrainedTokenizerBase | None
    runtime: RuntimeSettings

    def engine_of(self, model: PreTrainedModel | str) -> Engine:
        """The engine of a draft model (a model object or a path).

        Raises:
            UnsupportedError: the model cannot be loaded, its vocabulary cannot be mapped to the target's, it is on another device or
                other processes than the target, or the loop does not support its architecture.
        """
        model, tokenizer = self._loaded(model)
        target, engine = self.target, self.engine
        try:
            check_vocabulary(target, model, self.tokenizer, tokenizer)
        except UnsupportedError as difference:
            model = self.kept.translated(model, target, self.tokenizer, tokenizer, difference)
        if model is target:
            return engine
        if model.device != target.device:
            raise UnsupportedError(
                f"the draft model is on {model.device}, the target on {target.device}: call draft.to({str(target.device)!r})"
            )
        # A draft model that is a part of the target reads the target's cache.
        cache = engine.precision.cache if engine.is_part(model) else None
        precision = Precision(draft_scheme(self.runtime), cache, engine.precision.exact_products)
        known = self.kept.engine(model, engine.attention, precision)
        if known.target.ranks.several and known.target.ranks.size != engine.target.ranks.size:
            raise UnsupportedError(
                f"the draft model is split between {known.target.ranks.size} processes and the target is not: load the draft model "
                "without tp_plan, or both models with it"
            )
        return known

    def vocabulary_of(self, model: PreTrainedModel | str) -> OtherVocabulary | None:
        """Compares a draft model's vocabulary with the target's, see :attr:`decoders.strategy.Context.vocabulary_of`.

        Raises:
            UnsupportedError: the model cannot be loaded, or the bytes of tokens of one of the models are unknown.
        """
        model, tokenizer = self._loaded(model)
        try:
            check_vocabulary(self.target, model, self.tokenizer, tokenizer)
            return None
        except UnsupportedError as difference:
            if self.tokenizer is None or tokenizer is None:
                return None  # `Context.draft` will raise the error
            try:
                tokens = self.kept.tokens(model, self.target, self.tokenizer, tokenizer)
            except UnsupportedError as error:
                raise UnsupportedError(f"{difference}: {error}") from difference
        if model.device != self.target.device:
            return None
        begin = tuple(tokenizer("")["input_ids"])
        return OtherVocabulary(model, tokens.own, tokens.other, begin, tokens.shared)

    def _loaded(self, model: PreTrainedModel | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        """Returns a draft model, without the ``PeftModel`` around it, and its tokenizer. A model object, or a folder without a
        tokenizer, gets `assistant_tokenizer`.

        Raises:
            SettingsError: `assistant_tokenizer` belongs to another model.
        """
        loaded, own = self.kept.load(model, self.target) if isinstance(model, str) else (base_of(model), None)
        if own is None:
            check_tokenizer(loaded, own := self.assistant_tokenizer, "assistant_tokenizer", "draft model")
        return loaded, own


def draft_scheme(runtime: RuntimeSettings) -> Scheme | None:
    """The number format for the matrices of a call's draft models; None keeps the checkpoint's."""
    return scheme_of(runtime.weights if runtime.draft_weights == "auto" else runtime.draft_weights)


def check_vocabulary(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Raises UnsupportedError unless every id means the same token in both models.

    Compares the tokenizers if both are known, else the sizes of the output heads. Head sizes may differ by padding: by less than
    :data:`~decoders.hf.tokenizers.PADDING`, or by a small share if both heads contain all tokens of the target's tokenizer.
    """
    if draft is target:
        return
    if tokenizer is not None and draft_tokenizer is not None:
        if tokenizer is not draft_tokenizer:
            difference = _difference_of(tokenizer, draft_tokenizer)
            if difference is not None:
                raise UnsupportedError(difference)
        return
    sizes = [number_of_logits(model) for model in (target, draft) if model.get_output_embeddings() is not None]
    if len(sizes) < 2:
        return  # the engine refuses a model without a head
    least, most = sorted(sizes)
    padded = tokenizer is not None and least >= len(tokenizer) >= most - max(PADDING, most // PADDED_PART)
    if most - least >= PADDING and not padded:
        raise UnsupportedError(
            f"the draft model has another vocabulary: {sizes[1]} ids against the target's {sizes[0]}, more than padding "
            "explains. Use a draft model of the same family, or pass tokenizer= and assistant_tokenizer=, so that the tokens of both "
            "models can be compared"
        )


#: Per draft tokenizer: the target's tokenizer with which it was compared, the sizes of both at that time, and their difference or None.
_compared: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[weakref.ref[Any], tuple[int, int], str | None]] = (
    weakref.WeakKeyDictionary()
)


def _difference_of(tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describes how two tokenizers differ; None if they agree. Cached, because listing a large vocabulary takes a second."""
    sizes, known = (len(tokenizer), len(draft_tokenizer)), _compared.get(draft_tokenizer)
    if known is None or known[0]() is not tokenizer or known[1] != sizes:
        difference = _difference(tokenizer.get_vocab(), draft_tokenizer.get_vocab())
        known = _compared[draft_tokenizer] = weakref.ref(tokenizer), sizes, difference
    return known[2]


def _difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    moved = [(token, id, draft.get(token)) for token, id in target.items() if draft.get(token) != id]
    extra = len(draft.keys() - target.keys())
    # The draft never proposes ids above the target's last id, so additional tokens with such ids do no harm.
    if not moved and all(draft[token] >= len(target) for token in draft.keys() - target.keys()):
        return None
    shown = "; ".join(
        f"{token!r} is {id} for the target and {'absent' if other is None else other} for the draft"
        for token, id, other in sorted(moved, key=lambda item: item[1])[:3]
    )
    return (
        f"the draft model's tokenizer differs from the target's ({len(target)} and {len(draft)} tokens, {len(moved)} of the "
        f"target's under another id, {extra} unknown to it): {shown}. Use a draft of the same family"
    )
