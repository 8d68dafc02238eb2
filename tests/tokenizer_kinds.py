"""Tokenizers of every kind: how they write blanks, bytes, added tokens and the beginning of a text."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

#: Ordinary tokens that were added: with blanks, with characters that byte-level names are written with, with others.
ADDED = ["<tool call>", "日本", "  ", "<｜x▁y｜>", "Ä ö", "Äö", "<think>"]
SPECIAL = ["</s>", "<|im_start|>", '{"']


def byte_level(prefix: bool) -> Tokenizer:
    """Bytes, a few merges, one of them within a character and one across two."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "r"), ("tr", "u"), ("tru", "e"), ("Ġ", "true"), ("æ", "Ĺ"), ("¥", "æ"), ('"', ":"), ("Ã", "©")]
    vocabulary = {name: token for token, name in enumerate([*names, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback(scheme: str, blank: str = "▁") -> Tokenizer:
    """Pieces with a sign for a blank, ``▁`` in sentencepiece, and a token for each byte."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *f"{blank}abetru{{}}é",
        f"{blank}t",
        "ru",
        "ru" + "e",
        f"{blank}t" + "rue",
        blank * 2,
    ]
    merges = [(blank, "t"), ("r", "u"), ("ru", "e"), (f"{blank}t", "rue"), (blank, blank)]
    vocabulary = {name: token for token, name in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if scheme == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(blank, prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(blank, prepend_scheme="first")]
        )
        return tokenizer
    blanks = normalizers.Replace(" ", blank)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(blank), blanks]) if scheme == "prepend" else blanks
    strip = [decoders.Strip(" ", 1, 0)] if scheme == "prepend" else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def tiktoken() -> Tokenizer:
    """What transformers makes of a file of tiktoken's: bytes with ranks."""
    ranks = {
        text: rank for rank, text in enumerate([*(bytes([byte]) for byte in range(256)), b" t", b"ru", "é".encode()])
    }

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    return Converter("").converted()


def word_piece() -> Tokenizer:
    """Words, and pieces that go on with one."""
    names = ["[UNK]", *"abetrué.'!?,", "true", "n", *(f"##{piece}" for piece in ["a", "b", "ue", "é", "n't"])]
    tokenizer = Tokenizer(models.WordPiece({name: token for token, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    """Pieces with a sign for a blank and no bytes."""
    names = ["<unk>", "▁", "▁▁", *"abetrué", "▁t", "rue", "▁true", "a▁b"]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def words() -> Tokenizer:
    """Words without a decoder, which blanks are put between."""
    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "true": 2, "é": 3}, unk_token="<unk>"))


def ends_of_words() -> Tokenizer:
    """Pieces with a sign for the end of a word, which the last one loses."""
    names = ["<unk>", "a", "a</w>", "true</w>", "é", "</w>"]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


#: Those whose tokens are bytes.
BYTE_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(False),
    "byte level, prefix": lambda: byte_level(True),
    "byte fallback": lambda: byte_fallback("plain"),
    "byte fallback, prefix": lambda: byte_fallback("prepend"),
    "metaspace": lambda: byte_fallback("metaspace"),
    "metaspace, another sign": lambda: byte_fallback("metaspace", "Ġ"),
    "byte fallback, another sign": lambda: byte_fallback("plain", "Ġ"),
    "tiktoken": lambda: tiktoken(),
}
KINDS: dict[str, Callable[[], Tokenizer]] = BYTE_KINDS | {
    "word piece": lambda: word_piece(),
    "metaspace, never": lambda: unigram("never"),
    "metaspace, always": lambda: unigram("always"),
    "words": lambda: words(),
    "ends of words": lambda: ends_of_words(),
}


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """One of :data:`KINDS`, with special and ordinary tokens added."""
    built = KINDS[kind]()
    built.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    built.add_tokens([AddedToken(text, special=False, normalized=i % 2 == 0) for i, text in enumerate(ADDED)])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")
