"""Which engine runs, and why, is said: by the choice, by a warning, and by what was traced."""

import logging
import shutil

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.engine.executors import choice
from buddy.engine.executors.choice import describe_engine
from buddy.engine.executors.native.decoder import MOST_BESIDE_TORCH
from buddy.errors import ModelError
from buddy.generation.trace import DepthTrace
from tests.tiny import random_ids, tiny_buddy, tiny_model

MOST = MOST_BESIDE_TORCH["float32"]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(choice, "_warned_of", set())


@needs_compiler
def test_the_fast_engine_is_named_without_a_reason_or_a_warning(caplog):
    executor = tiny_buddy().executor
    assert (executor.name, executor.why_general) == ("native", None)
    assert executor.describe() == f"native engine ({executor.library.instructions})"
    assert executor.library is not None
    assert caplog.records == []


def test_the_general_engine_that_was_asked_for_is_no_cause_for_a_warning(caplog, no_kernel):
    executor = tiny_buddy(engine="general").executor
    assert executor.name == "general"
    assert executor.describe() == "general engine (it was asked for)"
    assert executor.library is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "no C compiler was found: CC names 'no-such-compiler'"),
        ("gemma", "the native kernel does not know model type 'gemma'"),
        ("qwen3_moe", "the native kernel does not know model type 'qwen3_moe'"),
    ],
)
def test_auto_says_once_in_a_process_what_it_goes_without_and_why(
    caplog, capfd, no_kernel, family, reason
):
    for _ in range(2):
        buddy = BuddyForCausalLM(tiny_model(family))
        buddy.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False)
        assert buddy.executor.describe().startswith(f"general engine ({reason}")
    [record] = caplog.records
    assert (record.name.split(".")[0], record.levelno) == ("buddy", logging.WARNING)
    assert "general engine, which takes several times as long" in record.message
    assert reason in record.message
    assert "\n" not in record.message
    assert capfd.readouterr().out == ""


def test_native_that_cannot_be_had_is_refused_with_the_reason(no_kernel, caplog):
    buddy = tiny_buddy(engine="native")
    with pytest.raises(ModelError, match=r'engine "native" cannot be had: no C compiler was found'):
        buddy.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False)
    assert caplog.records == []


def test_a_device_that_no_fast_engine_knows_is_named():
    buddy = BuddyForCausalLM(tiny_model().to("meta"))
    assert "the model is on meta, and the native kernel runs on a CPU" in buddy.executor.describe()


def test_a_reason_goes_with_any_engine():
    assert describe_engine("graphs", None) == "CUDA graphs"
    assert describe_engine("general and native", "so") == "general and native (so)"


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "tokens", "engines"),
    [
        (2, MOST // 2, ["native", "native", "native", "native"]),
        (2, MOST // 2 + 1, ["general", "native", "native", "native"]),
        (MOST + 1, 2, ["general", "general", "general", "general"]),
    ],
)
def test_a_trace_says_who_ran_each_pass(rows, tokens, engines):
    trace = DepthTrace()
    ids = random_ids(rows, tokens)
    tiny_buddy(engine="native").generate(ids, max_new_tokens=4, do_sample=False, trace=trace)
    assert [step.engine for step in trace.steps] == engines
    assert trace.decode_engine == engines[-1]


def test_a_trace_of_one_pass_has_no_engine_for_decode_steps():
    trace = DepthTrace()
    tiny_buddy().generate(random_ids(1, 4), max_new_tokens=1, do_sample=False, trace=trace)
    assert trace.decode_engine is None


@torch.no_grad()
@pytest.mark.parametrize("through", ["generate", "forward"])
def test_a_trace_begins_when_kernel_and_token_table_are_made(monkeypatch, through):
    buddy = tiny_buddy(summary="ema", ema_decay=0.5)
    happened = []

    def noting(name, make):
        return lambda *arguments: (happened.append(name), make(*arguments))[1]

    monkeypatch.setattr(buddy.executor, "_make", noting("kernel", buddy.executor._make))
    from buddy.engine import tabulate

    monkeypatch.setattr(tabulate, "first_values", noting("table", tabulate.first_values))
    trace = DepthTrace(clock=lambda: happened.append("clock") or float(len(happened)))
    ids = random_ids(1, 4)
    if through == "generate":
        buddy.generate(ids, budget=0.7, max_new_tokens=3, do_sample=False, trace=trace)
    else:
        buddy(ids, budget=0.7, trace=trace)
    assert happened[:3] == ["kernel", "table", "clock"]
    assert set(happened[3:]) == {"clock"}
