"""A model in other processes and threads: spawned work, forked are told, threads agree."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from buddy import BuddyForCausalLM
from tests.tiny import random_ids, tiny_buddy

ROOT = Path(__file__).parents[3]
LIMIT_S = 300


def answer(model, row=0):
    ids = random_ids(3, 12)[row : row + 1, : 12 - 3 * row]
    budget = ("4 blocks", 1.0, 0.7)[row]
    return model.generate(ids, budget=budget, max_new_tokens=8, do_sample=False).tolist()


def answer_from(folder):
    return answer(BuddyForCausalLM.from_pretrained(folder))


def test_a_spawned_process_gives_the_same_tokens(tmp_path):
    model = tiny_buddy()
    model.save_pretrained(tmp_path / "model")
    expected = answer(model)
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(answer_from, (tmp_path / "model",)).get(LIMIT_S) == expected


_FORKS = """
import os, sys, threading
import torch
torch.set_num_threads(2)
from tests.product.engine.test_processes import answer
from tests.tiny import tiny_buddy

for engine in ("general", "auto"):
    model = tiny_buddy(engine=engine)
    if engine == "auto":
        answer(model)
    if not os.fork():
        break
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(f"{engine}: {code}")
else:
    sys.exit()
for again in (answer, lambda model: tiny_buddy()):
    try:
        again(model)
        os._exit(3)
    except ValueError as error:
        message = str(error)
        assert '"spawn"' in message and "set_num_threads(1)" in message, message
# A thread of its own has a team of its own.
made = []
thread = threading.Thread(target=lambda: made.append(answer(model)))
thread.start()
thread.join()
torch.set_num_threads(1)
made.append(answer(model))
assert made[0] == made[1]
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_is_told_what_to_do_and_does_not_hang():
    """A model that has only been built, and one that has run."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("summary", [{}, {"summary": "ema", "ema_decay": 0.5}], ids=["mean", "ema"])
def test_threads_that_generate_with_one_model_get_what_each_gets_alone(engine, summary):
    alone = [answer(tiny_buddy(engine=engine, **summary), row) for row in range(3)]
    assert len({str(tokens) for tokens in alone}) == 3
    model = tiny_buddy(
        engine=engine, **summary
    )  # made anew: its engine and table are not there yet
    rows = [number % 3 for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda row: answer(model, row), rows))
    assert made == [alone[row] for row in rows]
