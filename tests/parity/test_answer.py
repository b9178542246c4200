"""`write_answer` writes what `generate` writes."""

import pytest
import torch

from buddy.budget.thinking import ThinkingMarks
from buddy.errors import BudgetError, PromptError
from buddy.generation.answer import needs_generate, write_answer
from buddy.generation.trace import DepthTrace
from tests.tiny import random_ids, tiny_buddy


class Told:
    """A streamer that keeps what it is told."""

    def __init__(self):
        self.told = []

    def put(self, value):
        self.told.append(value.flatten().tolist())

    def end(self):
        self.told.append("end")


def generated(model, ids, *, temperature, top_p, **asked):
    sampling = {"do_sample": temperature != 0}
    if temperature != 0:
        sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    told, trace = Told(), DepthTrace()
    torch.manual_seed(5)
    out = model.generate(
        ids,
        num_beams=1,
        num_return_sequences=1,
        streamer=told,
        trace=trace,
        **sampling,
        **asked,
    )
    return out, told.told, trace


def answered(model, ids, **asked):
    told, trace = Told(), DepthTrace()
    torch.manual_seed(5)
    out = write_answer(model, ids, streamer=told, trace=trace, **asked)
    return out, told.told, trace


ASKED = {
    "budget": "4 blocks",
    "reroute": "step",
    "max_new_tokens": 12,
    "thinking_tokens": None,
    "temperature": 0.0,
    "top_p": 1.0,
}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"budget": None},
        {"budget": "auto", "reroute": 3},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 0.6},
        {"max_new_tokens": 200},
        {"thinking_tokens": 2, "temperature": 1.0},
    ],
)
@pytest.mark.parametrize("ends", ["never", "early", "last"])
def test_tokens_streams_and_traces_are_those_of_generate(asked, ends):
    model, ids, asked = tiny_buddy(predictor=True), random_ids(1, 9), ASKED | asked
    model.thinking_marks = ThinkingMarks("A", "B", int(ids[0, -1]), 95)
    if ends != "never":
        written = generated(model, ids, **asked)[0][0, 9:]
        at = 3 if ends == "early" else len(written) - 1
        model.generation_config.eos_token_id = [int(written[at]), 96]
    before = model.generation_config.to_dict()
    theirs, told, expected = generated(model, ids, **asked)
    ours, told_too, trace = answered(model, ids, **asked)
    assert ours.tolist() == theirs.tolist()
    assert told_too == told
    assert trace.finish_reasons == expected.finish_reasons
    assert [step.plans for step in trace.steps] == [step.plans for step in expected.steps]
    assert model.generation_config.to_dict() == before


def test_pads_in_a_prompt_are_taken_for_pads():
    model, ids = tiny_buddy(), random_ids(1, 9)
    ids[0, :2] = ids[0, 5] = 0
    theirs, _, expected = generated(model, ids, **ASKED)
    ours, _, trace = answered(model, ids, **ASKED)
    assert ours.tolist() == theirs.tolist()
    assert trace.steps[0].fed == expected.steps[0].fed == 6


@pytest.mark.parametrize(
    ("ids", "asked", "error"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, PromptError),
        (torch.zeros(1, 4, dtype=torch.long), {}, PromptError),
        (torch.full((1, 4), 97), {}, PromptError),
        (torch.ones(1, 65, dtype=torch.long), {}, PromptError),
        (torch.ones(1, 4, dtype=torch.long), {"budget": "1 block"}, BudgetError),
    ],
)
def test_what_generate_refuses_is_refused_in_its_words(ids, asked, error):
    model = tiny_buddy()
    with pytest.raises(error) as theirs:
        generated(model, ids, **(ASKED | asked))
    with pytest.raises(error) as ours:
        answered(model, ids, **(ASKED | asked))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("wishes", "needed"),
    [
        ({}, False),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}, False),
        ({"eos_token_id": [1, 2], "pad_token_id": 0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"min_new_tokens": 3}, True),
        ({"suppress_tokens": [4]}, True),
    ],
)
def test_other_wishes_of_the_makers_need_generate(wishes, needed):
    config = tiny_buddy().generation_config
    config.update(**wishes)
    assert needs_generate(config) is needed
