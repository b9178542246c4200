"""`buddy load-test`, as `buddy load`: mistakes are one line, found before anything is sent."""

import json
import subprocess
import sys

import pytest

from tests.lab.load.test_load import Server, serve  # noqa: F401  (a fixture)


def load(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "buddy", "load", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_server_is_loaded_and_recorded(serve, tmp_path):  # noqa: F811
    out = tmp_path / "load.json"
    done = load(
        serve(Server(refuses=4)), "--rate", 12, "--duration", 1, "--out", out, "-b", "0.5=2",
        "-b", "none", "--slo-ttft-ms", 5000, "--label", "mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert "429" in done.stderr
    record = json.loads(out.read_text())
    assert record["kind"] == "serving-load"
    assert record["config"]["label"] == "mine"
    assert record["config"]["budgets"] == [["0.5", 2.0], ["none", 1.0]]
    point = record["results"]["points"][0]
    assert point["refused"] == point["requests"] // 4
    assert point["goodput_rps"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:9", "--rate", "0"], "must be above 0"),
        (["http://127.0.0.1:9", "--rate", "1", "-b", "0.5=x"], "BUDGET=WEIGHT"),
        (["127.0.0.1:9", "--rate", "1"], "is like http://127.0.0.1:8000"),
        (["http://127.0.0.1:99999", "--rate", "1"], "a port from 1 to 65535"),
        (["http://127.0.0.1:http", "--rate", "1"], "a port from 1 to 65535"),
        (["http://[::1", "--rate", "1"], "is like http://127.0.0.1:8000"),
        (["http://", "--rate", "1"], "is like http://127.0.0.1:8000"),
        (["http://127.0.0.1:9", "--rate", "1", "--key-env", "NO_SUCH_KEY"], "is not set"),
        (["http://127.0.0.1:9", "--rate", "1", "--prompts", "nowhere.txt"], "cannot be read"),
        (["http://127.0.0.1:9", "--rate", "1", "--duration", "0.5"], "start a server there"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says, tmp_path):
    done = load(*arguments, "--out", tmp_path / "load.json")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "load.json").exists()


def test_a_key_that_no_header_can_carry_is_refused_before_anything_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "cl\u00e9")
    out = tmp_path / "load.json"
    done = load("http://127.0.0.1:9", "--rate", 1, "--key-env", "SOME_KEY", "--out", out)
    assert done.returncode == 2
    assert done.stderr.endswith("must be printable ASCII: no header carries others\n")


def test_a_run_in_which_every_request_fails_says_why_and_fails(serve, tmp_path):  # noqa: F811
    out = tmp_path / "load.json"
    done = load(serve(Server(breaks=True)), "--rate", 4, "--duration", 1, "--out", out)
    assert done.returncode == 1
    count = len(json.loads(out.read_text())["results"]["requests"])
    assert f"{count} of {count} requests failed: " in done.stderr
    assert "the engine failed" in done.stderr


def test_help_loads_neither_torch_nor_httpx():
    code = """
import sys
sys.argv = ["buddy", "load", "--help"]
import buddy.cli.main
try:
    buddy.cli.main.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "transformers", "numpy", "httpx", "fastapi"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--slo-ttft-ms" in done.stdout
