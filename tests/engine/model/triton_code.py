"""The code that inductor writes for CUDA, run on the CPU by Triton's interpreter.

For float32 and integers: the interpreter (Triton 3.9) rounds to bfloat16 towards zero, half of the numbers to another one.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from decoders.engine.model.compiled.functions import private

#: Functions of CUDA's library that the interpreter does not have.
LIBRARY = {
    "ceil": np.ceil,
    "exp": np.exp,
    "floor": np.floor,
    "isnan": np.isnan,
    "log1p": np.log1p,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def needs_the_interpreter() -> None:
    """Skips a test where Triton is not installed, or was imported to run on a GPU."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU of this machine: TRITON_INTERPRET is not set")


class Kernel:
    """A kernel out of generated code, as the code around it starts it.

    Args:
        function: what ``triton.jit`` made of it.
        options: what inductor says about it.
    """

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        self.function, self.options = function, options

    def run(self, *args: Any, stream: Any) -> None:
        signature: dict[str, str] = self.options["triton_meta"]["signature"]
        given = dict(zip((name for name in signature if not name.endswith("BLOCK")), args, strict=True))
        assert self.options["inductor_meta"]["grid_type"] in ("Grid1D", "Grid2D"), self.options["inductor_meta"]
        hints = self.options["size_hints"]
        blocks = {
            name: min(hints[name.removesuffix("BLOCK").lower()], 1024)
            for name in signature
            if name.endswith("BLOCK") and name not in self.options["triton_meta"]["constants"]
        }
        grid = tuple(
            math.ceil(given.get(f"{axis}numel", 1) / blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in ("x", "y")
        )
        with np.errstate(all="ignore"):  # in entries that a mask leaves out
            self.function[grid](**given, **blocks)


class _Heuristics:
    """In the place of ``torch._inductor.runtime.triton_heuristics``, which asks the driver of a device."""

    def __getattr__(self, name: str) -> Callable[..., Callable[[Any], Kernel]]:
        return lambda **options: lambda function: Kernel(function, options)


class _Library:
    """In the place of ``libdevice``."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        from triton.language.core import block_type, int1, tensor
        from triton.runtime.interpreter import TensorHandle

        def call(x: Any) -> Any:
            data = LIBRARY[name](x.handle.data)
            kind = int1 if data.dtype == bool else x.dtype.scalar
            return tensor(TensorHandle(data, kind), block_type(kind, x.shape) if x.type.is_block() else kind)

        return call


@contextmanager
def written_for_triton(folder: Path) -> Iterator[list[str]]:
    """Within it, what is compiled for CPU tensors are Triton kernels: the code that CUDA gets, interpreted. Gives their sources.

    Args:
        folder: for the sources: Triton reads a kernel's own.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.utils import tensor_is_aligned

    sources: list[str] = []

    def load(self: AsyncCompile, name: str, source: str, device_str: str = "") -> Kernel:
        # These names are replaced below; and there is no driver to set.
        kept = [line for line in source.splitlines() if "triton_helpers.set_driver" not in line]
        text = "\n".join(kept).replace("triton_helpers, triton_heuristics", "triton_helpers").replace("libdevice, ", "")
        path = folder / f"kernel_{len(sources)}.py"
        sources.append(source)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{path.stem}_{next(_serial)}", path)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        module.triton_heuristics, module.libdevice = _Heuristics(), _Library()
        spec.loader.exec_module(module)
        return getattr(module, name)

    with (
        torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
        mock.patch.object(AsyncCompile, "triton", load),
        # Of inputs on a CPU inductor assumes nothing, and then nothing of what operators make of them.
        mock.patch("torch._inductor.graph.should_assume_input_aligned", tensor_is_aligned),
        mock.patch.object(
            CpuDeviceOpOverrides, "import_get_raw_stream_as", lambda self, name: f"{name} = lambda index: None"
        ),
    ):
        yield sources


_serial = itertools.count()


def run_as_triton_code(folder: Path, function: Callable[..., Any], *args: Any, dynamic: bool = False) -> Any:
    """`function`, compiled for CUDA and interpreted. At least one kernel must have come of it."""
    with written_for_triton(folder) as sources:
        result = torch.compile(private(function), fullgraph=True, dynamic=dynamic)(*args)
    assert sources, "no kernel was written"
    return result


def unaligned(source: str) -> list[str]:
    """The pointers of a kernel that are not known to be multiples of 16 bytes, from which numbers are loaded one by one."""
    signature = re.search(r"'signature': (\{.*?\})", source)
    known = re.search(r"'configs': \[(\{.*?\})\]", source)
    assert signature is not None and known is not None
    divisible = {place for (place,) in ast.literal_eval(known[1])}
    kinds = enumerate(ast.literal_eval(signature[1]).items())
    return [f"{name}: {kind}" for place, (name, kind) in kinds if kind.startswith("*") and place not in divisible]


def same(left: Any, right: Any) -> bool:
    """Whether tensors, or tuples of them, are equal."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return len(left) == len(right) and all(map(same, left, right))
