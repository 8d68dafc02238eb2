"""A vocabulary as llguidance wants a tokenizer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

from ..vocabulary import Vocabulary

#: Most vocabularies whose tries are kept: 13 to 50 MB and 0.4 s each at 128k tokens.
KEPT_TOKENIZERS = 4
#: llguidance marks special tokens with it; it never occurs in UTF-8.
_MARKER = b"\xff"

_tokenizers: OrderedDict[str, Any] = OrderedDict()
_tokenizers_lock = threading.Lock()


def tokenizer_for(vocabulary: Vocabulary) -> Any:
    """The ``LLTokenizer`` of `vocabulary`, made once."""
    import llguidance

    with _tokenizers_lock:
        key = vocabulary.fingerprint
        if key not in _tokenizers:
            stops = list(vocabulary.stops)
            _tokenizers[key] = llguidance.LLTokenizer(
                cast("llguidance.TokenizerWrapper", _Wrapper(vocabulary)), n_vocab=len(vocabulary), eos_token=stops
            )
        _tokenizers.move_to_end(key)
        while len(_tokenizers) > KEPT_TOKENIZERS:
            _tokenizers.popitem(last=False)
        return _tokenizers[key]


class _Wrapper:
    """A vocabulary as llguidance wants a tokenizer. Tokens without bytes have no place in its trie."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stops[0]
        self.tokens = [b"" if text is None or text.startswith(_MARKER) else text for text in vocabulary.tokens]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)
