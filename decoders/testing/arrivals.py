"""Rows that come and go while others are decoded, as in a scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..serving.scheduler import Scheduler
from ..strategy import Strategy
from .conditions import Conditions, needs
from .exactness import assert_same_tokens, prompts, reference

#: New tokens of each row: they end at different times, and a row that was waiting takes the place of one that has ended.
NEW_TOKENS = (6, 17, 3, 12, 9)


def check_rows_come_and_go(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Of five requests two are decoded at a time, and the next comes when one ends. Each writes what it writes alone: whatever
    `rebatch` keeps (by default nothing: `start` is called anew) belongs to the right rows.
    """
    name, inputs = conditions.models[0], prompts(len(NEW_TOKENS))
    eager = replace(conditions, compile=False)
    texts = [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    with conditions.enabled(name) as model, torch.no_grad():
        alone = [
            reference(
                model, dict(input_ids=text, attention_mask=torch.ones_like(text)), "autoregressive", max_new_tokens=new,
                do_sample=True, seed=number, decoders_config={"compile": False},
            ).sequences
            for number, (text, new) in enumerate(zip(texts, NEW_TOKENS, strict=True))
        ]  # fmt: skip
        options: dict[str, Any] = needs(model, name, strategy) | {
            "decoders_config": {"compile": eager.compile, "prune": False}
        }
        with Scheduler(model, strategy=strategy, rows=2, do_sample=True, **options) as scheduler:
            requests = [
                scheduler.submit(text[0], max_new_tokens=new, seed=number)
                for number, (text, new) in enumerate(zip(texts, NEW_TOKENS, strict=True))
            ]
            together = [request.result(120) for request in requests]
        for number, (text, own, shared) in enumerate(zip(texts, alone, together, strict=True)):
            inputs = dict(input_ids=text, attention_mask=torch.ones_like(text))
            what = f"request {number} beside others that come and go, not alone (see rebatch)"
            assert_same_tokens(model, inputs, own, shared, what)
