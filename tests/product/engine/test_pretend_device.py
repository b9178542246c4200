"""The first commands on a GPU, on a pretended one: what they feed lies where the model does."""

import pytest
import torch

from buddy.serving.rows.calibrate import measure
from tests.pretend import MixedDevices, OnDevice, PretendDevice, move
from tests.product.serving.made import Bench, byte_buddy, prompts, request
from tests.tiny import padded, random_ids, tiny_buddy

PROMPTS, MASK = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
INPUTS = {"input_ids": PROMPTS, "attention_mask": MASK}


def test_the_device_refuses_what_a_real_one_would():
    with PretendDevice():
        there = torch.ones(2, device="cuda")
        assert isinstance(there, OnDevice)
        mixed = (lambda: there + torch.ones(2), lambda: torch.ones(2)[there.long()], there.numpy)
        for work in mixed:
            with pytest.raises(MixedDevices):
                work()
        assert (there + torch.ones(2).to(there.device)).cpu().tolist() == [2, 2]
        assert float((there * torch.tensor(3.0)).sum()) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"budget": [0.5, 0.8, "4 blocks"], "do_sample": False},
        {"prefill_budget": 1.0, "budget": lambda step: 0.6, "do_sample": True, "top_k": 5},
        {"budget": 0.7, "num_beams": 2, "do_sample": False},
    ],
    ids=["rows", "sampled", "beams"],
)
def test_prompts_may_be_on_the_cpu_as_a_tokenizer_makes_them(options):
    buddy = tiny_buddy(engine="general")
    torch.manual_seed(0)
    expected = buddy.generate(**INPUTS, **options, max_new_tokens=3)
    with PretendDevice():
        torch.manual_seed(0)
        made = move(buddy).generate(**INPUTS, **options, max_new_tokens=3)
    assert isinstance(made, OnDevice)
    assert made.tolist() == expected.tolist()


def test_a_forward_pass_takes_ids_masks_and_labels_of_the_cpu():
    buddy = tiny_buddy(engine="general")
    inputs = {**INPUTS, "labels": PROMPTS, "prompt_mask": MASK.bool(), "budget": 0.75}
    with torch.no_grad():
        expected = buddy(**inputs)
        with PretendDevice():
            made = move(buddy)(**inputs)
    assert made.logits.tolist() == expected.logits.tolist()
    assert float(made.loss) == float(expected.loss)
    assert made.plan.executed_sets == expected.plan.executed_sets


def test_a_server_measures_its_steps_and_answers():
    buddy = byte_buddy("static:2,3,4,1", engine="general")
    asked = [request(prompt, max_tokens=3) for prompt in prompts(2)]
    expected = Bench(buddy, rows=2).run(*asked)
    with PretendDevice():
        move(buddy)
        assert len(measure(buddy, 2, seconds=0.0)[0]) == 7
        made = Bench(buddy, rows=2).run(*asked)
    assert [told.tokens for told in made] == [told.tokens for told in expected]
