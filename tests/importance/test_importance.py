"""Indicators on tiny models, against the same quantity computed the plain way."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from buddy.importance.cosine import cosine_importance
from buddy.importance.skipping import skip_losses
from buddy.models.backbone import Backbone
from tests.tiny import NUM_BLOCKS, delete_blocks, every_family, random_ids, tiny_model

IDS = random_ids(3, 12)


def nll(model):
    with torch.no_grad():
        logprobs = model(IDS).logits[:, :-1].log_softmax(-1)
    return -float(logprobs.gather(2, IDS[:, 1:, None]).double().sum())


@every_family
def test_loss_without_each_block_is_the_loss_of_the_model_without_it(family):
    model = tiny_model(family)
    whole, without = skip_losses(Backbone(model), IDS, range(NUM_BLOCKS))
    assert whole == pytest.approx(nll(model), rel=1e-5)
    for block in range(NUM_BLOCKS):
        assert without[block] == pytest.approx(nll(delete_blocks(model, {block})), rel=1e-5)
    assert len({round(loss, 3) for loss in without.values()}) == NUM_BLOCKS


def test_blocks_removed_before_stay_removed():
    model = tiny_model()
    whole, without = skip_losses(Backbone(model), IDS, [1, 4], removed=[2, 3])
    assert whole == pytest.approx(nll(delete_blocks(model, {2, 3})), rel=1e-5)
    assert set(without) == {1, 4}
    for block in (1, 4):
        removed = nll(delete_blocks(model, {2, 3, block}))
        assert without[block] == pytest.approx(removed, rel=1e-5)


@every_family
def test_cosine_from_hidden_states_but_for_the_final_norm(family):
    model = tiny_model(family)
    with torch.no_grad():
        states = model.model(IDS, output_hidden_states=True).hidden_states
        # The last of transformers' hidden states is after the final norm: take a hook's instead.
        caught = []
        hook = model.model.layers[-1].register_forward_hook(lambda m, i, out: caught.append(out))
        model(IDS)
        hook.remove()
    last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    states = (*states[:-1], last)
    expected = [
        float((1 - torch.cosine_similarity(a, b, dim=-1)).mean())
        for a, b in itertools.pairwise(states)
    ]
    assert_close(
        cosine_importance(Backbone(model), IDS).float(), torch.tensor(expected), atol=1e-5, rtol=0
    )
