"""Compiles the Triton kernels for NVIDIA cards as calls launch them, on a machine without a card, and prints what came of it.

    python tests/engine/model/kernels/ahead_of_time.py CAPABILITY [WORD …]

The project's own launching code runs on tensors of the "meta" device, with a driver that launches nothing: tiles, warps, stages,
strides and what Triton specializes are those of calls. Prints one JSON object per kernel; with words, of the calls whose name has one
of them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NODES = (1, 16, 32, 64, 128)


@dataclass(frozen=True)
class Model:
    """Sizes of a design. products: outputs of matrices that are multiplied as one, and inputs."""

    products: dict[str, tuple[tuple[int, ...], int]]
    heads: int
    key_heads: int
    width: int
    value_width: int = 0
    window: int = 0
    sinks: bool = False
    bias: bool = False
    norms: tuple[int, ...] = ()
    types: tuple[str, ...] = ("bf16",)


def _llama(hidden: int, inner: int, heads: int, key_heads: int, width: int, **more: Any) -> Model:
    q, k = heads * width, key_heads * width
    products = {"qkv": ((q, k, k), hidden), "o": ((hidden,), q), "gate up": ((inner, inner), hidden)}
    return Model(products | {"down": ((hidden,), inner)}, heads, key_heads, width, norms=(hidden,), **more)


MODELS = {
    "Llama 1B": _llama(2048, 8192, 32, 8, 64, types=("bf16", "fp16", "fp32")),
    "Llama 8B": _llama(4096, 14336, 32, 8, 128, types=("bf16", "fp32")),
    "Qwen3 0.6B": _llama(1024, 3072, 16, 8, 128),
    "Gemma 3 1B": _llama(1152, 6912, 4, 1, 256, window=512, types=("bf16", "fp32")),
    "SmolLM2 135M": _llama(576, 1536, 9, 3, 64),
    "gpt-oss 20B": Model({"qkv": ((4096, 512, 512), 2880)}, 64, 8, 64, window=128, sinks=True, bias=True),
    "MLA": Model({"kv": ((4096,), 512)}, 16, 16, 192, 128),
}


class Driver:
    """Says that the card is the one that is compiled for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of calls, and functions that make them."""
    from decoders.engine.model.kernels import Norm, attention_cuda, epilogues_triton, moves_triton, products_triton

    for name, model in MODELS.items():
        for kind, nodes in (
            (kind, n) for kind in model.types if kind != "fp32" for n in NODES
        ):  # cuBLAS computes those
            for part, (sizes, inputs) in model.products.items():
                dtype = DTYPES[kind]
                x = empty(1, nodes, inputs, dtype=dtype)
                matrices = [empty(size, inputs, dtype=dtype) for size in sizes]
                biases = [empty(size, dtype=dtype) for size in sizes] if model.bias else []
                call: Callable[[], Any] = functools.partial(products_triton.few_rows_linear, x, matrices, biases)
                if part == "gate up":
                    call = functools.partial(products_triton.gated_linear, x, matrices, biases, int(model.width == 256))
                elif part in ("o", "down"):
                    residual, norm = (
                        empty(1, nodes, *sizes, dtype=dtype),
                        Norm(empty(*sizes, dtype=dtype), 1e-6, False, True),
                    )
                    before = norm if model.width == 256 else Norm()
                    call = functools.partial(
                        products_triton.linear_to_residual, x, *matrices, None, residual, *before, *norm
                    )
                elif part == "qkv" and not model.sinks:
                    turns, slots = empty(1, nodes, model.width, dtype=dtype), empty(1, nodes, dtype=torch.int64)
                    cache = empty(1, model.key_heads, 512, model.width, dtype=dtype)
                    own = Norm(empty(model.width, dtype=dtype), 1e-6, True, False) if model.width == 256 else Norm()
                    options = x, matrices, biases, own.weight, *own, turns, turns, slots, cache, cache
                    call = functools.partial(products_triton.linear_to_cache, *options)
                yield f"{name} {part} {kind}, {nodes} nodes", call
        for kind in ("bf16", "int8"):
            widths = model.width, model.value_width or model.width
            buffers = [empty(1, model.key_heads, 512, w, dtype=DTYPES.get(kind, torch.int8)) for w in widths]
            scales = [empty(1, model.key_heads, 512, 1, dtype=torch.bfloat16)] * 2 if kind == "int8" else []
            places, base, path = (empty(*size, dtype=torch.int64) for size in ((4 * model.key_heads, 3), (1,), (1, 16)))
            yield f"{name} moves {kind}", functools.partial(moves_triton.move, places, base, path, buffers + scales)
        for width in model.norms:
            x, weight = (empty(*size, width, dtype=torch.bfloat16) for size in ((1, 4), ()))
            yield f"{name} norm", functools.partial(epilogues_triton.normalized, x, weight, 1e-6, False, True)
        for kind in model.types:
            for nodes, view in (*((n, 512) for n in NODES), (1, 32768), (32, 2048), (512, 8192)):
                text = view in (2048, 8192)
                query = empty(1, nodes, model.heads, model.width, dtype=DTYPES[kind]).transpose(1, 2)
                key = empty(1, model.key_heads, view, model.width, dtype=DTYPES[kind])
                value = empty(1, model.key_heads, view, model.value_width or model.width, dtype=DTYPES[kind])
                mask = empty(1, 1, nodes, (0 if text else -(-nodes // 64)) + 2, dtype=torch.int64)
                sinks = empty(model.heads, dtype=DTYPES[kind]) if model.sinks else None
                what = f"{name} attention {kind}, {nodes} {'tokens of text' if text else 'nodes'}, {view} slots"
                given = query, key, value, mask, sinks, model.window, 0, 0.125, 0.0
                yield what, functools.partial(attention_cuda.launch, *given)


def resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    said = ""
    for program in ("ptxas", "ptxas-blackwell"):  # an older one does not read every version of PTX
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "kernel.ptx"
            source.write_text(ptx)
            name = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
            command = [folder / program, "-v", name, source, "-o", Path(place) / "kernel.o"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            said = done.stderr + done.stdout
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, "no ptxas takes this"
    return int(registers[1]), sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))


def order_of(ttgir: str) -> list[list[int]]:
    """The terms at which the instructions of a step begin that add to one accumulator, in their order; all distinct orders.

    ``tt.dot`` is ``mma.sync`` for 16 terms after 16. The compiler may cut it into parts and load the first one a step ahead.
    """
    offset = {name: int(first) for name, first in re.findall(r"(%\w+) = ttg.memdesc_subslice %\w+\[0, (\d+)\]", ttgir)}
    loaded = dict(re.findall(r"(%\w+) = ttg.local_load (%\w+)", ttgir))
    chains: dict[str, list[int]] = {}
    dot = r"(%\w+) = tt.dot (%\w+), %\w+, (%\w+) : tensor<\d+x(\d+)x"
    for result, values, added, terms in re.findall(dot, ttgir):
        begin = offset.get(loaded.get(values, ""), 0)  # what was loaded a step ahead is the beginning
        chains[result] = [*chains.pop(added, []), *range(begin, begin + int(terms), 16)]
    return sorted(map(list, {tuple(chain) for chain in chains.values()}))


def main(capability: int, words: list[str]) -> None:
    driver.set_active(Driver(capability))
    run, name = JITFunction.run, ""
    printed: set[tuple[str, str]] = set()

    def compile_only(self: JITFunction, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *given, grid=grid, warmup=True, **options)
        kernel, call = self.fn.__name__, name.rpartition(",")[0] if "nodes" in name else name
        if (compiled.hash, call) not in printed:
            printed.add((compiled.hash, call))
            ptx = compiled.asm["ptx"]
            registers, spilled = resources(ptx, capability)
            line = {"call": name, "kernel": kernel, "shared": compiled.metadata.shared, "registers": registers}
            line |= {"spilled": spilled, "order": order_of(compiled.asm["ttgir"]) if kernel == "_multiply" else []}
            line["products"] = sorted(set(re.findall(r"(?:wgmma|mma|tcgen05)[._a-z]*(?:async|mma|\.sync)\b", ptx)))
            line["widths"] = sorted(set(re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfsu]\d+", ptx)))
            print(json.dumps(line), flush=True)
        return compiled

    JITFunction.run = compile_only  # type: ignore[method-assign]
    for name, call in calls():
        if not words or any(word in name for word in words):
            call()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
