"""The container file, as far as no builder is needed: `.ci/container` builds and runs it."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
from typer.main import get_command

from buddy.cli.main import app
from buddy.serving.http.server import Address, check_reach
from tests.product.serving.serving import served
from tests.test_docs import ROOT

TEXT = (ROOT / "deploy" / "Containerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def values(instruction):
    return [value for name, value in STEPS if name == instruction]


def test_its_base_is_pinned_and_a_python_that_buddy_runs_on():
    [python, _] = values("ARG")
    version = re.fullmatch(r"PYTHON=3\.(\d+)-slim-[a-z]+", python)
    assert int(version[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert {base.split(" AS ")[0] for base in values("FROM")} == {"python:${PYTHON}"}


def test_what_it_copies_is_there_and_is_all_that_a_wheel_needs():
    copied = [path for line in values("COPY") if "--from" not in line for path in line.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    needed = {PROJECT["readme"], *PROJECT["license-files"]}
    assert set(copied) == needed | {"pyproject.toml", "hatch_build.py", "src"}
    sent = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert sorted(line[1:] for line in sent) == sorted(copied)


def test_it_serves_without_root_where_the_volume_keeps_everything():
    [user], [volume] = values("USER"), values("VOLUME")
    assert user.isdecimal()
    assert user != "0"
    assert all(setting.split("=")[1].startswith(volume) for setting in values("ENV")[0].split())
    last = max(place for place, (name, _) in enumerate(STEPS) if name == "RUN")
    assert last < STEPS.index(["USER", user])


def test_the_command_is_one_of_ours_at_the_port_that_is_exposed():
    [entry], [arguments] = map(json.loads, values("ENTRYPOINT")), map(json.loads, values("CMD"))
    assert entry == ["buddy"]
    command = get_command(app)
    context = command.make_context("buddy", list(arguments))
    name, serve, rest = command.resolve_command(context, arguments)
    asked = serve.make_context(name, rest).params
    assert str(asked["port"]) == values("EXPOSE")[0]
    check_reach(Address(host=asked["host"], port=asked["port"]), has_keys=True)
    assert f":{asked['api_key_file']}:ro" in TEXT


@pytest.mark.parametrize("is_up", [True, False])
def test_the_health_check_asks_whether_the_server_is_ready(is_up):
    [check] = values("HEALTHCHECK")
    python, *arguments = json.loads(check.partition("CMD ")[2])
    assert python == "python"
    [port] = values("EXPOSE")
    with served() as running:
        there = f"127.0.0.1:{running.address[1] if is_up else 1}"
        arguments = [argument.replace(f"127.0.0.1:{port}", there) for argument in arguments]
        done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    assert there in arguments[-1]
    assert (done.returncode == 0) == is_up


def test_its_script_is_one_that_a_shell_reads():
    for name in ("container", "run"):
        subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=True)
