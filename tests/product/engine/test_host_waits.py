"""How often the host waits for a GPU in a decode step: once, for the new tokens."""

import pytest
import torch

from buddy.engine.executors.graphs import GraphDecoder
from buddy.errors import ModelError
from tests.pretend import OnDevice, PretendDevice, move
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
