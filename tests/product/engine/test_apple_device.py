"""Apple's GPU knows no float64, so inference makes none there; pretended, as by `tests.pretend`."""

from unittest.mock import patch

import pytest
import torch

from buddy import DepthTrace
from buddy.engine.influence import block_influence, summary_cosine
from tests.methods.adainfer.test_policy import adaptive
from tests.pretend import AppleDevice, move
from tests.product.serving.made import Bench, byte_buddy, prompts, request
from tests.tiny import padded, random_ids, tiny_buddy

PROMPTS, MASK = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")


@pytest.fixture(autouse=True)
def apple(monkeypatch):
    monkeypatch.setattr("tests.pretend.TYPE", "mps")


def test_it_refuses_float64_alone():
    with AppleDevice():
        there = torch.ones(2, device="mps")
        assert there.device.type == "mps"
        with pytest.raises(TypeError, match="float64"):
            there.double()
        assert torch.ones(2).double().dtype == torch.float64


@pytest.mark.parametrize("batch_route", ["independent", "shared"])
@pytest.mark.parametrize("planner", [{}, {"context_layer": 2}, {"summary": "ema"}], ids=str)
def test_a_routed_text(planner, batch_route):
    options = {"attention_mask": MASK, "budget": 0.7, "do_sample": False, "max_new_tokens": 3}
    options["batch_route"] = batch_route
    buddy = tiny_buddy(engine="general", predictor=True, **planner)
    expected = buddy.generate(PROMPTS, **options)
    with AppleDevice(), patch("torch.mps.synchronize") as waits:
        made = move(buddy).generate(PROMPTS, **options, trace=DepthTrace())
    assert waits.call_count == 2 * 3, "before and after each step that is traced"
    assert made.tolist() == expected.tolist()


def test_adainfer():
    buddy = adaptive(engine="general")
    expected = buddy.generate(PROMPTS, attention_mask=MASK, do_sample=False, max_new_tokens=3)
    with AppleDevice():
        move(buddy)
        made = buddy.generate(PROMPTS, attention_mask=MASK, do_sample=False, max_new_tokens=3)
    assert made.tolist() == expected.tolist()


SAMPLINGS = [
    {},
    {"temperature": 0.8, "top_k": 9, "seed": 1, "top_logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "seed": 2},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
]


def test_a_server_samples():
    asked = [
        request(prompt, 3, **sampling)
        for prompt, sampling in zip(prompts(4, most=6), SAMPLINGS, strict=True)
    ]
    buddy = byte_buddy(engine="general")
    expected = Bench(buddy, rows=4).run(*asked)
    with AppleDevice():
        made = Bench(move(buddy), rows=4).run(*asked)
    assert [told.tokens for told in made] == [told.tokens for told in expected]


@pytest.mark.parametrize("measure", [block_influence, summary_cosine])
def test_a_quick_order(measure):
    backbone, ids = tiny_buddy().backbone, random_ids(2, 8)
    expected = measure(backbone, ids)
    with AppleDevice():
        made = measure(move(tiny_buddy()).backbone, ids)
    assert made.dtype == torch.float64
    # atol: means in float32.
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
