"""Decoding measured side by side: strategies, transformers' own ways, prompts, batch sizes and dtypes in one run.

from decoders import bench
contestants = bench.transformers_contestants(model) + bench.strategy_contestants(model, ["prompt_lookup"])
entries = bench.measure(contestants, bench.workloads(tokenizer, texts, rows=1), new_tokens=64, repeats=3)
bench.summarise(entries)
"""

from __future__ import annotations

from .call import Call, decode
from .contestants import Contestant, Sampling, Workload, strategy_contestants, transformers_contestants, workloads
from .interleave import Entry, Sample, calls, measure, rotation, take_turns, warm_up
from .records import Record, Spread, summarise
from .shapes import random_workloads

__all__ = [
    "Call", "Contestant", "Entry", "Record", "Sample", "Sampling", "Spread", "Workload", "calls", "decode", "measure",
    "random_workloads", "rotation", "strategy_contestants", "summarise", "take_turns", "transformers_contestants",
    "warm_up", "workloads",
]  # fmt: skip
