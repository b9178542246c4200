"""Routes: OpenAI's, those that machines watch, and the page; streams and errors in OpenAI's shapes.

The engine is asked through `EngineClient` alone. Middleware is plain ASGI, so that whoever answers
hears of a client that leaves.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from buddy import __version__
from buddy.budget.resolved import ResolvedBudget
from buddy.errors import BuddyError
from buddy.serving.client import EngineClient
from buddy.serving.http.asking import budget_of, chat_requests, completion_requests
from buddy.serving.http.auth import Authenticated, Keys
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.http.guards import Bounded, CutOff, LocalOnly, Patience
from buddy.serving.http.logs import Logged
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import (
    RETRY_UNAVAILABLE_S,
    Refusal,
    failed,
    refusal_of,
    refusal_of_validation,
)
from buddy.serving.http.replies import ChatShape, CompletionShape, Extras, Reply, Shape, event
from buddy.serving.http.schema import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ErrorBody,
    Health,
    ModelBody,
    ModelList,
    RequestFields,
)
from buddy.serving.request import Delta, Failed, GenerationRequest

Body = TypeVar("Body", ChatBody, CompletionBody)

_PAGES: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies pass each event on at once."""


@dataclass(kw_only=True, slots=True)
class Service:
    """What the routes need.

    Attributes:
        under_way: Requests that are being answered.
        beginning: Lets one request at a time be read and handed to the engine.
    """

    engine: EngineClient
    reader: PromptReader
    rules: BudgetRules
    started: int = field(default_factory=lambda: int(time.time()))
    under_way: set[Answers] = field(default_factory=set)
    beginning: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    def model(self) -> dict[str, Any]:
        """The served model, as `/v1/models` lists it."""
        facts = self.engine.facts
        return {
            "id": facts.model,
            "object": "model",
            "created": self.started,
            "owned_by": "buddy",
            "buddy": {
                "num_blocks": facts.num_blocks,
                "least_blocks": facts.least_blocks,
                "context": facts.context,
                "has_predictor": facts.has_predictor,
                "means": facts.means,
                "has_chat": self.reader.has_chat,
                "least_ms_per_token": facts.least_ms_per_token,
                "engine": facts.engine,
            },
        }


