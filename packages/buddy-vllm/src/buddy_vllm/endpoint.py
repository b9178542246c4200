"""Puts what an answer ran into its usage block. vLLM loads it where `VLLM_PLUGINS=buddy` is set."""

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import State

from buddy_vllm import adapter
from buddy_vllm.statistics import Account, asked, report

PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class BuddyEndpoint:
    """Wraps vLLM's own handlers: `usage.buddy` has `blocks`, `num_blocks`, `blocks_executed`."""

    name = "buddy"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Put the wrapped handlers in the place of vLLM's."""
        if not adapter.is_written_for():
            return
        for route in list(app.routes):
            if (
                isinstance(route, APIRoute)
                and route.path in PATHS
                and "POST" in (route.methods or ())
            ):
                app.add_api_route(
                    route.path,
                    accounted(route.endpoint),
                    methods=["POST"],
                    dependencies=route.dependencies,
                    responses=route.responses,
                )

    async def init_state(self, engine_client: Any, state: State, args: Any) -> None:
        """Nothing is kept."""


def accounted(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A handler whose answers say what ran."""

    @functools.wraps(handler)
    async def handle(*args: Any, **options: Any) -> Any:
        accounts: list[Account] = []
        asked.set(accounts)
        response = await handler(*args, **options)
        if isinstance(response, JSONResponse):
            return _whole(response, accounts)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _streamed(response.body_iterator, accounts)
        return response

    return handle


def _whole(response: JSONResponse, accounts: list[Account]) -> JSONResponse:
    if not accounts or response.status_code != 200:
        return response
    said = json.loads(bytes(response.body))
    if not isinstance(said.get("usage"), dict):
        return response
    said["usage"]["buddy"] = report(accounts)
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    return JSONResponse(said, headers=headers)


async def _streamed(chunks: Any, accounts: list[Account]) -> AsyncIterator[Any]:
    """Chunks as they come; those with a usage block have it extended."""
    asked.set(accounts)  # of whatever context this runs in
    async for chunk in chunks:
        yield _extended(chunk, accounts) if accounts else chunk


def _extended(chunk: Any, accounts: list[Account]) -> Any:
    mark = "data: "
    if not isinstance(chunk, str) or '"usage":{' not in chunk or not chunk.startswith(mark):
        return chunk
    said = json.loads(chunk.removeprefix(mark))
    if not isinstance(said.get("usage"), dict):
        return chunk
    said["usage"]["buddy"] = report(accounts)
    return f"{mark}{json.dumps(said, ensure_ascii=False)}\n\n"
