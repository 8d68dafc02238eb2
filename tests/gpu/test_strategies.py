"""Every registered strategy writes what plain decoding writes, in float32 what transformers writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.registry import registry
from decoders.testing import assert_same_tokens

from .subjects import NETWORKS, SAMPLED, fresh_target, subject_of

STRATEGIES = [name for name in registry().strategies() if registry().strategy(name).exact]
COMPOSED = ["prompt_lookup+ngram", "grammar+prompt_lookup"]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("rows", [1, 3], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *COMPOSED, *NETWORKS])
def test_tokens_are_those_of_plain_decoding(strategy: str, dtype: torch.dtype, rows: int, device: torch.device) -> None:
    subject, given = subject_of(strategy, dtype, device)
    for how, sampling in (("greedy", {}), ("sampled", SAMPLED)):
        out = subject.decode(rows, given, **subject.options, **sampling)
        if dtype == FLOAT32 and not sampling and not subject.plain:
            expected = subject.decode(rows)  # transformers' own
        else:
            expected = subject.decode(rows, "autoregressive", **sampling)
        what = f"{strategy}, {how}"
        assert_same_tokens(subject.model, subject.inputs[rows], expected.sequences, out.sequences, what)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "lookahead", "speculative", "suffix", "auto"])
def test_nothing_changes_when_the_compiled_tier_is_ready(strategy: str, device: torch.device) -> None:
    subject, given = subject_of(strategy, FLOAT32, device)
    expected = {rows: subject.decode(rows).sequences for rows in (1, 3)}
    own = fresh_target(FLOAT32, device) if strategy == "autoregressive" else subject
    for rows in (1, 3):
        before = own.decode(rows, given, **subject.options)
        assert torch.equal(before.sequences, expected[rows])
        if own is not subject:  # on a model that nothing was compiled for, nothing waits for the compiler
            assert before.report.timings.compile == 0
    draft: Any = {"assistant_model": subject.options.get("assistant_model")}
    decoders.warmup(own.model, strategies=[given], rows=[1, 3], **draft)
    for rows in (1, 3):
        after = own.decode(rows, given, **subject.options)
        assert torch.equal(after.sequences, expected[rows])
        assert after.report.compiled_steps > 0


def test_what_is_sampled_depends_on_the_seed(device: torch.device) -> None:
    subject, _ = subject_of("autoregressive", FLOAT32, device)
    first, again, other = (
        subject.decode(3, "autoregressive", **{**SAMPLED, "seed": seed}).sequences for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first[:, : other.shape[1]], other[:, : first.shape[1]])
