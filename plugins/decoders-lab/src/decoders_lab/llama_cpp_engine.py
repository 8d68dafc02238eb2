"""llama.cpp as an engine, through llama-cpp-python: plain decoding, prompt lookup, and speculative decoding with a second model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoders.bench.methods import EngineOutput, OnTokens

from .engines import DRAFT, LOOKUP

#: Number of draft tokens per step. For prompt lookup 10 is llama-cpp-python's default; its documentation recommends 2 without a GPU.
DRAFT_TOKENS = {LOOKUP: 10, DRAFT: 4}
#: The KV cache is allocated in multiples of this many tokens.
ROOM = 256


class LlamaCpp:
    """The engine for one model file.

    One row is decoded by ``Llama.generate``, as most users call it. The class ``Llama`` has no method for several rows, so
    :class:`BatchedLlamaCpp` decodes them by ``llama_decode``, with a sequence for each row, and chooses the likeliest tokens.
    """

    def __init__(self, path: Path, mode: str = "", draft: Path | None = None) -> None:
        self.path, self.mode, self.draft = path, mode, draft
        self.llama: Any = None
        self.batched: BatchedLlamaCpp | None = None

    def generate(
        self, prompts: list[list[int]], new_tokens: int, stops: frozenset[int], on_tokens: OnTokens | None = None
    ) -> EngineOutput:
        room = max(map(len, prompts)) + new_tokens
        if len(prompts) > 1:
            if self.batched is None or self.batched.rows < len(prompts) or self.batched.room < room:
                self.close()
                self.batched = BatchedLlamaCpp(self.path, len(prompts), room)
            return self.batched.generate(prompts, new_tokens, stops, on_tokens)
        if self.llama is None or self.llama.n_ctx() < room + max(DRAFT_TOKENS.values()):
            self.close()
            self._open(room)
        llama = self.llama
        llama.reset()  # otherwise the KV cache of the prefix shared with the last prompt would be reused
        self.evaluations = 0
        tokens: list[int] = []
        for token in llama.generate(prompts[0], temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if (on_tokens is not None and not on_tokens([token])) or token in stops or len(tokens) == new_tokens:
                break
        return EngineOutput([tokens], self.evaluations)

    def close(self) -> None:
        if self.llama is not None:
            self.llama.close()
        if self.batched is not None:
            self.batched.close()
        self.llama = self.batched = None

    def _open(self, room: int) -> None:
        drafting = None
        if self.mode == LOOKUP:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            drafting = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT_TOKENS[LOOKUP])
        elif self.mode == DRAFT:
            assert self.draft is not None
            drafting = _drafting(_llama(self.draft, room))
        self.llama = _llama(self.path, room, drafting)
        evaluate = self.llama.eval

        def counted(tokens: Any) -> None:
            self.evaluations += 1
            evaluate(tokens)

        self.llama.eval = counted


def _llama(path: Path, room: int, drafting: Any = None) -> Any:
    """A ``Llama`` with room for `room` tokens and draft tokens, and with torch's number of threads."""
    import llama_cpp

    slots = -(-(room + max(DRAFT_TOKENS.values()) + 1) // ROOM) * ROOM
    threads = torch.get_num_threads()
    return llama_cpp.Llama(
        str(path),
        n_ctx=slots,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=drafting,
        verbose=False,
    )


def _drafting(small: Any) -> Any:
    """A drafter for llama-cpp-python that drafts the greedy tokens of the model `small`. The library's own drafter is prompt lookup."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class SecondModel(LlamaDraftModel):
        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            tokens = []
            # `small` keeps the KV cache of the prefix that this text shares with the last text.
            for token in small.generate(input_ids.tolist(), temp=0.0, repeat_penalty=1.0):
                tokens.append(token)
                if len(tokens) == DRAFT_TOKENS[DRAFT]:
                    break
            return np.array(tokens, dtype=np.intc)

    return SecondModel()


class BatchedLlamaCpp:
    """An engine for several rows, each of which is a sequence of llama.cpp."""

    def __init__(self, path: Path, rows: int, room: int) -> None:
        import llama_cpp as lib

        self.lib, self.rows, self.room = lib, rows, -(-room // ROOM) * ROOM
        parameters = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {path}")
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_seq_max = self.room * rows, rows
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        self.context = lib.llama_init_from_model(self.model, context)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(512, 0, 1)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, stops: frozenset[int], on_tokens: OnTokens | None
    ) -> EngineOutput:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        rows: list[list[int]] = [[] for _ in prompts]
        latest = [self.read_prompt(row, prompt) for row, prompt in enumerate(prompts)]
        active = list(range(len(prompts)))
        steps = 1
        while True:
            for row in active:
                rows[row].append(latest[row])
            go_on = on_tokens is None or on_tokens(latest)
            active = [row for row in active if latest[row] not in stops and len(rows[row]) < new_tokens]
            if not active or not go_on:
                return EngineOutput(rows, steps)
            entries = [(latest[row], len(prompts[row]) + len(rows[row]) - 1, row, True) for row in active]
            chosen = self.decode(entries)
            for row, token in zip(active, chosen, strict=True):
                latest[row] = token
            steps += 1

    def read_prompt(self, row: int, prompt: list[int]) -> int:
        """Prefills a row's prompt and returns the likeliest token after it."""
        chosen: list[int] = []
        for start in range(0, len(prompt), 512):
            part = prompt[start : start + 512]
            last = start + len(part) == len(prompt)
            chosen = self.decode([(token, start + i, row, last and i == len(part) - 1) for i, token in enumerate(part)])
        return chosen[0]

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest token after each entry whose `choose` is set. entries: (token, position, sequence, choose)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, choose) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, choose
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode ended with {status}")
        chosen = []
        for i, (_, _, _, choose) in enumerate(entries):
            if choose:
                logits = self.lib.llama_get_logits_ith(self.context, i)
                pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary))
                chosen.append(int(np.frombuffer(pointer.contents, dtype=np.float32).argmax()))
        return chosen

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
