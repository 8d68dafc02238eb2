"""Private parts of torch that this package uses, with reasons; for modules, see :mod:`.modules_compat`. Tests: test_compat.py."""

from __future__ import annotations

import importlib.util
import os
import sys
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
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

#: Name of a table of transformers: for each class of models that was created, the outputs that hooks can record.
_RECORDED = "_CAN_RECORD_REGISTRY"

#: The errors that Dynamo raises if it cannot compile. torch has no public class for them.
COMPILER_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


# The processor.


def instructions() -> str:
    """Names of the processor's instruction sets that decide which kernels run: vectors, VNNI, bfloat16 and AMX."""
    special = {
        "VNNI": torch.cpu._is_vnni_supported,
        "BF16": torch.cpu._is_avx512_bf16_supported,
        "AMX": torch.cpu._is_amx_tile_supported,
    }
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, here in special.items() if here())])


def has_instructions(variant: str) -> bool:
    """Whether this process can run `variant` of the CPU kernels. For AMX, this function also asks Linux for permission to use tiles."""
    needed: dict[str, tuple[str, ...]] = {"avx2": ("_is_avx2_supported",), "avx512": ("_is_avx512_supported",)}
    needed["avx512_vnni"] = (*needed["avx512"], "_is_vnni_supported")
    needed["avx512_bf16"] = (*needed["avx512_vnni"], "_is_avx512_bf16_supported")
    needed["amx"] = (*needed["avx512_bf16"], "_init_amx")
    return all(getattr(torch.cpu, here)() for here in needed.get(variant, ()))


class EqualOnce(CustomGraphPass):
    """Removes repeated calls of this package's operators with equal arguments. Inductor removes them only in training graphs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        numbers: dict[object, int] = {}
        number_of: dict[torch.fx.Node, int] = {}
        first: dict[int, torch.fx.Node] = {}
        for node in graph.nodes:
            known = torch.fx.map_arg((node.args, node.kwargs), lambda n: _Number(number_of[n]))
            # A node that is not a pure function of its arguments equals no other node.
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
    """The number of a node's result; equal results have equal numbers. Stands for the result in the arguments of other nodes."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_function(node: torch.fx.Node) -> bool:
    """Whether a node is a pure function of its arguments."""
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return False
    return not schema_of(operator).is_mutable and torch.Tag.nondeterministic_seeded not in operator.tags


# Operators. ``TorchDispatchMode``, imported above, is in a private module of torch. Only torch's notes document it.


def waiting_operators() -> tuple[Any, ...]:
    """Operators that wait for the device: ``item()`` and ``unique()`` call them."""
    return torch.ops.aten._local_scalar_dense, torch.ops.aten._unique2


def schema_of(operator: Any) -> torch.FunctionSchema:
    """The schema of an operator. ``torch.library`` has no function that returns it."""
    return operator._schema


# Tensors.


def rounds_float32(device: torch.device) -> bool:
    """Whether PyTorch rounds the factors of float32 products on `device`: on CUDA to TensorFloat-32, on some CPUs to bfloat16.

    On CUDA the user's setting tells it. ``allow_tf32`` and ``get_float32_matmul_precision`` read the same setting, but raise if another
    setting has set the precision. A CPU is tried, because only processors with fast products of bfloat16 follow the setting.
    """
    if device.type != "cpu":
        return device.type == "cuda" and float32_precision(device) == "tf32"
    numbers = torch.full((64, 64), 1 + 2**-12, dtype=torch.float32, device=device)  # bfloat16 lacks this number
    return not torch.equal(numbers @ torch.eye(64, dtype=torch.float32, device=device), numbers)


def float32_precision(device: torch.device) -> str:
    """The precision of float32 products on `device`, whichever of torch's settings has set it."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision: str = backend.matmul.fp32_precision
    return precision


def weak_memory(tensor: Tensor) -> Callable[[], torch.UntypedStorage | None]:
    """A function that returns the memory of `tensor`; None once the memory is freed. torch has no public weak references to memory."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of `tensor` if several processes share it (``DTensor``); else `tensor`."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # without gradients, to_local returns the part itself, not a view
        return to_local()


