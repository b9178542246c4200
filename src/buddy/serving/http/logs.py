"""Access logs: one line of JSON for each request, without prompts, answers, keys or queries."""

import json
import logging
import time
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCESS: Final = logging.getLogger("buddy.serving.access")
_MOST_PATH: Final = 200
_QUIET: Final = ("/health", "/ready", "/metrics")
"""What machines ask all the time is logged where it fails."""


class Logged:
    """ASGI middleware: names each request, and logs how it ended.

    The name is in the header `x-request-id` of the answer. The status is that of the headers; 499
    stands for a client that left before them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and log how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, began = uuid.uuid4().hex, time.perf_counter()
        status, sent, first_ms = 499, 0, None

        async def watched(message: Message) -> None:
            nonlocal status, sent, first_ms
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", name.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            elif body := message.get("body"):
                sent += len(body)
                first_ms = _ms_since(began) if first_ms is None else first_ms
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except BaseException:
            status = 500 if status == 499 else status
            raise
        finally:
            if scope["path"] not in _QUIET or status >= 400:
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "id": name,
                    "method": scope["method"],
                    "path": scope["path"][:_MOST_PATH],
                    "status": status,
                    "bytes": sent,
                    "first_byte_ms": first_ms,
                    "ms": _ms_since(began),
                }
                ACCESS.info("%s", json.dumps(line))


def _ms_since(began: float) -> float:
    return round(1000 * (time.perf_counter() - began), 1)
