"""OpenAI's routes: completions of conversations and prompts, whole or streamed, and the model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from buddy.budget.resolved import ResolvedBudget
from buddy.serving.http.asking import budget_of, chat_requests, completion_requests
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import (
    RETRY_UNAVAILABLE_S,
    Refusal,
    failed,
)
from buddy.serving.http.replies import ChatShape, CompletionShape, Extras, Reply, Shape, event
from buddy.serving.http.schema import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ErrorBody,
    ModelBody,
    ModelList,
    RequestFields,
)
from buddy.serving.http.service import Service
from buddy.serving.request import Delta, Failed, GenerationRequest

Body = TypeVar("Body", ChatBody, CompletionBody)

_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies pass each event on at once."""


def add_openai(api: FastAPI, service: Service) -> None:
    """Add the routes that OpenAI's clients know."""
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
        return JSONResponse(ModelList(object="list", data=[service.model()]))

    @api.get(
        "/v1/models/{name:path}",
        response_model=ModelBody,
        responses=_refusals({**few, 400: "The budget in the name cannot be.", 404: refused[404]}),
        tags=["OpenAI"],
    )
    async def model(name: str) -> Response:
        """The served model, if this is its name; a budget may follow an `@`."""
        budget_of(RequestFields(model=name), service.rules, service.engine.facts.model)
        return JSONResponse(service.model(name))


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
        num_answers=answers.num_answers,
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
        for index, news in taken:
            if isinstance(news, Delta):
                reply.add(index, news)
            elif isinstance(news, Failed):
                raise failed(news.message)
            else:
                reply.end(index, news)
    return JSONResponse(reply.whole())


async def _stream(answers: Answers, reply: Reply) -> AsyncIterator[bytes]:
    """Events as they come; those that came while the last were sent go together."""
    while taken := await answers.take():
        parts = []
        for index, news in taken:
            if isinstance(news, Delta):
                parts.append(reply.chunk(index, news))
            elif isinstance(news, Failed):
                yield b"".join(parts) + event(failed(news.message).body())
                return
            else:
                reply.end(index, news)
                parts.append(reply.last_chunk(index))
        if body := b"".join(parts):
            yield body
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
