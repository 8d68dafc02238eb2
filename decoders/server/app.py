"""The server's HTTP routes, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import DeadlineError, suggest
from . import chat, completions, responses
from .answers import Answer, EventStream, settled, while_connected
from .bodies import BaseBody, Body, ChatBody, CompletionBody
from .limits import CLIENT, SPENT, TOKENS, Arrival, Gate, Scope
from .refusals import Refusal, client_gone, parsed
from .response_bodies import ResponseBody
from .service import LARGE, Service

A = TypeVar("A", bound=BaseBody)
B = TypeVar("B", bound=Body)
_READ = ["GET", "HEAD"]
_ROUTES = ("/", "/health", "/metrics", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses")


def make_app(service: Service, keys: str | Collection[str] | None = None, hosts: Collection[str] | None = None) -> Gate:
    """The ASGI application, which closes `service` at shutdown. keys, hosts: see :class:`~decoders.server.limits.Gate`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    page, policy = _page()

    @app.api_route("/", methods=_READ)
    async def index() -> Response:
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        state = "stopping" if service.draining else "ok"
        counts = {"waiting": service.pool.waiting, "running": service.pool.running}
        return JSONResponse({"status": state, "model": service.name, **counts}, 503 if service.draining else 200)

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        # Formatting the metrics, a few hundred lines, takes too little time to need a thread.
        content = generate_latest(service.metrics.registry)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service)]}

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> Response:
        try:
            service.check_name(name)
        except Refusal as error:
            return error.response
        return JSONResponse(_card(service))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _answered(service, request, CompletionBody, completions.start)

    @app.post("/v1/chat/completions")
    async def converse(request: Request) -> Response:
        return await _answered(service, request, ChatBody, chat.start)

    kept = responses.Kept()

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        start = functools.partial(responses.start, kept)
        converted = functools.partial(responses.conversation, kept, service)
        return await _answered(service, request, ResponseBody, start, converted)

    @app.api_route("/v1/responses/{name}", methods=[*_READ, "DELETE"])
    async def response(name: str, request: Request, cache_salt: str | None = None) -> Response:
        owner = responses.owner_of(Arrival(request.scope.get(CLIENT, "")), cache_salt)
        try:
            if request.method != "DELETE":
                return Response(kept.find(owner, name).response, media_type="application/json")
            kept.delete(owner, name)
        except Refusal as error:
            return error.response
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @app.exception_handler(HTTPException)
    async def wrong(request: Request, error: Any) -> Response:
        path = request.url.path
        if error.status_code == 404:
            message = f"there is nothing at {path}. {suggest(path, _ROUTES)}"
            return Refusal(404, message, code="unknown_route").response
        allowed = (error.headers or {}).get("Allow")
        message = f"{request.method} {path}: {f'this route takes {allowed}' if allowed else error.detail}"
        return Refusal(error.status_code, message, headers=error.headers).response

    def refused(scope: Scope, error: Refusal) -> None:
        service.refused(_endpoint(scope["path"]), error)

    gate = Gate(app, keys, hosts, service.limits.body, refused, lambda: bool(service.pool.running))
    service.keys = len(gate.keys)
    return gate


