"""The kernels compiled for cards without one, as calls launch them: what the interpreter cannot see."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")

#: Bytes of shared memory that a program may have, by compute capability.
MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
#: Bytes that a thread may spill. In float32 products are loops that are written out.
SPILLS = {"16 bits": 64, "fp32": 512}
#: Calls that show each of the faults that there were, compiled in seconds.
QUICK = (
    "Gemma 3 1B attention bf16, 512",
    "Llama 8B attention fp32, 512",
    "SmolLM2 135M qkv bf16, 1",
    "Llama 1B gate up bf16, 16",
    "Llama 1B moves",
)


def compiled(capability: int, *words: str) -> list[dict[str, Any]]:
    """The kernels of calls, of all without words, compiled without a warning."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("ahead_of_time.py"), str(capability), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict[str, Any]], capability: int) -> None:
    for kernel in kernels:
        said = f"sm_{capability}, {kernel}"
        assert kernel["shared"] <= MEMORY[capability], said
        assert kernel["spilled"] <= SPILLS["fp32" if "fp32" in kernel["call"] else "16 bits"], said
        # Four numbers at a time, or eight of 16 bits that are copied past the registers.
        assert kernel["kernel"] not in ("_add_stretches", "_add_to_residual") or "4" in kernel["widths"], said
        nodes = kernel["kernel"] == "attend_kernel" and "nodes" in kernel["call"] and "fp32" not in kernel["call"]
        assert not nodes or kernel["products"] == ["mma.sync"], said  # one instruction, however many nodes there are
        if kernel["kernel"] == "_multiply":  # a stretch from beginning to end, for every number of rows
            assert kernel["products"] == ["mma.sync"] and kernel["order"] == [[0, 16, 32, 48]], said


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.parametrize("capability", MEMORY)
def test_wide_heads_fit_on_every_card_and_nothing_spills_much(capability: int) -> None:
    kernels = compiled(capability, *QUICK)
    kinds = {"attend_kernel", "merge_kernel", "_multiply", "_rotate_to_cache", "_move_slots"}
    assert kinds == {each["kernel"] for each in kernels}
    check(kernels, capability)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", MEMORY)
def test_every_kernel_of_every_design_fits_and_adds_in_one_order(capability: int) -> None:
    check(compiled(capability), capability)
