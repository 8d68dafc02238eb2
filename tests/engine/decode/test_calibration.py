"""Costs of steps, measured on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import decoders
from decoders.costs import curve as curve_files
from decoders.engine.decode.calibration import subject_of
from decoders.engine.decode.engine import Engine
from decoders.engine.model import torch_compat
from decoders.errors import CacheMemoryError, SettingsError, UnsupportedError
from decoders.hf import ready
from decoders.strategies import Speculative
from decoders.testing import decode, prompts, tiny_draft, tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model("llama"))


def test_points_are_measured_for_every_size_once_and_kept(engine: Engine, tmp_path: Path) -> None:
    calibration = engine.calibration
    curve = calibration.measured(tmp_path, [1, 2], [32], False, anew=True)
    assert {(p.rows, p.context) for p in curve.points} == {(1, 32), (2, 32)}
    assert [p.nodes for p in curve.points if p.rows == 1] == [1, 3, 5, 9, 17, 33, 65]  # two nodes are padded to three
    assert curve_files.read(tmp_path, subject_of(engine.target)) == curve
    assert calibration.measured(tmp_path, [1], [2000], False) is not None
    assert calibration.known(tmp_path) == curve  # in a longer context the steps of a call teach the difference


def test_a_call_waits_for_few_steps(stepwise: Any) -> None:
    engine, sizes = stepwise(lambda sizes: 10 + sizes[-1])
    points = engine.calibration.measured(None, [1], [16], False).points
    assert [p.nodes for p in points] == [1, 5, 17] and len(sizes) == 4 * len(points)


def test_sizes_are_those_of_the_blocks_of_a_call(engine: Engine, tmp_path: Path) -> None:
    """In a plain step several rows have one node each."""
    curve = engine.calibration.measured(tmp_path, [4], [16], False, anew=True)
    assert [p.nodes for p in curve.points if p.rows == 4] == [1, 2, 3, 5, 9, 17, 33, 65]


def test_a_plain_step_that_got_a_graph_of_its_own_is_measured_then(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = False
    monkeypatch.setattr(engine.forward_pass, "runs_single", lambda rows: single)
    before = engine.calibration.measured(tmp_path, [1], [300], False, anew=True)
    assert next(p.nodes for p in before.points if p.context == 300) == 3
    single = True
    after = engine.calibration.measured(tmp_path, [1], [290], False)  # at the context of the other sizes
    assert set(after.points) - set(before.points) == {p for p in after.points if p.context == 300 and p.nodes == 1}
    assert engine.calibration.measured(tmp_path, [1], [280], False) == after


def test_a_short_call_measures_nothing_at_a_much_longer_context(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.calibration.measured(tmp_path, [5], [120], False, anew=True)
    monkeypatch.setattr(engine.forward_pass, "runs_single", lambda rows: True)
    places = {p.place for p in before.points} - {(5, 120, 1, False)}
    engine.calibration._curve = before.model_copy(
        update={"points": tuple(p for p in before.points if p.place in places)}
    )
    short = engine.calibration.measured(None, [5], [29], False)
    assert {p.place for p in short.points} == places
    assert {p.place for p in engine.calibration.measured(None, [5], [30], False).points} - places


def test_another_process_reads_what_one_has_measured(engine: Engine, tmp_path: Path) -> None:
    curve = engine.calibration.measured(tmp_path, [3], [16], False)
    assert Engine(tiny_model("llama", seed=1)).calibration.known(tmp_path) == curve_files.read(tmp_path, curve.subject)


def test_little_time_leaves_sizes_out(tmp_path: Path) -> None:
    curve = Engine(tiny_model("llama")).calibration.measured(tmp_path, [1], [16, 500], False, seconds=1e-9, anew=True)
    assert [p.nodes for p in curve.points] == [1, 3]


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, list[int]]]:
    """An engine on a clock that its steps alone move, by what a function says of the sizes so far; and these."""

    def make(milliseconds: Callable[[list[int]], float]) -> tuple[Engine, list[int]]:
        engine, now, sizes = Engine(tiny_model("llama")), [0.0], []
        forward = engine.target.forward

        def timed(given: Any) -> Any:
            sizes.append(given.nodes.shape[1])
            now[0] += 0.001 * milliseconds(sizes)
            return forward(given)

        monkeypatch.setattr(type(engine.target.ranks), "clock", lambda self: now[0])
        monkeypatch.setattr(engine.target, "forward", timed)
        return engine, sizes

    return make


def test_a_machine_that_is_slow_for_a_while_makes_no_size_dear(stepwise: Any) -> None:
    """Two steps of each size come first; of those that follow, a stretch as long as all steps of one size is slow."""
    engine, sizes = stepwise(lambda sizes: 100 if 16 <= len(sizes) < 26 else 10 + sizes[-1])
    points = engine.calibration.measured(None, [1], [16], False, anew=True).points
    assert sizes[14:28] == [1, 1, 3, 3, 5, 5, 9, 9, 17, 17, 33, 33, 65, 65]
    assert [p.seconds for p in points] == pytest.approx([0.001 * (10 + p.nodes) for p in points])


def test_what_another_size_left_in_the_caches_is_not_what_a_step_costs(stepwise: Any) -> None:
    engine, _ = stepwise(lambda sizes: 10 + sizes[-1] + (5 if sizes[-2:-1] != sizes[-1:] else 0))
    points = engine.calibration.measured(None, [1], [16], False, anew=True).points
    assert [p.seconds for p in points] == pytest.approx([0.001 * (10 + p.nodes) for p in points])


def test_compiling_takes_no_time_from_measuring(stepwise: Any) -> None:
    engine, _ = stepwise(lambda sizes: 10 + sizes[-1] + (60_000 if sizes[-1] not in sizes[:-1] else 0))
    points = engine.calibration.measured(None, [1], [16], False, anew=True).points
    assert [p.nodes for p in points] == [1, 3, 5, 9, 17, 33, 65]


def test_what_steps_show_of_sizes_is_kept_until_they_are_measured_anew(tmp_path: Path) -> None:
    model = decoders.enable(tiny_model("llama"))
    loop = {"compile": False, "cost_cache": str(tmp_path)}
    for _ in range(2):
        decode(model, prompts(), "auto", max_new_tokens=8, decoders_config=loop)
    calibration = vars(model)["generate"].engine().calibration
    steps = sum(count for _, count in calibration.ratios(1, 8)[False].values())
    assert steps >= 8
    decode(model, prompts(), "autoregressive", max_new_tokens=8, decoders_config=loop)
    decode(
        model,
        prompts(),
        Speculative(tree="dynamic"),
        assistant_model=tiny_draft("llama"),
        max_new_tokens=8,
        decoders_config=loop,
    )
    learnt = calibration.ratios(1, 8)[False].values()
    assert sum(count for _, count in learnt) == steps  # equal calls have equal budgets
    calibration.measured(tmp_path, [1], [24], False, anew=True)
    assert not calibration.ratios(1, 8)


def test_what_the_curve_depends_on_is_in_its_subject(engine: Engine) -> None:
    subject = subject_of(engine.target)
    assert subject.model.startswith("LlamaConfig-2-32-48-4-2-") and subject.model.endswith("-128")
    assert (
        subject.dtype == "float32" and subject.torch == torch.__version__ and subject.threads == torch.get_num_threads()
    )
    assert subject.package == decoders.__version__ and torch_compat.instructions() in subject.device
    assert subject_of(Engine(tiny_model("gpt2")).target).key != subject.key
    assert "-(8, 16, 8, 16)-" in subject_of(Engine(tiny_model("gemma4")).target).model  # widths of its layers' heads
    assert subject_of(Engine(tiny_model("llama").to(torch.bfloat16)).target).dtype == "bfloat16"


def test_measuring_leaves_no_text_behind(engine: Engine, tmp_path: Path) -> None:
    engine.calibration.measured(tmp_path, [1], [8], False, anew=True)
    assert all(not len(text.tokens) for session in engine.sessions._free for text in session.texts)


def test_calibrate_says_what_strategies_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "TOKENS", 8)
    model = tiny_model("llama")
    done = decoders.calibrate(
        model, rows=[1], contexts=[16], assistant_model=tiny_model("llama", seed=1),
        decoders_config={"compile": False, "cost_cache": str(tmp_path)},
    )  # fmt: skip
    names = {cost.strategy for cost in done.strategies}
    assert {"autoregressive", "prompt_lookup", "ngram", "speculative"} <= names and "auto" not in names
    assert all(cost.step >= cost.propose >= 0 for cost in done.strategies)
    assert done.assistant is not None and done.assistant.points
    assert json.loads(done.path.read_text())["subject"] == done.curve.subject.model_dump()


def test_options_that_no_strategy_takes_are_refused_and_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="temprature"):
        decoders.calibrate(model, temprature=1)
    loop = {"compile": False, "cost_cache": str(tmp_path), "slots": 10**13}
    with pytest.raises(CacheMemoryError, match="slots"):  # what plain decoding refuses no strategy is left out for
        decoders.calibrate(model, rows=[1], contexts=[16], seconds=0.01, decoders_config=loop)


@pytest.mark.parametrize("bad", [{"rows": []}, {"rows": [0]}, {"contexts": [1.5]}, {"seconds": 0}])
def test_bad_sizes_are_refused_before_anything_is_measured(bad: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="must be a list of whole numbers|seconds"):
        decoders.calibrate(tiny_model("llama"), **bad)  # type: ignore[arg-type]
