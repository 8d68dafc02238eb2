"""Runs vLLM under a load, in the Python environment that has vLLM; imports nothing of this package.

Standard input consists of JSON lines: the engine (``model``, ``dtype``, ``rows``, ``slots``), then loads, each a list of ``[seconds,
prompt, new_tokens]``. For each load, a line ``{"firsts": […], "ends": […], "tokens": […]}`` is written to standard output among vLLM's
output: each request's seconds from the start of the load to its first token and to its end, and its number of tokens.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

#: Prefix of the lines with results.
MARK = "decoders-vllm "


def engine_of(settings: dict[str, Any]) -> Any:
    """A vLLM engine that prefills every prompt in full."""
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_num_seqs=settings["rows"],
        max_model_len=settings["slots"],
        enable_prefix_caching=False,
    ).llm_engine


def run(engine: Any, load: list[tuple[float, list[int], int]]) -> dict[str, list[Any]]:
    """Submits every request at its arrival time, and decodes it greedily to its full length. Returns the line to write."""
    from vllm import SamplingParams

    firsts, ends, tokens = [0.0] * len(load), [0.0] * len(load), [0] * len(load)
    began, sent, ended = time.perf_counter(), 0, 0
    while ended < len(load):
        while sent < len(load) and load[sent][0] <= time.perf_counter() - began:
            _, prompt, new_tokens = load[sent]
            sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
            engine.add_request(str(sent), {"prompt_token_ids": prompt}, sampling)
            sent += 1
        if sent == ended:  # no request is running
            time.sleep(max(load[sent][0] - (time.perf_counter() - began), 0))
            continue
        for output in engine.step():
            number, now = int(output.request_id), time.perf_counter() - began
            firsts[number] = firsts[number] or now
            tokens[number] = len(output.outputs[0].token_ids)
            if output.finished:
                ends[number], ended = now, ended + 1
    return {"firsts": firsts, "ends": ends, "tokens": tokens}


def main() -> None:
    engine = engine_of(json.loads(sys.stdin.readline()))
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(run(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
