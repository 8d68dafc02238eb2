"""Steps are recorded once and replayed: of strategies on the device as a whole, of those on the host their core."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoders.common import host_reads
from decoders.engine.decode import engine
from decoders.report import Report

from ..tape_recorder import TapeRecorder
from .subjects import NETWORKS, NEW, SAMPLED, Subject, demo_subject, fresh_target, subject_of

FLOAT32 = torch.float32
ON_DEVICE = ["autoregressive", "prompt_lookup", "lookahead", "token_recycling", "medusa"]
WITH_DRAFT_MODEL = ["speculative", "eagle3", "dflash", *NETWORKS]
ON_HOST = ["suffix", "threshold", "prompt_lookup+suffix", "auto"]


def replays(report: Report) -> int:
    """Steps of a call that were replays, in part or as a whole: the one place that knows how a report says so."""
    return report.replayed_steps


def recordings(subject: Subject) -> tuple[int, int]:
    """How often calls have recorded, and how often they found what they need: the one place that knows where this is kept."""
    kept = [s.recordings for s in vars(subject.model)["generate"].engine().sessions._free if s.recordings is not None]
    return sum(k.recorded for k in kept), sum(k.reused + k.replays for k in kept)


@pytest.fixture(autouse=True)
def records(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: a recorder of operations in the place of CUDA graphs."""
    if device.type == "cpu":
        recorder = TapeRecorder()
        monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)
        monkeypatch.setattr(engine, "recorder_of", lambda device: recorder)
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def subject_for(strategy: str, device: torch.device) -> tuple[Subject, Any, dict[str, Any]]:
    """A model whose sessions hold no recording yet."""
    own, given = subject_of.__wrapped__(strategy, FLOAT32, device)
    if own.model is demo_subject(FLOAT32, device).model:
        return fresh_target(FLOAT32, device), given, dict(own.options)
    # The prompts are short, and a session that holds an answer longer than its prompt is kept for a call that continues it.
    return own, given, {**own.options, "max_new_tokens": own.inputs[1]["input_ids"].shape[1] - 2}


@pytest.mark.parametrize("strategy", ON_DEVICE + WITH_DRAFT_MODEL + ON_HOST)
def test_steps_are_replayed_and_a_second_call_records_nothing(strategy: str, device: torch.device) -> None:
    subject, given, options = subject_for(strategy, device)
    expected = subject.decode(1, max_new_tokens=options.setdefault("max_new_tokens", NEW)).sequences
    if "suffix" in strategy:  # which would remember the text, and decode it again in too few steps
        options["decoders_config"] = {"memory": False}
    first = subject.decode(1, given, **options)
    recorded, reused = recordings(subject)
    second = subject.decode(1, given, **options)
    assert torch.equal(first.sequences, expected) and torch.equal(second.sequences, expected)
    assert replays(first.report) > 0
    assert second.report.steps - replays(second.report) <= first.report.steps - replays(first.report)
    if strategy != "auto":  # which may take other sizes, once it has measured them
        assert recordings(subject)[0] == recorded and recordings(subject)[1] > reused


def test_other_settings_and_another_number_of_rows_are_recorded_by_themselves(device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    for rows in (1, 3, 1, 3):
        for sampling in ({}, SAMPLED):
            out = subject.decode(rows, "prompt_lookup", **sampling)
            plain = subject.decode(rows, "autoregressive", **sampling)
            assert torch.equal(out.sequences, plain.sequences), (rows, sampling)


def test_rows_that_grow_out_of_their_slots_go_on_rightly(device: torch.device) -> None:
    """A recording reads the cache where it was; a call that needs more room makes its own."""
    subject = fresh_target(FLOAT32, device)
    for new in (16, 700, 16):
        out = subject.decode(1, "prompt_lookup", max_new_tokens=new)
        assert torch.equal(out.sequences, subject.decode(1, max_new_tokens=new).sequences), new
        assert out.report.steps < 6 or replays(out.report) > 0


def test_weights_that_are_written_to_are_read_anew(device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    before = subject.decode(1, "autoregressive").sequences
    with torch.no_grad():
        subject.model.get_output_embeddings().weight[: len(before)].mul_(0.5)
        subject.model.get_decoder().layers[0].mlp.down_proj.weight.mul_(-1.0)
    after = subject.decode(1, "autoregressive").sequences
    assert torch.equal(after, subject.decode(1).sequences) and not torch.equal(after, before)
