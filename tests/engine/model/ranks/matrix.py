"""Calls of every kind, made by one process or by several that share the model; run as a program, what one of them does.

python matrix.py FOLDER SIZE every|few NAME…

All of them: what is imported is imported once, and the others are forked then.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

import decoders
from decoders.heads.medusa import HeadsConfig, MedusaHeads, save_heads
from decoders.testing import tiny_draft, tiny_model
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import Matched, TokenAutomaton

NEW = 14
#: Wide enough that some of random heads' tokens are right.
WIDE = tuple((i,) for i in range(40)) + tuple((i, j) for i in range(4) for j in range(12))
SAMPLED = dict(do_sample=True, temperature=0.9, top_k=20, seed=11)
DRAFTED = ("speculative", "threshold", "staged")
#: Strategies with settings.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "prompt_lookup": ("prompt_lookup", {"branches": 3, "length": 4, "max_ngram": 2}),
    "lookahead": ("lookahead", {"window": 4, "ngram": 3, "candidates": 5}),
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "token_recycling": ("token_recycling", {"nodes": 9}),
    "speculative": ("speculative", {"length": 4}),
    "speculative tree": ("speculative", {"tree": "dynamic", "length": 4, "nodes": 8}),
    "speculative heuristic": ("speculative", {"schedule": "heuristic", "length": 2}),
    "early exit": ("early_exit", {"length": 3}),
    "threshold": ("threshold", {}),
    "threshold calibrated": ("threshold", {"rule": "calibrated"}),
    "staged": ("staged", {"passes": 2, "stage": "prompt_lookup", "nodes": 12}),
    "medusa": ("medusa", {}),
    "merged": ("prompt_lookup+speculative", {}),
    "suffix+token_recycling": ("suffix+token_recycling", {}),
    "auto": ("auto", {}),
}
#: Of a quick run: one with tables, one with heads, with a draft model those whose drafts depend on figures, and merged ones.
QUICK = (
    "prompt_lookup",
    "speculative tree",
    "threshold calibrated",
    "staged",
    "medusa",
    "suffix+token_recycling",
    "merged",
    "auto",
)
#: What is varied: greedy, with noise, in a ragged batch, under a grammar of each kind.
FORMS = ("greedy", "sampled", "ragged", "grammar", "host grammar")


class Wilful(decoders.Strategy):
    """Drafts something else in each process."""

    name = "wilful"
    summary = "Breaks the rule that processes draft alike."

    def start(self, context: decoders.Context) -> int:
        return dist.get_rank()

    def propose(self, state: int, sequences: decoders.Sequences) -> decoders.Draft:
        return decoders.Draft.chain(torch.full((len(sequences.length), 2), 5 + state))


class EndsByClock(StoppingCriteria):
    """Ends rows where this process's clock says so: after some tokens, which are not the same in each."""

    def __init__(self, tokens: int) -> None:
        self.length = 9 + tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def inputs_of(form: str) -> dict[str, torch.Tensor]:
    text = torch.tensor([[7, 9, 11, 7, 9, 12, 7, 9, 11]])
    if form != "ragged":
        return {"input_ids": text, "attention_mask": torch.ones_like(text)}
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, length in enumerate((9, 4, 6)):
        ids[row, 9 - length :], mask[row, 9 - length :] = text[0, :length] + 3 * row, 1
    return {"input_ids": ids, "attention_mask": mask}


class Models:
    """The models of one design, loaded from `folder` as the processes have them."""

    def __init__(self, folder: Path, name: str, shared: bool) -> None:
        self.folder, self.shared = folder, shared
        self.target = decoders.enable(self.load(f"{name}-target", shared))
        self.draft = self.load(f"{name}-draft", False)
        self.heads = str(folder / "heads")
        self.name = name

    def load(self, name: str, shared: bool, **options: Any) -> PreTrainedModel:
        if shared and not options:
            options = {"tp_plan": "auto"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # tp_plan= is to be said otherwise one day
            return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32, **options).eval()

    def tokens(self, strategy: str, form: str, **options: Any) -> list[list[int]]:
        name, config = STRATEGIES[strategy]
        if name == "medusa":
            config = {"heads": self.heads}
        if set(name.split("+")) & set(DRAFTED) or name == "auto":
            options.setdefault("assistant_model", self.draft)
        if form == "sampled":
            options = SAMPLED | options
        if "grammar" in form:
            grammar = TokenAutomaton.random(5, VOCAB, [2])
            options |= dict(grammar=Matched(grammar) if form == "host grammar" else grammar, eos_token_id=2)
        inputs = inputs_of(form)
        options = dict(max_new_tokens=NEW, pad_token_id=0) | options
        out = self.target.generate(
            **inputs, strategy=name, strategy_config=config or None, return_dict_in_generate=True, **options
        )
        return out.sequences[:, inputs["input_ids"].shape[1] :].tolist()


