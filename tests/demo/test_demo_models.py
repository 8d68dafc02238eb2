"""What ships: the two models, their cards and the prompts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoders import demo
from decoders.demo import data
from decoders.errors import UnknownNameError
from decoders.heads.medusa import check_fit, load_heads

MODELS = Path(demo.__file__).parent / "models"


@pytest.fixture(scope="module")
def models():
    return {name: demo.load(name) for name in demo.MODELS}


def test_weights_ship_and_are_small():
    assert demo.available()
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) <= 40e6


def test_models_load_in_the_dtype_asked_for(models):
    assert models["target"][0].dtype == torch.float32
    assert demo.load("draft", torch.bfloat16)[0].dtype == torch.bfloat16


def test_draft_is_eight_to_fifteen_times_smaller_and_shares_the_tokenizer(models):
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, (model, _) in models.items()}
    assert 8 <= sizes["target"] / sizes["draft"] <= 15
    assert models["target"][1].get_vocab() == models["draft"][1].get_vocab()


def test_end_token_is_the_same_everywhere(models):
    for model, tokenizer in models.values():
        for config in (model.config, model.generation_config):
            assert config.eos_token_id == config.bos_token_id == config.pad_token_id == tokenizer.eos_token_id == 0


def test_shipped_tokenizer_is_lossless(models):
    text = "def f( a ,b ):\n\treturn  'naïve ∑ 日本 🐍' # don't\r\n\n"
    tokenizer = models["target"][1]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_target_copies_from_its_context_better_than_the_draft(models):
    share = {}
    for name, (model, tokenizer) in models.items():
        right, count = 0, 0
        for prompt in demo.prompts("copy"):
            start = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
            answer = tokenizer(prompt.answer, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = model(torch.cat([start, answer], dim=1)).logits[:, start.shape[1] - 1 : -1]
            right += int((logits.argmax(-1) == answer).sum())
            count += answer.numel()
        share[name] = right / count
    assert share["target"] > 0.9
    assert share["target"] > share["draft"] > 0.8


def test_cards_name_data_licence_tokens_and_loss():
    for name in demo.MODELS:
        card = (MODELS / name / "README.md").read_text(encoding="utf-8")
        for part in ("license:", "PSF-2.0", "tokens seen", "nats per token", "held out"):
            assert part in card


def test_prompts_come_from_held_out_files(models):
    tokenizer = models["target"][1]
    every = demo.prompts()
    counts = {"code": 12, "copy": 8, "docstring": 4}
    assert {kind: len(demo.prompts(kind)) for kind in counts} == counts
    assert len({prompt.id for prompt in every}) == len({prompt.text for prompt in every}) == len(every)
    for prompt in every:
        assert data.is_held_out(prompt.source)
        assert 80 <= len(tokenizer(prompt.text)["input_ids"]) < 300
        assert bool(prompt.answer) == (prompt.kind == "copy")


def test_unknown_names_list_the_choices():
    with pytest.raises(UnknownNameError, match="target"):
        demo.load("targt")
    with pytest.raises(UnknownNameError, match="docstring"):
        demo.prompts("poem")


def test_missing_weights_name_the_command(tmp_path):
    assert not demo.available(tmp_path)
    with pytest.raises(
        demo.DemoModelMissingError, match="decoders train demo`, of the distribution decoders-lab"
    ) as caught:
        demo.load(directory=tmp_path)
    assert "plugins/" not in str(caught.value) and "docs/" not in str(caught.value), (
        "a wheel has no folders of the repository"
    )


def test_importing_the_demo_package_needs_no_transformers():
    code = (
        "import sys, decoders.errors; before = set(sys.modules); "
        "import decoders.demo; print(*(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"transformers", "numpy"} & set(out.split())


def test_medusa_heads_ship_small_and_their_card_has_the_accuracy_on_held_out_files(models):
    folder = MODELS / "target" / "medusa"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6e6
    heads = load_heads(folder)
    check_fit(heads, models["target"][0], folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"Searched on the held-out text: {len(heads.config.tree)} nodes" in card
    assert re.search(r"^\| test files, own \| \d+\.\d%", card, re.MULTILINE)
