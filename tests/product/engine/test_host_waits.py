"""How often the host waits for a GPU in a decode step: once, for the new tokens."""

from dataclasses import dataclass, field

import pytest
import torch

from buddy import DepthTrace
from buddy.engine.executors.graphs import GraphDecoder
from buddy.errors import ModelError
from buddy.serving.control.protocol import NoControl
from tests.pretend import OnDevice, PretendDevice, move
from tests.product.serving.made import Bench, byte_buddy, prompts, request
from tests.spread import spread
from tests.tiny import padded, random_ids, tiny_buddy

ENGINES = pytest.mark.parametrize("engine", ["general", "graphs"])
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.2}


def at_once(work):
    """In the place of a CUDA graph: the work itself."""
    work()
    return work


def on_device(monkeypatch, buddy, engine):
    """The model there, run by captured blocks or by the general path."""
    move(buddy)
    if engine == "graphs":
        decoder = GraphDecoder(buddy.backbone, at_once)
        monkeypatch.setattr(buddy.executor, "fast_path", lambda: decoder)
    return buddy


def generated(buddy, new_tokens, **options):
    """Tokens, and where the host waited."""
    with PretendDevice() as device:
        torch.manual_seed(0)
        made = buddy.generate(**options, max_new_tokens=new_tokens)
    assert isinstance(made, OnDevice)
    return made.tolist(), device.waits


ROWS, MASK = padded([random_ids(1, 3 + n % 3, seed=n)[0] for n in range(8)], "left")
BATCH = {"input_ids": ROWS, "attention_mask": MASK, "do_sample": True, **SAMPLED, **PENALTIES}
ALONE = {"input_ids": ROWS[:1, -3:]}
STEADY = {"policy": "routed", "reroute": "prefill"}
"""A plan that stays as it is."""


@ENGINES
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        (ALONE | {"policy": "static:2,3,4,1"}, 1),
        (BATCH | {"policy": "static:2,3,4,1", "batch_route": "shared"}, 1),
        (ALONE | STEADY, 1),
        (BATCH | STEADY | {"budget": [0.5, 0.7, "4 blocks", 1.0] * 2}, 1),
        (BATCH | STEADY | {"eos_token_id": list(range(8, 19)), "pad_token_id": 7}, 1),
        (BATCH | {"policy": "routed", "batch_route": "shared"}, 2),
    ],
    ids=["static", "static-batch", "steady", "mixed", "some-end", "a-plan-a-step"],
)
def test_a_step_of_generate_waits_for_its_tokens_and_a_new_plan(
    monkeypatch, engine, options, waits
):
    options = {"budget": 0.7, **options}
    buddy = tiny_buddy(engine="general", policy=options.pop("policy"))
    torch.manual_seed(0)
    expected = buddy.generate(**options, max_new_tokens=5).tolist()
    with PretendDevice():
        on_device(monkeypatch, buddy, engine)
    _, before = generated(buddy, 4, **options)
    made, after = generated(buddy, 5, **options)
    assert made == expected
    assert len(step := list((after - before).elements())) == waits, step


@pytest.mark.parametrize("options", [ALONE, BATCH], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_refused_with_the_tokens(options):
    buddy = tiny_buddy(engine="general", policy="full")
    with PretendDevice():
        move(buddy)
    with torch.no_grad():
        buddy.backbone.final_norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match="are not finite"):
        generated(buddy, 3, **options)


@dataclass(frozen=True)
class Noting(NoControl):
    """Keeps what passes took."""

    seconds: list = field(default_factory=list)

    def report(self, step):
        self.seconds.append(step.seconds)


def test_a_server_is_told_what_a_step_took_on_the_device():
    control = Noting()
    with PretendDevice():
        buddy = move(byte_buddy("static:2,3,4,1", engine="general"))
        Bench(buddy, rows=2, control=control).run(*(request(p, 3) for p in prompts(2)))
    assert len(control.seconds) >= 3
    assert set(control.seconds) == {0.25}


@pytest.mark.parametrize("form", [{}, {"drafts": "ngram"}, {"draft_budget": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("put", "step_s"),
    [(move, 1.0), (lambda buddy: move(buddy, 1), 10.0), (spread, 111.0)],
    ids=["one", "another", "three"],
)
def test_a_trace_is_timed_when_every_device_of_the_model_has_done_its_work(
    monkeypatch, put, step_s, form
):
    now = [0.0]

    def synchronize(device):
        now[0] += 10.0**device.index

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    buddy, trace = tiny_buddy(engine="general", policy="static:2,3,4,1"), DepthTrace()
    with PretendDevice():
        monkeypatch.setattr("torch.cuda.synchronize", synchronize)
        put(buddy).generate(**ALONE, **form, max_new_tokens=4, do_sample=False, trace=trace)
    took_s = [step.ended_s - step.started_s for step in trace.steps]
    assert len(took_s) == 4
    assert took_s[0] == step_s
    kept = [round(step_s / taken, 6) for taken in took_s]  # tokens that a pass over drafts kept
    assert all(number in (1, 2, 3) for number in kept)


@ENGINES
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, SAMPLED | PENALTIES | {"logit_bias": {65: 2.0}, "seed": 3}],
    ids=["greedy", "wide", "seeded"],
)
def test_a_step_of_a_server_waits_for_its_tokens(monkeypatch, engine, sampling):
    buddy = byte_buddy("static:2,3,4,1", engine="general")
    asked = [request(prompt, 6, **sampling) for prompt in prompts(4)]
    expected = [told.tokens for told in Bench(buddy, rows=4).run(*asked)]
    with PretendDevice() as device:
        on_device(monkeypatch, buddy, engine)
        bench = Bench(buddy, rows=4)
        told = [bench.add(each) for each in asked]
        for _ in range(12):  # prompts, and the first tokens of all
            if min(len(each.tokens) for each in told) < 2:
                bench.batcher.step()
        before, steps = device.waits.copy(), bench.batcher.steps
        bench.batcher.step()
        step = list((device.waits - before).elements())
        passes = bench.batcher.steps - steps
        while bench.batcher.has_work:
            bench.batcher.step()
    if "temperature" not in sampling or "seed" in sampling:
        assert [each.tokens for each in told] == expected
    assert len(step) == passes, step


EIGHT = [
    {},
    *({"temperature": 1.0}, SAMPLED, {"temperature": 0.8, "top_p": 0.9}),
    {"temperature": 0.8, "top_k": 9, "logit_bias": {65: 2.0, 66: -1.0}},
    SAMPLED | PENALTIES | {"presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 0.7, "top_logprobs": 3},
]
"""What rows of a batch ask for that is sampled on the device; the first is greedy."""


def test_rows_that_are_sampled_each_in_its_own_way_are_waited_for_once():
    with PretendDevice() as device:
        buddy = move(byte_buddy("static:2,3,4,1", engine="general"))
        bench = Bench(buddy, rows=8)
        asked = zip(prompts(8), EIGHT, strict=True)
        told = [bench.add(request(prompt, 6, **sampling)) for prompt, sampling in asked]
        while min(len(each.tokens) for each in told) < 2:
            bench.batcher.step()
        device.waits.clear()
        device.most_read = 0
        steps = bench.batcher.steps
        bench.batcher.step()
        assert bench.batcher.steps == steps + 1
    assert len(step := list(device.waits.elements())) == 1, step
    assert device.most_read == 8 + 1 + 3 + 3, "tokens, and the logprobs of one row"
