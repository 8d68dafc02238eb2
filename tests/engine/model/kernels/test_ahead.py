"""What calls will launch is known before the first of them, and compiled side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
import torch

from decoders.engine.model import experts, self_check
from decoders.engine.model.kernels import LAUNCHERS, ahead, attention
from decoders.engine.model.target import Target
from decoders.testing import tiny_model
from decoders.tree import Topology

from ....turns import slow_but

triton = pytest.importorskip("triton")


def kinds_of(calls: list[tuple[str, list[Any]]]) -> set[Any]:
    return {(name, *map(ahead._kind, given)) for name, given in calls}


@pytest.mark.parametrize("design", slow_but(["gpt_oss"], ["llama", "gemma3", "gpt_oss"]))
@torch.no_grad()
def test_the_calls_of_passes_are_known_without_computing_them(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from decoders.engine.model.kernels import attention_triton

    for name in ("attend_kernel", "merge_kernel"):  # which the interpreter would take a minute for
        monkeypatch.setattr(attention_triton, name, defaultdict(lambda: lambda *given, **sizes: None))
    monkeypatch.setattr(experts, "is_grouped_natively", lambda device, dtype: False)  # which has no form without values
    target = Target(tiny_model(design), "triton")
    twin = target.sibling()

    def passes() -> None:
        self_check._passes_of_calls(twin)

    found = ahead.calls_within(passes)
    with ahead.Noted() as real:
        passes()
    assert kinds_of(found) == kinds_of(list(real.calls.values()))
    assert {name for name, _ in found} == {"tree_attention", "move_slots"}
    assert all(t.device.type == "meta" for _, given in found for t in given if isinstance(t, torch.Tensor))
    for module in target.model.modules():  # of the twin alone
        assert not any("Fake" in type(t).__name__ for t in module.buffers(recurse=False))


def test_trees_that_are_kept_for_all_calls_are_tensors() -> None:
    tree = Topology.chain(53)

    def passes() -> None:
        tree.tensors(1, torch.device("cpu"))

    ahead.calls_within(passes)
    assert tree.tensors(1, torch.device("cpu")).offsets.tolist() == [[*range(54)]]


def test_what_is_launched_before_a_module_that_reads_values_is_known() -> None:
    def passes() -> None:
        query = torch.zeros(1, 4, 4, 16)
        mask = attention.pack_mask(torch.zeros(1, dtype=torch.int64), torch.arange(4)[None], None)
        torch.ones(attention.attend(query, query, query, mask).shape).sum().item()

    assert [name for name, _ in ahead.calls_within(passes)] == ["tree_attention"]


def test_kernels_are_compiled_and_not_launched_by_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, bool]] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **given: launched.append((self, warmup)))
    with ahead.compiling_only():
        JITFunction.run("ours", grid=(1,), warmup=False)  # type: ignore[arg-type]
        other = threading.Thread(target=lambda: JITFunction.run("theirs", grid=(1,), warmup=False))  # type: ignore[arg-type]
        other.start()
        other.join()
    JITFunction.run("afterwards", grid=(1,), warmup=False)  # type: ignore[arg-type]
    assert launched == [("ours", True), ("theirs", False), ("afterwards", False)]


def test_compilers_work_in_threads_and_what_fails_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Executor] = []

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def __init__(self, executor: Executor, **options: Any) -> None:
            modes.append(executor)
            super().__init__(executor, **options)

    launches: list[str] = []
    monkeypatch.setattr(triton, "AsyncCompileMode", Mode)
    monkeypatch.setattr(ahead, "calls_within", lambda passes: [("tree_attention", [1]), ("rms_norm", [2])])
    monkeypatch.setitem(LAUNCHERS, "tree_attention", lambda given: launches.append("attention"))
    monkeypatch.setitem(LAUNCHERS, "rms_norm", lambda given: launches.append("norm"))
    assert ahead.compile_kernels(lambda: None) == 2 and launches == ["attention", "norm"] and len(modes) == 1

    def fails(given: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setitem(LAUNCHERS, "tree_attention", fails)
    assert ahead.compile_kernels(lambda: None) == 0


#: Compiles the kernels of three calls for a card that is not there, then launches them; says what Triton compiled, and in which thread.
FIRST_CALL = """
import json, sys, threading
import torch, triton
from triton.runtime import driver
from ahead_of_time import Driver, empty
from decoders.engine.model.kernels import LAUNCHERS, ahead, products

driver.set_active(Driver(90))
compiled = []

def listen(*, src, cache_hit, **more):
    compiled.append((src.hash(), cache_hit, threading.current_thread() is threading.main_thread()))

triton.knobs.compilation.listener = listen
half = dict(dtype=torch.float16)
products_of = [[empty(1, 4, k, **half), [empty(64, k, **half)], []] for k in (64, 1024)]
calls = [("rms_norm", [empty(1, 4, 64, **half), empty(64, **half), 1e-6, False, True])]
calls += [("few_rows_linear", given) for given in products_of]
ahead.calls_within = lambda passes: calls
assert ahead.compile_kernels(lambda: None) == len(calls)
ahead_of_calls = len(compiled)
with ahead.compiling_only():
    for name, given in calls:
        LAUNCHERS[name](*given)
assert len(compiled) == ahead_of_calls
print(json.dumps(compiled))
"""


@pytest.mark.slow
def test_calls_compile_nothing_that_was_compiled_ahead_and_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    kernels: list[set[str]] = []
    for process in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        compiled = json.loads(done.stdout.splitlines()[-1])
        kernels.append({name for name, _, _ in compiled})
        assert len(compiled) == len(kernels[-1]) == 4  # two products, the sum of one's stretches, the norm: once each
        assert not any(in_main_thread for _, _, in_main_thread in compiled)
        assert {kept for _, kept, _ in compiled} == {process == 1}
    assert kernels[0] == kernels[1]
