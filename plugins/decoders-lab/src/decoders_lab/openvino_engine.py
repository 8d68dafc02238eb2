"""OpenVINO GenAI as an engine: plain decoding, GenAI's prompt lookup, and its speculative decoding with a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoders.bench.methods import EngineOutput, OnTokens

from .engines import DRAFT, LOOKUP

#: Number of draft tokens per step, and length of the longest n-gram to look up: the values of GenAI's own samples.
DRAFT_TOKENS = 5
NGRAM = 3


class OpenVino:
    """The engine for one model folder. Attention is paged: GenAI's default, which its speculative decoding requires."""

    def __init__(self, folder: Path, number_format: str, mode: str = "", draft: Path | None = None) -> None:
        import openvino_genai as genai

        self.genai, self.mode = genai, mode
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # otherwise calls after the first would reuse the prompt's KV cache
        scheduler.max_num_batched_tokens = 2**20
        scheduler.cache_size = 1  # GiB
        # On a processor without bfloat16 instructions, GenAI cannot compute in bfloat16.
        computed = "bf16" if number_format != "f32" and "BF16" in _capabilities() else "f32"
        precision = {
            "INFERENCE_PRECISION_HINT": computed,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # By default GenAI rounds keys and values to eight bits.
            "KV_CACHE_PRECISION": computed,
        }
        options: dict[str, Any] = {"scheduler_config": scheduler, **precision}
        if mode == LOOKUP:
            options["prompt_lookup"] = True
        elif mode == DRAFT:
            options["draft_model"] = genai.draft_model(str(draft), "CPU", **precision)
        self.pipeline = genai.LLMPipeline(str(folder), "CPU", **options)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, stops: frozenset[int], on_tokens: OnTokens | None = None
    ) -> EngineOutput:
        import openvino as ov

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = new_tokens, False
        config.ignore_eos = not stops
        config.set_eos_token_id(min(stops, default=0))
        config.stop_token_ids = set(stops or {0})
        if self.mode == LOOKUP:
            config.num_assistant_tokens, config.max_ngram_size = DRAFT_TOKENS, NGRAM
        elif self.mode == DRAFT:
            config.num_assistant_tokens = DRAFT_TOKENS
        longest = max(map(len, prompts))
        ids = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], dtype=np.int64)
        mask = np.array([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], dtype=np.int64)
        inputs = self.genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
        # With several rows, GenAI reports nothing before the end.
        streamer = _streamer(self.genai, on_tokens) if on_tokens is not None and len(prompts) == 1 else None
        result = self.pipeline.generate(inputs, config, streamer)
        return EngineOutput([list(row) for row in result.tokens], self._steps(result) if len(prompts) == 1 else None)

    def close(self) -> None:
        self.pipeline = None

    def _steps(self, result: Any) -> int | None:
        """Number of passes of the target, from GenAI's figures; None if GenAI reports none."""
        return len(result.perf_metrics.raw_metrics.token_infer_durations) or None


def _capabilities() -> list[str]:
    """The number formats that OpenVINO reports for this processor."""
    import openvino as ov

    return list(ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def _streamer(genai: Any, on_tokens: OnTokens) -> Any:
    class Streamer(genai.StreamerBase):
        def write(self, token: Any) -> Any:
            tokens = [token] if isinstance(token, int) else list(token)
            go_on = all(on_tokens([each]) for each in tokens)
            return genai.StreamingStatus.RUNNING if go_on else genai.StreamingStatus.STOP

        def end(self) -> None:
            """Nothing to close."""

    return Streamer()
