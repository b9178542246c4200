"""Reads a TOML recipe, and `--set key=value`, into frozen dataclasses; a typo is an error."""

import dataclasses
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from buddy.errors import BuddyError, RecipeError

Section = TypeVar("Section")


def read_recipe(kind: type[Section], path: Path, changes: Sequence[str] = ()) -> Section:
    """Read a recipe.

    Args:
        kind: A dataclass; fields that are dataclasses are tables of the file.
        path: TOML.
        changes: `KEY=VALUE` with dots between tables and keys, as in `optim.steps=250`; VALUE as
            in TOML, or a plain word.

    Raises:
        RecipeError: The file cannot be read, or has a key or a value that does not fit.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is no TOML: {error}") from error
    for change in changes:
        _change(values, change)
    return build(kind, values, str(path))


def _change(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set takes KEY=VALUE, as in optim.steps=250, got {change!r}")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *tables, last = (part.strip() for part in key.split("."))
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--set {change}: {table} is no table")
    values[last] = value


def build(kind: type[Section], values: dict[str, Any], where: str) -> Section:
    """A dataclass from plain values.

    Raises:
        RecipeError: An unknown or a missing key, or a value of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise RecipeError(
            f"{where} has an unknown key {', '.join(unknown)}: expected {', '.join(fields)}"
        )
    hints = get_type_hints(kind)
    made = {
        name: _convert(hints[name], value, f"{where}: {name}") for name, value in values.items()
    }
    missing = [name for name, field in fields.items() if _is_required(field) and name not in made]
    if missing:
        raise RecipeError(f"{where} lacks {', '.join(missing)}")
    try:
        return kind(**made)
    except RecipeError:
        raise
    except BuddyError as error:
        raise RecipeError(f"{where}: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
        return _convert(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise RecipeError(f"{where}: expected a list, got {value!r}")
        return tuple(
            _convert(get_args(hint)[0], one, f"{where}[{place}]") for place, one in enumerate(value)
        )
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(str(one) for one in get_args(hint))
            raise RecipeError(f"{where}: expected one of {choices}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: expected a table, got {value!r}")
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise RecipeError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
