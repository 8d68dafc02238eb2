"""The bytes of every token of a model. Grammars work on bytes, because a token may be part of a character."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ..common.pieces import BYTE_TOKEN, special_tokens
from ..errors import GrammarError, UnsupportedError, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: "full": every token after which the text can be completed is legal. "canonical": where the grammar forces the next bytes, only
#: the token that the tokenizer would write there is legal, which changes the distribution of sampled texts.
Policy = Literal["full", "canonical"]


class Vocabulary:
    """The bytes of each token that a model can predict.

    Attributes:
        tokens: the bytes of each of the ``V`` tokens; None for special tokens, stop tokens and unused rows of the logits.
        stops: ids that end a text.
        encode: returns the tokenizer's ids of a text, without added special tokens.
        special: ids of special tokens by their names.
        spelled: names of the special tokens that this vocabulary spells as private-use characters, see :meth:`spelling`.

    Raises:
        UnsupportedError: stop tokens are given, and none of their ids is below ``V``.
    """

    def __init__(
        self, tokens: Sequence[bytes | None], stops: Sequence[int], encode: Callable[[str], Sequence[int]] | None = None,
        rules: str | Callable[[], str] = "", special: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        ends = set(stops)
        self.tokens = tuple(None if token in ends or not text else text for token, text in enumerate(tokens))
        self.stops = tuple(sorted(token for token in ends if 0 <= token < len(self.tokens)))
        if ends and not self.stops:  # otherwise no text could end
            raise UnsupportedError(
                f"grammar= needs a token that ends the text, and eos_token_id={sorted(ends)} has none of the model's "
                f"{len(self.tokens)} tokens: set eos_token_id in the call or the generation config to ids from 0 to "
                f"{len(self.tokens) - 1}"
            )
        self.encode, self._rules, self.special = encode or self._greedy, rules, dict(special or {})
        self.spelled: tuple[str, ...] = ()
        self._spellings = dict[tuple[str, ...], Vocabulary]()

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, size: int, stops: Sequence[int]) -> Vocabulary:
        """The vocabulary of `tokenizer` for logits of `size` entries.

        Raises:
            UnsupportedError: the bytes of its tokens are unknown (it is neither byte-level nor has byte fallback), or all `stops`
                are outside of the logits.
        """
        backend, vocabulary = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
        spell = _spelling(tokenizer, vocabulary, _part(backend, "decoder"))
        added, special = tokenizer.added_tokens_decoder, special_tokens(tokenizer)
        tokens: list[bytes | None] = [None] * size
        # The tokenizer decodes a token from the name that convert_ids_to_tokens returns. In its vocabulary, names of added tokens may
        # be normalised; in the vocabulary of a tokenizer written in Python, all names may be normalised.
        renamed = [token for token in {*added, *(vocabulary.values() if backend is None else ())} if token < size]
        names = {token: name for name, token in vocabulary.items() if token < size}
        names |= dict(zip(renamed, tokenizer.convert_ids_to_tokens(renamed), strict=True))
        for token in special.values():
            names.pop(token, None)
        for token, name in names.items():
            tokens[token] = spell(name)

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return [token for token in ids if token < size]  # a model may have fewer tokens than its tokenizer

        special = {name: token for name, token in special.items() if token < size}
        return Vocabulary(tokens, stops, encode, lambda: _rules(backend), special)

    def __len__(self) -> int:
        return len(self.tokens)

    def spelling(self, names: tuple[str, ...]) -> Vocabulary:
        """This vocabulary with the special tokens `names` spelt as private-use characters, so that grammars can contain them.

        ``stand_in(i)`` is the character for ``names[i]``.

        Raises:
            GrammarError: a name belongs to a stop token.
        """
        if not names:
            return self
        ends = next((name for name in names if self.special[name] in self.stops), None)
        if ends is not None:
            raise GrammarError(
                f"{ends!r} has to be written, but it is a stop token: leave this token out of eos_token_id", "marker"
            )
        if names not in self._spellings:
            ids = {self.special[name]: stand_in(place).encode() for place, name in enumerate(names)}
            first = stand_in(0).encode()[0]
            tokens = [None if text is not None and first in text else text for text in self.tokens]
            for token, text in ids.items():
                tokens[token] = text

            def encode(text: str) -> Sequence[int]:
                for place, name in enumerate(names):
                    text = text.replace(stand_in(place), name)
                return self.encode(text)

            own = Vocabulary(tokens, self.stops, encode, lambda: f"{self.rules} {names}", self.special)
            own.spelled = names
            self._spellings[names] = own
        return self._spellings[names]

    @cached_property
    def rules(self) -> str:
        """A digest of how texts are encoded. It differs between tokenizers with the same tokens but other rules."""
        return self._rules if isinstance(self._rules, str) else self._rules()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, stop tokens, and how texts are encoded."""
        digest = hashlib.sha256(repr((self.stops, self.rules)).encode())
        for token in self.tokens:
            digest.update(b"-" if token is None else b"%d:" % len(token) + token)
        return digest.hexdigest()

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """For each spelling (the bytes of a token), the first token that has it."""
        first_ids: dict[bytes, int] = {}
        for token, text in enumerate(self.tokens):
            if text is not None:
                first_ids.setdefault(text, token)
        return first_ids

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.tokens) if text is not None)

    def beginning_with(self, text: bytes) -> list[int]:
        """Tokens that begin with `text`."""
        begin, found = bisect_left(self._sorted, (text, -1)), []
        for whole, token in self._sorted[begin:]:
            if not whole.startswith(text):
                break
            found.append(token)
        return found

    def holding(self, text: bytes) -> list[int]:
        """Tokens that contain `text`."""
        return [token for token, whole in enumerate(self.tokens) if whole is not None and text in whole]

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    @cached_property
    def _prefixes(self) -> frozenset[bytes]:
        """All proper prefixes of tokens."""
        return frozenset(text[:end] for text in self.ids for end in range(1, len(text)))

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens`; tokens without text are skipped."""
        return b"".join(self.tokens[token] or b"" for token in tokens if token >= 0)

    def encoded(self, text: bytes) -> list[int]:
        """The tokens of `text` as the tokenizer encodes it; an incomplete character at the end of `text` is left out.

        If `text` is not valid UTF-8, each token is the longest that matches.
        """
        whole = _decodable(text)
        if not whole and len(text) > 3:
            return self.longest_tokens(text)
        tokens = [*self.encode(whole)]
        if self.spell(tokens) != whole.encode():  # the tokenizer may add a leading blank
            tokens = self._greedy(whole)
        return tokens

    def canonical(self, forced: bytes) -> list[int]:
        """The tokens of `forced` as the tokenizer encodes it, up to (not including) the first token that following bytes could change.

        Following bytes could change a token if the rest of `forced`, from this token on, is the beginning of a longer token.
        """
        if not _decodable(forced):  # empty, or the last bytes of a character, which a tokenizer cannot encode alone
            return []
        tokens = self.encoded(forced)
        begin = 0
        for count, token in enumerate(tokens):
            if forced[begin:] in self._prefixes:
                return tokens[:count]
            begin += len(self.tokens[token] or b"")
        return tokens

    def written(self, forced: bytes, limit: int, policy: Policy) -> list[int]:
        """The first tokens of :meth:`canonical`, at most `limit`. The policy ``canonical`` stops before a token that would differ if
        the bytes from this token on were encoded alone: in the whole text, a tokenizer may group digits or find special tokens.
        """
        tokens = self.canonical(forced)[:limit]
        for count, token in enumerate(tokens if policy == "canonical" else ()):
            if count and self.canonical(forced)[:1] != [token]:
                return tokens[:count]
            forced = forced[len(self.tokens[token] or b"") :]
        return tokens

    def _greedy(self, text: str) -> list[int]:
        """The tokens of `text`, each the longest that matches; empty if some byte has no token."""
        return self.longest_tokens(text.encode())

    def longest_tokens(self, rest: bytes) -> list[int]:
        """The tokens of `rest`, each the longest that matches; empty if some byte has no token."""
        tokens: list[int] = []
        while rest:
            for size in range(min(len(rest), self.longest), 0, -1):
                if rest[:size] in self.ids:
                    tokens.append(self.ids[rest[:size]])
                    rest = rest[size:]
                    break
            else:
                return []
        return tokens


def stand_in(place: int) -> str:
    """The character of plane 16 (private use) that stands for the special token with index `place`."""
    return chr(0x100000 + place)


def _decodable(text: bytes) -> str:
    """`text` without an incomplete character at its end."""
    for cut in range(min(4, len(text) + 1)):
        try:
            return text[: len(text) - cut].decode()
        except UnicodeDecodeError:
            continue
    return ""


def _part(backend: Any, name: str) -> dict | None:
    """The part `name` of a tokenizer of the tokenizers library, as in its JSON file; serializing the whole tokenizer takes seconds."""
    part = getattr(backend, name, None)
    return None if part is None else dict(json.loads(part.__getstate__()))


def _rules(backend: Any) -> str:
    """A digest of the parts of a tokenizer that affect encoding. Computing it takes a second for 500,000 merges."""
    parts = [getattr(backend, name, None) for name in ("model", "normalizer", "pre_tokenizer")]
    states = [b"" if part is None else bytes(part.__getstate__()) for part in parts]
    return hashlib.sha256(b"\0".join(states)).hexdigest()


def _spelling(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], decoder: dict | None
) -> Callable[[str], bytes]:
    """The function that returns the bytes of a token of `tokenizer`, given the token's name.

    Raises:
        UnsupportedError: the tokenizer is neither byte-level nor has byte fallback, or its decoder is unknown.
    """
    if '"ByteLevel"' in json.dumps(decoder):
        alphabet = _byte_level_alphabet()

        def spell_bytes(
            name: str,
        ) -> bytes:  # an added token with characters outside of the alphabet is spelt by its name
            known = all(character in alphabet for character in name)
            return bytes(alphabet[character] for character in name) if known else name.encode()

        return spell_bytes
    if all(f"<0x{byte:02X}>" in vocabulary for byte in range(128, 256)):
        steps = _decoding(tokenizer, decoder)

        def spell(name: str) -> bytes:
            is_byte = False
            for step in steps:
                if step is not None:
                    if is_byte and step[0] in name:  # the decoder would replace the byte by a blank
                        return b""
                    name = name.replace(*step)
                elif byte := BYTE_TOKEN.fullmatch(name):
                    code = int(byte[1], 16)
                    if code >= 0x80:
                        return bytes([code])
                    name, is_byte = chr(code), True
            return name.encode()

        return spell
    raise UnsupportedError(
        f"grammar= works on bytes, and the bytes of the tokens of {type(tokenizer).__name__} are unknown: it is neither a "
        "byte-level tokenizer nor one with byte fallback"
    )


def _decoding(tokenizer: PreTrainedTokenizerBase, decoder: dict | None) -> list[tuple[str, str] | None]:
    """The steps by which `decoder` turns a token's name into text: pairs (text, replacement), or None for reading ``<0x0A>`` as a byte.

    Raises:
        UnsupportedError: a step of `decoder` is unknown.
    """
    if decoder is None:  # the rule of sentencepiece
        return [None, ("\u2581", " ")]
    steps: list[tuple[str, str] | None] = []
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match part:
            case {"type": "ByteFallback"}:
                steps.append(None)
            case {"type": "Metaspace", "replacement": replacement}:
                steps.append((replacement, " "))
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                steps.append((old, new))
            case {"type": "Fuse" | "Strip"}:  # these steps have no effect within a text
                pass
            case _:
                raise UnsupportedError(
                    f"grammar= works on bytes, and the bytes of the tokens of {type(tokenizer).__name__} are unknown: its decoder "
                    f"has an unknown part, {shortened(json.dumps(part))}"
                )
    return steps


@lru_cache
def _byte_level_alphabet() -> dict[str, int]:
    """Maps each character that byte-level tokenizers write for a byte to the byte (Radford et al. 2019). Printable bytes are kept."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
