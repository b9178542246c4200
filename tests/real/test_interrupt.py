"""Ctrl-C ends a real generation cleanly."""

import signal
import subprocess
import sys
import threading

import pytest

pytestmark = pytest.mark.real

LIMIT_S = 300


def start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "buddy", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # A process that prints nothing would be waited for without end.
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.daemon = True
    watchdog.start()
    return process


def test_generate_stops_says_what_it_ran_and_exits_130():
    process = start("generate", "Tell a long story about a dragon.", "--max-new-tokens", "2000")
    assert process.stdout.read(12), "the text streams while it is made"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "blocks per token" in stderr
    assert "tokens/s" in stderr


def test_chat_stops_the_answer_and_goes_on():
    process = start("chat", "--max-new-tokens", "300")
    process.stdin.write("Tell a long story about a dragon.\n")
    process.stdin.flush()
    assert process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate("Say hello.\n/exit\n", timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert stdout.strip()
    assert stderr.count("30 of 30 blocks · ") == 2
    assert stderr.count(" · stopped") == 1
