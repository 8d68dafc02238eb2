"""A Ray Serve application: replicas of a model with a scheduler each, and in front of them whoever speaks to clients."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import decoders
from decoders.scheduling import TextPieces

from .resume import Delivered, resumed

#: What is raised where a replica is gone.
LOST = (RayActorError, WorkerCrashedError)
#: Arguments of ``generate`` that a request over HTTP may give, besides its prompt.
ARGUMENTS = (
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
    "stop_strings", "strategy", "strategy_config", "grammar", "priority", "deadline",
)  # fmt: skip


class RequestError(ValueError):
    """A request that a replica refused, or that failed there by its own fault; the message begins with the error's name."""


Loader = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


def load(path: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer from a folder or the hub."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path)


class Replica:
    """A model with a scheduler.

    Args:
        model: a path, or a function that gives model and tokenizer.
        options: of :class:`decoders.Scheduler`.
    """

    def __init__(self, model: str | Loader, options: dict[str, Any]) -> None:
        loaded, self.tokenizer = load(model) if isinstance(model, str) else model()
        self.scheduler = decoders.Scheduler(loaded, tokenizer=self.tokenizer, **options)
        self.requests = 0

    async def tokens(self, prompt: list[int], arguments: dict[str, Any]) -> AsyncIterator[list[int]]:
        """The new tokens of a request, as many at a time as have come.

        Args:
            prompt: token ids; the first argument, by which requests are routed.
            arguments: of :meth:`decoders.Scheduler.submit`.
        """
        self.requests += 1
        # Its arguments are prepared outside of the loop that serves the others.
        try:
            generation = await asyncio.to_thread(self.scheduler.submit, prompt, **arguments)
            held: list[int] = []
            sent = 0
            async for token in generation:  # cancels it where nobody listens any more
                held.append(token)
                if sent + len(held) == len(generation.tokens):
                    yield held
                    sent, held = sent + len(held), []
        except (decoders.DecodersError, TypeError, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from None
        if held:
            yield held

    def figures(self) -> dict[str, int]:
        """What it has to do and has done."""
        scheduler = self.scheduler
        return {
            "process": os.getpid(), "requests": self.requests, "waiting": scheduler.waiting, "running": scheduler.running,
            "steps": scheduler.steps,
        }  # fmt: skip

    def check_health(self) -> None:
        """Serve starts another replica in the place of one whose thread has died."""
        if not self.scheduler.alive:
            raise RuntimeError("the scheduler's thread has ended")


class Front:
    """Speaks to clients, and asks another replica where one is lost.

    Args:
        replicas: of the model.
        tokenizer: a path, or a function that gives model and tokenizer.
        attempts: most replicas to ask for one request.
    """

    def __init__(self, replicas: DeploymentHandle, tokenizer: str | Loader, attempts: int) -> None:
        self.replicas, self.attempts = replicas, attempts
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer()[1]

    async def stream(self, prompt: str | list[int], **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        """``{"tokens": …, "text": …}`` as they come, and last ``{"done": true, …}``.

        Args:
            prompt: text, or token ids.
            arguments: of :meth:`decoders.Scheduler.submit`.
        """
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        if arguments.get("do_sample") and arguments.get("seed") is None:
            arguments["seed"] = random.getrandbits(62)  # one text, whichever replicas write it
        asked = self.replicas.options(method_name="tokens", stream=True)
        delivered, pieces = Delivered(), TextPieces(self.tokenizer, ids)
        stream = resumed(lambda: asked.remote(ids, arguments), lost=LOST, attempts=self.attempts, delivered=delivered)
        async for tokens in stream:
            yield {"tokens": tokens, "text": pieces.next(delivered.tokens, ended=False)}
        yield {
            "tokens": [], "text": pieces.next(delivered.tokens, ended=True), "done": True, "count": len(delivered.tokens),
            "attempts": delivered.attempts, "repeated": delivered.repeated,
        }  # fmt: skip

    async def __call__(self, request: Request) -> StreamingResponse | JSONResponse:
        """``POST {"prompt": …, "stream": true, …}``: lines of JSON, or one object."""
        try:
            body = await request.json()
            prompt, streams = body.pop("prompt"), bool(body.pop("stream", False))
            if unknown := sorted(set(body) - set(ARGUMENTS)):
                raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(ARGUMENTS)}")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return JSONResponse({"error": f"a request is an object with a prompt: {error}"}, status_code=400)
        if streams:
            return StreamingResponse(self._lines(prompt, body), media_type="application/x-ndjson")
        try:
            parts = [part async for part in self.stream(prompt, **body)]
        except Exception as error:
            return JSONResponse({"error": _said(error)}, status_code=400 if isinstance(error, RequestError) else 503)
        tokens = [token for part in parts for token in part["tokens"]]
        return JSONResponse(parts[-1] | {"tokens": tokens, "text": "".join(part["text"] for part in parts)})

    async def _lines(self, prompt: Any, arguments: dict[str, Any]) -> AsyncIterator[str]:
        try:
            async for part in self.stream(prompt, **arguments):
                yield json.dumps(part) + "\n"
        except Exception as error:
            yield json.dumps({"error": _said(error)}) + "\n"


def application(
    model: str | Loader, *, rows: int = 8, min_replicas: int = 1, max_replicas: int = 4, busy: float = 1.0, attempts: int = 3,
    slack: int | None = None, actor_options: dict[str, Any] | None = None, autoscaling: dict[str, Any] | None = None, **scheduler: Any,
) -> serve.Application:  # fmt: skip
    """An application for ``serve.run``.

    Args:
        model: a path, or a function that gives model and tokenizer.
        rows: of a replica's scheduler.
        min_replicas, max_replicas: of the model; as many as there are requests for.
        busy: requests per row, waiting ones included, that a replica is to have.
        attempts: most replicas that one request is sent to, where they die.
        slack: requests that the replica which has read a prompt's beginning may have more than the least busy one; `rows` by
            default.
        actor_options: ``ray_actor_options`` of a replica: ``{"num_gpus": 1}``.
        autoscaling: more fields of Serve's ``AutoscalingConfig``.
        scheduler: more arguments of :class:`decoders.Scheduler`.
    """
    scaling = dict(min_replicas=min_replicas, max_replicas=max_replicas, target_ongoing_requests=busy * rows)
    router = RequestRouterConfig(
        request_router_class="decoders_ray.router:PrefixRouter",
        request_router_kwargs={"slack": rows if slack is None else slack},
    )
    replicas = serve.deployment(
        Replica, name="replicas", autoscaling_config=AutoscalingConfig(**(scaling | (autoscaling or {}))),
        max_ongoing_requests=4 * rows, request_router_config=router, ray_actor_options=actor_options or {"num_cpus": 1},
        health_check_period_s=5, graceful_shutdown_timeout_s=20,
    )  # fmt: skip
    front = serve.deployment(
        Front,
        name="front",
        max_ongoing_requests=4 * rows * max_replicas,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(model, {"rows": rows} | scheduler), model, attempts)


def _said(error: Exception) -> str:
    """What a client is told; Ray's own message holds a traceback."""
    cause = getattr(error, "cause", None) or error
    return str(cause) if isinstance(cause, RequestError) else f"{type(cause).__name__}: {cause}"
