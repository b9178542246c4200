"""`--template-option KEY=VALUE`: variables of a model's chat template, as on a command line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from buddy.cli.named import offer
from buddy.cli.options import read_by
from buddy.data.template_variables import refused_variable
from buddy.errors import PromptError, shown

_PYTHON: Final = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class TemplateVariable:
    """One variable, and what it is set to."""

    name: str
    value: Any

    @classmethod
    def read(cls, text: str) -> "TemplateVariable":
        """Read `KEY=VALUE`: a value of JSON or of Python's constants, or else a text.

        Raises:
            PromptError: There is no key.
        """
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise PromptError(
                "--template-option must be KEY=VALUE, such as enable_thinking=true, got "
                f"{shown(text)}"
            )
        try:
            return cls(name, _PYTHON[value] if value in _PYTHON else json.loads(value))
        except (ValueError, RecursionError):
            return cls(name, value)


TemplateOptions = Annotated[
    list[TemplateVariable] | None,
    read_by(
        TemplateVariable.read,
        "--template-option",
        metavar="KEY=VALUE",
        help="Variable of the model's chat template; repeat for several. enable_thinking=true lets "
        "a model think aloud. The template's own if not given.",
        autocompletion=offer("enable_thinking=true"),
    ),
]


def template_variables(given: Sequence[TemplateVariable] | None) -> dict[str, Any]:
    """All variables by name.

    Raises:
        PromptError: One has two values.
    """
    variables: dict[str, Any] = {}
    for variable in given or ():
        if variable.name in variables:
            raise PromptError(f"--template-option {variable.name} has two values: leave one out")
        variables[variable.name] = variable.value
    return variables


def check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Refuse variables that a tokenizer's chat template would not obey.

    Raises:
        PromptError: There is one.
    """
    if (refused := refused_variable(tokenizer, variables)) is not None:
        name, why = refused
        raise PromptError(f"--template-option {name}: {why}")
