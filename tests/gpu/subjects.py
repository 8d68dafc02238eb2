"""Models to decode and the arguments of a call, for every strategy: the demo pair where it will do, tiny models elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders import demo
from decoders.strategies import DFlash, Eagle3, Speculative
from decoders.testing import prompts, tiny_model

#: Of calls on the demo target, and how they draw.
NEW = 32
SAMPLED: Mapping[str, Any] = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.95, seed=5)
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "import os\nimport sys\n",
    "class A:\n    def f(self):\n        return 1\n",
)
#: What ``grammar`` follows: long enough for every call.
FUNCTIONS = r"(    return a [-+*/] b\n\n\ndef (div|pow|mod)\(a, b\):\n){9}"
#: What strategies are given besides their name. The demo model has heads of its own.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "medusa": {"strategy_config": {"heads": "demo"}},
    "eagle3": {"strategy_config": {"head": "demo"}},
    "early_exit": {"strategy_config": {"exit_layer": 2}},
}
NEEDS_DRAFT = ("speculative", "threshold", "staged")
#: Strategies with other networks than the usual ones: a head with a vocabulary of its own, P-EAGLE, PARD.
NETWORKS = ("dspark", "peagle", "pard")


@dataclass(frozen=True)
class Subject:
    """What a strategy is tested on.

    Attributes:
        model: enabled.
        inputs: of a call, by number of rows: 1, and 3 of unequal lengths.
        options: of its calls. plain: those of calls that it is compared with.
    """

    model: PreTrainedModel
    inputs: Mapping[int, dict[str, Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)

    def decode(self, rows: int, strategy: Any = None, compile: Any = "auto", **more: Any) -> Any:
        """A greedy call with an output object; None: transformers' own loop."""
        own = {} if strategy is None else self.plain | {"strategy": strategy, "decoders_config": {"compile": compile}}
        call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **own, **more}
        return self.model.generate(**self.inputs[rows], **call)  # type: ignore[operator]


@functools.cache
def demo_subject(dtype: torch.dtype, device: torch.device) -> Subject:
    """The demo target, shared: whoever changes it makes its own with :func:`fresh_target`."""
    return fresh_target(dtype, device)


def fresh_target(dtype: torch.dtype, device: torch.device) -> Subject:
    model, tokenizer = demo.load("target", dtype)
    tokenizer.padding_side = "left"
    one, many = (tokenizer(list(TEXTS[:rows]), return_tensors="pt", padding=True).to(device) for rows in (1, 3))
    enabled = decoders.enable(model.to(device), tokenizer=tokenizer)  # type: ignore[arg-type]
    return Subject(enabled, {1: dict(one), 3: dict(many)})


@functools.cache
def draft(dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    return demo.load("draft", dtype)[0].to(device)  # type: ignore[arg-type]


@functools.cache
def subject_of(strategy: str, dtype: torch.dtype, device: torch.device) -> tuple[Subject, Any]:
    """What to test `strategy` on, and what ``generate(strategy=…)`` is given."""
    if strategy == "mtp":
        from ..strategies import test_mtp  # here: it skips whoever imports it where transformers builds no such layers

        # Built anew: those of the other tests stay on the CPU.
        return _tiny(test_mtp.with_layers.__wrapped__("llama"), dtype, device), "mtp"
    if strategy in ("dflash", *NETWORKS):
        model, given = _with_network(strategy, dtype, device)
        return _tiny(model, dtype, device), given
    subject = demo_subject(dtype, device)
    options = dict(OPTIONS.get(strategy, {}))
    if strategy.partition("+")[0] in NEEDS_DRAFT:
        options["assistant_model"] = draft(dtype, device)
    plain = {"grammar": decoders.regex(FUNCTIONS)} if "grammar" in strategy else {}
    return Subject(subject.model, subject.inputs, options, plain), strategy


def _with_network(strategy: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Built anew, as those of the other tests stay on the CPU: a target, and what drafts for it."""
    from ..strategies import test_block_heads, test_dflash, test_eagle3, test_parallel_draft_models

    if strategy == "pard":
        draft_model = test_parallel_draft_models.parallel.__wrapped__().to(device=device, dtype=dtype)
        return decoders.enable(tiny_model("llama")), Speculative(draft_model=draft_model, length=4)
    if strategy == "peagle":
        return test_eagle3.target.__wrapped__(), Eagle3(head=test_eagle3.newer("parallel"), length=4, nodes=12)
    small = "dspark rnn, small vocabulary"
    folder = test_block_heads.written(small) if strategy == "dspark" else test_dflash.written("authors")
    return test_dflash.target.__wrapped__("llama"), DFlash(draft_model=folder)


def _tiny(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Subject:
    moved = model.to(device=device, dtype=dtype)  # type: ignore[arg-type]
    inputs = {rows: {name: t.to(device) for name, t in prompts(rows).items()} for rows in (1, 3)}
    return Subject(moved, inputs)
