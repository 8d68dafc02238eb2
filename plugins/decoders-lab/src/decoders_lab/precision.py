"""Measures the effect of quantized weights and a quantized cache on the next token's distribution, a step's time, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decoders.bench.measurement import rotation
from decoders.bench.tables import plain_table, shown
from decoders.engine.model.blocks import PassInput, causal_block
from decoders.engine.model.buckets import view_bucket
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.compiled.forward_pass import ForwardPass
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.report import Report
from decoders.tree import Topology

#: Number of tokens of a text in one forward pass: few enough for the decoding kernels.
STRETCH = 32


@dataclass(frozen=True)
class PrecisionCost:
    """Costs and savings of one precision.

    Attributes:
        perplexity: perplexity of the texts.
        divergence: KL divergence from the model's own next-token distribution, in nats, mean over the tokens.
        agreement: share of positions at which the likeliest next token equals the model's own.
        logit_error: error of the log probabilities: its standard deviation over the vocabulary, averaged over the tokens.
        matrix_bytes: bytes of the matrices.
        slot_bytes: bytes of one token's keys and values.
        same_bits: whether a token's logits have the same bits in every block that contains it; None if this was not checked.
        step_seconds: median seconds of a step, by number of nodes.
    """

    name: str
    perplexity: float
    divergence: float
    agreement: float
    logit_error: float
    matrix_bytes: int
    slot_bytes: int
    same_bits: bool | None
    step_seconds: dict[int, float] = field(default_factory=dict)


def precision_of(name: str) -> Precision:
    """The precision called `name`: ``"int8"``, ``"int4"``, ``"kv:int8"``, several joined by ``+``, or ``"own"``, the model's own."""
    known: dict[str, dict] = {
        "own": {},
        "int8": {"weights": "int8"},
        "int4": {"weights": "int4"},
        "kv:int8": {"cache": "int8"},
    }
    parts: dict = {}
    for part in name.split("+"):
        parts |= known[part]
    return Precision(**parts)


def measure(
    model: PreTrainedModel, names: Sequence[str], texts: Sequence[Tensor], nodes: Sequence[int], repeats: int,
    compile: bool, length: int = 200, advance: Callable[[str], object] = lambda what: None,
) -> list[PrecisionCost]:  # fmt: skip
    """Measures the errors of precisions relative to the model's own, and, in turns, the times of steps. The model's own come first.

    Args:
        texts: token ids, ``[tokens]`` each.
        length: number of tokens before the timed block.
    """
    targets = {name: target_of(model, "sdpa", precision_of(name)) for name in ("own", *names)}
    with torch.no_grad():
        distributions = {name: [_read(target, text) for text in texts] for name, target in targets.items()}
        advance("texts")
        forwards = {name: ForwardPass(target) for name, target in targets.items()}
        times = _times(forwards, nodes, repeats, compile, length)
        advance("steps")
    own = torch.cat(distributions["own"])
    following = torch.cat([text[1 : len(rows)] for text, rows in zip(texts, distributions["own"], strict=True)])
    costs = []
    for name, target in targets.items():
        rows = distributions[name]
        likelihood = torch.cat([part[:-1] for part in rows]).gather(1, following[:, None])
        difference = own - torch.cat(rows)
        slot = CacheBuffers.allocate(target.layout, 1, 1).nbytes
        costs.append(
            PrecisionCost(
                name, float((-likelihood.mean()).exp()), float((own.exp() * difference).sum(-1).mean()),
                float((own.argmax(-1) == torch.cat(rows).argmax(-1)).float().mean()),
                float((difference - difference.mean(-1, keepdim=True)).square().mean(-1).sqrt().mean()),
                _matrix_bytes(target), slot,
                target.checks.invariance.holds if target.checks.invariance is not None else None,
                {count: times[name, count] for count in nodes},
            )
        )  # fmt: skip
    return costs


def _matrix_bytes(target: Target) -> int:
    """The sum of the bytes of the quantized matrices, and of the weights of linear layers that are not quantized."""
    quantized = {id(module) for module, _ in target.products.quantized.layers.values()}
    linear = [
        part for part in target.model.modules() if isinstance(part, (nn.Linear, Conv1D)) and id(part) not in quantized
    ]
    return sum(t.nbytes for t in {*target.matrices, *(layer.weight for layer in linear)})


def _read(target: Target, text: Tensor) -> Tensor:
    """Log probabilities after every token, ``[tokens, V]``. Last tokens that do not fill :data:`STRETCH` are left out."""
    count = len(text) - len(text) % STRETCH
    buffers, parts = CacheBuffers.allocate(target.layout, 1, view_bucket(count) + STRETCH), []
    for start in range(0, count, STRETCH):
        block = causal_block(1, STRETCH, target.device)
        view = torch.arange(view_bucket(start + STRETCH))
        base = torch.tensor([start])
        parts.append(
            target.forward(PassInput(text[None, start : start + STRETCH], base, block, buffers, view)).logits[0]
        )
    return torch.cat(parts).log_softmax(-1)


def _times(
    forwards: dict[str, ForwardPass], nodes: Sequence[int], repeats: int, compile: bool, length: int
) -> dict[tuple[str, int], float]:
    report = Report("")
    for forward in forwards.values():
        if compile:
            forward.tiers.compile(False, report)
    buffers = {
        name: CacheBuffers.allocate(f.target.layout, 1, view_bucket(length + max(nodes)) + 64)
        for name, f in forwards.items()
    }
    seconds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in forwards for count in nodes}
    for turn in range(repeats + 1):
        for count in nodes:
            for name, forward in rotation(list(forwards.items()), turn):
                tokens = torch.arange(count)[None] + 5
                tree, view = (
                    Topology.chain(count - 1).tensors(1, tokens.device),
                    torch.arange(view_bucket(length + count)),
                )
                with forward.tiers.during("auto" if compile else False, report):
                    started = time.perf_counter()
                    forward(PassInput(tokens, torch.tensor([length]), tree, buffers[name], view))
                    seconds[name, count].append(time.perf_counter() - started)
    return {key: median(values[1:]) for key, values in seconds.items()}


def precision_table(costs: Sequence[PrecisionCost], title: str = "") -> Table:
    """A table with a row for each precision."""
    nodes = list(costs[0].step_seconds) if costs else []
    table = plain_table(
        title, "perplexity", "KL", "same best", "logit error", "weights MB", "cache B/token", "same bits",
        *(f"{count} nodes ms" for count in nodes),
    )  # fmt: skip
    for cost in costs:
        table.add_row(
            Text(cost.name, style="bold"), shown(cost.perplexity, ".2f"), shown(cost.divergence, ".4f"),
            f"{cost.agreement:.1%}", shown(cost.logit_error, ".3f"), shown(cost.matrix_bytes / 1e6, ".0f"),
            str(cost.slot_bytes), {None: "", True: "yes", False: "no"}[cost.same_bits],
            *(shown(cost.step_seconds[count] * 1e3, ".1f") for count in nodes),
        )  # fmt: skip
    return table
