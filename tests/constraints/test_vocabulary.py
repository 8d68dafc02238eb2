"""What tokens stand for in bytes, against what tokenizers of every kind decode."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoders.constraints.base import Language
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import UnsupportedError
from decoders.testing.grammars import check_grammar
from decoders.testing.languages import REGEXES, Reference, ToyRegex

from ..tokenizer_kinds import ADDED, BYTE_KINDS, SPECIAL, byte_fallback, tokenizer_of


@pytest.fixture(params=BYTE_KINDS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_of(request.param)


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


def test_tokens_that_only_the_tokenizer_has_are_spelt_by_others(tokenizer: PreTrainedTokenizerFast) -> None:
    """The model has no rows for added tokens if its embeddings were not resized."""
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer) - len(ADDED) - len(SPECIAL), [0])
    for text in ("<tool call> true", "日本", "<|im_start|>"):
        assert vocabulary.spell(vocabulary.encoded(text.encode())) == text.encode()


@pytest.mark.in_turns
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


def test_a_sign_for_a_blank_that_is_ascii_is_read_and_its_byte_left_out() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_fallback("metaspace", "_"))
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer), [0])
    texts = dict(zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), vocabulary.tokens, strict=True))
    assert (texts["_t"], texts["__"], texts["<0x5F>"], texts["<0x0A>"]) == (b" t", b"  ", None, b"\n")


def test_a_decoder_that_does_something_else_to_tokens_is_refused() -> None:
    built = byte_fallback("plain")
    built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.BPEDecoder("</w>")])
    with pytest.raises(UnsupportedError, match=r"its decoder has an unknown part, .*BPEDecoder.*</w>"):
        Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=built), 300, [0])


@pytest.mark.parametrize("stops", [[-1], [3], [1_000_000, -5]])
def test_stop_tokens_that_the_model_does_not_have_are_refused(stops: list[int]) -> None:
    with pytest.raises(UnsupportedError, match=r"eos_token_id=\[.*\] has none of the model's 3 tokens.* from 0 to 2"):
        Vocabulary([b"a", b"b", None], stops)
    assert Vocabulary([b"a", b"b", None], [*stops, 2]).stops == (2,)
    assert Vocabulary([b"a", b"b", None], []).stops == ()
