"""The application: all routes, every error in OpenAI's shape, and the middleware around them.

The engine is asked through `EngineClient` alone. Middleware is plain ASGI, so that whoever answers
hears of a client that leaves.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from buddy import __version__
from buddy.errors import BuddyError, ServingError, shown
from buddy.serving.http.auth import Keys, is_open
from buddy.serving.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from buddy.serving.http.guards import Bounded, CutOff, Guarded, Patience, foreign_host
from buddy.serving.http.logs import Logged
from buddy.serving.http.openai import add_openai
from buddy.serving.http.pages import add_pages
from buddy.serving.http.refusals import (
    RETRY_UNAVAILABLE_S,
    Refusal,
    failed,
    refusal_of,
)
from buddy.serving.http.responses import ResponsesBody
from buddy.serving.http.schema import Health, HealthStatus
from buddy.serving.http.service import Service
from buddy.serving.http.tokens import add_tokens
from buddy.serving.http.unknown_fields import HEADER
from buddy.serving.request import Failed

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+")


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers name them.

    Raises:
        ServingError: One is neither an origin nor `*`.
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ServingError(
                f"--allow-origin: expected * or an origin such as https://chat.example or "
                f"http://localhost:3000, got {shown(origin)}"
            )
    return tuple(origins)


def make_app(
    service: Service,
    *,
    keys: Keys | None = None,
    patience: Patience | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The server, as uvicorn runs it.

    Args:
        service: The engine and what is known of its model.
        keys: Who may ask; without them the server answers to this machine's names alone.
        patience: How much of a client is borne.
        origins: Of web pages, beside the server's own, whose scripts may ask; `*` = any.
    """
    api = FastAPI(
        title="Buddy",
        version=__version__,
        description="An OpenAI-compatible server in which each request may name a depth budget.",
        docs_url=None,
        redoc_url=None,
    )
    add_openai(api, service)
    add_tokens(api, service)
    _add_watched(api, service)
    add_pages(api)
    _add_errors(api)
    _document(api, has_keys=keys is not None)
    guarded: ASGIApp = Bounded(api, patience or Patience())
    guarded = Guarded(guarded, foreign_host if keys is None else keys.missing)
    if origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(HEADER, "Retry-After"),
        )
    return CutOff(Logged(guarded))


def _add_watched(api: FastAPI, service: Service) -> None:
    def health(status: HealthStatus, *, is_good: bool) -> Response:
        headers = {} if is_good else {"Retry-After": str(RETRY_UNAVAILABLE_S)}
        return JSONResponse(Health(status=status), 200 if is_good else 503, headers)

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
        return Response(service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = {
            404: f"there is nothing at {request.url.path[:200]}: see /docs",
        }.get(error.status_code, str(error.detail).lower())
        refusal = Refusal(error.status_code, message, code=code, headers=error.headers)
        return refusal.response()

    @api.exception_handler(BuddyError)
    async def on_purpose(request: Request, error: BuddyError) -> Response:
        return refusal_of(error).response()

    @api.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return failed(Failed(message="the server failed: its log says why")).response()


def _document(api: FastAPI, *, has_keys: bool) -> None:
    """Let OpenAPI tell what is so: what bodies hold, that wrong ones are 400, who needs a key."""
    document = api.openapi()
    _, bodies = models_json_schema(
        [
            (body, "validation")
            for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)
        ],
        ref_template="#/components/schemas/{model}",
    )
    document["components"]["schemas"].update(bodies["$defs"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_keys and not is_open(path):
                operation["security"] = [{"key": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
