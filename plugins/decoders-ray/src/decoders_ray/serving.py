"""A Ray Serve application: replicas of a model, each with a scheduler, and a front to which clients connect."""

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

#: The exceptions that Ray raises for a lost replica.
LOST = (RayActorError, WorkerCrashedError)
#: Arguments of ``generate`` that an HTTP request may have besides its prompt.
ARGUMENTS = (
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
    "stop_strings", "strategy", "strategy_config", "grammar", "priority", "deadline",
)  # fmt: skip


class RequestError(ValueError):
    """A replica refused a request, or the request caused an error in the replica. The message begins with the name of that error."""


Loader = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


def load(path: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer from a folder or the hub."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path)


class Replica:
    """A replica: the model with a scheduler.

    Args:
        model: a path, or a function that returns model and tokenizer.
        options: arguments of :class:`decoders.Scheduler`.
    """

    def __init__(self, model: str | Loader, options: dict[str, Any]) -> None:
        loaded, self.tokenizer = load(model) if isinstance(model, str) else model()
        self.scheduler = decoders.Scheduler(loaded, tokenizer=self.tokenizer, **options)
        self.requests = 0

    async def tokens(self, prompt: list[int], arguments: dict[str, Any]) -> AsyncIterator[list[int]]:
        """Yields the new tokens of a request as they arrive.

        Args:
            prompt: token ids. The router expects the prompt as the first argument.
            arguments: arguments of :meth:`decoders.Scheduler.submit`.
        """
        self.requests += 1
        # The request is prepared in a thread, so that the event loop can serve other requests.
        try:
            generation = await asyncio.to_thread(self.scheduler.submit, prompt, **arguments)
            held: list[int] = []
            sent = 0
            async for token in generation:  # cancels the request if the client has gone
                held.append(token)
                if sent + len(held) == len(generation.tokens):
                    yield held
                    sent, held = sent + len(held), []
        except (decoders.DecodersError, TypeError, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from None
        if held:
            yield held

    def figures(self) -> dict[str, int]:
        """The id of the replica's process, its numbers of waiting and running requests, and its totals of requests and steps."""
        scheduler = self.scheduler
        return {
            "process": os.getpid(), "requests": self.requests, "waiting": scheduler.waiting, "running": scheduler.running,
            "steps": scheduler.steps,
        }  # fmt: skip

    def check_health(self) -> None:
        """Raises RuntimeError if the scheduler's thread has ended. Serve then replaces the replica."""
        if not self.scheduler.alive:
            raise RuntimeError("the scheduler's thread has ended")


class Front:
    """Answers clients with the text of a replica, or, if that replica is lost, of another.

    Args:
        replicas: the model's replicas.
        tokenizer: a path, or a function that returns model and tokenizer.
        attempts: greatest number of replicas to ask for a request.
    """

    def __init__(self, replicas: DeploymentHandle, tokenizer: str | Loader, attempts: int) -> None:
        self.replicas, self.attempts = replicas, attempts
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer()[1]

    async def stream(self, prompt: str | list[int], **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields ``{"tokens": …, "text": …}`` as tokens arrive, and at the end ``{"done": true, …}``.

        Args:
            prompt: text, or token ids.
            arguments: arguments of :meth:`decoders.Scheduler.submit`.
        """
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        if arguments.get("do_sample") and arguments.get("seed") is None:
            arguments["seed"] = random.getrandbits(62)  # with a seed, every replica writes the same text
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
        """Answers ``POST {"prompt": …, "stream": true, …}`` with lines of JSON, or without ``stream`` with one object."""
        try:
            body = await request.json()
            prompt, streams = body.pop("prompt"), bool(body.pop("stream", False))
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
                raise ValueError(f"prompt is text or a list of token ids, not {prompt!r}")
            if unknown := sorted(set(body) - set(ARGUMENTS)):
                raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(ARGUMENTS)}")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return JSONResponse({"error": f"a request must be an object with a prompt: {error}"}, status_code=400)
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
        model: a path, or a function that returns model and tokenizer.
        rows: number of rows of a replica's scheduler.
        min_replicas, max_replicas: bounds of the number of replicas, which follows the number of requests.
        busy: target number of requests per row of a replica, waiting requests included.
        attempts: greatest number of replicas to which a request is sent if replicas die.
        slack: a prompt goes to the replica that has read the prompt's beginning, if that replica has at most `slack` requests more than
            the least busy replica; None: `rows`.
        actor_options: a replica's ``ray_actor_options``: ``{"num_gpus": 1}``.
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
    """The message of an error for a client, without the traceback in Ray's message."""
    cause = getattr(error, "cause", None) or error
    return str(cause) if isinstance(cause, RequestError) else f"{type(cause).__name__}: {cause}"
