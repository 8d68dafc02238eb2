"""The head that comes with the demo model: found without a word, small, and worth its passes."""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.demo import load, prompts
from decoders.errors import UnsupportedError
from decoders.heads.eagle3_files import find_head
from decoders.testing import tiny_model


@pytest.fixture(scope="module")
def demo():
    model, tokenizer = load()
    return decoders.enable(model, tokenizer=tokenizer), tokenizer


def test_it_is_found_and_small(demo) -> None:
    folder = find_head(None, demo[0].config)
    assert folder == find_head("demo", None) and folder.name == "eagle3"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    with pytest.raises(UnsupportedError, match="decoders train eagle3"):
        find_head(None, tiny_model("llama").config)


def test_it_drafts_well(demo) -> None:
    model, tokenizer = demo
    inputs = tokenizer(prompts("code")[0].text, return_tensors="pt")
    options = dict(max_new_tokens=48, do_sample=False, decoders_config={"compile": False})
    out = model.generate(**inputs, strategy="eagle3", return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, model.generate(**inputs, strategy="autoregressive", **options))
    assert out.report.mean_accepted_length > 1.5
