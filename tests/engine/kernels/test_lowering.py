"""The kernels are compiled for GPUs, which takes none: what the interpreter cannot see."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]

PROGRAM = """
import re
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from decoders.engine.model.kernels.attention_triton import attend_kernel, merge_kernel

def lowered(kernel, constants, warps, capability, dtype):
    pointers = {"MASK": "*i64", "PART_OUT": "*fp32", "PART_MAX": "*fp32", "PART_SUM": "*fp32", "scale": "fp32", "softcap": "fp32"}
    pointers |= {name: f"*{dtype}" for name in ("Q", "K", "V", "OUT", "SINKS")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "enable_fp_fusion": True})

shared = dict(HEADS=8, G=4, WORDS=1, FIRST=128, OCTAVE=16, CHUNK=True, WINDOW=True, SINK=True, CAP=True)
for capability in (80, 90):
    for width, dtype, tile in ((64, "bf16", 16), (256, "bf16", 16), (64, "fp16", 64), (64, "fp32", 16)):
        constants = shared | dict(D=width, DV=width, WIDTH=width, VWIDTH=width, BN=64 if width == 64 else 32, M=tile,
                                  TEXT=tile == 64, SPLIT=tile == 16, IEEE=dtype == "fp32")
        built = lowered(attend_kernel, {k: v for k, v in constants.items() if k in attend_kernel.arg_names}, 4, capability, dtype)
        products = sorted(set(re.findall(r"mma[._a-z]*sync", built.asm["ptx"])))
        assert built.metadata.shared < 163_000, built.metadata.shared
        print(capability, width, dtype, tile, *products)
        lowered(merge_kernel, {k: v for k, v in constants.items() if k in merge_kernel.arg_names}, 1, capability, dtype)
"""


def test_the_attention_kernel_lowers_for_gpus_and_multiplies_by_one_instruction_in_every_block() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    # Blocks of nodes have tiles of 16 rows, and so the same tensor-core instruction on every card, however many nodes there are.
    assert {tuple(line[4:]) for line in lines if line[2] == "bf16"} == {("mma.sync",)}
