"""Vocabularies of any size for measurements of grammars. They need no network, and are equal on all machines with the same Python.

The first :data:`TRAINED` tokens come from a byte-level BPE that is trained on the standard library's sources. The other tokens are
made up: words of syllables, other scripts, numbers and marks, mixed as in large vocabularies.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from decoders.constraints import Vocabulary

#: Number of trained tokens; training more would take longer than the measurement.
TRAINED = 16_000
#: Number of characters of the sources to read.
READ = 6_000_000


@lru_cache(maxsize=4)
def vocabulary(size: int) -> Vocabulary:
    """A vocabulary of `size` tokens with different spellings; token 0 is the stop token."""
    spellings = _trained(min(size, TRAINED))
    known = set(spellings)
    for text in _made_up():
        if len(spellings) >= size:
            break
        if text not in known:
            known.add(text)
            spellings.append(text)
    return Vocabulary([None, *spellings[1:size]], stops=[0])


def _trained(size: int) -> list[bytes]:
    """The bytes of a byte-level BPE's tokens, by id; the end token, which comes first, has no bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        _sources(),
        trainers.BpeTrainer(vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False),
    )
    tokens = Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>"), size, [0]).tokens
    return [text or b"" for text in tokens]


def _sources() -> Iterator[str]:
    characters_left = READ
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:characters_left]
        characters_left -= len(text)
        yield text
        if characters_left <= 0:
            return


def _made_up() -> Iterator[bytes]:
    """Yields made-up tokens: words with and without a leading blank, capitals, other scripts, numbers, marks, parts of characters."""
    generator = random.Random(0)
    begins = "b br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh st str t th tr v w".split()  # noqa: SIM905
    middles = "a ai e ea ee i ie o oo ou u".split()  # noqa: SIM905
    ends = ["", *"b ck d ff g l m n nd ng nt p r rd rt s ss st t th x".split()]  # noqa: SIM905
    scripts = [(0x430, 0x450), (0x4E00, 0x9FA0), (0x627, 0x64A), (0x905, 0x939), (0xAC00, 0xD7A0), (0xE0, 0xFF)]
    marks = ['"', '",', '":', '"\n', "\n", "\n\n", "\t", "\\", "\\n", "(", ")", "=", ";", "->", "'", ".", "/"]

    def word() -> str:
        count = generator.choices([1, 2, 3, 4], [3, 5, 3, 1])[0]
        return "".join(
            generator.choice(begins) + generator.choice(middles) + generator.choice(ends) for _ in range(count)
        )

    def foreign() -> str:
        low, high = generator.choice(scripts)
        return "".join(chr(generator.randrange(low, high)) for _ in range(generator.choice([1, 2, 2, 3, 4])))

    for length in range(2, 100):
        for character in " \t\n=-*#_/.":
            yield (character * length).encode()
    while True:
        kind = generator.random()
        if kind < 0.68:
            text = word()
            text = text.capitalize() if generator.random() < 0.3 else text
            yield ((" " if generator.random() < 0.6 else "") + text).encode()
        elif kind < 0.83:
            yield foreign().encode()
        elif kind < 0.96:
            yield generator.choice(
                [generator.choice(marks) + word(), word() + generator.choice(marks), generator.choice(marks) * 2]
            ).encode()
        elif kind < 0.98:
            yield str(generator.randrange(1000)).encode()
        else:
            yield foreign().encode()[: -generator.choice([1, 1, 2])] or b"\xe4"
