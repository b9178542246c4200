"""Registry of commands: every module of `buddy.cli.commands`, then what other packages add.

Another package adds a command by an entry point of the group `buddy.commands`, whose value is a
`Command`, or a package in which each module that defines `COMMAND` is one.
"""

import logging
import os
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from buddy.cli import commands as own_commands
from buddy.cli.command import GROUPS, Command
from buddy.cli.named import let_model_stand_alone
from buddy.processes import check_alone, joined, number_of_processes

ENTRY_POINTS: Final = "buddy.commands"
_BESIDE: Final = ("--max-new-tokens", "--max-tokens")
"""A name of transformers, and that of OpenAI beside it: both are shown."""
_OWN: Final = "buddy-llm"
_SETTINGS: Final[dict[str, Any]] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}

_log = logging.getLogger(__name__)


class CommandTable(TyperGroup):
    """The command `buddy`, which imports a subcommand when it is asked for.

    A command of ours is found by the name of its file, without a look at other packages. All are
    imported for `--help`, and for a name that is not ours.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a name; None if there is none."""
        if cmd_name not in self.commands:
            own = _own_command(cmd_name)
            self._add(_in_order_of_help() if own is None else [own])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand that is typed; processes that were launched together must share it."""
        name, command, rest = super().resolve_command(ctx, args)
        if number_of_processes() > 1:
            commands = (_own_command(str(name)), *_in_order_of_help())
            known = next(own for own in commands if own is not None and name in own.names)
            if not known.shares:
                if os.environ["RANK"] != "0":  # the first says it for all
                    raise typer.Exit(2)
                check_alone(f"buddy {name}")
            ctx.with_resource(joined())
        return name, command, rest

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of help."""
        self.commands.clear()
        self._add(_in_order_of_help())
        return list(self.commands)

    def _add(self, commands: list[Command]) -> None:
        for command in commands:
            self.commands.update(_built(command))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each name and its first sentence; the options of no command are read for it."""
        commands = _in_order_of_help()
        widest = max(len(command.name) for command in commands)
        room = formatter.width - 6 - widest
        for group in GROUPS:
            rows = [
                (f"{command.name:{widest}}", shorten(command.summary, room, placeholder="..."))
                for command in commands
                if command.group == group
            ]
            if rows:
                with formatter.section(f"Commands to {group}"):
                    formatter.write_dl(rows)


def _in_order_of_help() -> list[Command]:
    return sorted(all_commands(), key=lambda command: command.order)


def make_app() -> typer.Typer:
    """The app whose subcommands are those of the table."""
    app = typer.Typer(
        cls=CommandTable,
        help="Run a language model under a compute budget: pay for as many blocks as you ask for.",
        context_settings={"help_option_names": ["--help", "-h"]},
        add_completion=True,
        **_SETTINGS,
    )
    app.callback()(_options)
    return app


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"buddy {version(_OWN)}")
        raise typer.Exit
    return is_asked


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself, which runs a subcommand and nothing else."""


def all_commands() -> list[Command]:
    """Every command, ours first. What cannot be added is a line in the log, and left out."""
    commands = list(_commands_of(own_commands))
    owners = {name: _OWN for command in commands for name in command.names}
    for package, command in _outside_commands():
        owner = next((owners[name] for name in command.names if name in owners), None)
        if owner is not None:
            _warn(f"{package} adds a command {command.name}, which {owner} has: left out")
            continue
        owners |= dict.fromkeys(command.names, package)
        commands.append(command)
    return commands


def _own_command(name: str) -> Command | None:
    module = f"{own_commands.__name__}.{name.replace('-', '_')}"
    if not name.replace("-", "").isalpha() or find_spec(module) is None:
        return None
    return _command_of(import_module(module))


def _outside_commands() -> Iterator[tuple[str, Command]]:
    """Commands of other packages, with the package's name; what fails there is no one else's."""
    for package, name, value in _entry_points():
        try:
            for command in _loaded(value):
                if package != _OWN:
                    _built(command)
                yield package, command
        except Exception as error:
            _warn(f"{package} cannot add its command {name}: {type(error).__name__}: {error}")


def _entry_points() -> Iterator[tuple[str, str, str]]:
    """Package, name and value of each entry point of the group, as pip leaves them on the path.

    importlib.metadata reads the same files; importing it takes longer than all else of `--help`.
    """
    packages = set()
    for folder in filter(os.path.isdir, sys.path):
        for entry in sorted(os.listdir(folder)):
            stem, kind = os.path.splitext(entry)
            package = stem.partition("-")[0].replace("_", "-").lower()
            file = Path(folder, entry, "entry_points.txt")
            if kind not in (".dist-info", ".egg-info") or package in packages:
                continue
            packages.add(package)
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            _, _, rest = text.partition(f"[{ENTRY_POINTS}]\n")
            for line in rest.partition("\n[")[0].splitlines():
                name, is_point, value = line.partition("=")
                if is_point:
                    yield package, name.strip(), value.strip()


def _warn(text: str) -> None:
    _log.warning("buddy: %s", " ".join(text.split()))


def _loaded(point: str) -> list[Command]:
    """The commands that `module` or `module:attribute` stands for."""
    module, _, attribute = point.partition(":")
    value: Any = import_module(module)
    for name in filter(None, attribute.split(".")):
        value = getattr(value, name)
    if isinstance(value, Command):
        return [value]
    if isinstance(value, ModuleType) and hasattr(value, "__path__"):
        return list(_commands_of(value))
    raise TypeError(f"{point} must be a Command or a package of commands, got {value!r:.80}")


def _commands_of(package: ModuleType) -> Iterator[Command]:
    """The command of each module of a package that defines one."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        command = _command_of(import_module(module.name))
        if command is not None:
            yield command


def _command_of(module: ModuleType) -> Command | None:
    return getattr(module, "COMMAND", None)


@cache
def _built(command: Command) -> dict[str, Any]:
    """The command as click runs it, by its name and its alias."""
    table = typer.Typer(add_completion=False, **_SETTINGS)
    table.callback()(lambda: None)
    for name in command.names:
        hidden = name != command.name
        if isinstance(command.run, typer.Typer):
            table.add_typer(command.run, name=name, hidden=hidden)
        else:
            table.command(name, hidden=hidden)(command.run)
    group = get_command(table)
    assert isinstance(group, TyperGroup)
    for built in group.commands.values():
        _finish(built)
    return dict(group.commands)


def _finish(command: Any) -> None:
    """Let a model be named by its place, and have help show what it is to show."""
    for part in getattr(command, "commands", {}).values():
        _finish(part)
    let_model_stand_alone(command)
    for value in command.params:
        if value.param_type_name == "argument":
            _show_name_alone(value)
            continue
        if value.metavar is None and not value.is_flag:  # typer would show its type
            value.metavar = value.opts[0].rpartition("-")[2].upper()
        _hide_old_names(value)


def _hide_old_names(option: Any) -> None:
    """Show the first long name of an option, and short ones: the others are earlier names."""
    first, *others = [name for name in option.opts if name.startswith("--")]
    old = [name for name in others if (first, name) != _BESIDE]
    names, record = option.opts, option.get_help_record

    def without_old(context: Any) -> Any:
        option.opts = [name for name in names if name not in old]
        try:
            return record(context)
        finally:
            option.opts = names

    option.get_help_record = without_old


def _show_name_alone(argument: Any) -> None:
    record = argument.get_help_record

    def without_type(context: Any) -> Any:
        found = record(context)
        return found and (found[0].partition(" ")[0], found[1])

    argument.get_help_record = without_type
