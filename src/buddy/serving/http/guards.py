"""What keeps one client from costing the server more than its share: sizes, and patience."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buddy.errors import ServingError
from buddy.serving.client import Overloaded
from buddy.serving.http.refusals import Refusal, refusal_of
from buddy.settings import Range, check_ranges

SMALL_BODY: Final = 2**14
"""Bytes of a body that is soon read."""
_BODIES: Final = 16
"""So many of the largest bodies may be held at once; small ones are always taken."""
_TAKES_BODIES: Final = ("/v1/", "/tokenize", "/detokenize")
_ANNOUNCE_BODY: Final = (b"content-length", b"transfer-encoding")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How much of a client is borne.

    Raises:
        ServingError: A number is out of its range.
    """

    body_bytes: Annotated[int, Range(1024, 2**30)] = 2**21
    """Size of a request; more is 413."""
    body_s: Annotated[float, Range(above=0, high=3600)] = 30
    """Time for a request's body to arrive; later is 408."""
    stall_s: Annotated[float, Range(above=0, high=3600)] = 30
    """Time for a client to take the next piece of its answer; then it is cut off."""

    def __post_init__(self) -> None:
        check_ranges(self, ServingError)


@dataclass(slots=True)
class _Body:
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class Bounded:
    """ASGI middleware: bodies are read whole before the application sees them, or refused.

    What comes after the body is passed on, so that the application hears of a client that leaves.
    No path but OpenAI's takes a body: what is sent to another is not read.
    """

    def __init__(self, app: ASGIApp, patience: Patience) -> None:
        self._app, self._patience = app, patience
        self._bytes = 0
        """Bytes of the bodies of all requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass it on, or answer 408, 413 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] != "POST" or not scope["path"].startswith(_TAKES_BODIES):
            is_last = any(
                name in _ANNOUNCE_BODY and value != b"0" for name, value in scope["headers"]
            )
            await self._app(scope, receive, self._patient(send, is_last=is_last))
        else:
            body = _Body()
            try:
                await self._answer(body, scope, receive, send)
            finally:
                self._bytes -= body.size

    async def _answer(self, body: _Body, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._patience.body_s):
                is_whole = await self._read(body, scope, receive)
        except TimeoutError:
            refusal = Refusal(408, f"no body came in {self._patience.body_s:g} s", code="timeout")
        except Refusal as error:
            refusal = error
        else:
            if is_whole:
                await self._app(scope, _replayed(body, receive), self._patient(send))
            return
        await refusal.closing()(scope, receive, send)  # what is left of the body is not read

    async def _read(self, body: _Body, scope: Scope, receive: Receive) -> bool:
        """Read the body; False where the client left within it."""
        most = self._patience.body_bytes
        too_large = Refusal(
            413, f"the body is larger than {most:,} bytes: send less", code="body_too_large"
        )
        for name, value in scope["headers"]:
            # A length of thousands of digits is no number for Python.
            if name == b"content-length" and (len(value) > 15 or int(value) > most):
                raise too_large
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            body.parts.append(part)
            body.size += len(part)
            self._bytes += len(part)
            if body.size > most:
                raise too_large
            if body.size > SMALL_BODY and self._bytes > _BODIES * most:
                raise refusal_of(Overloaded("too many large requests at once: try again later", 1))
            if not message.get("more_body", False):
                return True

    def _patient(self, send: Send, *, is_last: bool = False) -> Send:
        """Sending that ends where the client takes nothing.

        Args:
            send: Of the server.
            is_last: Whether the connection ends with the answer.
        """

        async def sent(message: Message) -> None:
            if is_last and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            try:
                async with asyncio.timeout(self._patience.stall_s):
                    await send(message)
            except TimeoutError:
                raise ClientStalled from None

        return sent


class ClientStalled(Exception):
    """A client has taken nothing of its answer for too long."""


class CutOff:
    """ASGI middleware, the outermost: neither a stalled client nor the server's end is an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        try:
            await self._app(scope, receive, send)
        except (ClientStalled, asyncio.CancelledError):
            return  # uvicorn closes a connection whose answer is not complete


def _replayed(body: _Body, receive: Receive) -> Receive:
    """Receiving that begins with a body, which is given away and no longer held here."""

    async def received() -> Message:
        if not body.parts:
            return await receive()
        content = b"".join(body.parts)
        body.parts.clear()
        return {"type": "http.request", "body": content, "more_body": False}

    return received


class Guarded:
    """ASGI middleware: a request that may not pass is answered by the refusal that says why.

    Args:
        app: What it stands before.
        refuses: From a request's scope to a refusal, or None where it may pass.
    """

    def __init__(self, app: ASGIApp, refuses: Callable[[Scope], Refusal | None]) -> None:
        self._app, self._refuses = app, refuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may be, or answer."""
        refusal = self._refuses(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.closing())(scope, receive, send)


def foreign_host(scope: Scope) -> Refusal | None:
    """The refusal of a server without keys, which answers to this machine's names alone.

    A page of somebody's, whose name was made to lead to this machine, is another host. (Starlette's
    `TrustedHostMiddleware` answers in plain text, and takes the first of several hosts.)
    """
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) == 1 and _without_port(hosts[0].decode("latin-1")) in _LOOPBACK:
        return None
    return Refusal(
        403,
        "without keys this server answers to localhost alone: start it with "
        "--api-key-file to use another name",
        code="wrong_host",
    )


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
