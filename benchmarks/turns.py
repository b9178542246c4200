"""Processes that take turns: each is stopped while another works, lest it spin on the cores."""

import json
import os
import signal
import subprocess
import sys


def threads_of(number):
    """Variables by which a process of its own, of vLLM too, runs on so many cores."""
    return {
        "OMP_NUM_THREADS": str(number),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(number))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }


class Engine:
    """A process that is stopped while it is not asked. It answers lines of JSON by lines of JSON.

    Args:
        command: What it runs; its first line says what it is, and becomes `facts`.
        environment: Variables beside this process' own.
    """

    def __init__(self, command, environment):
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.facts = self._read()
        self._signal(signal.SIGSTOP)

    def ask(self, case):
        """What it answers to a case."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        found = self._read()
        self._signal(signal.SIGSTOP)
        return found

    def end(self):
        """Let the process go."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit("an engine ended before it answered: its message is above")
        return json.loads(line)

    def _signal(self, which):
        os.killpg(self._process.pid, which)


def answer_lines(make):
    """What an engine's process does: say what it is, and answer each line that comes in.

    Args:
        make: Gives what answers a case, and what the engine says of itself.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    run, facts = make()
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
