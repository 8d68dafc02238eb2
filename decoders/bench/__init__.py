"""Measures ways of decoding side by side: strategies, transformers' own methods, prompts, batch sizes and dtypes in one run.

from decoders import bench
methods = bench.transformers_methods(model) + bench.strategy_methods(model, ["prompt_lookup"])
entries = bench.measure(methods, bench.workloads(tokenizer, texts, rows=1), new_tokens=64, repeats=3)
bench.summarise(entries)
"""

from __future__ import annotations

from .figures import Spread
from .measurement import Competitor, Interrupted, Measurement, measure, rotation, take_turns, warm_up
from .methods import Engine, EngineOutput, Method, Sampling, strategy_methods, transformers_methods
from .records import Record, summarise
from .shapes import random_workloads
from .timed_call import TimedCall, decode
from .workloads import Workload, workloads

__all__ = [
    "Competitor", "Engine", "EngineOutput", "Interrupted", "Measurement", "Method", "Record", "Sampling", "Spread", "TimedCall",
    "Workload", "decode", "measure", "random_workloads", "rotation", "strategy_methods", "summarise", "take_turns",
    "transformers_methods", "warm_up", "workloads",
]  # fmt: skip
