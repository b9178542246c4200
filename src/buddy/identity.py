"""What a measurement depends on, so that it goes on only from what the same measurement left."""

import json
from collections.abc import Iterator
from typing import Any, Final

from buddy.errors import shown

_ABSENT: Final = object()


def differing(saved: Any, wanted: dict[str, Any]) -> list[str]:
    """What differs between two identities, each as `dtype (was 'float32', is 'bfloat16')`.

    Args:
        saved: What was left: plain JSON, whatever it is.
        wanted: What is asked for now; it can be written as JSON.
    """
    return [
        f"{name or 'identity'} (was {_said(was)}, is {_said(now)})"
        # As JSON gives it back, tuples are lists.
        for name, was, now in _pairs(saved, json.loads(json.dumps(wanted)), "")
        if was != now
    ]


def _pairs(saved: Any, wanted: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Both values by dotted name; what is an object in both is taken apart."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*wanted, *saved]):
            place = f"{name}.{key}" if name else key
            yield from _pairs(saved.get(key, _ABSENT), wanted.get(key, _ABSENT), place)
    else:
        yield name, saved, wanted


def _said(value: Any) -> str:
    return "not there" if value is _ABSENT else shown(value, 30)
