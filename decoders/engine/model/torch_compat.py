"""Private parts of torch that we use: each with why, and what would replace it. Nothing else reads them.

The engine uses nearly all of them, and the layers above it a few. tests/engine/test_compat.py tries every one, so that a version of
torch that moves one says which.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

#: What Dynamo raises where it cannot compile; there is no public class for it.
COMPILER_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


# The processor.


def _onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def instructions() -> str:
    """Those of this processor that decide which kernels run: its vectors, and for bytes (VNNI), bfloat16 and tiles (AMX)."""
    special = {
        "VNNI": torch.cpu._is_vnni_supported,
        "BF16": torch.cpu._is_avx512_bf16_supported,
        "AMX": torch.cpu._is_amx_tile_supported,
    }
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, here in special.items() if here())])


def has_instructions(variant: str) -> bool:
    """Whether this process can run a variant of the kernels for CPUs. torch has no public names for this.

    For tiles it asks Linux, which lets a process use them only if it has asked.
    """
    needed: dict[str, tuple[str, ...]] = {"avx2": ("_is_avx2_supported",), "avx512": ("_is_avx512_supported",)}
    needed["avx512_vnni"] = (*needed["avx512"], "_is_vnni_supported")
    needed["avx512_bf16"] = (*needed["avx512_vnni"], "_is_avx512_bf16_supported")
    needed["amx"] = (*needed["avx512_bf16"], "_init_amx")
    return all(getattr(torch.cpu, here)() for here in needed.get(variant, ()))


class EqualOnce(CustomGraphPass):
    """Removes repeated calls of our operators with equal arguments. Inductor does so only in graphs for training; replaced by its own
    pass once that runs on others, too.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        numbers: dict[object, int] = {}
        number_of: dict[torch.fx.Node, int] = {}
        first: dict[int, torch.fx.Node] = {}
        for node in graph.nodes:
            known = torch.fx.map_arg((node.args, node.kwargs), lambda n: _Number(number_of[n]))
            # A node that is no pure function of its arguments equals no other.
            what: object = (node.target, repr(known)) if _is_function(node) else node
            number = number_of[node] = numbers.setdefault(what, len(numbers))
            if (
                getattr(node.target, "namespace", "").startswith("decoders")
                and first.setdefault(number, node) is not node
            ):
                node.replace_all_uses_with(first[number])
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        return "decoders: equal once, 1"


class _Number(int):
    """A value in the arguments of another."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_function(node: torch.fx.Node) -> bool:
    """Whether a node gives the same for the same arguments, and does nothing else."""
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return False
    return not schema_of(operator).is_mutable and torch.Tag.nondeterministic_seeded not in operator.tags


# Operators. torch documents ``TorchDispatchMode`` itself, in a private module, and in its notes only.


def waiting_operators() -> tuple[Any, ...]:
    """Operators that wait for the device, behind public functions with other names: ``item()`` and ``unique()``."""
    return torch.ops.aten._local_scalar_dense, torch.ops.aten._unique2


def schema_of(operator: Any) -> torch.FunctionSchema:
    """What an operator writes to and gives back. ``torch.library`` takes schemas and gives none."""
    return operator._schema


# Modules.

#: The hooks of a module by their ids, those after its forward pass and those before. Nothing public lists them. An `attrgetter`,
#: since every call asks it of every module and a Python function would take longer.
hooks_of: Callable[[nn.Module], tuple[Mapping[int, Any], Mapping[int, Any]]] = operator.attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)


def hooks_everywhere() -> tuple[int, ...]:
    """The hooks of all modules there are (``register_module_forward_hook``), by their ids. Nothing public lists them."""
    registered = nn.modules.module
    return *registered._global_forward_hooks, *registered._global_forward_pre_hooks


def remove_hooks(module: nn.Module, ids: Iterable[int]) -> None:
    """Removes hooks from a copy of the module that they were registered on, which their handles do not know."""
    for hooks in hooks_of(module):
        for name in ids:
            cast(dict, hooks).pop(name, None)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dict of its own parameters; whoever puts a tensor there bypasses ``register_parameter``.

    A parametrized or pruned weight is not in it, although ``module.weight`` exists. ``register_parameter`` would run others' hooks,
    and refuses stand-ins that are no parameters.
    """
    return module._parameters


def modules_in(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())`` in a third of the time: every call asks for it, and that walks by generators within generators."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of `modules` themselves, each once. Every call asks for them, and ``Module.parameters`` takes its time."""
    return list({id(t): t for module in modules for t in own_parameters(module).values() if t is not None}.values())


def buffers_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Likewise their buffers."""
    return list({id(t): t for module in modules for t in module._buffers.values() if t is not None}.values())


# Tensors.


def writes_counted(tensor: Tensor) -> int:
    """How often the tensor was written in place, by autograd's counter; nothing public tells it.

    Writes to inference tensors and writes through ``.data`` are not counted.
    """
    if tensor.is_inference():  # asked first: to raise and catch the error costs 30 microseconds
        return 0
    try:
        return tensor._version
    except RuntimeError:
        return 0


def rounds_float32(device: torch.device) -> bool:
    """Whether products of float32 matrices are rounded on a CUDA `device`, as TensorFloat-32 does: the user may have allowed it.

    ``allow_tf32`` and ``get_float32_matmul_precision`` say the same, and raise where it was allowed by another of the three names.
    """
    return device.type == "cuda" and float32_precision(device) == "tf32"


def float32_precision(device: torch.device) -> str:
    """How products of float32 matrices are rounded on `device`, whichever name it was set by."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision: str = backend.matmul.fp32_precision
    return precision


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of `tensor`: a part where several processes share it (``DTensor``), all of it elsewhere."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # the part itself and no view of it
        return to_local()


