"""vLLM, and models with the cost of larger ones, under a load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from decoders_lab.vllm_engine import Vllm
from typer.testing import CliRunner

import decoders
from decoders.bench.load import Arrival, arrivals
from decoders.cli import app

#: A stand-in for the parts of vLLM that are called: every step gives each request a token, and the first request may end too early.
STAND_IN = """
import os, types

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0 and ignore_eos
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, dtype, max_num_seqs, max_model_len, enable_prefix_caching):
        print("chatter of the engine")
        assert os.environ["OMP_NUM_THREADS"] == "2" and dtype == "float32" and not enable_prefix_caching
        if "missing" in model:
            raise OSError("there is no such model")
        self.llm_engine, self.here, self.rows = self, {}, max_num_seqs
        self.short = "short" in model

    def add_request(self, name, prompt, sampling):
        assert prompt["prompt_token_ids"]
        self.here[name] = [[], sampling.max_tokens - (self.short and name == "0")]

    def step(self):
        outputs = []
        for name, (tokens, most) in list(self.here.items())[: self.rows]:
            tokens.append(1)
            if len(tokens) >= most:
                del self.here[name]
            output = types.SimpleNamespace(token_ids=list(tokens))
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[output], finished=len(tokens) >= most))
        return outputs
"""


@pytest.fixture
def vllm_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter of an environment whose package `vllm` is the stand-in."""
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


@pytest.mark.parametrize("rate", [None, 400.0])
def test_vllm_decodes_the_whole_load_in_a_process_of_its_own(vllm_stand_in: Path, rate: float | None) -> None:
    load = arrivals([[3, 4, 5], [6, 7]], 7, median=4, longest=9, rate=rate)
    with Vllm(vllm_stand_in, "a folder", "float32", 3, 16, threads=2) as engine:
        for result in (engine.run(load), engine.run(load)):
            assert result.tokens == sum(request.new_tokens for request in load)
            assert all(0 < a <= b for a, b in zip(result.first_token, result.latency, strict=True))
            assert max(result.latency) <= result.seconds


def test_what_goes_wrong_in_vllm_is_told(vllm_stand_in: Path, tmp_path: Path) -> None:
    with pytest.raises(decoders.DecodersError, match=r"process ended with 1: .*there is no such model"):
        Vllm(vllm_stand_in, "missing", "float32", 3, 16, threads=2)
    with (
        Vllm(vllm_stand_in, "short", "float32", 3, 16, threads=2) as engine,
        pytest.raises(decoders.DecodersError, match="other numbers of tokens"),
    ):
        engine.run([Arrival(0.0, [1], 4)])
    (tmp_path / "config.json").write_text("{}")  # a folder is a model's if it has this file
    for more in ([], ["--vllm", sys.executable], [str(tmp_path), "--vllm", "no such file"]):
        done = CliRunner().invoke(app, ["bench", "load-beside", *more, "--method", "vllm"])
        assert done.exit_code != 0 and "--vllm PYTHON" in done.output


def test_the_model_may_have_the_cost_of_a_larger_one():
    shown = [
        "bench",
        "load-beside",
        "--requests",
        "2",
        "--rows",
        "2",
        "-n",
        "3",
        "--scale",
        "110m",
        "--method",
        "scheduler",
    ]
    done = CliRunner().invoke(app, [*shown, "--dtype", "bfloat16", "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["run"]["scale"] == "110m"
    refused = CliRunner().invoke(app, ["bench", "load-beside", "--scale", "110", "--dtype", "bfloat16"])
    assert refused.exit_code != 0 and "110m" in refused.output + str(refused.exception)
