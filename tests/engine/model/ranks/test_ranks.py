"""Two processes that share a model (gloo, on the CPU) write what one process writes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # two more processes, which the others would wait for; .ci/run runs them

PROGRAM = Path(__file__).with_name("matrix.py")
SIZE = 2


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decoders_test_matrix", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _load()


class Run:
    """What processes that share models have written, and what one process writes.

    Attributes:
        shared: of every process, by design.
        alone: of this process, by design and case.
    """

    def __init__(self, folder: Path, names: list[str], every: bool) -> None:
        matrix.prepare(folder, names)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(SIZE), "every" if every else "few", *names], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self.alone = {name: matrix.written(matrix.Models(folder, name, False), every) for name in names}
            errors = process.communicate(timeout=1800)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, errors[-6000:]
        self.shared = {
            name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(SIZE)] for name in names
        }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("ranks"), ["llama"], every=False)


def compare(run: Run, name: str) -> None:
    first, *others = run.shared[name]
    assert all(other["written"] == first["written"] for other in others)
    assert first["written"] == run.alone[name]


def test_strategies_write_what_one_process_writes(llama: Run) -> None:
    compare(llama, "llama")


def test_every_strategy_in_every_form_on_several_designs(tmp_path: Path) -> None:
    names = ["llama", "qwen2", "mixtral"]
    run = Run(tmp_path, names, every=True)
    for name in names:
        compare(run, name)
    expected = [run.alone["mixtral"]["suffix, ragged"], run.alone["mixtral"]["speculative, sampled"]]
    assert all(shared["experts"] == expected for shared in run.shared["mixtral"])


@pytest.fixture
def several(llama: Run) -> dict[str, Any]:
    """What only processes that share a model can do; all of them have done the same."""
    first, *others = [shared["several"] for shared in llama.shared["llama"]]
    assert all(other == first for other in others)
    return first


def test_a_draft_model_that_is_shared_as_well(llama: Run, several: dict[str, Any]) -> None:
    assert several["shared draft"] == llama.alone["llama"]["autoregressive, sampled"]


def test_a_missing_seed_is_that_of_the_first_process(llama: Run, several: dict[str, Any]) -> None:
    (expected,) = several["seeds"].values()
    assert several["no seed"] == expected


def test_the_first_process_decides_when_time_is_over(llama: Run, several: dict[str, Any]) -> None:
    assert several["clock"] == [llama.alone["llama"]["autoregressive, greedy"][0][:4]]
    assert [len(row) for row in several["max_time"]] == [1, 1, 1]


def test_texts_of_earlier_calls_are_reused(llama: Run, several: dict[str, Any]) -> None:
    assert several["reused"] == llama.alone["llama"]["autoregressive, greedy"]


def test_weights_that_were_changed_are_seen(llama: Run, several: dict[str, Any]) -> None:
    assert several["changed"] != several["changed back"] == llama.alone["llama"]["autoregressive, greedy"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "RanksError: the 2 processes that share the model differ in what generate is asked for"),
        (1, "UnsupportedError: compile=True: 2 processes share this model"),
        (2, "UnsupportedError: weights='int8': 2 processes share the weights of LlamaForCausalLM"),
        (3, "UnsupportedError: 2 processes share this model, and a request that reaches one of them"),
        (4, "RanksError: the 2 processes that share the model differ in what a step drafts"),
        (5, "RanksError: the 2 processes that share the model differ in what generate is asked for"),
        (6, "RanksError: the 2 processes that share the model differ in how they prepare it"),
        (7, "RanksError: the 2 processes that share the model differ in how they prepare it"),
        (8, "RanksError: the 2 processes that share the model differ in the texts of earlier calls that they keep"),
    ],
)
def test_what_cannot_be_is_said_in_every_process(several: dict[str, Any], place: int, message: str) -> None:
    assert several["errors"][place].startswith(message)
