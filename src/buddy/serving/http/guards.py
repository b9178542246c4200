"""What keeps one client from costing the server more than its share: sizes, and patience."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buddy.errors import ServingError
from buddy.serving.http.refusals import Refusal
from buddy.settings import Range, check_ranges

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


class Bounded:
    """ASGI middleware: bodies are read whole before the application sees them, or refused.

    What comes after the body is passed on, so that the application hears of a client that leaves.
    """

    def __init__(self, app: ASGIApp, patience: Patience) -> None:
        self._app, self._patience = app, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass it on, or answer 408 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._patience.body_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            refusal = Refusal(408, f"no body came in {self._patience.body_s:g} s", code="timeout")
        except Refusal as error:
            refusal = error
        else:
            if body is not None:
                await self._app(scope, _replayed(body, receive), self._patient(send))
            return
        refusal.headers["Connection"] = "close"  # what is left of the body is not read
        await refusal.response()(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client left within it."""
        most = self._patience.body_bytes
        too_large = Refusal(
            413, f"the body is larger than {most:,} bytes: send less", code="body_too_large"
        )
        for name, value in scope["headers"]:
            # A length of thousands of digits is no number for Python.
            if name == b"content-length" and (len(value) > 15 or int(value) > most):
                raise too_large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(parts)

    def _patient(self, send: Send) -> Send:
        """Sending that ends where the client takes nothing."""

        async def sent(message: Message) -> None:
            try:
                async with asyncio.timeout(self._patience.stall_s):
                    await send(message)
            except TimeoutError:
                raise ClientStalled from None

        return sent


class ClientStalled(Exception):
    """A client has taken nothing of its answer for too long."""


class CutOff:
    """ASGI middleware, the outermost: a stalled client is no error of the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        try:
            await self._app(scope, receive, send)
        except ClientStalled:
            return  # uvicorn closes a connection whose answer is not complete


def _replayed(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def received() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

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
        await (self._app if refusal is None else refusal.response())(scope, receive, send)


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
