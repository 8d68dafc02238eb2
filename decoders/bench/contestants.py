"""What is measured: our strategies and transformers' own ways to generate, behind one call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import generate as _generate
from ..engine.compiler import compilations
from ..errors import UnknownNameError

if TYPE_CHECKING:
    from ..report import Report

#: transformers' generate with its dynamic cache: what every ratio and every "identical" refers to.
YARDSTICK = "transformers"
#: Tokens that transformers' own prompt lookup proposes per step (the value its documentation uses).
LOOKUP_TOKENS = 10
_GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}


@dataclass(frozen=True)
class Workload:
    """Prompts that are decoded in one call.

    Attributes:
        name: of the prompt, or of the first and last. kind: what it is counted under.
        input_ids, attention_mask: ``[B, P]``, padded on the left.
    """

    name: str
    kind: str
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]


@dataclass(frozen=True)
class Contestant:
    """One way to generate.

    Attributes:
        name: a strategy's registry name (``a+b``), or ``transformers…``. dtype: of the weights.
        arguments: of ``generate``. ours: whether they are for an enabled model's ``generate``.
        exact: whether its output must be transformers' own. settings: given by hand, for the record.
        impossible: why it cannot run at all. one_row_only: why it cannot run on batches.
    """

    name: str
    dtype: str
    model: PreTrainedModel
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    exact: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    impossible: str = ""
    one_row_only: str = ""

    def refusal(self, rows: int) -> str:
        """Why it cannot decode `rows` rows; empty if it can."""
        return self.impossible or (self.one_row_only if rows > 1 else "")


@dataclass(frozen=True)
class Call:
    """One finished call: `sequences` ``[B, P + new]``, wall `seconds` with and seconds spent in compilation,
    `compilations` graphs compiled on the way, and the loop's own report if it ran.
    """

    sequences: Tensor
    seconds: float
    compile_seconds: float
    compilations: int
    report: Report | None

    @property
    def decoding(self) -> float:
        """Wall seconds, compilation excluded."""
        return self.seconds - self.compile_seconds


def workloads(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str, str]], rows: int = 1
) -> list[Workload]:
    """Workloads of `rows` prompts each from ``(name, kind, text)``; prompts of one kind stay together.

    The last workload of a kind is filled up from the kind's first prompts, so that all have the same number of rows.
    """
    made = []
    for kind in dict.fromkeys(kind for _, kind, _ in texts):
        own = [(name, text) for name, other, text in texts if other == kind]
        for start in range(0, len(own), rows):
            chosen = [own[i % len(own)] for i in range(start, start + rows)]
            encoded = [tokenizer(text)["input_ids"] for _, text in chosen]
            longest = max(map(len, encoded))
            ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in encoded])
            mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in encoded])
            name = chosen[0][0] if rows == 1 else f"{chosen[0][0]}…{chosen[-1][0]}"
            made.append(Workload(name, kind, ids, mask))
    return made


def transformers_contestants(
    model: PreTrainedModel, draft: PreTrainedModel | None = None, names: Sequence[str] | None = None, dtype: str = ""
) -> list[Contestant]:
    """transformers' own ways: all that apply, or those of `names`. The yardstick always comes first.

    Off CUDA transformers compiles nothing by itself; ``transformers-compiled`` makes it compile its static-cache decoding.
    """
    dtype = dtype or str(model.dtype).removeprefix("torch.")
    one_row = "transformers' assisted generation takes one row"
    everything = CompileConfig()
    everything._compile_all_devices = True
    ways = {
        YARDSTICK: Contestant(YARDSTICK, dtype, model),
        "transformers-static": Contestant(
            "transformers-static", dtype, model, {"cache_implementation": "static"}),
        "transformers-compiled": Contestant(
            "transformers-compiled", dtype, model, {"cache_implementation": "static", "compile_config": everything}),
        "transformers-prompt-lookup": Contestant(
            "transformers-prompt-lookup", dtype, model, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, one_row_only=one_row),
        "transformers-assisted": Contestant(
            "transformers-assisted", dtype, model, {"assistant_model": draft}, one_row_only=one_row,
            impossible="" if draft is not None else "needs a draft model: --draft"),
    }  # fmt: skip
    if names is None:
        wanted = [name for name in ways if name != "transformers-compiled" or model.device.type != "cuda"]
    else:
        for name in names:
            if name not in ways:
                raise UnknownNameError("baseline", name, ways)
        wanted = list(dict.fromkeys([YARDSTICK, *names]))
    return [ways[name] for name in wanted]


def strategy_contestants(
    model: PreTrainedModel,
    names: Sequence[str] | None = None,
    draft: PreTrainedModel | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    decoders_config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = "",
) -> list[Contestant]:
    """Registered strategies, all or those of `names` (``a+b`` merges). Enables `model`.

    Args:
        settings: by strategy name. decoders_config: of every call, for instance ``{"compile": False}``.

    Raises:
        UnknownNameError, PluginError: no such strategy. SettingsError: no such setting, or of no strategy chosen.
    """
    from ..errors import SettingsError
    from ..names import canonical
    from ..plugins import registry

    _generate.enable(model, tokenizer)
    given = {canonical(name): dict(values) for name, values in (settings or {}).items()}
    names = list(registry().strategies()) if names is None else names
    made, used = [], set()
    for name in names:
        classes = [registry().strategy(part) for part in name.split("+")]
        parts = [cls.name for cls in classes]
        own = {part: given[part] for part in parts if part in given}
        used |= set(own)
        config = own if len(parts) > 1 else own.get(parts[0], {})
        impossible = ""
        try:
            # A misspelt setting ends the run before it starts.
            resolved = _generate.resolve_strategy("+".join(parts), config, None)
        except SettingsError as error:
            if own:
                raise
            resolved, impossible = None, str(error)  # a required setting was not given
        arguments: dict[str, Any] = {"strategy": "+".join(parts), "decoders_config": dict(decoders_config or {})}
        if config:
            arguments["strategy_config"] = config
        if any(cls.needs_assistant for cls in classes):
            arguments["assistant_model"] = draft
            if draft is None:
                impossible = impossible or "needs a draft model: --draft"
        made.append(
            Contestant(
                "+".join(parts),
                dtype or str(model.dtype).removeprefix("torch."),
                model,
                arguments,
                ours=True,
                exact=resolved.exact if resolved else all(cls.exact for cls in classes),
                settings=own,
                impossible=impossible,
            )  # fmt: skip
        )
    if set(given) - used:
        raise SettingsError(f"settings given for {', '.join(sorted(set(given) - used))}, which is not measured")
    return made


def decode(contestant: Contestant, workload: Workload, new_tokens: int, streamer: Any = None) -> Call:
    """One greedy call, timed as a whole with the device waited for at both ends."""
    model = contestant.model
    arguments: dict[str, Any] = {
        "input_ids": workload.input_ids.to(model.device),
        "attention_mask": workload.attention_mask.to(model.device),
        "max_new_tokens": new_tokens,
        "pad_token_id": pad_token(model),
        "return_dict_in_generate": True,
        **_GREEDY,
        **contestant.arguments,
    }
    if streamer is not None:
        arguments["streamer"] = streamer
    # transformers' own must not pass through ours, whose default strategy may be set in the environment.
    generate = model.generate if contestant.ours else type(model).generate.__get__(model)
    graphs = compilations()
    synchronize(model.device)
    started = time.perf_counter()
    output = generate(**arguments)
    synchronize(model.device)
    seconds = time.perf_counter() - started
    report = output.report if contestant.ours else None
    compiling = report.timings.compile if report is not None else 0.0
    return Call(output.sequences.cpu(), seconds, compiling, compilations() - graphs, report)


def pad_token(model: PreTrainedModel) -> int:
    """The token that fills rows that have ended: the model's pad token, else its first stop token, else 0."""
    stops = stop_tokens(model)
    pad = model.generation_config.pad_token_id
    return pad if pad is not None else stops[0] if stops else 0


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """End-of-sequence ids of the model's generation config."""
    stops = model.generation_config.eos_token_id
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its work; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
