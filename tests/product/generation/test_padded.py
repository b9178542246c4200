"""A caller's rows and columns, and the lanes that a pass makes of them."""

import inspect

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.errors import PromptError
from buddy.generation.options import ForwardOptions
from buddy.generation.padded import PaddedBatch
from tests.tiny import tiny_model

IDS = torch.tensor([[0, 5, 6], [7, 8, 0]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 0]])


@pytest.fixture(scope="module")
def model():
    return BuddyForCausalLM(tiny_model(), policy="random")


def test_pads_are_left_out_and_columns_come_back(model):
    batch = PaddedBatch.read(IDS, MASK, None, None, model.backbone)
    assert (batch.num_rows, batch.num_columns, batch.rows) == (2, 3, [0, 1])
    assert batch.feed.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.feed.counts == (2, 2)
    by_lane = torch.arange(8.0).view(4, 2)
    columns = batch.in_columns(by_lane)
    assert_close(columns[batch.valid], by_lane)
    assert columns.shape == (2, 3, 2)


def test_a_mask_over_all_columns_is_cut_to_the_new_ones(model):
    past = torch.cat([torch.ones(2, 4, dtype=torch.long), MASK], dim=1)
    batch = PaddedBatch.read(IDS, past, None, None, model.backbone)
    assert batch.valid.tolist() == MASK.bool().tolist()


def test_what_a_route_may_see_is_no_pad(model):
    batch = PaddedBatch.read(IDS, MASK, torch.ones_like(MASK), None, model.backbone)
    assert batch.router_sees.tolist() == MASK.bool().tolist()
    token_ids, valid, seen = batch.prompts
    assert token_ids is IDS
    assert valid.equal(seen)


def test_a_row_of_pads_alone_runs_nothing(model):
    with torch.no_grad():
        session = model(IDS, MASK).cache
        out = model(torch.tensor([[5], [0]]), torch.tensor([[1], [0]]), budget=0.5, cache=session)
    assert out.executed_blocks.tolist()[1] == 0
    assert out.executed_blocks.tolist()[0] > 0
    assert out.plan.host.sum(1).tolist() == out.executed_blocks.tolist()


def test_a_batch_of_pads_alone_is_refused(model):
    with torch.no_grad():
        session = model(IDS, MASK).cache
    nothing = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(PromptError, match="attention_mask calls every one a pad"):
        PaddedBatch.read(nothing, nothing, None, session, model.backbone)


def test_transformers_sees_what_forward_takes_by_name():
    """Its Trainer keeps columns of these names, and drops all others from a data set."""
    names = inspect.signature(BuddyForCausalLM.forward).parameters
    assert {"input_ids", "attention_mask", "labels", "budget", "prompt_mask"} <= names.keys()
    assert "logits_to_keep" in names
    assert not names.keys() & ForwardOptions.__annotations__.keys()
