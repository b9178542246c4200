"""OpenAI's routes: completions of conversations and prompts, whole or streamed, and the model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from buddy.errors import shown
from buddy.serving.http.asking import budget_of
from buddy.serving.http.auth import OWNER
from buddy.serving.http.beginning import Asked, begin
from buddy.serving.http.bodies import ChatBody, CompletionBody, RequestFields
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.refusals import RETRY_UNAVAILABLE_S, Refusal, failed, not_json
from buddy.serving.http.replies import Reply
from buddy.serving.http.responses import ResponsesBody
from buddy.serving.http.schema import (
    ChatCompletion,
    Completion,
    ErrorBody,
    ModelBody,
    ModelList,
    ResponseBody,
)
from buddy.serving.http.service import Service
from buddy.serving.request import Delta, Failed

_Made = TypeVar("_Made")

_REFUSED: Final = {
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
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies pass each event on at once."""
_EXAMPLES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ChatBody": {
        "An answer with 60 % of the blocks": {
            "messages": [{"role": "user", "content": "Name three fruits."}],
            "budget": 0.6,
        },
    },
    "CompletionBody": {
        "A continuation": {"prompt": "The sky is", "budget": 0.6, "max_tokens": 16},
        "Log-probabilities of a prompt alone": {
            "prompt": "The sky is blue.",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
        },
    },
    "ResponsesBody": {
        "An answer with 60 % of the blocks": {"input": "Name three fruits.", "budget": 0.6},
    },
}
"""Bodies that `/docs` shows."""


def add_openai(api: FastAPI, service: Service) -> None:
    """Add the routes that OpenAI's clients know."""

    def answers(model: type[Any]) -> dict[int | str, dict[str, Any]]:
        data = {"type": "string", "description": "OpenAI's chunk, an error, or [DONE]."}
        each = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        good = {
            "model": model,
            "description": "An answer; with stream, server-sent events.",
            "content": {"text/event-stream": {"schema": each}},
        }
        return {200: good, **refused_by(*_REFUSED)}

    @api.post(
        "/v1/chat/completions",
        responses=answers(ChatCompletion),
        openapi_extra=body_named("ChatBody"),
        tags=["OpenAI"],
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, ChatBody)

    @api.post(
        "/v1/completions",
        responses=answers(Completion),
        openapi_extra=body_named("CompletionBody"),
        tags=["OpenAI"],
    )
    async def complete(request: Request) -> Response:
        """Continue prompts."""
        return await _answer(service, request, CompletionBody)

    @api.post(
        "/v1/responses",
        responses=answers(ResponseBody),
        openapi_extra=body_named("ResponsesBody"),
        tags=["OpenAI"],
    )
    async def respond(request: Request) -> Response:
        """Answer a conversation by the Responses API; nothing is stored."""
        return await _answer(service, request, ResponsesBody)

    @api.get(
        "/v1/models",
        response_model=ModelList,
        responses=refused_by(401, 403, 408, 413),
        tags=["OpenAI"],
    )
    async def models() -> Response:
        """The served model."""
        return JSONResponse(ModelList(object="list", data=[service.model()]))

    @api.get(
        "/v1/models/{name:path}",
        response_model=ModelBody,
        responses=refused_by(400, 401, 403, 404, 408, 413),
        tags=["OpenAI"],
    )
    async def model(name: str) -> Response:
        """The served model, if this is its name; a budget may follow an `@`."""
        budget_of(RequestFields(model=name), service.rules, service.engine.facts.model)
        return JSONResponse(service.model(name))


def body_named(name: str) -> dict[str, Any]:
    """What OpenAPI is told of a route that takes a body of this name."""
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    if name in _EXAMPLES:
        examples = _EXAMPLES[name].items()
        content["examples"] = {title: {"value": value} for title, value in examples}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def refused_by(*codes: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI is told of the statuses by which a route refuses."""
    return {code: {"model": ErrorBody, "description": _REFUSED[code]} for code in codes}


async def _answer(service: Service, request: Request, kind: type[Asked]) -> Response:
    """Ask the engine, and answer whole or as a stream; it refuses before any header is sent."""
    _check_ready(service)
    owner = request.scope.get(OWNER, "")
    begun = await _unless_gone(request, begin(service, kind, await content_of(request), owner))
    if begun is None:
        return Response(status_code=499)
    answers = begun.answers
    service.under_way.add(answers)
    if begun.is_streamed:
        end = partial(_end, service, answers)
        return EventStream(_stream(answers, begun.reply), end, begun.headers)
    try:
        whole = await _unless_gone(request, _whole(answers, begun.reply))
        if whole is None:
            return Response(status_code=499)
        whole.headers.update(begun.headers)
        return whole
    finally:
        _end(service, answers)


async def content_of(request: Request) -> bytes:
    """What is sent as JSON.

    Raises:
        Refusal: It is sent as something else, such as a page's form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
        raise not_json(f"got {shown(kind)}")
    return b"".join([part async for part in request.stream()])


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
        for index, news in taken:
            if isinstance(news, Delta):
                reply.add(index, news)
            elif isinstance(news, Failed):
                raise failed(news)
            else:
                reply.end(index, news)
    # Log-probabilities of long answers take seconds to write.
    content = await anyio.to_thread.run_sync(reply.whole) if reply.is_long else reply.whole()
    return Response(content, media_type="application/json")


async def _stream(answers: Answers, reply: Reply) -> AsyncIterator[bytes]:
    """Events as they come; those that came while the last were sent go together."""
    if opening := reply.opening():
        yield opening
    while taken := await answers.take():
        parts = []
        for index, news in taken:
            if isinstance(news, Delta):
                write = partial(reply.chunk, index, news)
                is_long = news.prompt is not None
                parts.append(await anyio.to_thread.run_sync(write) if is_long else write())
            elif isinstance(news, Failed):
                yield b"".join(parts) + reply.failure(failed(news))
                return
            else:
                parts += [reply.end(index, news), reply.last_chunk(index)]
        if body := b"".join(parts):
            yield body
    yield reply.closing()


async def _unless_gone(request: Request, work: Awaitable[_Made]) -> _Made | None:
    """What is made for a client; None where it leaves first, and then the rest is not made."""
    with anyio.CancelScope() as scope:
        listening = asyncio.ensure_future(_listen(request, scope))
        try:
            return await work
        finally:
            listening.cancel()
    return None


async def _listen(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class EventStream(StreamingResponse):
    """Server-sent events of answers, which are cancelled however the stream ends."""

    def __init__(
        self, content: AsyncIterator[bytes], end: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(
            content, headers={**_STREAM_HEADERS, **headers}, media_type="text/event-stream"
        )
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and cancel what has not been answered."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
