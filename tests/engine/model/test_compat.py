"""Every private part of torch and transformers that we use, one test each: a version that moves one fails here first."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache

import decoders
from decoders.common import transformers_compat
from decoders.engine.model import kernels, modules_compat, torch_compat
from decoders.testing import tiny_model

PACKAGE = Path(decoders.__file__).parent
VERSION = f"torch {torch.__version__}"
TRANSFORMERS = f"transformers {transformers.__version__}"


def version_of(library: ModuleType) -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(int(part) for part in library.__version__.split(".")[:2])


def test_writes_in_place_are_counted_and_inference_tensors_are_none() -> None:
    tensor = torch.zeros(2)
    before = modules_compat.writes_counted(tensor)
    tensor.add_(1)
    assert modules_compat.writes_counted(tensor) == before + 1
    with torch.inference_mode():
        assert modules_compat.writes_counted(torch.zeros(2)) == 0


def test_switches_of_dynamo_are_there() -> None:
    before = torch_compat.graphs_compiled()
    with torch_compat.floats_as_constants(), torch_compat.sizes_of_their_own():
        x = torch.ones(2, 3)
        torch_compat.mark_static(x, 0)
        function = torch_compat.compiled_whole(lambda x: x * 2, dynamic=True, options={"size_asserts": False})
        assert torch.equal(function(x), x * 2)
    assert torch_compat.graphs_compiled() == before + 1, VERSION
    assert torch_compat.skip_module_guards([]) == []
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    function(x)
    torch.set_num_threads(threads)
    assert torch_compat.graphs_compiled() == before + 1, "another number of threads is the same graph"
    assert torch.equal(torch_compat.compiled_region(lambda x: x + 1)(x), x + 1)


def test_what_was_compiled_is_told_from_a_function_around_it() -> None:
    model = tiny_model("llama")
    compiled = torch.compile(model.forward)
    assert torch_compat.uncompiled(compiled) == model.forward, VERSION

    @functools.wraps(compiled)
    def around(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    assert torch_compat.uncompiled(around) is around
    disabled = torch.compiler.disable(model.forward)
    assert torch_compat.uncompiled(disabled) is disabled
    assert torch_compat.uncompiled(None) is None


def test_what_dynamo_raises_is_known() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch_compat.COMPILER_ERRORS):
        torch.compile(broken, fullgraph=True, backend="eager")(torch.ones(1))


def test_tracing_leaves_modules_of_other_threads_alone() -> None:
    from threading import Thread

    seen: list[torch.Tensor] = []
    module = torch.nn.Linear(2, 2)

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = Thread(target=lambda: seen.append(module(torch.ones(1, 2))))
            thread.start()
            thread.join()
            return x

    with torch_compat.traced_by_one_thread():
        torch.fx.symbolic_trace(Waits())
    assert type(seen[0]) is torch.Tensor


def test_operators_tell_what_they_write_to_and_which_wait() -> None:
    assert torch_compat.schema_of(torch.ops.aten.add_.Tensor).arguments[0].alias_info.is_write, VERSION
    assert not torch_compat.schema_of(torch.ops.aten.add.Tensor).is_mutable, VERSION
    seen = set()

    class Notes(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Notes():
        torch.tensor(3).item()
        torch.tensor([3, 3]).unique()
    assert set(torch_compat.waiting_operators()) <= seen, VERSION


def test_entries_of_a_config_that_are_no_part_of_the_network_are_named_as_ever() -> None:
    newer = set() if version_of(transformers) >= (5, 22) else {"_post_init_done"}
    assert vars(tiny_model("llama").config).keys() >= transformers_compat.NO_PART_OF_NETWORK - newer, TRANSFORMERS


def test_hooks_of_all_modules_are_listed() -> None:
    registered = torch.nn.modules.module
    after = registered.register_module_forward_hook(lambda *_: None)
    before = registered.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert {after.id, before.id} <= set(modules_compat.hooks_everywhere()), VERSION
    finally:
        after.remove()
        before.remove()
    assert not {after.id, before.id} & set(modules_compat.hooks_everywhere()), VERSION


def test_hooks_are_listed_and_removed_from_copies() -> None:
    module = torch.nn.Linear(2, 2)
    after, before = module.register_forward_hook(print), module.register_forward_pre_hook(print)
    assert [list(hooks) for hooks in modules_compat.hooks_of(module)] == [[after.id], [before.id]], VERSION
    twin = deepcopy(module)
    modules_compat.remove_hooks(twin, [after.id, before.id])
    assert not any(modules_compat.hooks_of(twin)), VERSION
    assert all(modules_compat.hooks_of(module)), VERSION


def test_modules_are_those_that_torch_gives_in_its_order() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp  # one that is there twice, and a place without any
    model.register_module("nothing", None)
    assert modules_compat.modules_in(model) == list(model.modules()), VERSION


def test_instructions_say_what_kernels_are_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_vnni_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    vectors = torch.backends.cpu.get_cpu_capability()
    assert torch_compat.instructions() == f"{vectors} VNNI BF16 AMX", VERSION
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert torch_compat.instructions() == f"{vectors} VNNI AMX", VERSION


def test_parameters_of_a_module_itself() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    assert modules_compat.own_parameters(module) == {"weight": module.weight, "bias": None}, VERSION
    other = torch.nn.Parameter(torch.zeros(2, 2))
    modules_compat.own_parameters(module)["weight"] = other
    assert module.weight is other, VERSION
    assert not modules_compat.is_parametrized(module)
    torch.nn.utils.parametrizations.orthogonal(module)
    assert "weight" not in modules_compat.own_parameters(module), VERSION
    assert modules_compat.is_parametrized(module), VERSION


def test_whoever_waits_for_a_device_does_so_by_one_function() -> None:
    """CUDA builds alone have it: here the source says so."""
    assert "torch._C._cuda_synchronize()" in inspect.getsource(torch.cuda.synchronize), VERSION


def test_warnings_of_the_compiler_are_no_errors_where_warnings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would end the compilation; the pytest settings of this project make them errors."""
    from torch._inductor import compile_fx, lowering
    from torch._inductor.runtime import compile_tasks
    from torch.utils import cpp_extension

    class Settings:
        said, fp32_precision = False, "ieee"

        @property
        def allow_tf32(self) -> bool:
            if not self.said:
                self.said = True
                warnings.warn("Please use the new API settings to control TF32 behavior", stacklevel=1)
            return False

    cublas = Settings()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "matmul", cublas)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)
    monkeypatch.setattr(lowering, "_warn_complex_not_supported", inspect.unwrap(lowering._warn_complex_not_supported))
    torch_compat.spare_compiler_warnings.__wrapped__()
    library = os.environ.get("TRITON_LIBDEVICE_PATH")
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", library or "")  # taken back with the rest
    assert cublas.allow_tf32 is False
    compile_fx._warn_tf32_disabled()
    assert lowering.unsupported_input_tensor(torch.zeros(1, dtype=torch.complex64)), VERSION
    if (
        set_path := getattr(compile_tasks, "_set_triton_libdevice_path_impl", None)
    ) is not None and kernels._installed():
        assert library is not None and Path(library).is_file()
        from triton import knobs

        set_path()
        assert knobs.nvidia.libdevice_path == library


