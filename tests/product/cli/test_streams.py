"""The standard streams may be closed, full, broken or of another encoding: one line says so."""

import io
import os
import signal
import subprocess
import sys

import pytest
from transformers import GenerationConfig

from buddy.cli import chat_session, main, streams
from buddy.errors import CheckpointError

BUDDY = [sys.executable, "-m", "buddy"]
FULL = "/dev/full"


def shell(command, **environment):
    """Run a command line of bash, in which `buddy` is the command of this checkout."""
    line = f'buddy() {{ "{sys.executable}" -m buddy "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("buddy --help >&-", 2, "buddy: stdout is closed: connect it to"),
        (f"buddy --help >{FULL}", 1, "buddy: stdout cannot be written whole: No space left"),
        ("buddy generate - <&-", 2, "buddy: stdin is closed"),
        ("buddy chat <&-", 2, "buddy: stdin is closed"),
        ("buddy generate - </dev/null", 2, "buddy: the prompt is empty"),
        ("printf '\\xff\\x00' | buddy generate -", 2, "buddy: the prompt on stdin is no UTF-8"),
        ("buddy nonsense 2>&-", 2, None),
        (f"buddy nonsense 2>{FULL}", 2, None),
        ("buddy --help >&- 2>&- <&-", 2, None),
        ("LC_ALL=C PYTHONIOENCODING=ascii buddy generate x -b '5·é'", 2, "budget '5.\\xe9' cannot"),
        ("set -o pipefail; buddy --help | exec true; exit ${PIPESTATUS[0]}", 141, None),
    ],
)
@pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")
def test_it_ends_with_one_line_and_a_code(command, code, says):
    done = shell(command.replace("| exec true", "| (exec <&-; sleep 5)"))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == (says is not None)
    assert says is None or lines[0].startswith("buddy: ")
    assert says is None or says in lines[0]


def test_ctrl_c_is_one_line_from_the_first_import_on():
    code = (
        "import sys, buddy.__main__ as start; sys.argv = ['buddy', 'generate', '-']; "
        "print('here', flush=True); start.command()"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == "buddy: interrupted\n"


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "buddy: interrupted\n"),
        (MemoryError(), 1, "buddy: there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "not enough memory"),
        (OSError(5, "Input/output error", "/dev/x"), 1, "buddy: /dev/x: Input/output error\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_the_machine_cannot_do_is_one_line(monkeypatch, capsys, raised, code, says):
    class Stdin:
        def read(self):
            raise raised

    monkeypatch.setattr(sys, "argv", ["buddy", "generate", "-"])
    monkeypatch.setattr(sys, "stdin", Stdin())
    monkeypatch.setattr(streams, "_read", lambda _: Stdin().read())
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == code
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == bool(says)


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["buddy", "generate", "-"])
    monkeypatch.setattr(streams, "_read", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.main()


def written(text, encoding):
    """What is on disk after a text was written to a standard output of an encoding."""
    file = io.BytesIO()
    out = io.TextIOWrapper(file, encoding, streams.ERRORS)
    out.write(text)
    out.flush()
    return file.getvalue().decode(encoding)


def test_no_character_is_lost_nor_stops_a_text_in_another_encoding():
    assert written("a · b ±1 █…", "ascii") == "a . b +-1 #..."
    assert written("caf\xe9 \u6f22 \U0001f600", "ascii") == "caf\\xe9 \\u6f22 \\U0001f600"
    assert written("caf\xe9 \u6f22", "latin-1") == "caf\xe9 \\u6f22"
    assert written("caf\xe9 \udc80", "utf-8") == "caf\xe9 \\udc80"


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), MemoryError()])
def test_what_the_machine_cannot_do_is_not_blamed_on_a_models_wishes(error):
    wishes = GenerationConfig(penalty_alpha=0.6)
    with pytest.raises(type(error)), chat_session._explained_by_wishes(wishes):
        raise error
    with (
        pytest.raises(CheckpointError, match="asks for penalty_alpha: delete that there"),
        chat_session._explained_by_wishes(wishes),
    ):
        raise RuntimeError


def test_what_every_file_has_is_no_wish():
    wishes = GenerationConfig(use_cache=True, output_attentions=False, output_hidden_states=False)
    with pytest.raises(RuntimeError), chat_session._explained_by_wishes(wishes):
        raise RuntimeError
