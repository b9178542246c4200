"""A package outside of the tree adds a command by one entry point; a broken one harms no other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from buddy.cli import registry

SOURCE = Path(registry.__file__).parents[2]

TOY = '''
"""A command in one file."""
import typer

from buddy.cli.command import Command


def toy(word: str = typer.Argument(help="What is said.")) -> None:
    """Say a word."""
    typer.echo(f"toy says {word}")


COMMAND = Command(name="toy", group="measure", run=toy, alias="plaything")
'''


def install(folder, package, entry_points, modules):
    """A package as pip leaves it: its modules, and a dist-info folder with its entry points."""
    for name, text in modules.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[buddy.commands]\n{lines}\n")


@pytest.fixture
def buddy(tmp_path):
    """Runs `buddy` where what `install` put into tmp_path is installed."""
    path = os.pathsep.join([str(SOURCE), str(tmp_path)])

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
        command = [sys.executable, "-m", "buddy", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def listed(text):
    """The commands that help names, in its order."""
    return re.findall(r"^  ([\w-]+)  ", text.partition("Commands to")[2], re.MULTILINE)


def test_a_command_runs_and_stands_in_help_with_its_group(tmp_path, buddy):
    install(tmp_path, "buddy-toy", {"toy": "buddy_toy:COMMAND"}, {"buddy_toy": TOY})
    assert buddy("toy", "hello") == (0, "toy says hello\n", "")
    assert buddy("plaything", "hello") == (0, "toy says hello\n", "")
    code, out, err = buddy("--help")
    assert (code, err) == (0, "")
    assert "Say a word." in out
    names = listed(out)
    assert "plaything" not in names
    assert names.index("search") < names.index("toy") < names.index("train")
    assert buddy("toy")[::2] == (2, "buddy: missing argument 'word'; see buddy toy --help\n")


def test_a_package_adds_each_of_its_modules_that_has_a_command(tmp_path, buddy):
    more = TOY.replace('name="toy"', 'name="second-toy"').replace("plaything", "bauble")
    install(
        tmp_path,
        "buddy-toys",
        {"toys": "buddy_toys"},
        {
            "buddy_toys/__init__": "",
            "buddy_toys/first": TOY,
            "buddy_toys/second": more,
            "buddy_toys/helpers": "NUMBER = 3",
        },
    )
    names = listed(buddy("--help")[1])
    assert names.index("second-toy") < names.index("toy")
    assert buddy("second-toy", "hi") == (0, "toy says hi\n", "")


@pytest.mark.parametrize(
    ("value", "module", "reason"),
    [
        ("buddy_broken:COMMAND", "import nowhere_at_all", "ModuleNotFoundError: No module named"),
        ("buddy_broken:COMMAND", "COMMAND = 1 /\\\n 0", "ZeroDivisionError: division by zero"),
        ("buddy_broken:COMMAND", "", "AttributeError: module 'buddy_broken' has no attribute"),
        ("buddy_broken:COMMAND", "COMMAND = 3", "buddy_broken:COMMAND must be a Command or a"),
        ("buddy_broken:COMMAND", TOY.replace("measure", "games"), "the group must be one of run,"),
        ("buddy_gone:COMMAND", "", "No module named 'buddy_gone'"),
    ],
)
def test_a_broken_package_is_one_line_and_all_else_works(tmp_path, buddy, value, module, reason):
    install(tmp_path, "buddy-broken", {"wreck": value}, {"buddy_broken": module})
    install(tmp_path, "buddy-toy", {"toy": "buddy_toy:COMMAND"}, {"buddy_toy": TOY})
    code, out, err = buddy("--help")
    assert code == 0
    assert err.startswith("buddy: buddy-broken cannot add its command wreck: ")
    assert reason in err
    assert err.count("\n") == 1
    assert {"generate", "toy", "serve"} <= set(listed(out))
    assert buddy("toy", "hello") == (0, "toy says hello\n", err)


def test_a_command_of_ours_asks_no_other_package(tmp_path, buddy):
    install(tmp_path, "buddy-broken", {"wreck": "nowhere:COMMAND"}, {})
    empty = "buddy: the prompt is empty: write what the model is to answer\n"
    assert buddy("generate", "")[::2] == (2, empty)


def test_of_two_commands_with_one_name_the_first_counts(tmp_path, buddy):
    ours = TOY.replace('name="toy"', 'name="info"')
    install(tmp_path, "buddy-a", {"toy": "buddy_a:COMMAND"}, {"buddy_a": TOY})
    install(
        tmp_path,
        "buddy-b",
        {"info": "buddy_b:COMMAND", "toy": "buddy_c:COMMAND"},
        {"buddy_b": ours, "buddy_c": TOY.replace("toy says", "another says")},
    )
    code, out, err = buddy("--help")
    assert code == 0
    assert sorted(err.splitlines()) == [
        "buddy: buddy-b adds a command info, which buddy-llm has: left out",
        "buddy: buddy-b adds a command toy, which buddy-a has: left out",
    ]
    assert listed(out).count("info") == listed(out).count("toy") == 1
    assert buddy("toy", "hello")[1] == "toy says hello\n"
    assert "what each budget" in buddy("info", "--help")[1]


def test_each_command_of_ours_is_found_by_the_name_of_its_file():
    """So `buddy generate` imports one module of commands, and asks no other package."""
    own = list(registry._commands_of(registry.own_commands))
    assert len(own) >= 10
    for command in own:
        assert registry._own_command(command.name) is command
    assert registry._own_command("nonsense") is None
    assert registry._own_command("..x") is None
