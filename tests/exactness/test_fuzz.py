"""Random calls, every strategy: the tokens of transformers when greedy, of ``autoregressive`` when sampled.

One example is a call; each strategy that is tried on it is a case. ``FUZZ_EXAMPLES`` sets the size of the slow run.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import decoders
from decoders.testing import Replay, assert_same_tokens, tiny_draft, tiny_model
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import Matched, TokenAutomaton

MODELS = ("llama", "gemma2", "gpt2")
DRAFTED = ("speculative", "threshold", "staged")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("autoregressive", {}),
    ("prompt_lookup", {}),
    ("prompt_lookup", {"branches": 3, "length": 4, "max_ngram": 2}),
    ("lookahead", {}),
    ("lookahead", {"window": 4, "ngram": 3, "candidates": 5}),
    ("ngram", {}),
    ("suffix", {}),
    ("token_recycling", {"nodes": 9}),
    ("suffix+token_recycling", {}),
    ("speculative", {}),
    ("speculative", {"tree": "static", "length": 3, "nodes": 7}),
    ("speculative", {"tree": "dynamic", "length": 4, "nodes": 8}),
    ("speculative", {"schedule": "heuristic", "length": 2}),
    ("threshold", {}),
    ("threshold", {"tree": "dynamic", "max_length": 5}),
    ("staged", {"passes": 2, "stage": "prompt_lookup", "nodes": 12}),
    ("prompt_lookup+ngram", {}),
    ("prompt_lookup+speculative", {}),
    ("replay", {}),
)


class Repeats(LogitsProcessor):
    """Forbids what the row wrote two tokens ago, and counts its calls: stateful, and it reads the text."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        last = input_ids[:, -2:-1] if input_ids.shape[1] > 1 else input_ids[:, -1:]
        return scores.scatter(1, last, -50.0) + (0.5 if self.calls % 3 else 0.0) * (torch.arange(VOCAB) % 7 == 0)


