"""Decoding measured side by side: strategies, transformers' own ways, prompts, batch sizes and dtypes in one run.

    from decoders import bench
    contestants = bench.transformers_contestants(model) + bench.strategy_contestants(model, ["prompt_lookup"])
    entries = bench.measure(contestants, bench.workloads(tokenizer, texts, rows=1), new_tokens=64, repeats=3)
    bench.summarise(entries)
"""

from __future__ import annotations

from .contestants import Call, Contestant, Workload, decode, strategy_contestants, transformers_contestants, workloads
from .measure import Entry, Sample, measure, rotation
from .records import Record, Spread, summarise

__all__ = [
    "Call", "Contestant", "Entry", "Record", "Sample", "Spread", "Workload", "decode", "measure", "rotation",
    "strategy_contestants", "summarise", "transformers_contestants", "workloads",
]  # fmt: skip
