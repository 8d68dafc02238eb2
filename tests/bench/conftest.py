"""A tiny model, a tokenizer of single bytes, and methods that never compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoders import bench, demo
from decoders.bench import machine
from decoders.demo import Prompt
from decoders.engine.decode import step
from decoders.testing import tiny_model

TEXTS = [
    ("one", "copy", "one two one two one"),
    ("two", "copy", "a b c a b c a b c"),
    ("three", "code", "x = 1; y = x; x"),
]


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("DECODERS_CONFIG", raising=False)
    monkeypatch.setattr(machine.copy_bandwidth, "__defaults__", (1 << 22, 1))  # every command asks the machine for it
    monkeypatch.setattr(step, "waiting_share", lambda *_: 0.0)  # where the machine is busy ratios are left out


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def draft() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    inner = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture
def methods(model: PreTrainedModel) -> list[Any]:
    ours = bench.strategy_methods(
        model, ["autoregressive", "prompt_lookup"], decoders_config={"compile": False, "prefill_chunk": 64}
    )
    return [*bench.transformers_methods(model, names=[]), *ours]


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """The demo with tiny models in the place of its own."""
    kinds = {"copy": "one two one two", "code": "x = 1; y = x", "docstring": "def f(): '''"}

    def load(name: str = "target", dtype: Any = None, directory: Any = None) -> Any:
        return tiny_model("llama", seed=name == "draft").to(dtype), tokenizer

    def prompts(kind: str | None = None) -> list[Prompt]:
        return [Prompt(f"{k}-01", k, text, "nowhere.py") for k, text in kinds.items() if kind in (None, k)]

    monkeypatch.setattr(demo, "load", load)
    monkeypatch.setattr(demo, "prompts", prompts)