class Ends(StoppingCriteria):
    """Ends rows at a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


class Remembers(StoppingCriteria):
    """Ends everybody once every row has written a token whose remainder is this; remembers which have."""

    def __init__(self, remainder: int) -> None:
        self.remainder, self.done = remainder, torch.zeros(0, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        here = input_ids[:, -1] % 5 == self.remainder
        self.done = here if len(self.done) != len(here) else self.done | here
        return bool(self.done.all())


@dataclass(frozen=True)
class Case:
    """A call; `options` go to generate as they are, the rest makes objects anew for each time it is made."""

    model: str
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    config: dict[str, Any]
    processor: bool
    criterion: int | None
    grammar: int | None
    wrong_every: int

    def keywords(self) -> dict[str, Any]:
        made: dict[str, Any] = dict(self.options)
        if self.processor:
            made["logits_processor"] = LogitsProcessorList([Repeats()])
        if self.criterion is not None:
            made["stopping_criteria"] = [Ends(self.criterion) if self.criterion > 4 else Remembers(self.criterion)]
        return made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, longest = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    lengths = [longest] + [draw(st.integers(1, longest)) for _ in range(rows - 1)]
    # Few different tokens: texts repeat themselves, and drafts are right now and then.
    alphabet = st.sampled_from(draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6)))
    texts = [draw(st.lists(alphabet, min_size=n, max_size=n)) for n in lengths]
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    options: dict[str, Any] = dict(max_new_tokens=draw(st.integers(1, 14)), pad_token_id=draw(st.sampled_from([0, 2])))
    stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=12, unique=True))
    if stops:
        options["eos_token_id"] = stops
    if draw(st.booleans()):
        options["min_new_tokens"] = draw(st.integers(0, options["max_new_tokens"]))
    if draw(st.integers(0, 3)) == 0:
        options["repetition_penalty"] = draw(st.sampled_from([0.8, 1.3]))
    if draw(st.integers(0, 5)) == 0:
        options["no_repeat_ngram_size"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        options |= dict(
            do_sample=True, seed=draw(st.integers(0, 2**40)), temperature=draw(st.sampled_from([0.3, 0.9, 1.5]))
        )
        options["top_k"] = draw(st.sampled_from([0, 1, 3, 40]))
        options["top_p"] = draw(st.sampled_from([1.0, 0.9, 0.3]))
        if draw(st.booleans()):
            options["min_p"] = draw(st.sampled_from([0.01, 0.3]))
    else:
        options["do_sample"] = False
    if draw(st.integers(0, 3)) == 0:
        options["num_return_sequences"] = 1 if not options["do_sample"] else draw(st.integers(1, 2))
    config = dict(compile=False, reuse=draw(st.booleans()), prefill_chunk=draw(st.sampled_from([1, 3, 512])))
    return Case(
        draw(st.sampled_from(MODELS)), {"input_ids": ids, "attention_mask": mask}, options, config,
        processor=draw(st.integers(0, 3)) == 0,
        criterion=draw(st.none() | st.none() | st.integers(0, 4) | st.integers(5, VOCAB - 1)),
        grammar=draw(st.none() | st.none() | st.none() | st.integers(0, 1000)), wrong_every=draw(st.integers(0, 4)),
    )  # fmt: skip


_models: dict[str, PreTrainedModel] = {}
_drafts: dict[str, PreTrainedModel] = {}


def model_of(name: str) -> PreTrainedModel:
    if name not in _models:
        _models[name], _drafts[name] = decoders.enable(tiny_model(name)), tiny_draft(name)
    return _models[name]


def ours(case: Case, strategy: Any, config: dict[str, Any], **more: Any) -> Tensor:
    model, options = model_of(case.model), case.keywords() | more
    if case.grammar is not None:
        stops = options.get("eos_token_id", [])
        grammar = TokenAutomaton.random(case.grammar, VOCAB, stops)
        options["grammar"] = grammar if case.grammar % 2 else Matched(grammar)
    if isinstance(strategy, str) and set(strategy.split("+")) & set(DRAFTED):
        options["assistant_model"] = _drafts[case.model]
    return model.generate(
        **case.inputs, strategy=strategy, strategy_config=config or None, decoders_config=case.config, **options
    )


#: How often each strategy was compared, and how often a call was refused.
compared: Counter[str] = Counter()


def check(case: Case, variants: tuple[tuple[str, dict[str, Any]], ...] = VARIANTS) -> None:
    model = model_of(case.model)
    if case.options["do_sample"] or case.grammar is not None:
        expected = ours(case, "autoregressive", {})
    else:
        expected = model.generate(**case.inputs, **case.keywords())
    returned = case.options.get("num_return_sequences", 1)
    inputs = {name: tensor.repeat_interleave(returned, 0) for name, tensor in case.inputs.items()}
    texts = [row[mask.argmax() :].tolist() for row, mask in zip(expected, inputs["attention_mask"], strict=True)]
    for name, config in variants:
        strategy: Any = name
        if name == "replay":
            strategy = Replay(texts=tuple(map(tuple, texts)), length=5, wrong_every=case.wrong_every)
        compared[name] += 1
        assert_same_tokens(model, inputs, expected, ours(case, strategy, config), f"{name} {config} {case}")


QUICK = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
SIZE = int(os.environ.get("FUZZ_EXAMPLES", "2000"))


@QUICK
@given(cases(), st.randoms(use_true_random=False))
def test_random_calls_write_what_plain_decoding_writes(case: Case, chance: Any) -> None:
    check(case, tuple(chance.sample(VARIANTS, 4)))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_very_many_random_calls() -> None:
    """Prints how many cases were compared; see docs/explanation/reliability.md."""

    @settings(QUICK, max_examples=SIZE, phases=[Phase.generate, Phase.shrink])
    @given(cases())
    def run(case: Case) -> None:
        check(case)

    compared.clear()
    run()
    print(f"{sum(compared.values())} cases: {dict(compared)}")
    assert sum(compared.values()) >= SIZE * len(VARIANTS)


class Stops(BaseStreamer):
    """Fails after a few tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Nothing to close."""


class OneModel(RuleBasedStateMachine):
    """Calls of all kinds, failures and changes of the model, in any order: each call writes what a new model would."""

    @initialize(name=st.sampled_from(MODELS))
    def load(self, name: str) -> None:
        self.name = name
        self.model = decoders.enable(tiny_model(name))
        self.texts = [torch.arange(3, 9)[None]]

    def call(self, ids: Tensor, variant: tuple[str, dict[str, Any]], **options: Any) -> Tensor:
        name, config = variant
        if set(name.split("+")) & set(DRAFTED):
            options["assistant_model"] = tiny_draft(self.name)
        return self.model.generate(
            input_ids=ids, strategy=name, strategy_config=config or None, decoders_config={"compile": False}, **options
        )

    @rule(variant=st.sampled_from(VARIANTS[:-1]), new=st.integers(1, 9), rows=st.integers(1, 3), data=st.data())
    def decode(self, variant: tuple[str, dict[str, Any]], new: int, rows: int, data: Any) -> None:
        text = data.draw(st.sampled_from(self.texts))
        more = data.draw(st.lists(st.integers(3, VOCAB - 1), max_size=3))
        ids = torch.cat([text[:1], torch.tensor([more], dtype=torch.int64)], dim=1).repeat(rows, 1)
        expected = self.model.generate(input_ids=ids, do_sample=False, max_new_tokens=new)
        actual = self.call(ids, variant, do_sample=False, max_new_tokens=new)
        assert_same_tokens(self.model, {"input_ids": ids}, expected, actual, f"{variant}")
        if expected.shape[1] < 60:
            self.texts.append(expected)

    @rule(variant=st.sampled_from(VARIANTS[:-1]), seed=st.integers(0, 99), grammar=st.none() | st.integers(0, 99))
    def sample(self, variant: tuple[str, dict[str, Any]], seed: int, grammar: int | None) -> None:
        options: dict[str, Any] = dict(do_sample=True, seed=seed, max_new_tokens=6, temperature=0.8)
        if grammar is not None:
            options["grammar"] = TokenAutomaton.random(grammar, VOCAB, [])
        ids = self.texts[-1]
        assert torch.equal(self.call(ids, variant, **options), self.call(ids, ("autoregressive", {}), **options))

    @rule(variant=st.sampled_from(VARIANTS[:-1]), after=st.integers(0, 4))
    def fail(self, variant: tuple[str, dict[str, Any]], after: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.call(self.texts[-1], variant, do_sample=False, max_new_tokens=9, streamer=Stops(after))

    @rule(change=st.sampled_from(["add", "data", "scale", "replace", "hook"]), which=st.integers(0, 30))
    def change(self, change: str, which: int) -> None:
        weights = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        weight = weights[which % len(weights)]
        with torch.no_grad():
            if change == "add":
                weight.mul_(0.9)
            elif change == "data":
                weight.data.mul_(1.1)
            elif change == "scale":
                weight.numpy()[:] *= 0.95
            elif change == "replace":
                weight.data = weight.data * 1.05
            else:
                head = self.model.get_output_embeddings()
                head.register_forward_hook(lambda module, args, out, by=1 + which / 30: out * by)

    @invariant()
    def the_model_is_as_it_was(self) -> None:
        if hasattr(self, "model"):
            assert not self.model.training and "generate" in vars(self.model)


TestOneModel = OneModel.TestCase
TestOneModel.settings = settings(
    max_examples=3, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)
