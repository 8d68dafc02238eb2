"""Requests that share steps write on the device what each writes by itself."""

from __future__ import annotations

import pytest
import torch

import decoders

from .subjects import SAMPLED, TEXTS, subject_of

#: New tokens of the requests: rows come and go.
LENGTHS = (5, 30, 12, 24, 40, 9)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "suffix", "speculative", "auto"])
def test_requests_write_what_they_write_alone(strategy: str, device: torch.device) -> None:
    subject, given = subject_of(strategy, torch.float32, device)
    tokenizer = vars(subject.model)["generate"].tokenizer
    prompts = [tokenizer(TEXTS[number % 3] * (1 + number)).input_ids for number in range(len(LENGTHS))]
    draws = [dict(do_sample=False) if number % 2 else dict(SAMPLED, seed=number) for number in range(len(LENGTHS))]
    options = {"decoders_config": {"compile": "auto"}, **subject.options}
    with decoders.Scheduler(subject.model, strategy=given, rows=3, **options) as scheduler:
        waiting = [
            scheduler.submit(prompt, max_new_tokens=new, **draw)
            for prompt, new, draw in zip(prompts, LENGTHS, draws, strict=True)
        ]
        results = [generation.result(timeout=120) for generation in waiting]
    for prompt, new, draw, result in zip(prompts, LENGTHS, draws, results, strict=True):
        ids = torch.tensor([prompt], device=device)
        alone = subject.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, strategy="autoregressive", **draw
        )
        assert torch.equal(result.cpu(), alone.cpu())


def test_generate_many_streams_a_data_set_through(device: torch.device) -> None:
    subject, _ = subject_of("prompt_lookup", torch.float32, device)
    results = list(
        decoders.generate_many(
            subject.model, list(TEXTS), strategy="prompt_lookup", rows=2, max_new_tokens=16, do_sample=False
        )
    )
    assert len(results) == len(TEXTS)
