"""The way from a request's bytes to its answers: in a thread, one request after another."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

import anyio.to_thread

from buddy.serving.client import Overloaded
from buddy.serving.http.asking import budget_of, chat_requests, completion_requests
from buddy.serving.http.bodies import Body, ChatBody, read_body
from buddy.serving.http.guards import SMALL_BODY
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.replies import ChatShape, CompletionShape, Extras, Reply
from buddy.serving.http.service import Service


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that the engine has."""

    answers: Answers
    reply: Reply
    is_streamed: bool


async def begin(service: Service, kind: type[Body], content: bytes, owner: str) -> Begun:
    """Read a request and hand it to the engine.

    A long text, a model's template or a large schema would hold up everybody's streams, so they
    are read in a thread. Large bodies wait for each other first, and a small one for one of them
    at most. Who is cancelled while it waits is not read at all.

    Args:
        service: What the routes need.
        kind: Of the body.
        content: The body.
        owner: Of the request, who shares cached prompts with no other.

    Raises:
        BuddyError: It is refused.
    """
    most = service.engine.facts.most_answers
    if most is not None and service.waiting >= most:
        raise Overloaded(f"{service.waiting} requests wait to be read: try again later", 1)
    loop = asyncio.get_running_loop()
    async with service.reading_large if len(content) > SMALL_BODY else nullcontext():
        return await anyio.to_thread.run_sync(
            _begin, service, kind, content, owner, loop, limiter=service.reading
        )


def _begin(
    service: Service,
    kind: type[Body],
    content: bytes,
    owner: str,
    loop: asyncio.AbstractEventLoop,
) -> Begun:
    body, facts = read_body(kind, content), service.engine.facts
    budget = budget_of(body, service.rules, facts.model)
    shape: ChatShape | CompletionShape
    if isinstance(body, ChatBody):
        requests = chat_requests(body, budget, service)
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
    reply = Reply(
        shape,
        model=body.model or facts.model,
        num_blocks=facts.num_blocks,
        num_answers=len(requests),
        per_prompt=body.n or 1,
        extras=extras,
        reader=service.reader,
    )
    requests = [replace(asked, owner=owner) for asked in requests]
    answers = Answers(service.engine, requests, loop, is_streamed=bool(body.stream))
    return Begun(answers, reply, bool(body.stream))
