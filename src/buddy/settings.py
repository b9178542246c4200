"""Settings are frozen dataclasses; this reads them from TOML, `--set` and JSON, and checks ranges.

A typo is an error, and so is a number outside the range that its field is annotated with.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from buddy.errors import BuddyError, RecipeError, shown
from buddy.files import read_text

Section = TypeVar("Section")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """What a number may be: `rank: Annotated[int, Range(1, 4096)]`. Floats are always finite."""

    low: int | float = -math.inf
    """Smallest value."""
    high: int | float = math.inf
    """Largest value."""
    above: int | float | None = None
    """A bound in place of `low`: values must be greater than it."""

    def __contains__(self, value: int | float) -> bool:
        finite = isinstance(value, int) or math.isfinite(value)
        above = self.above is None or value > self.above
        return finite and above and self.low <= value <= self.high

    def __str__(self) -> str:
        ends = []
        if self.above is not None:
            ends.append(f"above {self.above:g}")
        elif self.low > -math.inf:
            ends.append(f"at least {_written(self.low)}")
        if self.high < math.inf:
            ends.append(f"at most {_written(self.high)}")
        return " and ".join(ends) or "finite"


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How long a text or a tuple may be: `label: Annotated[str, Size(1)]`."""

    low: int = 0
    """Fewest letters or items."""
    high: int | float = math.inf
    """Most of them."""

    def __contains__(self, value: str | tuple[Any, ...]) -> bool:
        return self.low <= len(value) <= self.high

    def __str__(self) -> str:
        most = "" if self.high == math.inf else f" and at most {self.high}"
        return f"at least {self.low}{most} long"


def _written(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


_MAX_RECIPE_BYTES: Final = 2**20
SEED = Range(0, 2**63 - 1)
"""What torch and Python both take as a seed."""


def check_ranges(settings: Any, error: type[BuddyError]) -> None:
    """Refuse settings with a number or a length outside the range of its field.

    For `__post_init__`. The items of tuples are checked too.

    Args:
        settings: A dataclass.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`.
    """
    for name, hint in _hints(cast(Any, type(settings)), include_extras=True).items():
        _check_range(name, getattr(settings, name), hint, error)


def _check_range(name: str, value: Any, hint: Any, error: type[BuddyError]) -> None:
    if type(value) not in (int, float, str, tuple):
        return
    limit: Any = Size if isinstance(value, str | tuple) else Range
    allowed = next((extra for extra in _extras(hint) if isinstance(extra, limit)), limit())
    if value not in allowed:
        raise error(f"{name} must be {allowed}, got {shown(value)}")
    items = get_args(_plain(hint))
    if isinstance(value, tuple) and items:
        for place, item in enumerate(value):
            _check_range(f"{name}[{place}]", item, items[0], error)


@functools.cache
def _hints(kind: type[Any], *, include_extras: bool) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=include_extras)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecipeTable:
    """A table of a recipe; one with a number outside the range of its field cannot be made.

    Raises:
        RecipeError: A number is outside its range.
    """

    def __post_init__(self) -> None:
        check_ranges(self, RecipeError)


def _extras(hint: Any) -> tuple[Any, ...]:
    """What `Annotated` says of a hint, or of the part of a union that is not None."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(extra for part in get_args(hint) for extra in _extras(part))
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _plain(hint: Any) -> Any:
    """The type without what `Annotated` says of it, and without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return _plain(next(part for part in get_args(hint) if part is not type(None)))
    return _plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def read_recipe(kind: type[Section], path: Path, changes: Sequence[str] = ()) -> Section:
    """Read a recipe.

    Args:
        kind: A dataclass; fields that are dataclasses are tables of the file.
        path: TOML.
        changes: `KEY=VALUE` with dots between tables and keys, as in `optim.steps=250`; VALUE as
            in TOML, or a plain word. The last of several with one key holds.

    Raises:
        RecipeError: The file cannot be read, or has a key or a value that does not fit.
    """
    return build(kind, read_values(path, changes), str(path))


