"""One request of a load: how it is asked, and what becomes of it."""

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buddy.errors import ResultError, shown

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in milliseconds."""

    at_s: float
    """When it was sent, from the beginning of its rate."""
    budget: str
    status: int = 0
    """Status of HTTP; 0 = there was no answer."""
    finished: bool = False
    """Whether the answer came to its end."""
    ttft_ms: float | None = None
    itls_ms: list[float] = field(default_factory=list)
    """Times between two pieces of text, in milliseconds."""
    end_s: float = 0.0
    tokens: int = 0
    blocks_per_token: float | None = None
    num_blocks: int | None = None
    retry_after_s: float | None = None
    error: str | None = None

    @property
    def itl_ms(self) -> float | None:
        """Mean time between tokens; None of fewer than two."""
        if self.ttft_ms is None or self.tokens < 2:
            return None
        return sum(self.itls_ms) / (self.tokens - 1)


async def first_model(client: "httpx.AsyncClient", base: str) -> str:
    """The model that a server lists first.

    Raises:
        ResultError: There is no server, or it lists no model.
    """
    import httpx

    try:
        answer = await client.get(f"{base}/models")
        listed = answer.raise_for_status().json()
        return str(listed["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ResultError(
            f"{base}/models gives no answer ({error or type(error).__name__}): start a server there"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ResultError(f"{base}/models lists no model: name one with --model") from error


async def ask(
    client: "httpx.AsyncClient", url: str, body: dict[str, Any], outcome: Outcome
) -> None:
    """One request, and its answer as it comes; nothing is tried again."""
    sent_s = last_s = time.perf_counter()
    async with client.stream("POST", url, json=body) as answer:
        outcome.status = answer.status_code
        if answer.status_code != 200:
            outcome.error = _error_text((await answer.aread()).decode(errors="replace"))[:300]
            after = answer.headers.get("retry-after", "")
            outcome.retry_after_s = float(after) if after.isdecimal() else None
            return
        pieces = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                outcome.finished = outcome.error is None and outcome.ttft_ms is not None
                break
            chunk = json.loads(data)
            if "error" in chunk:
                outcome.error = shown(chunk["error"], 300)
                continue
            _read_usage(chunk.get("usage"), outcome)
            if any(_has_text(choice) for choice in chunk.get("choices", ())):
                now_s, pieces = time.perf_counter(), pieces + 1
                if outcome.ttft_ms is None:
                    outcome.ttft_ms = 1e3 * (now_s - sent_s)
                else:
                    outcome.itls_ms.append(1e3 * (now_s - last_s))
                last_s = now_s
        outcome.tokens = outcome.tokens or pieces


def _error_text(body: str) -> str:
    """What an error in OpenAI's shape says; another body as it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _has_text(choice: Any) -> bool:
    return bool((choice.get("delta") or {}).get("content"))


def _read_usage(usage: Any, outcome: Outcome) -> None:
    if not isinstance(usage, dict):
        return
    outcome.tokens = int(usage.get("completion_tokens") or 0)
    ours = usage.get("buddy")
    if isinstance(ours, dict):
        outcome.blocks_per_token = float(ours["blocks_per_token"])
        outcome.num_blocks = int(ours["num_blocks"])