def with_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`tensors`, and the parts (levels, scales) of quantized tensors: torch counts writes to a quantized tensor only in its parts."""
    every = list(tensors)
    for tensor in every:
        if type(tensor) not in (nn.Parameter, Tensor) and not hasattr(tensor, "to_local"):
            flatten = getattr(tensor, "__tensor_flatten__", None)
            every += [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []
    return every


# Dynamo.


def skip_module_guards(entries: Sequence[Any]) -> list[bool]:
    """A guard filter that leaves out the guards of :func:`skip_state_guard`, guards on modules (the engine compares the state of the
    weights instead), and guards on a table of transformers that gets an entry for every class of models.
    """
    left = [_RECORDED not in entry.name for entry in entries]
    modules = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)
    return [all(kept) for kept in zip(left, modules, skip_state_guard(entries), strict=True)]


def skip_state_guard(entries: Sequence[Any]) -> list[bool]:
    """A guard filter that leaves out the guards on torch's number of threads and default device, which may change between two steps.

    The first guard also checks autocast, which is off in calls, and the default dtype, which does not change compiled code. The second
    guard reads a value of the process, which another thread sets while it loads a model.
    """
    return [entry.guard_type not in ("GLOBAL_STATE", "DEFAULT_DEVICE") for entry in entries]


@contextmanager
def without_default_device() -> Iterator[None]:
    """Within this context, this thread has no default device. With a default device, Dynamo would compile code again, and raise an
    error for code that calls ``unflatten``, as our code does. Do not use this context if :func:`within_modes` is True.
    """
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def within_modes() -> bool:
    """Whether this thread is in a ``TorchDispatchMode`` or ``TorchFunctionMode``, except the mode of a default device. In a
    dispatch mode, Dynamo raises an error instead of compiling, and raises it again in all later calls of the same code.
    """
    modes = _get_current_function_mode_stack()
    return torch._C._len_torch_dispatch_stack() > 0 or not all(isinstance(mode, DeviceContext) for mode in modes)


def mark_static(tensor: Tensor, dim: int) -> None:
    """Declares that dimension `dim` of `tensor` never varies."""
    torch._dynamo.mark_static(tensor, dim)


def floats_as_constants() -> AbstractContextManager:
    """A context in which this thread compiles floats as constants. Otherwise, with dynamic sizes, an epsilon would be an input."""
    return torch._dynamo.config.patch(specialize_float=True)


def sizes_of_their_own() -> AbstractContextManager:
    """A context in which sizes that happen to be equal (four rows, four children) are compiled as different sizes."""
    from torch.fx.experimental import _config

    return cast(Any, _config).patch(use_duck_shape=False)


def graphs_compiled() -> int:
    """The number of graphs that ``torch.compile`` has compiled in this process so far, for all models."""
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def compiled_region(function: Callable) -> Callable:
    """Returns `function` as a nested region, so that equal calls share a graph, without torch's limit of eight graphs per region."""
    region: Any = torch.compiler.nested_compile_region
    bound = "max_reuse_entries" in signature(region).parameters
    return region(function, **({"max_reuse_entries": 1 << 20} if bound else {}))


def compiled_whole(function: Callable, dynamic: bool, options: Mapping[str, Any], **more: Any) -> Callable:
    """Returns `function` compiled without graph breaks and without guards on modules."""
    compile: Any = torch.compile  # Any, because torch.compile annotates options too narrowly
    given = {"guard_filter_fn": skip_module_guards, "cpp.dynamic_threads": True, **options}
    return compile(function, fullgraph=True, dynamic=dynamic, options=given, **more)


def uncompiled(function: Any) -> Any:
    """The original function if `function` is a result of ``torch.compile``; otherwise `function`."""
    original = getattr(function, "_torchdynamo_orig_callable", None)
    disabled = getattr(function, "_torchdynamo_disable", False)  # torch.compiler.disable sets both attributes
    # functools.wraps copies both attributes to a function that calls a compiled function, but sets another `__wrapped__`.
    compiled = original is not None and not disabled and getattr(function, "__wrapped__", None) == original
    return original if compiled else function


@cache
def spare_compiler_warnings() -> None:
    """Silences warnings of torch's compiler that users can do nothing about. If warnings are errors, such a warning ends a compilation.

    The compiler warns once per process about TensorFloat-32 settings. This function triggers the warnings and ignores them. Without a
    CUDA toolkit, ``TRITON_LIBDEVICE_PATH`` is set to Triton's own libdevice, which the compiler would use anyway. A warning filter
    during compilation would not help, because all threads share it and any thread may replace it.

    Inductor also warns about complex numbers, with which some designs rotate (Llama 4), and Dynamo (torch 2.13) about functions with a
    cache. Those of transformers that models call compare versions.
    """
    allow = getattr(torch._dynamo.utils, "allow_lru_cache_wrapper_trace_without_warning", lambda function: None)
    versions = sys.modules.get("transformers.utils.import_utils")
    for function in vars(versions).values() if versions else ():
        if hasattr(function, "cache_info"):
            allow(function)
    from torch._inductor import lowering

    cast(Any, lowering)._warn_complex_not_supported = lambda: None
    if not torch.cuda.is_available():
        return
    from torch._inductor import compile_fx
    from torch.utils import cpp_extension

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for said in (lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32):
            with suppress(RuntimeError):  # raised if another of torch's settings has set the precision
                said()
        getattr(compile_fx, "_warn_tf32_disabled", lambda: None)()
    triton = importlib.util.find_spec("triton")
    if cpp_extension.CUDA_HOME is None and triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc"
        if own.is_file():
            os.environ.setdefault("TRITON_LIBDEVICE_PATH", str(own))  # compiling processes read it, too


@contextmanager
def traced_by_one_thread() -> Iterator[None]:
    """Lets other threads call modules while this thread traces with torch.fx.

    A tracer replaces ``nn.Module.__call__`` for the whole process (torch 2.13). So it would also trace a decoding step that another
    thread runs at the same time, and raise an exception in that thread.
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
    """Within this context, a thread that synchronizes a CUDA device first waits for `lock`, and holds `lock` while it synchronizes.
    After `seconds` the thread goes on without the lock, because the lock's owner may be waiting for this thread's compilation.

    Inductor and Triton synchronize to time kernels. They import ``torch.cuda.synchronize`` under several names, so the patch replaces
    the function in torch._C that ``synchronize`` calls. CUDA graphs that torch itself records need not hold `lock`: torch's
    ``cudagraph_trees.graph_capture_lock`` protects them.
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
    """Tells torch's allocator that a failed recording into `pool` is over.

    If CUDA ends a recording with an error, torch (2.11) raises before it tells its allocator. Until the process ends, the allocator
    would then neither reuse memory of other streams nor free memory when it runs out.
    """
    if not torch.cuda.is_initialized():  # the functions below would raise
        return
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    with suppress(RuntimeError):  # raised if torch has told the allocator before
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


# The compiler's surroundings.


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that inductor would run; None if there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return None


def kernel_folder() -> str:
    """The folder of inductor's compiled code."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return cache_dir()