def read_values(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """What a recipe says, before it is known what kind of recipe it is.

    Args:
        path: TOML.
        changes: As `read_recipe` takes them.

    Raises:
        RecipeError: The file cannot be read, or a change is none.
    """
    import tomllib  # only where a recipe is read: help need not wait for it

    text = read_text(path, RecipeError, most=_MAX_RECIPE_BYTES)
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise RecipeError(
            f"recipe {path} is no TOML that can be read: it nests too deeply"
        ) from error
    except ValueError as error:  # also a number of thousands of digits
        raise RecipeError(f"recipe {path} is no TOML: {error}") from error
    for change in changes:
        change_value(values, change)
    return values


def change_value(values: dict[str, Any], change: str) -> None:
    """Change one value of a recipe in place.

    Args:
        values: By table.
        change: `table.key=value`, the value as in TOML, or a text.

    Raises:
        RecipeError: It is no change.
    """
    import tomllib

    key, equals, text = change.partition("=")
    *tables, last = (part.strip() for part in key.split("."))
    if not equals or not all((*tables, last)):
        raise RecipeError(f"--set takes KEY=VALUE, as in optim.steps=250, got {shown(change)}")
    try:
        parsed = tomllib.loads(f"x = {text}")
    except RecursionError as error:
        raise RecipeError(f"--set {shown(change)}: the value nests too deeply") from error
    except ValueError:
        parsed = {"x": text.strip()}
    if len(parsed) > 1:
        raise RecipeError(f"--set takes one KEY=VALUE, got {shown(change)}")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--set {shown(change)}: {table} is no table")
    values[last] = parsed["x"]


def build(
    kind: type[Section],
    values: Any,
    where: str,
    error: type[BuddyError] = RecipeError,
    *,
    others: bool = False,
) -> Section:
    """A dataclass from plain values, such as those of TOML or JSON.

    Args:
        kind: The dataclass.
        values: A dictionary by field.
        where: What a message calls them.
        error: What is raised.
        others: Whether keys that are no fields are passed over, at any depth: a record has more
            in it than one reader takes.

    Raises:
        BuddyError: Of the kind `error`: an unknown or a missing key, a value of another type, or
            one that the dataclass refuses.
    """
    if not isinstance(values, dict):
        raise error(f"{where}: expected a table, got {shown(values)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(map(str, values.keys() - fields.keys()))
    if unknown and not others:
        names = shown(", ".join(unknown))[1:-1]
        keys = "an unknown key" if len(unknown) == 1 else "unknown keys"
        raise error(f"{where} has {keys} {names}: expected {', '.join(fields)}")
    hints = _hints(cast(Any, kind), include_extras=False)
    fields_given = {
        name: _convert(hints[name], value, f"{where}: {name}", error, others)
        for name, value in values.items()
        if name in fields
    }
    missing = [
        name for name, field in fields.items() if _is_required(field) and name not in fields_given
    ]
    if missing:
        raise error(f"{where} lacks {', '.join(missing)}")
    try:
        return kind(**fields_given)
    except BuddyError as refused:
        raise error(f"{where}: {refused}") from refused


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _convert(hint: Any, value: Any, where: str, error: type[BuddyError], others: bool) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):  # JSON has null, TOML has not
            return None
        return _convert(_plain(hint), value, where, error, others)
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{where}: expected a list, got {shown(value)}")
        return tuple(
            _convert(get_args(hint)[0], item, f"{where}[{place}]", error, others)
            for place, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise error(f"{where}: expected a table, got {shown(value)}")
        return {
            name: _convert(get_args(hint)[1], item, f"{where}.{name}", error, others)
            for name, item in value.items()
        }
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(map(str, get_args(hint)))
            raise error(f"{where}: expected one of {choices}, got {shown(value)}")
        return value
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where, error, others=others)  # type: ignore[arg-type]
    if hint is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is not hint:
        raise error(f"{where}: expected {hint.__name__}, got {shown(value)}")
    if hint is str and ("\0" in value or not _is_unicode(value)):
        raise error(f"{where}: expected a text of Unicode without NUL, got {shown(value)}")
    return value


def _is_unicode(text: str) -> bool:
    """False with half a surrogate pair, as bytes of the command line that are no UTF-8 become."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
