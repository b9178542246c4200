"""A conversation at a real terminal: keys, Ctrl-C, files and the history of lines."""

import json
import re
import shutil
import stat
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from buddy.cli.main import main
from tests.product.cli import forked, test_cli
from tests.product.cli.terminal import terminal

folder = test_cli.folder


@pytest.fixture(scope="module")
def talker(folder, tmp_path_factory):
    """The tiny model with a context in which an answer takes minutes."""
    path = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200_000}))
    return str(path)


@contextmanager
def chat(folder, home, *arguments, tokens=4):
    environment = {"BUDDY_HOME": str(home), "TERM": "xterm"}
    command = [
        "chat",
        folder,
        "--policy=random",
        "--engine=general",
        "--max-new-tokens",
        str(tokens),
        *arguments,
    ]
    with terminal(command, environment) as there:
        there.wait_for("> ")
        yield there


def messages(path):
    return [message["content"] for message in json.loads(path.read_text())]


def test_ctrl_c_keeps_the_conversation_and_lines_are_there_in_the_next_session(folder, tmp_path):
    saved, history = tmp_path / "talk.json", tmp_path / "chat-history"
    with chat(folder, tmp_path, "--budget", "0.5") as there:
        there.type("w3 w4\n")
        shown = there.wait_for(" 4 tokens")
        footer = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()[-1]
        assert re.fullmatch(r"budget 0\.5 · 3 of 6 blocks · [\d,.]+ tokens/s · 4 tokens", footer)
        there.wait_for("> ")
        there.type("w5 w6")
        there.wait_for("w5 w6")
        there.type("\x03")
        assert "again" not in there.wait_for("> ")
        there.type(f"/save {saved}\n")
        there.wait_for("2 messages in")
        there.wait_for("> ")
        there.type("\x03")
        there.wait_for("Ctrl-C again, or Ctrl-D, ends the conversation")
        there.wait_for("> ")
        there.type("/help\n")
        there.wait_for("ends the answer")
        there.wait_for("> ")
        there.type("\x03")
        there.wait_for("> ")
        there.type("\x03")
    assert there.code == 0
    assert messages(saved)[0] == "w3 w4"
    assert history.read_text().splitlines() == ["w3 w4", f"/save {saved}", "/help"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with chat(folder, tmp_path) as there:
        there.type("\x1b[A" * 3 + "\n")  # three lines up
        assert "w3 w4" in there.wait_for(" 4 tokens")
        there.wait_for("> ")
        there.type("\x04")
    assert there.code == 0


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(talker, tmp_path):
    saved = tmp_path / "talk.json"
    (tmp_path / "chat-history").mkdir()
    with chat(talker, tmp_path, tokens=100_000) as there:
        assert "lines are not kept in" in there.shown
        there.type("w3 w4\n")
        there.wait_for("\nw")
        there.type("\x03")
        there.wait_for("· stopped")
        there.wait_for("> ")
        there.type(f"/save {saved}\n")
        there.wait_for("2 messages in")
        there.wait_for("> ")
        there.type("\x04")
    assert there.code == 0
    question, answer = messages(saved)
    assert question == "w3 w4"
    assert answer.split()


@pytest.mark.parametrize(("options", "is_kept"), [([], True), (["--no-history"], False)])
def test_no_history_keeps_no_line(monkeypatch, tmp_path, options, is_kept):
    given = []

    def no_lines(console, history):
        given.append(history)
        return []

    monkeypatch.setenv("BUDDY_HOME", str(tmp_path))
    monkeypatch.setattr("buddy.cli.chat_session.ChatSession", Mock())
    monkeypatch.setattr("buddy.cli.commands.chat.typed_lines", no_lines)
    monkeypatch.setattr(sys, "argv", ["buddy", "chat", *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert given == [tmp_path / "chat-history" if is_kept else None]


def test_a_saved_conversation_goes_on_and_nothing_else_is_replaced(folder, tmp_path):
    saved, other = tmp_path / "talk.json", tmp_path / "other.txt"
    other.write_text("mine")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('[{"role": "wizard", "content": "w3"}]')
    lines = ["w3 w4", f"/save {saved}", "/reset", f"/load {saved}", "w5", f"/save {saved}"]
    lines += [
        f"/save {other}",
        f"/load {wrong}",
        "/save",
        f"/load {tmp_path}/nowhere.json",
        "/exit",
    ]
    environment = {"BUDDY_HOME": str(tmp_path)}
    arguments = [
        "chat",
        "-m",
        folder,
        "--policy=random",
        "--engine=general",
        "--max-new-tokens",
        "4",
    ]
    done = forked.run(arguments, environment, "\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert [role["role"] for role in json.loads(saved.read_text())] == ["user", "assistant"] * 2
    assert messages(saved)[::2] == ["w3 w4", "w5"]
    assert other.read_text() == "mine"
    for said in (
        "2 messages in",
        "2 messages of",
        "4 messages in",
        "other.txt is no JSON",
        "wrong.json is no saved conversation",
        "/save needs the name of a file",
        "nowhere.json cannot be read",
    ):
        assert said in done.stderr
    assert not (tmp_path / "chat-history").exists(), "lines that nobody typed are not kept"