def test_the_allocator_is_told_that_a_recording_is_over_by_two_functions() -> None:
    """Likewise; torch's own recordings call them."""
    from torch._inductor import cudagraph_trees

    source = inspect.getsource(cudagraph_trees)
    for name in ("_cuda_endAllocateToPool(device, mem_pool)", "_cuda_releasePool(device, mem_pool)"):
        assert f"torch._C.{name}" in source, VERSION


def test_float32_that_is_rounded_is_known_by_whatever_name_it_was_allowed() -> None:
    cuda, matmul = torch.device("cuda"), torch.backends.cuda.matmul
    usual, precision = torch.get_float32_matmul_precision(), matmul.fp32_precision
    assert not torch_compat.rounds_float32(cuda)
    try:
        torch.set_float32_matmul_precision("high")
        assert torch_compat.rounds_float32(cuda), VERSION
        torch.set_float32_matmul_precision(usual)
        assert not torch_compat.rounds_float32(cuda), VERSION
        matmul.fp32_precision = "tf32"
        assert torch_compat.rounds_float32(cuda), VERSION
    finally:
        matmul.fp32_precision = precision
        torch.set_float32_matmul_precision(usual)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_that_the_processor_rounds_is_known(precision: str) -> None:
    """Processors with AMX do so in "medium", most others never."""
    usual = torch.get_float32_matmul_precision()
    x, matrix = torch.randn(64, 512), torch.randn(256, 512)
    try:
        torch.set_float32_matmul_precision(precision)
        wrong = (torch.nn.functional.linear(x, matrix) - x.double() @ matrix.double().T).abs().max()
        assert torch_compat.rounds_float32(torch.device("cpu")) == bool(wrong > 0.01), VERSION
    finally:
        torch.set_float32_matmul_precision(usual)


