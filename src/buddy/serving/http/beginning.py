"""The way from a request's bytes to its answers: in a thread, one request after another."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import anyio.to_thread

from buddy.errors import BuddyError
from buddy.serving.client import Overloaded
from buddy.serving.http.asking import budget_of, chat_requests, completion_requests
from buddy.serving.http.bodies import ChatBody, CompletionBody, read_body
from buddy.serving.http.echo import echoes
from buddy.serving.http.guards import SMALL_BODY
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.refusals import refusal_of
from buddy.serving.http.replies import ChatShape, CompletionShape, Extras, Reply
from buddy.serving.http.response_reply import ResponseReply
from buddy.serving.http.responses import ResponsesBody, named_as_response
from buddy.serving.http.service import Service
from buddy.serving.http.speech import Speech
from buddy.serving.http.unknown_fields import check_unknown

Made = TypeVar("Made")
Asked = TypeVar("Asked", ChatBody, CompletionBody, ResponsesBody)


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that the engine has."""

    answers: Answers
    reply: Reply
    is_streamed: bool
    headers: dict[str, str] = field(default_factory=dict)
    """What the answer says beside its body."""


async def in_turn(service: Service, content: bytes, work: Callable[[], Made]) -> Made:
    """What a thread makes of a body, one body after another.

    A long text, a model's template or a large schema would hold up everybody's streams. Large
    bodies wait for each other first, and a small one for one of them at most. Who is cancelled
    while it waits is not read at all.

    Args:
        service: What the routes need.
        content: The body.
        work: Reads it.

    Raises:
        BuddyError: It is refused.
    """
    most = service.engine.facts.most_answers
    if most is not None and service.waiting >= most:
        raise Overloaded(f"{service.waiting} requests wait to be read: try again later", 1)
    async with service.reading_large if len(content) > SMALL_BODY else nullcontext():
        return await anyio.to_thread.run_sync(work, limiter=service.reading)


async def begin(service: Service, kind: type[Asked], content: bytes, owner: str) -> Begun:
    """Read a request, in its turn, and hand it to the engine.

    Args:
        service: What the routes need.
        kind: Of the body.
        content: The body.
        owner: Of the request, who shares cached prompts with no other.

    Raises:
        BuddyError: It is refused.
    """
    loop = asyncio.get_running_loop()
    return await in_turn(service, content, partial(_begin, service, kind, content, owner, loop))


def _begin(
    service: Service,
    kind: type[Asked],
    content: bytes,
    owner: str,
    loop: asyncio.AbstractEventLoop,
) -> Begun:
    body = read_body(kind, content)
    ignored = check_unknown(body)
    if isinstance(body, ResponsesBody):
        try:
            begun = _begin_chat(service, body.chat(), owner, loop, body)
        except BuddyError as error:
            raise named_as_response(refusal_of(error)) from error
    else:
        begun = _begin_chat(service, body, owner, loop)
    return replace(begun, headers=service.note_ignored(ignored))


def _begin_chat(
    service: Service,
    body: ChatBody | CompletionBody,
    owner: str,
    loop: asyncio.AbstractEventLoop,
    response: ResponsesBody | None = None,
) -> Begun:
    """Hand a chat or a completion to the engine; its reply is a response's, if it was asked so."""
    facts = service.engine.facts
    budget = budget_of(body, service.rules, facts.model)
    shape: ChatShape | CompletionShape
    speeches: Sequence[Speech] = ()
    if isinstance(body, ChatBody):
        requests, speeches = chat_requests(body, budget, service)
        shape, has_logprobs = ChatShape(), bool(body.logprobs)
    else:
        requests = completion_requests(body, budget, service)
        shape, has_logprobs = CompletionShape(), body.logprobs is not None
    options = body.stream_options
    extras = Extras(
        logprobs=has_logprobs,
        usage=options is not None and bool(options.include_usage),
        depth=options is not None and bool(options.include_depth),
    )
    make = Reply if response is None else partial(ResponseReply, response)
    reply = make(
        shape=shape,
        model=body.model or facts.model,
        num_blocks=facts.num_blocks,
        num_answers=len(requests),
        per_prompt=body.n or 1,
        extras=extras,
        reader=service.reader,
        speeches=speeches,
        echoes=echoes(body, [each.prompt for each in requests[:: body.n or 1]], service.reader),
    )
    requests = [replace(asked, owner=owner) for asked in requests]
    answers = Answers(service.engine, requests, loop, is_streamed=bool(body.stream))
    return Begun(answers, reply, bool(body.stream))
