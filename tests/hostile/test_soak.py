"""Clients of every kind at more than a server can do, for ten minutes by `make soak`.

The suite has some seconds of it.
"""

import json
import os
import subprocess
import sys
from functools import partial

import httpx
import pytest

from buddy.budget.thinking import ThinkingMarks
from buddy.serving.control.admission import AdmissionConfig
from buddy.serving.control.controller import ControlConfig
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.start import start_engine
from tests.hostile.soak import KINDS, Answer, Asked, check
from tests.product.serving.made import END, byte_buddy
from tests.product.serving.serving import served, until
from tests.product.serving.test_tools import TEMPLATE, tokenizer_of

SECONDS = float(os.environ.get("BUDDY_SOAK", "2"))


def test_no_request_is_lost_memory_is_flat_and_contracts_are_exact():
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = tokenizer_of(TEMPLATE + "{# </think> #}", *marks)
    model = byte_buddy(context=2048, ends=END)
    engine = start_engine(
        model,
        tokenizer,
        "tiny",
        ControlConfig(num_blocks=6, min_blocks=3, max_rows=8, itl_ms=50),
        AdmissionConfig(max_queue=16),
    )
    marks_of = partial(ThinkingMarks.of, tokenizer)
    rules = BudgetRules(num_blocks=6, has_predictor=False, find_marks=marks_of)
    with served(engine, tokenizer=tokenizer, rules=rules) as running:
        command = [sys.executable, "-m", "tests.hostile.soak", running.url]
        command += [str(os.getpid()), str(SECONDS)]
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        until(lambda: engine.gauges.running == engine.gauges.waiting == 0)
        assert not running.service.under_way
        assert httpx.get(f"{running.url}/ready").status_code == 200
    sys.stdout.write(made.stdout)
    figures = json.loads(made.stdout)
    assert figures["lost"] == []
    answered, refused, left = sum(figures["answered"].values()), figures["refused"], figures["left"]
    assert answered + refused + left == figures["asked"]
    assert figures["contracts"] > 0
    memory = figures["memory_mb"]
    quarter = len(memory) // 4
    assert max(memory[-quarter:]) < 1.05 * max(memory[quarter : 2 * quarter])
    if SECONDS >= 120:  # of so few not every kind comes, and all can wait
        assert len(figures["answered"]) >= len(KINDS) - 1  # all but those that leave
        assert refused > 0
        assert left > 0


def answered(runs, blocks):
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "buddy": {"blocks_executed": blocks}}
    usage["prompt_tokens_details"] = {"cached_tokens": 1}
    return Answer(runs=runs, reason="length", usage=usage)


def test_a_contract_that_is_off_by_a_block_is_told():
    asked = Asked("streamed", {"stream": True}, contract=(4, 3, 3))
    runs = ["1111", "0111", "1011"]
    check(asked, answered(runs, 4 * 4 + 2 * 3))
    with pytest.raises(ValueError, match="expected 22 blocks"):
        check(asked, answered(runs, 23))
    with pytest.raises(ValueError, match="runs of"):
        check(asked, answered(["1111", "1111", "1011"], 22))
    with pytest.raises(ValueError, match="expected an end"):
        check(asked, Answer())
