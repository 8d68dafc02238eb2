"""Decoding measured side by side: strategies, transformers' own methods, prompts, batch sizes and dtypes in one run.

from decoders import bench
methods = bench.transformers_methods(model) + bench.strategy_methods(model, ["prompt_lookup"])
entries = bench.measure(methods, bench.workloads(tokenizer, texts, rows=1), new_tokens=64, repeats=3)
bench.summarise(entries)
"""

from __future__ import annotations

from .batches import Workload, workloads
from .call import TimedCall, decode
from .interleave import Interrupted, calls, measure, rotation, take_turns, warm_up
from .measurements import Competitor, Measurement
from .methods import Method, Sampling, strategy_methods, transformers_methods
from .records import Record, Spread, summarise
from .shapes import random_workloads

__all__ = [
    "Competitor", "Interrupted", "Measurement", "Method", "Record", "Sampling", "Spread", "TimedCall", "Workload", "calls", "decode",
    "measure", "random_workloads", "rotation", "strategy_methods", "summarise", "take_turns", "transformers_methods",
    "warm_up", "workloads",
]  # fmt: skip