def with_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`tensors`, and the parts (levels, scales) of those that a library has quantized: writes to a part are counted there alone."""
    every = list(tensors)
    for tensor in every:
        if type(tensor) not in (nn.Parameter, Tensor) and not hasattr(tensor, "to_local"):
            flatten = getattr(tensor, "__tensor_flatten__", None)
            every += [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []
    return every


# Dynamo.


def skip_module_guards(entries: Sequence[Any]) -> list[bool]:
    """The guard filter that leaves modules out: the engine compares the state of the weights instead."""
    return list(
        map(operator.and_, torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries), skip_state_guard(entries))
    )


def skip_state_guard(entries: Sequence[Any]) -> list[bool]:
    """The guard filter that leaves out the one on torch's number of threads, which may change between two steps.

    The same guard is on autocast, which is off in calls, and on the default dtype, which changes nothing that has been compiled.
    """
    return [entry.guard_type != "GLOBAL_STATE" for entry in entries]


def mark_static(tensor: Tensor, dim: int) -> None:
    """Declares a dimension that never varies. Replaced by ``torch.compile(dynamic_shapes=…)``, which is not there yet."""
    torch._dynamo.mark_static(tensor, dim)


def floats_as_constants() -> AbstractContextManager:
    """With dynamic sizes Dynamo would take the epsilon of a norm for an input. For this thread only."""
    return torch._dynamo.config.patch(specialize_float=True)


def sizes_of_their_own() -> AbstractContextManager:
    """Sizes that happen to be equal, four rows and four children, are not the same size."""
    from torch.fx.experimental import _config

    return cast(Any, _config).patch(use_duck_shape=False)


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def compiled_region(function: Callable) -> Callable:
    """`function` as a region that is compiled once. The default number of its variants, where there is one, raises at the ninth."""
    region: Any = torch.compiler.nested_compile_region
    bound = "max_reuse_entries" in signature(region).parameters
    return region(function, **({"max_reuse_entries": 1 << 20} if bound else {}))


def compiled_whole(function: Callable, dynamic: bool, options: Mapping[str, Any], **more: Any) -> Callable:
    """`function` compiled without graph breaks and without guards on modules."""
    compile: Any = torch.compile  # its annotation of options is narrower than what it takes
    given = {"guard_filter_fn": skip_module_guards, "cpp.dynamic_threads": True, **options}
    return compile(function, fullgraph=True, dynamic=dynamic, options=given, **more)


@cache
def spare_compiler_warnings() -> None:
    """Spares users warnings of torch's compiler that they can do nothing about, and that end a compilation where warnings are errors.

    What it says once in a process is said now, to nobody: that settings of TensorFloat-32 which it reads itself have newer names,
    and that such products are possible. Where no CUDA toolkit is installed, it is told to take Triton's functions of mathematics,
    which it takes anyway. A filter of warnings would not do: all threads share them, and each may replace them.
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor import compile_fx
    from torch.utils import cpp_extension

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for said in (lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32):
            with suppress(RuntimeError):  # set by one name and read by another
                said()
        getattr(compile_fx, "_warn_tf32_disabled", lambda: None)()
    triton = importlib.util.find_spec("triton")
    if cpp_extension.CUDA_HOME is None and triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc"
        if own.is_file():
            os.environ.setdefault("TRITON_LIBDEVICE_PATH", str(own))  # processes that compile read it as well


@contextmanager
def traced_by_one_thread() -> Iterator[None]:
    """While this thread traces with torch.fx, modules that other threads call run as they always do.

    A tracer puts itself in the place of ``nn.Module.__call__`` for the whole process (torch 2.13): a decoding step, or anybody's
    model, that is called meanwhile would be taken for a part of what is traced, and raise. Goes once torch.fx traces per thread.
    """
    tracing = threading.get_ident()
    usual = torch.fx.Tracer.call_module

    def call_module(self: Any, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if threading.get_ident() != tracing:
            return forward(*args, **kwargs)
        return usual(self, module, forward, args, kwargs)

    with mock.patch.object(torch.fx.Tracer, "call_module", call_module):
        yield


@contextmanager
def device_waits_behind(lock: threading.RLock, seconds: float = 30.0) -> Iterator[None]:
    """While inside, any thread that synchronizes with a whole CUDA device holds `lock` meanwhile. It goes on without the lock after
    `seconds`, since the thread that holds it may be waiting for this one's compilation.

    Inductor and Triton synchronize when they time kernels, by ``torch.cuda.synchronize`` under several names, all of which call what is
    patched here. torch's own recordings have such a lock, too (``cudagraph_trees.graph_capture_lock``), which only they take.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    wait: Callable[[], None] = torch._C._cuda_synchronize

    def synchronize() -> None:
        held = lock.acquire(timeout=seconds)
        try:
            wait()
        finally:
            if held:
                lock.release()

    with mock.patch.object(torch._C, "_cuda_synchronize", synchronize):
        yield


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tells the allocator that a recording into `pool` which has failed is over; nothing public does.

    Where CUDA ends a recording with an error, torch (2.11) raises before it tells its allocator. That would then keep the memory of
    other streams from being used again and free none when it runs out, until the process ends.
    """
    if not torch.backends.cuda.is_built():  # there is no such allocator
        return
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    with suppress(RuntimeError):  # it has been told
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


# The compiler's surroundings. Replaced by a public way to ask what a compilation would use.


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor would run, None where it finds none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return None


def kernel_folder() -> str:
    """The folder that inductor keeps what it compiles in."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return cache_dir()
