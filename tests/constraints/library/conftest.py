"""Whether a text is in a language, byte by byte, and random texts of a language."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import llguidance
import pytest

from decoders.constraints.coerce import as_spec

#: What opens something nested, and what a random text is brought to its end with once it is long enough.
OPENING = b"[({"
CLOSING = b"})]'\"0:1;|\n-e"
END = 256  # id of the end of a text in llguidance's byte vocabulary


@lru_cache
def fresh_matcher(name: str) -> llguidance.LLMatcher:
    spec = as_spec(name)
    assert spec is not None
    language = spec.language()
    if language.regex is not None:
        grammar = llguidance.grammar_from("regex", language.regex)
    else:
        grammar = llguidance.grammar_from("lark", language.lark or "")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@pytest.fixture
def accepts() -> Callable[[str, str], bool]:
    """``accepts(name, text)``: whether `text` is a complete text of the grammar."""

    def accepted(name: str, text: str) -> bool:
        matcher = fresh_matcher(name).deep_copy()
        tokens = list(text.encode())
        legal = matcher.validate_tokens(tokens) == len(tokens) and (not tokens or matcher.consume_tokens(tokens))
        return bool(legal and matcher.is_accepting())

    return accepted


@pytest.fixture
def texts() -> Callable[..., Iterator[str]]:
    """``texts(name, count)``: random texts of the grammar, the same in every run."""

    def walk(name: str, count: int, size: int = 60, closing: bytes = CLOSING) -> Iterator[str]:
        draw = random.Random(name)
        made = (one(name, draw, draw.randrange(size), closing) for _ in range(2 * count))
        found = list(islice((text for text in made if text is not None), count))
        assert len(found) == count, f"random walks through {name} rarely end"
        return iter(found)

    return walk


def one(name: str, draw: random.Random, size: int, closing: bytes = CLOSING) -> str | None:
    """A random text of about `size` bytes; None if it does not come to an end."""
    matcher = fresh_matcher(name).deep_copy()
    text = bytearray()
    while len(text) < 40 * (size + 10):
        done = len(text) >= size
        if matcher.is_accepting() and (done or draw.random() < 0.02):
            return text.decode()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        legal = [byte for byte in range(END) if bits >> byte & 1]
        if not legal:
            assert matcher.is_accepting(), bytes(text)
            return text.decode()
        plain = [byte for byte in legal if byte < 128]  # rather than the many bytes of other scripts
        wanted = [byte for byte in (closing if done else OPENING) if byte in legal]
        if wanted and draw.random() < (0.8 if done else 0.3):
            byte = draw.choice(wanted)
        else:
            byte = draw.choice(plain if plain and draw.random() < 0.95 else legal)
        assert matcher.consume_tokens([byte])
        text.append(byte)
    return None
