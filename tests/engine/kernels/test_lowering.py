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
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from decoders.engine.model.kernels.attention import tiles_for
from decoders.engine.model.kernels.attention_triton import attend_kernel, merge_kernel

def lowered(kernel, constants, warps, stages, capability, dtype):
    pointers = {"MASK": "*i64", "PART_OUT": "*fp32", "PART_MAX": "*fp32", "PART_SUM": "*fp32", "scale": "fp32", "softcap": "fp32"}
    pointers |= {name: f"*{dtype}" for name in ("Q", "K", "V", "OUT", "SINKS")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)

shared = dict(HEADS=8, G=4, WORDS=1, FIRST=128, OCTAVE=16, CHUNK=True, WINDOW=True, SINK=True, CAP=True)
types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
for capability, width, dtype, text in (
    (80, 64, "bf16", False), (86, 256, "bf16", True), (86, 128, "fp32", True), (86, 256, "fp32", True), (90, 64, "bf16", False),
    (90, 256, "bf16", False), (90, 64, "fp16", True), (90, 64, "fp32", False), (100, 64, "bf16", False), (120, 128, "bf16", False),
):
    tile = tiles_for(width, width, types[dtype], text=text)
    constants = shared | dict(D=width, DV=width, WIDTH=tile.width, VWIDTH=tile.value_width, BN=tile.keys, M=tile.rows, TEXT=text,
                              SPLIT=not text, IEEE=dtype == "fp32")
    known = {k: v for k, v in constants.items() if k in attend_kernel.arg_names}
    built = lowered(attend_kernel, known, 4, tile.stages, capability, dtype)
    products = sorted(set(re.findall(r"(?:mma|tcgen05)[._a-z]*(?:sync|mma)", built.asm["ptx"])))
    print(capability, width, dtype, "text" if text else "nodes", built.metadata.shared, *products)
for capability, dtype in ((80, "bf16"), (90, "fp32")):
    lowered(merge_kernel, {k: v for k, v in constants.items() if k in merge_kernel.arg_names}, 1, 3, capability, dtype)
"""


def test_the_attention_kernel_lowers_for_gpus_and_multiplies_by_one_instruction_in_every_block() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 10
    # The least that a card has since Ampere; a kernel that wants more would be left for PyTorch's.
    assert max(int(line[4]) for line in lines) <= 99 * 1024
    # Blocks of nodes have tiles of 16 rows, and so the same tensor-core instruction on every card, however many nodes there are.
    assert {tuple(line[5:]) for line in lines if line[2] == "bf16" and line[3] == "nodes"} == {("mma.sync",)}
