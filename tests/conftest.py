"""Tests run offline, and on one thread each, so that they can run side by side."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compilers beside every worker

import pytest
import torch

_costs = tempfile.TemporaryDirectory()  # not the user's own
os.environ.setdefault("DECODERS_COST_CACHE", _costs.name)

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the tests must call them the same."""
    fleeting = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if fleeting:
        raise pytest.UsageError(f"the address of an object is no test id: {fleeting[0]}")
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