class EventStream(StreamingResponse):
    """Server-sent events of answers, which are cancelled however the stream ends."""

    def __init__(self, content: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(content, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and cancel what has not been answered."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def make_app(
    service: Service, *, keys: Keys | None = None, patience: Patience | None = None
) -> ASGIApp:
    """The server, as uvicorn runs it.

    Args:
        service: The engine and what is known of its model.
        keys: Who may ask; without them the server answers to this machine's names alone.
        patience: How much of a client is borne.
    """
    api = FastAPI(
        title="Buddy",
        version=__version__,
        description="An OpenAI-compatible server in which each request may name a depth budget.",
        docs_url=None,
        redoc_url=None,
    )
    _add_openai(api, service)
    _add_watched(api, service)
    _add_pages(api)
    _add_errors(api)
    _document(api, has_keys=keys is not None)
    guarded: ASGIApp = Bounded(api, patience or Patience())
    guarded = LocalOnly(guarded) if keys is None else Authenticated(guarded, keys)
    return CutOff(Logged(guarded))


def _add_openai(api: FastAPI, service: Service) -> None:
    refused = {
        400: "What cannot be asked for.",
        401: "No valid key.",
        403: "Without keys the server answers to localhost alone.",
        404: "Another model.",
        408: "The body did not arrive.",
        413: "The body is too large.",
        429: "Too busy: try again after Retry-After seconds.",
        500: "The engine failed.",
        503: "The server starts, drains or has failed: try again after Retry-After seconds.",
    }

    def answers(model: type[Any]) -> dict[int | str, dict[str, Any]]:
        data = {"type": "string", "description": "OpenAI's chunk, an error, or [DONE]."}
        each = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        good = {
            "model": model,
            "description": "An answer; with stream, server-sent events.",
            "content": {"text/event-stream": {"schema": each}},
        }
        return {200: good, **_refusals(refused)}

    @api.post("/v1/chat/completions", responses=answers(ChatCompletion), tags=["OpenAI"])
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        extras = _extras(body, wants_logprobs=bool(body.logprobs))
        return await _answer(service, request, body, chat_requests, ChatShape(), extras)

    @api.post("/v1/completions", responses=answers(Completion), tags=["OpenAI"])
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        extras = _extras(body, wants_logprobs=body.logprobs is not None)
        return await _answer(service, request, body, completion_requests, CompletionShape(), extras)

    few = {code: refused[code] for code in (401, 403, 408, 413)}

    @api.get(
        "/v1/models",
        response_model=ModelList,
        responses=_refusals(few),
        tags=["OpenAI"],
    )
    async def models() -> Response:
        """The served model."""
        return JSONResponse({"object": "list", "data": [service.model()]})

    @api.get(
        "/v1/models/{name:path}",
        response_model=ModelBody,
        responses=_refusals({**few, 400: "The budget in the name cannot be.", 404: refused[404]}),
        tags=["OpenAI"],
    )
    async def model(name: str) -> Response:
        """The served model, if this is its name; a budget may follow an `@`."""
        budget_of(RequestFields(model=name), service.rules, service.engine.facts.model)
        return JSONResponse({**service.model(), "id": name})


def _refusals(meant: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": ErrorBody, "description": text} for code, text in meant.items()}


def _extras(body: RequestFields, *, wants_logprobs: bool) -> Extras:
    options = body.stream_options
    return Extras(
        logprobs=wants_logprobs,
        usage=options is not None and bool(options.include_usage),
        depth=options is not None and bool(options.include_depth),
    )


async def _answer(
    service: Service,
    request: Request,
    body: Body,
    make: Callable[[Body, ResolvedBudget, Any, PromptReader], list[GenerationRequest]],
    shape: Shape,
    extras: Extras,
) -> Response:
    """Ask the engine, and answer whole or as a stream; it refuses before any header is sent."""
    facts = service.engine.facts
    _check_ready(service)
    budget = budget_of(body, service.rules, facts.model)
    loop = asyncio.get_running_loop()

    def begin() -> Answers:
        requests = make(body, budget, facts, service.reader)
        return Answers(service.engine, requests, loop, is_streamed=bool(body.stream))

    # A long text, a model's template or a large schema would hold up everybody's streams.
    answers = await anyio.to_thread.run_sync(begin, limiter=service.beginning)
    reply = Reply(
        shape,
        model=body.model or facts.model,
        num_blocks=facts.num_blocks,
        num_answers=answers.number,
        per_prompt=body.n or 1,
        extras=extras,
        reader=service.reader,
    )
    service.under_way.add(answers)
    if body.stream:
        return EventStream(_stream(answers, reply), partial(_end, service, answers))
    try:
        return await _unless_gone(request, _whole(answers, reply))
    finally:
        _end(service, answers)


def _check_ready(service: Service) -> None:
    if (state := service.engine.state) != "ready":
        raise Refusal(
            503,
            f"the server takes nothing now: it is {state}",
            code="unavailable",
            headers={"Retry-After": str(RETRY_UNAVAILABLE_S)},
        )


def _end(service: Service, answers: Answers) -> None:
    answers.cancel()
    service.under_way.discard(answers)


async def _whole(answers: Answers, reply: Reply) -> Response:
    while taken := await answers.take():
        for index, one in taken:
            if isinstance(one, Delta):
                reply.add(index, one)
            elif isinstance(one, Failed):
                raise failed(one.message)
            else:
                reply.end(index, one.reason, one.usage)
    return JSONResponse(reply.whole())


async def _stream(answers: Answers, reply: Reply) -> AsyncIterator[bytes]:
    """Events as they come; those that came while the last were sent go together."""
    while taken := await answers.take():
        parts = []
        for index, one in taken:
            if isinstance(one, Delta):
                parts.append(reply.chunk(index, one))
            elif isinstance(one, Failed):
                yield b"".join(parts) + event(failed(one.message).body())
                return
            else:
                reply.end(index, one.reason, one.usage)
                parts.append(reply.last_chunk(index))
        if made := b"".join(parts):
            yield made
    yield reply.closing()


async def _unless_gone(request: Request, answer: Any) -> Response:
    """An answer, unless its client leaves first; then it is given up."""
    working = asyncio.ensure_future(answer)
    listening = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        listening.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_watched(api: FastAPI, service: Service) -> None:
    def health(status: str, *, is_good: bool) -> Response:
        headers = {} if is_good else {"Retry-After": str(RETRY_UNAVAILABLE_S)}
        return JSONResponse({"status": status}, 200 if is_good else 503, headers)

    not_so: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "It is not."}}

    @api.get("/health", response_model=Health, responses=not_so, tags=["Operation"])
    async def alive() -> Response:
        """Whether the server is alive; if not, it must be started anew."""
        is_good = service.engine.state != "failed"
        return health("ok" if is_good else "failed", is_good=is_good)

    @api.get("/ready", response_model=Health, responses=not_so, tags=["Operation"])
    async def ready() -> Response:
        """Whether requests are taken."""
        return health(service.engine.state, is_good=service.engine.state == "ready")

    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @api.get("/metrics", response_class=Response, responses=text, tags=["Operation"])
    async def metrics() -> Response:
        """Counters and gauges, as Prometheus reads them."""
        made = service.engine.metrics()
        return Response(made, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(api: FastAPI) -> None:
    folder = files("buddy.serving.http") / "playground"
    contents = {name: (folder / name).read_bytes() for name in _PAGES}

    def page(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        # Starlette would add a charset of its own to text.
        return Response(contents[name], headers={**_PAGE_HEADERS, "Content-Type": _PAGES[name]})

    @api.get("/", include_in_schema=False)
    async def playground() -> Response:
        return page("index.html")

    @api.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return page("docs.html")

    @api.get("/playground/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page(name)


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refusal_of_validation(error.errors(), error.body).response()

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        said = {
            400: "the body is no JSON",
            404: f"there is nothing at {request.url.path[:200]}: see /docs",
        }.get(error.status_code, str(error.detail).lower())
        refusal = Refusal(error.status_code, said, code=code, headers=error.headers)
        return refusal.response()

    @api.exception_handler(BuddyError)
    async def on_purpose(request: Request, error: BuddyError) -> Response:
        return refusal_of(error).response()

    @api.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return failed("the server failed: its log says why").response()


def _document(api: FastAPI, *, has_keys: bool) -> None:
    """Let OpenAPI tell what is so: wrong bodies are 400 here, and keys are needed or not."""
    made = api.openapi()
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_keys and (path.startswith("/v1") or path == "/metrics"):
                operation["security"] = [{"key": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)
    if has_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
