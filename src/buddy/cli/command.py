"""Command: the name of a subcommand, its place in `buddy --help`, and what it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import typer

Group = Literal["run", "serve", "measure", "train", "research"]
"""What a command is for. Help lists the groups in this order."""

GROUPS: Final[tuple[Group, ...]] = get_args(Group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What a module of commands defines as `COMMAND`; nothing else has to name the command.

    Attributes:
        name: As it is typed.
        group: Help lists the command with those of its group.
        run: A function as typer takes it, or a Typer app where the command has subcommands.
        place: Among its group, the smallest first; equal ones by name.
        alias: An earlier name, which goes on working and which help does not show.
        shares: Processes that are launched side by side share its work; else it refuses them.
    """

    name: str
    group: Group
    run: Callable[..., Any] | typer.Typer
    place: int = 100
    alias: str | None = None
    shares: bool = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"the group must be one of {', '.join(GROUPS)}, got {self.group!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """All that may be typed: the name, and the alias if there is one."""
        return (self.name,) if self.alias is None else (self.name, self.alias)

    @property
    def summary(self) -> str:
        """The first sentence of what it does."""
        run = self.run
        text = (run.info.help if isinstance(run, typer.Typer) else run.__doc__) or ""
        sentence, stop, _ = " ".join(text.split()).partition(". ")
        return sentence + stop.strip()

    @property
    def order(self) -> tuple[int, int, str]:
        """The key by which help sorts commands."""
        return GROUPS.index(self.group), self.place, self.name
