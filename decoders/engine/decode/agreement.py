"""What the processes that share a model must agree on before they decode a call."""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ..model.ranks import Ranks
from .request import Request


def agreed(request: Request, ranks: Ranks) -> Request:
    """`request` as all processes that share the model decode it.

    Raises:
        RanksError: they were asked for different things. UnsupportedError: for compiled passes.
    """
    if not ranks.several:
        return request
    runtime = request.runtime
    if runtime.compile is True:
        raise UnsupportedError(
            f"compile=True: {ranks.size} processes share this model, and what they share runs uncompiled. Leave compile='auto'"
        )
    ranks.check(
        "what generate is asked for", *request.prompts, request.new_tokens, request.stop_tokens, request.seed, request.values,
        request.plan.sample, request.strategy.name, request.strategy.settings, runtime.compile, runtime.reuse, runtime.memory,
        runtime.prune, runtime.prefill_chunk, runtime.slots, request.keep_logits, request.keep_scores, request.criteria is None,
        request.processors is None, [grammar is None for grammar in request.grammars],
        [request.verifier.name, request.verifier.settings_in_force()] if request.verifier is not None else None,
    )  # fmt: skip
    return replace(request, runtime=runtime.model_copy(update={"compile": False}))
