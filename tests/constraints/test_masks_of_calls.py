"""Calls in every format: at every token, masks and replacements allow what the matcher takes, in vocabularies with random merges."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest
import torch

from decoders.constraints import (
    FORMATS,
    Called,
    CallFormat,
    Calls,
    CallSpec,
    CompiledGrammar,
    LLGuidance,
    Matcher,
    Spec,
    Table,
    Thinking,
    Vocabulary,
    mask_words,
    unpack,
)
from decoders.constraints.tags.thinking import KNOWN, ThinkingMarkers
from decoders.errors import GrammarError

from ..turns import slow_but

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, "a"]}}, "required": ["n"]}
FUNCTIONS = tuple(Called.of(name, SCHEMA, True) for name in ("walk", "walk_far"))
#: Names that tokenizers have as special tokens.
NAMES = re.compile(r'<[|｜/]?[\w▁:]+[|｜]?>|\[/?[A-Z_]+\]|<\|"\|>|<tool_call\|>|<\|tool_call>')
#: Tokens of a thought: it has no place, any number, or at most so many.
THOUGHTS = ("none", None, 0, 5)
STEPS = 40

Piece = bytes | None  # None is a special token


def markers_of(format: CallFormat) -> ThinkingMarkers:
    """How thoughts are marked beside calls of `format`."""
    return KNOWN[0] if format.message else KNOWN[len(format.name) % 3 + 1]


def texts_of(format: CallFormat) -> list[str]:
    """What a model writes, as it has to be and otherwise."""
    markers = markers_of(format)
    call = format.written([("walk", '{"n": 1}')])
    calls = format.written([("walk", '{"n": "a"}'), ("walk_far", '{"n": 1}')])
    message, answer = format.message_end + format.message, "".join(format.answer)
    also = [f'{opening}walk{middle}{{"n": 1}}{format.closing}' for opening, middle in format.also]
    thought = f"{markers.begin}so{'' if format.message else markers.end}"
    behind = [f"{message}{each}" for each in (call, *also) if message]
    return [call, calls, *also, *behind, thought, f"{thought}{message}{answer}no", f"no{call}", f"{answer}no{message}"]


def parts_of(text: str, special: Sequence[str]) -> list[str]:
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    return [part for part in re.split(f"({names})", text) if part] if names else [text]


def merged(pieces: Sequence[Piece], pair: tuple[bytes, bytes]) -> list[Piece]:
    whole: list[Piece] = []
    for piece in pieces:
        if whole and (whole[-1], piece) == pair:
            whole[-1] = pair[0] + pair[1]
        else:
            whole.append(piece)
    return whole


def vocabulary_of(texts: Sequence[str], rng: random.Random, stopping: bool) -> Vocabulary:
    """Bytes, most names as special tokens, pieces merged as in BPE, and some that no merge gives.

    Args:
        stopping: whether a few of the special tokens end texts.
    """
    special = sorted(name for name in {*NAMES.findall(" ".join(texts))} if rng.random() < 0.8)
    corpus: list[list[Piece]] = [
        [piece for part in parts_of(text, special) for piece in ([None] if part in special else single(part))]
        for text in texts
    ]
    merges: list[tuple[bytes, bytes]] = []
    for _ in range(rng.randrange(120)):
        pairs = [(a, b) for a, b in itertools.pairwise(rng.choice(corpus)) if a is not None and b is not None]
        if pairs:
            merges.append(rng.choice(pairs))
            corpus = [merged(pieces, merges[-1]) for pieces in corpus]
    cuts = [(rng.choice(texts), rng.randrange(40), rng.randrange(2, 9)) for _ in range(20)]
    odd = [text[begin : begin + size] for text, begin, size in cuts]
    odd = [text for text in odd if text and not any(name in text for name in special)]
    pieces = [a + b for a, b in merges] + [text.encode() for text in odd]
    plain = [*dict.fromkeys([*(bytes([byte]) for byte in range(256)), *pieces])]
    ids = {text: token for token, text in enumerate(plain)}

    def encode(text: str) -> list[int]:
        pieces = single(text)
        for pair in merges:
            pieces = merged(pieces, pair)
        return [ids[piece] for piece in pieces if piece is not None]

    size, names = len(plain), {name: len(plain) + place for place, name in enumerate(special)}
    stops = [size + len(names), *(token for token in names.values() if stopping and rng.random() < 0.2)]
    return Vocabulary([*plain, *[None] * (len(names) + 1)], stops, encode, special=names)


def single(text: str) -> list[Piece]:
    return [bytes([byte]) for byte in text.encode()]


def spelled(text: str, vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """`text` in tokens, each part as the tokenizer encodes it or in random pieces."""
    tokens: list[int] = []
    for part in parts_of(text, [*vocabulary.special]):
        rest = part.encode()
        if part in vocabulary.special:
            tokens.append(vocabulary.special[part])
        elif rng.random() < 0.4:
            tokens += vocabulary.encoded(rest)
        else:
            while rest:
                sizes = [size for size in range(1, vocabulary.longest + 1) if rest[:size] in vocabulary.ids]
                size = rng.choice(sizes)
                tokens.append(vocabulary.ids[rest[:size]])
                rest = rest[size:]
    return tokens


def grammar_of(
    format: CallFormat, required: bool, several: bool, thought: int | str | None, vocabulary: Vocabulary, rng: random.Random
) -> CompiledGrammar:  # fmt: skip
    backend = Table() if rng.random() < 0.3 else LLGuidance()

    def compile(spec: Spec) -> CompiledGrammar:
        language = spec.language()
        return backend.compile(language, vocabulary.spelling(language.special), spec.policy)

    spec: Spec | CompiledGrammar | None = (
        Calls(FUNCTIONS, format, required, several)
        if required or format.trigger
        else CallSpec(FUNCTIONS, format, alone=False, several=several)
    )
    if not isinstance(thought, str):
        markers = markers_of(format)
        thinking = Thinking(thought, markers.begin, None if format.message else markers.end)
        spec = thinking.around(spec, (), vocabulary, None)
    assert isinstance(spec, Spec)
    return spec.compiled(vocabulary, compile) if hasattr(spec, "compiled") else compile(spec)


def allowed_at(matcher: Matcher, size: int) -> set[int]:
    out = torch.zeros(mask_words(size), dtype=torch.int32)
    matcher.fill_mask(out)
    return {*unpack(out, size).nonzero().flatten().tolist()}


def walk(grammar: CompiledGrammar, vocabulary: Vocabulary, texts: Sequence[str], rng: random.Random) -> None:
    """Goes along parts of `texts` and random tokens; what must not be written is replaced as in generation."""
    matcher, stops, written = grammar.start(), {*vocabulary.stops}, list[bytes | int]()
    script = spelled(rng.choice(texts), vocabulary, rng)
    for _ in range(STEPS):
        allowed, taken = allowed_at(matcher, len(vocabulary)), set()
        for token in range(len(vocabulary)):
            if matcher.advance([token]):
                taken.add(token)
                assert token not in stops or matcher.accepting, (written, token)
                matcher.rollback(1)
        assert allowed and allowed == taken, (written, allowed - taken, taken - allowed)
        assert not matcher.accepting or not allowed.isdisjoint(stops), written
        replaced = matcher.replacements()
        if replaced is not None:
            assert {*replaced} == {*range(len(vocabulary))} - allowed, (written, replaced)
            assert {*replaced.values()} <= allowed, (written, replaced)
        forced = matcher.forced_tokens(8) or []
        assert matcher.advance(forced) == len(forced), (written, forced)
        matcher.rollback(len(forced))
        if not script or rng.random() < 0.06:
            script = spelled(rng.choice(texts), vocabulary, rng)[rng.randrange(4) :]
        token = script.pop(0) if script else rng.randrange(len(vocabulary))
        token = (replaced or {}).get(token, token)
        token = token if token in allowed else rng.choice(sorted(allowed))
        matcher.advance([token])
        written.append(vocabulary.tokens[token] or token)
        if token in stops:
            break


@pytest.mark.in_turns
@pytest.mark.parametrize("walks", slow_but([1], [1, 25]))
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_masks_and_matchers_agree_at_every_token(
    format: CallFormat, required: bool, several: bool, thought: int | str | None, walks: int
) -> None:
    for seed in range(walks):
        case = f"{seed} {format.name} {required} {several} {thought}"
        rng, texts = random.Random(case), texts_of(format)
        vocabulary = vocabulary_of(texts, rng, stopping=rng.random() < 0.3)
        try:
            grammar = grammar_of(format, required, several, thought, vocabulary, rng)
        except GrammarError as error:
            assert "has to be written" in str(error) and len(vocabulary.stops) > 1, case
            continue
        walk(grammar, vocabulary, texts, rng)


@pytest.mark.parametrize("split", [False, True], ids=["in one token", "in two"])
def test_an_answer_that_may_not_be_written_becomes_a_call(split: bool) -> None:
    names = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
    pieces = ["analysis", "comment", "ary", "assistant", *(["fin", "al"] if split else ["final"])]
    plain = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in pieces)]
    special = {name: len(plain) + place for place, name in enumerate(names)}
    vocabulary = Vocabulary([*plain, *[None] * 7], [len(plain) + 6], special=special)
    harmony = next(format for format in FORMATS if format.name == "harmony")
    matcher = grammar_of(harmony, True, True, "none", vocabulary, random.Random(0)).start()
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>"
    tokens = [
        token
        for part in parts_of(thought, names)
        for token in ([special[part]] if part in special else vocabulary.encoded(part.encode()))
    ]
    tokens += [vocabulary.ids[b"fin"]] if split else []
    assert matcher.advance(tokens) == len(tokens)
    answer = vocabulary.ids[b"al" if split else b"final"]
    instead = special["<|end|>"] if split else vocabulary.ids[b"comment"]  # "fin" stays text
    assert (matcher.replacements() or {})[answer] == instead and matcher.advance([answer]) == 0


@pytest.mark.parametrize("name", ["<|end|>", "<|start|>"])
def test_a_stop_token_in_what_has_to_be_written_is_an_error(name: str) -> None:
    special = {"<|channel|>": 256, "<|message|>": 257, "<|start|>": 258, "<|end|>": 259, "<|call|>": 260, "</s>": 261}
    plain = [*(bytes([byte]) for byte in range(256)), *[None] * len(special)]
    harmony = next(format for format in FORMATS if format.name == "harmony")
    for stops in ([261, 260], [261, special[name]]):
        vocabulary = Vocabulary(plain, stops, special=special)
        if special[name] in stops:
            with pytest.raises(GrammarError, match="has to be written, and the text would end at the stop token"):
                grammar_of(harmony, True, True, "none", vocabulary, random.Random(0))
        else:  # gpt-oss ends its texts with <|call|>
            grammar_of(harmony, True, True, "none", vocabulary, random.Random(0))
