"""What tokens stand for in bytes, against what tokenizers of every kind decode."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoders.constraints.base import Language
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import UnsupportedError
from decoders.testing.grammars import check_grammar
from decoders.testing.languages import REGEXES, Reference, ToyRegex

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


def byte_fallback(scheme: str) -> Tokenizer:
    """Pieces with ``▁`` for a blank, as sentencepiece has them, and a token for each byte."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abetru{}é",
        "▁t",
        "ru",
        "ru" + "e",
        "▁t" + "rue",
        "▁▁",
    ]
    merges = [("▁", "t"), ("r", "u"), ("ru", "e"), ("▁t", "rue"), ("▁", "▁")]
    vocabulary = {name: token for token, name in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if scheme == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        return tokenizer
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if scheme == "prepend" else blanks
    strip = [decoders.Strip(" ", 1, 0)] if scheme == "prepend" else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


KINDS = {
    "byte level": lambda: byte_level(False),
    "byte level, prefix": lambda: byte_level(True),
    "byte fallback": lambda: byte_fallback("plain"),
    "byte fallback, prefix": lambda: byte_fallback("prepend"),
    "metaspace": lambda: byte_fallback("metaspace"),
}


@pytest.fixture(params=KINDS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    built = KINDS[request.param]()
    built.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    built.add_tokens([AddedToken(text, special=False, normalized=i % 2 == 0) for i, text in enumerate(ADDED)])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    assert tokenizer.eos_token_id is not None
    return Vocabulary.of(tokenizer, len(tokenizer) + 5, [tokenizer.eos_token_id])


def test_tokens_are_the_bytes_that_are_decoded(tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary) -> None:
    between = vocabulary.ids[b"a"]
    seen = 0
    for token, text in enumerate(vocabulary.tokens):
        try:
            want = None if text is None else f"a{text.decode()}a"
        except UnicodeDecodeError:  # half a character
            continue
        if want is not None:
            seen += 1
            assert tokenizer.decode([between, token, between]) == want
    assert seen > 128 + len(ADDED)


def test_special_tokens_stand_for_no_text(tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary) -> None:
    assert all(
        vocabulary.tokens[token] is None for token in tokenizer.convert_tokens_to_ids(["</s>", "<|im_start|>", '{"'])
    )
    assert vocabulary.tokens[len(tokenizer) :] == (None,) * 5


@pytest.mark.parametrize(
    "text", ['{"a": true}', "true", " true", "日本é😀", "<|im_start|>", "a  b", "▁", "<0x41>", "\x00\r\n"]
)
def test_canonical_tokens_spell_the_text(vocabulary: Vocabulary, text: str) -> None:
    assert text.encode().startswith(vocabulary.spell(vocabulary.canonical(text.encode())))


@pytest.mark.parametrize(
    ("backend", "name", "policy"),
    [(Table, "long forced parts", "canonical"), (Table, "long characters", "full"), (LLGuidance, "counted", "full")],
)
def test_backends_keep_the_contract(backend: type, name: str, policy: str, vocabulary: Vocabulary) -> None:
    language = Language(name, regex=REGEXES[name])
    check_grammar(
        backend().compile(language, vocabulary, policy), Reference(language, ToyRegex(REGEXES[name]), vocabulary)
    )


@pytest.mark.parametrize("backend", [Table, LLGuidance])
def test_forced_tokens_are_legal_one_by_one(backend: type, vocabulary: Vocabulary) -> None:
    """Here the tokenizer sees a special token in the whole, and none in what is left after the first."""
    matcher = backend().compile(Language("forced", regex=r'\{"true": true\}'), vocabulary, "canonical").start()
    tokens = vocabulary.written(matcher.forced_bytes(), 99, "canonical")
    assert tokens and matcher.advance(tokens) == len(tokens)


def test_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="neither a byte-level tokenizer nor one with byte fallback"):
        Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=words), 3, [0])