def prepare(folder: Path, names: list[str]) -> None:
    for name in names:
        tiny_model(name).save_pretrained(folder / f"{name}-target")
        tiny_draft(name).save_pretrained(folder / f"{name}-draft")
    heads = MedusaHeads(HeadsConfig(heads=2, layers=1, hidden_size=32, vocab_size=VOCAB, projection="tied", tree=WIDE))
    with torch.no_grad():
        heads.linear.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    save_heads(heads, folder / "heads")


def cases(every: bool) -> list[tuple[str, str]]:
    """All of them, or plain decoding in all forms and strategies of every kind in one."""
    pairs = [(strategy, form) for strategy in STRATEGIES for form in FORMS]
    if every:
        return pairs
    places = {strategy: place for place, strategy in enumerate(STRATEGIES)}
    few = [(s, f) for s, f in pairs if s in QUICK and FORMS.index(f) == places[s] % len(FORMS)]
    return [(s, f) for s, f in pairs if s == "autoregressive"] + few


def written(models: Models, every: bool) -> dict[str, list[list[int]]]:
    """What all cases write, by name."""
    return {f"{strategy}, {form}": models.tokens(strategy, form) for strategy, form in cases(every)}


def of_several(models: Models, rank: int) -> dict[str, Any]:
    """What only processes that share a model can do, or do wrong."""
    both: dict[str, Any] = {}
    both["shared draft"] = models.tokens(
        "speculative", "sampled", assistant_model=models.load(f"{models.name}-draft", True)
    )
    torch.manual_seed(0)
    drawn = int(torch.randint(0, 2**63 - 1, ()))
    both["seeds"] = {str(drawn): models.tokens("autoregressive", "sampled", seed=drawn)}
    torch.manual_seed(rank)
    both["no seed"] = models.tokens("prompt_lookup", "sampled", seed=None)
    both["clock"] = models.tokens("autoregressive", "greedy", stopping_criteria=[EndsByClock(4 + 3 * rank)])
    both["max_time"] = models.tokens("suffix", "ragged", max_time=1e-9 if rank == 0 else 100.0)
    both["reused"] = [models.tokens("autoregressive", "greedy") for _ in range(2)][1]
    both["errors"] = [
        refusal(lambda: models.tokens("autoregressive", "greedy", max_new_tokens=3 + rank)),
        refusal(lambda: models.tokens("autoregressive", "greedy", decoders_config={"compile": True})),
        refusal(lambda: models.tokens("autoregressive", "greedy", decoders_config={"weights": "int8"})),
        refusal(lambda: decoders.Scheduler(models.target)),
        refusal(lambda: models.target.generate(**inputs_of("greedy"), strategy=Wilful(), max_new_tokens=4)),
        refusal(
            lambda: models.tokens(
                "autoregressive", "greedy", verifier="typical", verifier_config={"epsilon": 0.1 + 0.1 * rank}
            )
        ),
        refusal(
            lambda: models.tokens("autoregressive", "greedy", decoders_config={"kv_cache": "int8" if rank else "keep"})
        ),
        dropped_by(0, rank, models, decoders.release),
        dropped_by(0, rank, models, decoders.forget),
    ]
    before = models.tokens("autoregressive", "greedy")
    with torch.no_grad():
        models.target.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    both["changed"] = models.tokens("autoregressive", "greedy")
    assert both["changed"] != before
    with torch.no_grad():
        models.target.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    both["changed back"] = models.tokens("autoregressive", "greedy")
    return both


def whole_experts() -> Any:
    """Expert parallelism: each process has some experts, whole."""
    from transformers.distributed import DistributedConfig

    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return DistributedConfig(tp_plan="auto", ep_size=dist.get_world_size())
    return DistributedConfig(tp_plan="auto", enable_expert_parallel=True)  # transformers 5.17


def dropped_by(one: int, rank: int, models: Models, drop: Callable[[Any], object]) -> str:
    """What happens after only process `one` has called `drop`, which drops data of the model."""
    models.tokens("autoregressive", "greedy")
    if rank == one:
        drop(models.target)
    said = refusal(lambda: models.tokens("autoregressive", "greedy"))
    drop(models.target)
    return said


def refusal(call: Any) -> str:
    try:
        call()
    except decoders.DecodersError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main(folder: Path, rank: int, size: int, every: bool, names: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    for name in names:
        models = Models(folder, name, shared=True)
        result: dict[str, Any] = {"written": written(models, every)}
        if name == "mixtral":
            models.target = decoders.enable(models.load("mixtral-target", True, distributed_config=whole_experts()))
            result["experts"] = models.tokens("suffix", "ragged"), models.tokens("speculative", "sampled")
        if name == "llama":
            result["several"] = of_several(models, rank)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()


def run(folder: Path, size: int, every: bool, names: list[str]) -> None:
    """Becomes `size` processes; the first one ends as the worst of them."""
    rank, others = 0, []
    for other in range(1, size):
        others.append(os.fork())
        if others[-1] == 0:
            rank, others = other, []
            break
    status = 1
    try:
        main(folder, rank, size, every, names)
        status = max((os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in others), default=0)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads now and then abort a process that ends in the usual way


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "every", sys.argv[4:])
