"""`buddy serve`: what is wrong with its command line is one line, before a model is loaded."""

import importlib.util
import io
import sys

import pytest
from rich.console import Console

from buddy.cli.commands.serve import show_panel
from buddy.cli.main import main
from buddy.serving.http.server import Address, listen
from tests.product.serving.scripted import ScriptedEngine


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["buddy", "serve", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    def loaded(*arguments, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr("buddy.cli.loading.load_to_run", loaded)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "there are no keys: give --api-key-file"),
        (["--port", "65536"], "must be at least 0 and at most 65,535"),
        (["--api-key-file", "{none}"], "cannot be read: No such file"),
        (["--api-key-file", "{empty}"], "there is no key: write one a line"),
        (["--min-budget", "much"], "budget 'much' cannot be read"),
        (["--default-budget", "2"], 'for a count write "2 blocks"'),
        (["--effort-budgets", "low"], "efforts 'low' cannot be read"),
        (["--effort-budgets", "low=much"], "budget 'much' cannot be read"),
        (["--max-rows", "0"], "must be at least 1"),
        (["--max-rows", "1025"], "must be at least 1 and at most 1,024, got 1025"),
        (["--slo-itl-ms", "0"], "must be above 0"),
        (["--batch-route", "none"], "'none' is not one of"),
        (["--drafts", "ngram+auto"], 'drafts must be "none", "ngram", a budget'),
        (["--drain-s", "nan"], "must be at least 0"),
        (["--host", "192.0.2.1", "--api-key-file", "{keys}"], "cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_it_is_one_line(monkeypatch, capsys, tmp_path, arguments, said):
    (tmp_path / "empty").write_text("")
    (tmp_path / "keys").write_text("k" * 20)
    paths = {name: str(tmp_path / name) for name in ("none", "empty", "keys")}
    code, err = run(monkeypatch, capsys, *(argument.format(**paths) for argument in arguments))
    assert said in err
    assert err.count("\n") == 1
    assert code == 2


def test_a_port_in_use_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    with listen(Address(host="127.0.0.1", port=0)) as taken:
        port = taken.getsockname()[1]
        code, err = run(monkeypatch, capsys, "--port", str(port))
    assert err == (
        f"buddy: port {port} of 127.0.0.1 is in use: stop what listens there, or give another "
        "--port\n"
    )
    assert code == 2


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "buddy.cli.commands.serve.find_spec",
        lambda name: None if name in ("uvicorn", "llguidance") else find(name),
    )
    code, err = run(monkeypatch, capsys)
    assert err == ("buddy: buddy serve needs uvicorn, llguidance: pip install 'buddy-llm[serve]'\n")
    assert code == 2


def test_the_panel_says_address_model_and_limits_plainly_in_a_pipe():
    engine = ScriptedEngine(str)
    try:
        for is_terminal in (False, True):
            out = io.StringIO()
            console = Console(file=out, force_terminal=is_terminal, width=100)
            with listen(Address(host="127.0.0.1", port=0)) as listener:
                port = listener.getsockname()[1]
                show_panel(console, listener, engine, {"queue": "64"})
            text = out.getvalue()
            assert f"http://127.0.0.1:{port}" in text
            assert "tiny, 30 blocks, context 256" in text
            assert "2 ms a token" in text
            assert ("\x1b" in text) == is_terminal
            if not is_terminal:
                assert text.startswith(f"address: http://127.0.0.1:{port}\n")
                assert "queue: 64\n" in text
    finally:
        engine.close(2.0)
