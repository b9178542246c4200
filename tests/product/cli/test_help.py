"""The help of every command, found by walking the parser: examples, names and defaults."""

import shlex

import pytest
from typer.main import get_command

from buddy.cli.registry import all_commands, make_app
from tests.product.cli.forked import is_plain

APP = get_command(make_app())
ROOT = APP.make_context("buddy", [], resilient_parsing=True)
PLAIN = {"system", "trace", "data_dir", "wheel", "shuffle_plans", "against", "key_env", "answers"}
PLAIN |= {"without", "changes", "method", "prefill_budget"}
"""Options that do nothing unless they are given: there is no default to show."""


def walk(command, context):
    """Each command that does something, with a context of its own."""
    for name, part in getattr(command, "commands", {}).items():
        if not part.hidden:
            yield from walk(part, type(context)(part, info_name=name, parent=context))
    if not getattr(command, "commands", None):
        yield pytest.param(context, id=context.command_path)


COMMANDS = [
    parameters
    for found in sorted(all_commands(), key=lambda command: command.order)
    for parameters in walk(
        APP.get_command(ROOT, found.name),
        type(ROOT)(APP.get_command(ROOT, found.name), info_name=found.name, parent=ROOT),
    )
]


def options(context):
    return [value for value in context.command.params if value.param_type_name == "option"]


def long_names(option):
    return [name for name in option.opts if name.startswith("--")]


def parsed(context, arguments):
    return context.command.make_context(
        context.info_name, list(arguments), parent=context.parent
    ).params


def example(context):
    [line] = [line for line in context.command.help.splitlines() if line.startswith("Example:")]
    path, *arguments = [line.partition("`")[2].rstrip("`"), *context.command_path.split()]
    words = shlex.split(path)
    assert words[: len(arguments)] == arguments
    return words[len(arguments) :]


@pytest.fixture(autouse=True)
def narrow(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def test_all_commands_are_walked():
    paths = {parameters.id for parameters in COMMANDS}
    assert {"buddy eval ppl", "buddy observe ranks", "buddy models pull", "buddy serve"} <= paths
    assert len(paths) == len(COMMANDS) >= 25


@pytest.mark.parametrize("context", COMMANDS)
def test_help_is_plain_fits_80_columns_and_has_an_example_that_parses(context):
    text = context.command.get_help(context)
    assert is_plain(text)
    assert max(map(len, text.splitlines())) <= 80
    assert sum(line.startswith("  Example: `") for line in text.splitlines()) == 1
    parsed(context, example(context))


@pytest.mark.parametrize("context", COMMANDS)
def test_a_model_is_named_by_m_and_by_place_where_nothing_else_has_one(context):
    by_name = {value.name: value for value in options(context)}
    if "model" not in by_name:
        assert context.command_path.split()[1] in ("data", "plot", *TRAINERS)
        return
    model = by_name["model"]
    assert sorted(model.opts) == ["--model", "-m"]
    assert model.default in DEFAULTS or context.command_path == "buddy route"
    arguments = [value.name for value in context.command.params if value not in options(context)]
    if arguments != ["place"]:
        return
    rest = [part for value in options(context) if value.required for part in needed(value)]
    assert parsed(context, ["here", *rest])["model"] == "here"
    assert parsed(context, ["-m", "here", *rest])["model"] == "here"
    if model.default is not None:
        assert parsed(context, rest)["model"] == model.default
    with pytest.raises(Exception, match="is given twice, 'here' and 'there'"):
        parsed(context, ["here", "--model", "there", *rest])


TRAINERS = ("train", "train-budget", "train-ledger")
DEFAULTS = ("smollm2-135m-buddy", None)
"""`route` alone has another one, as it says: it fits a router to a model that has none."""


def needed(option):
    values = {"out": "out.json", "order": "out.json", "quant": "int4"}
    return (long_names(option)[0], values.get(option.name, "15"))


@pytest.mark.parametrize("context", COMMANDS)
def test_every_default_is_shown_and_no_type(context):
    for option in options(context):
        if option.name in ("help", *PLAIN) or option.hidden or context.info_name == "remove":
            continue
        left, right = option.get_help_record(context)
        assert left.split()[-1].lower() not in ("integer", "float", "path", "str", "int", "bool")
        assert "<" not in left
        if not option.is_flag and not option.required:
            shown = "not given" if option.default is None else "[default: "
            assert shown in right, f"{context.command_path} {left}"


OLD = {"--windows": "--limit", "--inputs": "--limit", "--window": "--tokens"}
OLD |= {"--new-tokens": "--max-new-tokens"}


@pytest.mark.parametrize("context", COMMANDS)
def test_one_name_for_one_thing_and_earlier_names_work_unseen(context):
    text = context.command.get_help(context).replace(",", "").split()
    for option in options(context):
        first, *old = long_names(option)
        assert first not in OLD
        assert not set(old) & set(text) - {"--max-tokens"}
        rest = [part for value in options(context) if value.required for part in needed(value)]
        places = [value for value in context.command.params if value.param_type_name == "argument"]
        for name in [] if option.is_flag else old:
            arguments = ["x" for value in places if value.required] + rest
            new = parsed(context, [first, "7", *arguments])[option.name]
            assert new == parsed(context, [name, "7", *arguments])[option.name] == 7
