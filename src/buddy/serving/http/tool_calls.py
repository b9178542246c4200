"""Calls of tools in a model's text: how its family writes them, and how they are read.

A family is known by the marks in its chat template. Qwen's is Hermes style: `<tool_call>`, a JSON
object, `</tool_call>`. Llama 3 answers with a JSON object and nothing else. Mistral writes a list
behind `[TOOL_CALLS]`.
"""

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any, Final

from buddy.serving.overlap import overlap

_LETTERS: Final = string.ascii_letters + string.digits
_LENGTH_OF_ID: Final = 9
"""Mistral's templates take ids of this length alone."""
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    Attributes:
        mark: Stands before each call, or before a list of them; a call needs none where a bare
            JSON object that begins the answer is one.
        is_needed: Whether there is no call without the mark.
        closes: Stands after a call.
        between: Stands between two calls.
        in_list: Whether calls are a JSON list.
        key: Of the arguments.
    """

    mark: str
    closes: str = ""
    between: str = "\n"
    is_needed: bool = True
    in_list: bool = False
    key: str = "arguments"


HERMES: Final = CallFormat("<tool_call>", "</tool_call>")
LLAMA: Final = CallFormat("<|python_tag|>", between="; ", is_needed=False, key="parameters")
MISTRAL: Final = CallFormat("[TOOL_CALLS]", between=", ", in_list=True)


def format_of(template: str) -> CallFormat | None:
    """The form that a chat template teaches; None where it teaches none that is known here."""
    if HERMES.mark in template:
        return HERMES
    if MISTRAL.mark in template and "[ARGS]" not in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool that a model has made.

    Attributes:
        name: The function.
        arguments: A JSON object, as text.
        id: By which a message of the role tool answers it.
    """

    name: str
    arguments: str
    id: str


class CallReader:
    """Parts a text, as it comes, into calls and what is said beside them.

    Args:
        form: How the family writes calls.
        most: Calls that are read, at most; later ones are dropped. None = all.
    """

    def __init__(self, form: CallFormat, most: int | None = None) -> None:
        self._form, self._most = form, most
        self._held = ""
        """What may be a call, or begin one."""
        self._is_inside = False
        """Whether a call, or a list of them, has begun."""
        self._mark = ""
        """What was read of it: its mark, and space before that."""
        self._has_said = False
        """Whether there was a text that is no call: a bare object is none after that."""
        self._num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[Call]]:
        """What is sure to be said, and the calls that are complete."""
        self._held += text
        said, calls = "", list[Call]()
        while self._held:
            if not self._is_inside:
                before = self._begin(is_last=is_last)
                said += before
                self._has_said |= bool(before.strip())
                if not self._is_inside:
                    break
            found = self._read(is_last=is_last)
            if found is None:
                if is_last:  # it looked like a call, and is none
                    said, self._held = said + self._mark + self._held, ""
                break
            left = len(found) if self._most is None else max(0, self._most - self._num_calls)
            calls += found[:left]
            self._num_calls += len(found)
            self._is_inside = False
        return said, calls

    def _begin(self, *, is_last: bool) -> str:
        """Go on to where a call begins, if one does; gives the text before it that is sure."""
        text, mark = self._held, self._form.mark
        at = text.find(mark)
        if at >= 0 and (self._form.is_needed or not text[:at].strip()):
            before, end = text[:at].rstrip(), at + len(mark)
            self._is_inside, self._mark, self._held = True, text[len(before) : end], text[end:]
            return before
        if not self._form.is_needed and not self._has_said:
            bare = text.lstrip(" \n;" if self._num_calls else None)
            if bare.startswith("{"):
                self._is_inside, self._mark, self._held = True, "", bare
                return ""
            if not is_last and mark.startswith(bare):
                return ""
        # What may begin a mark is held, and space before it, which is no text if a call follows.
        cut = len(text) if is_last else len(text[: len(text) - overlap(text, mark)].rstrip())
        self._held = text[cut:]
        return text[:cut]

    def _read(self, *, is_last: bool) -> list[Call] | None:
        """The calls at the beginning of what is held; None where they are not complete."""
        text, closes = self._held.lstrip(), self._form.closes
        if not is_last and not (closes in text if closes else text.endswith(("}", "]"))):
            return None
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        if isinstance(value, list) != self._form.in_list or not calls or None in calls:
            return None
        rest = text[end:]
        self._held = rest.lstrip().removeprefix(closes) if closes else rest
        return [call for call in calls if call is not None]

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        given = value.get(self._form.key, {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return Call(value["name"], arguments, new_id())


def new_id() -> str:
    """An id of a call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH_OF_ID))
