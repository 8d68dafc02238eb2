"""What calls will launch is known before the first of them, and compiled side by side."""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from typing import Any

import pytest
import torch

from decoders.engine.model import experts, self_check
from decoders.engine.model.kernels import LAUNCHERS, ahead, attention
from decoders.engine.model.target import Target
from decoders.testing import tiny_model
from decoders.tree import Topology

triton = pytest.importorskip("triton")


def kinds_of(calls: list[tuple[str, list[Any]]]) -> set[Any]:
    return {(name, *map(ahead._kind, given)) for name, given in calls}


@pytest.mark.parametrize("design", ["llama", "gemma3", "gpt_oss"])
@torch.no_grad()
def test_the_calls_of_passes_are_known_without_computing_them(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_launch", lambda *given: None)  # which the interpreter would take a minute for
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
