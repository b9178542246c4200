"""What is refused, and what fails, becomes an answer in the shape of OpenAI's errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from buddy.errors import BuddyError, BudgetError, PromptError, shown
from buddy.serving.client import Overloaded, Unavailable
from buddy.serving.http.schema import Error, ErrorBody
from buddy.serving.request import Failed, GrammarError

RETRY_UNAVAILABLE_S: Final = 5
"""When to ask again a server that takes nothing now."""

_TYPES: Final = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ABSENT: Final = ("missing", "no_text")
"""Errors of fields that a body need not have."""
_LONGEST_NAME: Final = 64


class Refusal(BuddyError):
    """An answer that is an error.

    Args:
        status: Of HTTP.
        message: One line: what is wrong, expected, got, what to do.
        param: The field that is meant.
        code: A word for programs.
        headers: More of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> ErrorBody:
        """The error as OpenAI writes errors."""
        return ErrorBody(
            error=Error(
                message=" ".join(str(self).split()),
                type=_TYPES.get(self.status, "invalid_request_error"),
                param=self.param,
                code=self.code,
            )
        )

    def response(self) -> Response:
        """The error as Starlette sends it."""
        body = json.dumps(self.body()).encode()
        return Response(body, self.status, self.headers, media_type="application/json")

    def closing(self) -> Response:
        """The same, and the connection ends with it: a body that follows is not read."""
        self.headers["Connection"] = "close"
        return self.response()


def failed(why: Failed) -> Refusal:
    """An answer that could not be given: the engine's fault, unless a field is named."""
    if why.param is None:
        return Refusal(500, why.message, code="engine_failed")
    return Refusal(400, why.message, param=why.param, code="invalid_value")


def refusal_of(error: BuddyError, param: str | None = None) -> Refusal:
    """What a client is told of an error that was raised on purpose."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Overloaded):
        wait = {"Retry-After": str(max(1, min(60, error.retry_after_s)))}
        return Refusal(429, str(error), code="overloaded", headers=wait)
    if isinstance(error, Unavailable):
        wait = {"Retry-After": str(RETRY_UNAVAILABLE_S)}
        return Refusal(503, str(error), code="unavailable", headers=wait)
    if isinstance(error, BudgetError):
        return Refusal(400, str(error), param=param or "budget", code="invalid_budget")
    if isinstance(error, GrammarError):
        return Refusal(400, str(error), param=error.param, code="invalid_schema")
    if isinstance(error, PromptError):
        return Refusal(400, str(error), param=param, code="invalid_prompt")
    return Refusal(400, str(error), param=param)


def refusal_of_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> Refusal:
    """One line of what pydantic finds wrong with a body.

    The first field that is wrong is named. One that may have several forms gives an error for
    each: those are joined that got deepest into what was sent.

    Args:
        errors: As pydantic lists them.
        body: What was sent.
    """
    first = errors[0]
    place, value = _walk(first, body)
    for error in errors[1:]:
        other = _walk(error, body)
        if place and len(other[0]) > len(place) and other[0][: len(place)] == place:
            (place, value), first = other, error
    if not place:
        return not_json(f"got {shown(value)}")
    name = ".".join(place)
    reasons: list[str] = []
    for error in errors:
        reason = _lower(str(error["msg"]))
        if _walk(error, body)[0] == place and reason not in reasons:
            reasons.append(reason)
    got = "" if first["type"] == "missing" else f", got {shown(value)}"
    return Refusal(400, f"{name}: {' or '.join(reasons)}{got}", param=name, code="invalid_value")


def not_json(why: str) -> Refusal:
    """The refusal of a body that is no JSON object."""
    return Refusal(
        400,
        f"the body must be a JSON object of type application/json, {why}",
        code="invalid_json",
    )


def _walk(error: Mapping[str, Any], body: Any) -> tuple[tuple[str, ...], Any]:
    """The part of an error's place that the body has, and what is there.

    pydantic's places also name the forms of a union, which are no parts of the body.
    """
    place: list[str] = []
    for step in error["loc"]:
        in_list = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if in_list or (isinstance(body, Mapping) and step in body):
            body = body[step]
            place.append(_name(str(step)))
    if error["type"] in _ABSENT and place[-1:] != [name := str(error["loc"][-1])]:
        place.append(name)
    return tuple(place), body


def _name(step: str) -> str:
    """A part of a place as a message shows it; a client names fields as it likes."""
    return step if step.isprintable() and len(step) <= _LONGEST_NAME else shown(step, _LONGEST_NAME)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
