"""Measures grammar backends in the decoding loop: the milliseconds that a grammar adds to a step, and the steps per second.

    python measure.py VOCABULARY ROUNDS TOKENS

The model is a Llama of two small layers with random weights and a made-up vocabulary, so that the grammar takes most of the time.
Drafts are 15 legal tokens: a chain, or a tree of three branches of five tokens. They come from the automaton of the backend `table`, so
they are the same for every backend, and the time to propose them is not counted. Backends take turns. The output has the median and
the quartiles of the rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from decoders_lab.vocabularies import vocabulary
from decoders_xgrammar import XGrammar
from tokenizers import Tokenizer, models
from tokenizers import decoders as token_decoders
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import decoders
import decoders.registry
from decoders import Context, Draft, Sequences, Settings, Strategy
from decoders.constraints import Backend, Table, TableGrammar, Vocabulary, unpack
from decoders.tree import Topology

NODES = 15
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["customer", "supplier", "employee", "visitor"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 5, "maxItems": 6},
    },
    "required": ["name", "age", "kind", "notes"],
    "additionalProperties": False,
}
LOG = r"([0-9]{4}-[0-9]{2}-[0-9]{2} (INFO|WARN|ERROR) [a-z]{3,12}: [A-Za-z0-9 ,._/-]{20,80}\n){6,12}"
GRAMMARS = {
    "schema": lambda **how: decoders.json_schema(PERSON, whitespace="compact", **how),
    "regex": lambda **how: decoders.regex(LOG, **how),
}
BACKENDS = {
    "schema": ("table", "llguidance", "xgrammar_schema"),
    "regex": ("table", "llguidance", "xgrammar"),
}
SHAPES = {
    "plain": [],
    "chain": list(range(NODES)),
    "tree": [0, 0, 0, *range(1, 13)],  # three branches of five
}


class XGrammarSchema(XGrammar):
    """The backend that gives xgrammar the JSON schema itself, not its regular expression."""

    name = "xgrammar_schema"
    summary = "xgrammar, from the JSON schema itself"

    def compiled(self, compiler: Any, regex: str) -> Any:
        return compiler.compile_json_schema(json.dumps(PERSON), any_whitespace=False, separators=(",", ":"))


class PlannedSettings(Settings):
    """No settings."""


class Planned(Strategy):
    """Proposes legal tokens that depend only on the state of the grammar."""

    name = "planned"
    settings_class = PlannedSettings
    summary = "legal draft tokens, chosen at random"
    grammar: TableGrammar
    parents: list[int]

    def start(self, context: Context) -> dict[str, Any]:
        assert context.sequences is not None
        return {"read": int(context.sequences.length[0]), "state": self.grammar.first}

    def propose(self, state: dict[str, Any], sequences: Sequences) -> Draft:
        length = int(sequences.length[0])
        for token in sequences.tokens[0, state["read"] : length].tolist():
            state["state"] = self.grammar.step(state["state"], token)
        state["read"] = length
        tokens = torch.tensor([self.planned(self.grammar, state["state"], tuple(self.parents))], dtype=torch.int64)
        return Draft(tokens, Topology.from_parents([-1, *self.parents]))

    @staticmethod
    @cache
    def planned(grammar: TableGrammar, state: int, parents: tuple[int, ...]) -> list[int]:
        generator, states, tokens = random.Random(state), [state], []
        for parent in parents:
            legal = Planned.legal(grammar, states[parent])
            token = generator.choice(legal) if legal else -1
            tokens.append(token)
            states.append(grammar.step(states[parent], token) if legal else 0)
        return tokens

    @staticmethod
    @cache
    def legal(grammar: TableGrammar, state: int) -> list[int]:
        if not state:
            return []
        tables = Planned.tables(grammar)
        allowed = unpack(tables.masks[grammar.mask_rows[state]], len(grammar.vocabulary)).nonzero().flatten().tolist()
        return [token for token in allowed if token not in grammar.vocabulary.stops]

    @staticmethod
    @cache
    def tables(grammar: TableGrammar) -> Any:
        return grammar.tables()


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the made-up vocabulary."""
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in text) if text else "<end>" for text in vocabulary(size).tokens]
    inner = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    inner.decoder = token_decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


class Plugin:
    """The backend of this file as a plugin."""

    @staticmethod
    @decoders.hookimpl
    def decoders_grammar_backends() -> list[type[Backend]]:
        return [XGrammarSchema]


def measure(size: int, rounds: int, tokens: int) -> Iterator[str]:
    """Yields a line of figures for each grammar, shape of drafts and backend."""
    tokenizer = tokenizer_of(size)
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=0, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = decoders.enable(LlamaForCausalLM(config).eval(), tokenizer)
    prompt = torch.tensor([[65, 66, 67, 68]])
    for name, spec in GRAMMARS.items():
        planning = Table().compile(spec().language(), Vocabulary.of(tokenizer, size, [0]))
        for shape, parents in SHAPES.items():
            strategy: Any = Planned() if parents else "autoregressive"
            if parents:
                strategy.grammar, strategy.parents = planning, parents
            figures: dict[str, list[tuple[float, float]]] = {}
            texts = {}
            for turn in range(rounds + 1):
                for backend in BACKENDS[name] if parents else (*BACKENDS[name], None):  # drafts need a grammar
                    output = model.generate(
                        prompt, strategy=strategy, grammar=spec(backend=backend) if backend else None, do_sample=True, seed=1,
                        max_new_tokens=tokens, return_dict_in_generate=True,
                    )  # fmt: skip
                    texts[backend], report = output.sequences[0].tolist(), output.report
                    if turn:  # the first round is for warming up
                        steps = report.steps - report.prefill_steps
                        seconds = report.timings.steps - report.timings.propose
                        figures.setdefault(backend, []).append((report.timings.mask / steps * 1e3, steps / seconds))
            for backend, times in figures.items():
                masks, rates = zip(*times, strict=True)
                low, middle, high = statistics.quantiles(masks)
                same = "" if not backend or texts[backend] == texts["table"] else "other tokens"
                yield (
                    f"| {size // 1000}k | {name} | {shape} | {backend or 'no grammar'} | {middle:.2f} ({low:.2f}–{high:.2f}) "
                    f"| {statistics.median(rates):.0f} | {same}"
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    decoders.registry.registry().register(Plugin, "measure")
    for line in measure(*map(int, sys.argv[1:])):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