@pytest.mark.parametrize("rounded", [False, True])
def test_products_of_a_processor_are_tried(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def as_on_amx(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        fewer = rounded and a.dtype == torch.float32
        return multiply(a.bfloat16(), b.bfloat16()).float() if fewer else multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", as_on_amx)
    assert torch_compat.rounds_float32(torch.device("cpu")) == rounded


def test_the_compiler_and_its_folder_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert torch_compat.kernel_folder() == str(tmp_path), VERSION
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "c++")
    assert torch_compat.cpp_compiler() == "c++", VERSION
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert torch_compat.cpp_compiler() is None, VERSION


def test_prepared_configs_tell_the_token_that_fills_ended_rows() -> None:
    model = tiny_model("llama")
    config = GenerationConfig(eos_token_id=[5, 6])
    assert transformers_compat.pad_token_of(config) == 0, "not prepared yet"
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    assert transformers_compat.pad_token_of(config) == 5
    config = GenerationConfig(eos_token_id=5, pad_token_id=9)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    assert transformers_compat.pad_token_of(config) == 9


def test_recurrent_designs_are_told_from_others() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4))
    assert transformers_compat.keeps_recurrent_state(mamba)
    assert not transformers_compat.keeps_recurrent_state(tiny_model("llama"))


def test_fields_in_which_layers_differ_are_values_of_all_layers() -> None:
    config = tiny_model("gemma4").config
    values = [transformers_compat.config_value(config, name) for name in ("head_dim", "hidden_size", "no_such_field")]
    assert values == [(8, 16, 8, 16), 32, None]


def test_what_generating_leaves_on_a_model_is_known() -> None:
    model = tiny_model("llama")
    before = set(vars(model))
    tokens, cache = torch.ones(1, 3, dtype=torch.int64), {"cache_implementation": "static", "disable_compile": True}
    model.generate(tokens, max_new_tokens=2, pad_token_id=0, **cache)
    left = set(vars(model)) - before
    assert left, f"{TRANSFORMERS} keeps its static cache elsewhere"
    assert left <= transformers_compat.SET_BY_GENERATE, TRANSFORMERS


@pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"
)  # 5.17 has no other name
def test_what_trainers_switch_on_a_model_is_named_as_ever() -> None:
    model = tiny_model("llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # newer versions have done it
    left = {name for path, module in model.named_modules() for name in set(vars(module)) - before[path]}
    assert "_gradient_checkpointing_func" in left and left <= transformers_compat.OF_TRAINING, TRANSFORMERS
    hooks = modules_compat.hooks_of(model.get_input_embeddings())[0].values()
    assert hooks and all(map(transformers_compat.is_of_training, hooks)), TRANSFORMERS


def test_transformers_compiles_on_any_device_where_it_is_asked_to() -> None:
    model, cache = tiny_model("llama"), {transformers_compat.CACHE: StaticCache(tiny_model("llama").config, 8)}
    asked = GenerationConfig(compile_config=transformers_compat.compiled_on_any_device())
    assert model._valid_auto_compile_criteria(cache, asked), TRANSFORMERS
    assert not model._valid_auto_compile_criteria(cache, GenerationConfig()), (
        "compiles by itself: nothing need be asked"
    )


def test_the_attention_of_a_config_is_told_and_set() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    assert transformers_compat.attention_of(model.config) == "sdpa", TRANSFORMERS
    transformers_compat.set_attention(model.config, "eager")
    assert transformers_compat.attention_of(model.config) == "eager", TRANSFORMERS


def test_the_name_of_the_cache_is_that_of_the_forward_pass() -> None:
    class Later(torch.nn.Module):
        def forward(self, tokens, cache=None): ...

    class Earlier(torch.nn.Module):
        def forward(self, tokens, past_key_values=None): ...

    class Any(torch.nn.Module):
        def forward(self, tokens, **arguments): ...

    names = [transformers_compat.cache_keyword(module) for module in (Later(), Earlier(), Any())]
    assert names == ["cache", "past_key_values", transformers_compat.CACHE]


@pytest.mark.filterwarnings("error")
def test_models_take_and_give_their_cache_by_the_name_that_they_have_for_it() -> None:
    model, tokens = tiny_model("llama"), torch.ones(1, 3, dtype=torch.int64)
    cache = transformers_compat.cache_of(model(tokens, use_cache=True))
    assert isinstance(cache, DynamicCache), TRANSFORMERS
    model(tokens, **{transformers_compat.cache_keyword(model): cache})
    assert cache.get_seq_length() == 6, TRANSFORMERS


def test_a_model_of_one_process_has_no_mesh() -> None:
    model = tiny_model("llama")
    assert hasattr(type(model), "_device_mesh"), f"{TRANSFORMERS} keeps the mesh of a divided model elsewhere"
    assert transformers_compat.device_mesh_of(model) is None


def test_loading_shows_no_progress_and_leaves_the_bars_as_they_were() -> None:
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    enabled, bar = logging.is_progress_bar_enabled(), reader.tqdm
    logging.enable_progress_bar()
    try:
        with transformers_compat.without_progress_bars():
            assert not logging.is_progress_bar_enabled(), TRANSFORMERS
            assert reader.tqdm(range(3)).disable, TRANSFORMERS
        assert logging.is_progress_bar_enabled()
        assert reader.tqdm is bar
    finally:
        if not enabled:
            logging.disable_progress_bar()


#: Files that may name private parts of torch and transformers.
COMPAT = {
    PACKAGE / "engine" / "model" / "torch_compat.py",
    PACKAGE / "engine" / "model" / "modules_compat.py",
    PACKAGE / "common" / "transformers_compat.py",
}
#: Public in spite of their names: Python documents them.
NAMED_TUPLES = {"_fields", "_asdict", "_replace", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in NAMED_TUPLES


@cache
def theirs() -> frozenset[str]:
    """Private attributes of what torch and transformers hand out: tensors, modules, models, configs, operators, caches."""
    model = tiny_model("llama")
    objects = (
        model, model.config, model.generation_config, torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), torch.nn.Linear(1, 1),
        torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.aten, CompileConfig(), DynamicCache(), torch.Generator(),
    )  # fmt: skip
    return frozenset(name for thing in objects for name in dir(thing) if is_private(name))


def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def defined(nodes: list[ast.AST]) -> set[str]:
    """Private names that a file gives to something itself: functions, classes, variables, attributes of ``self``."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def root_of(node: ast.expr) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def paths_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a line imports of torch and transformers, with its module: ``torch.nn.Module``."""
    if isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{alias.name}" for alias in node.names] if node.level == 0 else []
    else:
        paths = [alias.name for alias in node.names]
    return [path for path in paths if path.split(".")[0] in ("torch", "transformers")]


def imported(nodes: list[ast.AST]) -> set[str]:
    """Names that a file imports from inside of torch and transformers: who sets an attribute of one changes it for everybody."""
    lines = [node for node in nodes if isinstance(node, ast.ImportFrom) and paths_of(node)]
    return {alias.asname or alias.name for node in lines for alias in node.names}


def private_parts(nodes: list[ast.AST], ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of all private parts of torch and transformers that a file names.

    Args:
        ours: private names that the package defines anywhere. One that theirs have as well is ours on ``self``, in a file that
            defines it.
    """
    here, foreign, modules = defined(nodes), theirs(), imported(nodes)
    parts_of_texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if (is_own(node.value) and node.attr in here) or (root_of(node), node.attr) == (
                "os",
                "_exit",
            ):  # it is documented
                continue
            if root_of(node) in ("torch", "transformers") or node.attr in foreign or node.attr not in ours:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) in modules:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            # For getattr, setattr, vars(…)[…], and in lists of names.
            if node.value in foreign - here and id(node) not in parts_of_texts:
                yield node.lineno, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, part) for path in paths_of(node) for part in path.split(".") if is_private(part))


def test_no_other_file_names_a_private_part() -> None:
    files = {path: nodes_of(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    ours = set().union(*map(defined, files.values()))
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, nodes in files.items()
        if path not in COMPAT
        for line, name in private_parts(nodes, ours)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "module._forward_hooks.pop(name)",
        "module._parameters[name] = stand_in",
        "self._parameters",
        "weight._version",
        "func._schema",
        "aten._unique2",
        "torch._check(True)",
        "torch.ops.aten._anything",
        "config._attn_implementation",
        "LlamaForCausalLM._from_config(config)",
        "getattr(model, '_device_mesh', None)",
        "setattr(config, '_compile_all_devices', True)",
        "vars(model)['_modules']",
        "NAMES = ('shape', '_version')",
        "import torch._dynamo",
        "from torch._inductor import cpp_builder",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from transformers import reader\nreader.tqdm = None",
    ],
)
def test_a_private_part_is_found_however_it_is_named(line: str) -> None:
    assert list(private_parts(nodes_of(line), set()))


def test_what_is_our_own_is_no_private_part() -> None:
    text = "class A:\n  def __init__(self):\n    self._modules = []\n  def f(self, other):\n    return self._modules, other._places"
    assert list(private_parts(nodes_of(text), {"_places"})) == []
