"""New processes: the first token needs no compiler, and every launch may be waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

#: Decodes with `arguments` twice and says what it took, with nothing in the process before.
SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import decoders
from decoders import demo

device, new_tokens = sys.argv[1], int(sys.argv[2])
model, tokenizer = demo.load("target")
decoders.enable(model.to(device), tokenizer=tokenizer)
inputs = tokenizer("def add(a, b):", return_tensors="pt").to(device)
call = dict(max_new_tokens=new_tokens, do_sample=False)
out = model.generate(**inputs, strategy="prompt_lookup", return_dict_in_generate=True, **call)
graphs = counters["stats"]["unique_graphs"]
same = torch.equal(out.sequences, model.generate(**inputs, strategy="autoregressive", **call))
report = out.report
print(json.dumps(dict(
    compile=report.timings.compile, compilations=report.compilations, compiled_steps=report.compiled_steps,
    tokens=report.new_tokens, graphs=graphs,
    same=same, plain=torch.equal(out.sequences, model.generate(**inputs, **call)),
)))
"""


def in_a_new_process(device: torch.device, new_tokens: int, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(device), str(new_tokens)], env=os.environ | environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_first_token_of_a_process_waits_for_no_compiler(device: torch.device) -> None:
    said = in_a_new_process(device, 1)
    assert said["tokens"] == [1] and said["same"] and said["plain"]
    assert said["compile"] == said["compilations"] == said["compiled_steps"] == said["graphs"] == 0


@pytest.mark.parametrize("new_tokens", [40])
def test_launches_that_are_waited_for_change_nothing(new_tokens: int, device: torch.device) -> None:
    said = in_a_new_process(device, new_tokens, CUDA_LAUNCH_BLOCKING="1")
    assert said["tokens"] == [new_tokens] and said["same"] and said["plain"]