async def _answered(
    service: Service, request: Request, kind: type[A], start: Callable[[Service, B, Arrival], Answer],
    converted: Callable[[A, Arrival], B] | None = None,
) -> Response:  # fmt: skip
    """Reads a request's body, submits its choices (the texts to generate), and returns the response: an answer, a stream, or an error.

    Args:
        kind: class to which the body is parsed.
        start: submits the choices and returns the answer.
        converted: converts the parsed body to the body that `start` takes; None if `start` takes the parsed body.
    """
    endpoint, arrival = _endpoint(request.url.path), Arrival(request.scope.get(CLIENT, ""))

    def submit(body: B) -> Answer:
        try:
            return start(service, body, arrival)
        except RecursionError as error:
            raise Refusal(400, "a value in the body is nested too deeply", code="invalid_value") from error

    def begin(content: bytes) -> B | Answer:
        service.limits.check_values(content)
        asked = parsed(kind, content)
        service.check(asked)
        body = converted(asked, arrival) if converted is not None else cast(B, asked)
        return body if len(content) <= LARGE and service.takes_long(body) else submit(body)

    def refused(error: BaseException) -> Refusal:
        return service.refused(endpoint, error).renamed(kind.names)

    def counted(error: BaseException | None) -> Refusal | None:
        if error is not None:
            return refused(error)
        service.metrics.requests.labels(endpoint, "completed").inc()
        return None

    prepared = functools.partial(_prepared, service, request, arrival)
    try:
        content = await request.body()
        if len(content) > LARGE:
            with service.waits():
                begun: Any = await prepared(service.patient, service.seconds(), lambda: begin(content))
                # Delays the answer only: its choices are already being decoded.
                await asyncio.sleep(service.pace.delay(request.scope[SPENT]))
        else:
            begun = await prepared(service.threads, service.seconds(), lambda: begin(content))
        if isinstance(begun, Body):
            with service.waits():
                heavy, work = begun.heavy, functools.partial(submit, cast(B, begun))
                begun = await prepared(service.patient, service.seconds(begun), work)
                if heavy:
                    await asyncio.sleep(service.pace.delay(request.scope[SPENT]))
        answer: Answer = begun
        request.scope[TOKENS] = answer.job.tokens
        if answer.body.stream:
            return EventStream(answer, counted)
        await while_connected(request.receive, settled(answer))
        response = JSONResponse(await service.run(service.threads, answer.whole))
    except ClientDisconnect:  # the client disconnected before its whole body had arrived
        return refused(client_gone()).response
    except Exception as error:
        return refused(error).response
    counted(None)
    return response


async def _prepared(
    service: Service, request: Request, arrival: Arrival, pool: ThreadPoolExecutor, seconds: float, work: Callable[[], Any]
) -> Any:  # fmt: skip
    """Runs `work` in a thread of `pool` and returns its result. Adds the processor seconds of `work` to ``request.scope[SPENT]``.

    Raises:
        Refusal: the client disconnected before `work` ended. CancelledError: the server cancelled its requests to shut down.
            DeadlineError: the request's `seconds` passed before `work` ended. Errors of `work` are raised as they are.
    """

    def unless_given_up() -> Any:
        arrival.check(seconds)
        started = time.thread_time()
        try:
            return work()
        finally:
            request.scope[SPENT] = request.scope.get(SPENT, 0.0) + time.thread_time() - started

    def dropped(late: asyncio.Future[Any]) -> None:
        """Cancels the choices of an answer that `work` returns after the wait has ended. late: the future of `work`."""
        if not late.cancelled() and late.exception() is None and isinstance(answer := late.result(), Answer):
            answer.job.cancel()

    async def worked() -> Any:
        return await asyncio.shield(working)

    working = asyncio.ensure_future(service.run(pool, unless_given_up))
    service.arrivals.add(arrival)
    try:
        async with asyncio.timeout(max(arrival.left(seconds), 0)):
            return await while_connected(request.receive, worked())
    except DeadlineError:  # a subclass of TimeoutError, whose message already names the limit
        raise
    except TimeoutError as error:
        raise arrival.late(seconds) from error
    finally:
        if not working.done():
            arrival.gone = True
            working.add_done_callback(dropped)


def _endpoint(path: str) -> str:
    """The value of the metrics' label ``endpoint`` for a path. Unknown paths share a value, so that clients cannot create labels."""
    return path.removeprefix("/v1/") if path in _ROUTES else "other"


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "decoders",
        "decoders": {
            "context": service.slots, "strategy": service.pool.default, "strategies": service.offered.names,
            "chat": service.conversations.has_template, "max_tokens": service.limits.new_tokens,
        },
    }  # fmt: skip


def _page() -> tuple[str, str]:
    """The HTML page, and a content security policy that allows only the page's own scripts and styles."""
    text = resources.files(__package__).joinpath("page", "index.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
