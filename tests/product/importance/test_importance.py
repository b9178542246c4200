"""Indicators on tiny models, against the same quantity computed the plain way."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from buddy.backbone.backbone import Backbone
from buddy.errors import PolicyError
from buddy.importance.forward import Windows
from buddy.importance.indicators.cosine import BlockInfluence, SummaryCosine
from buddy.importance.indicators.indicator import INDICATORS, build_indicator
from buddy.importance.indicators.skipping import DeltaPerplexity, skip_losses
from tests.pretend import PretendDevice, move
from tests.tiny import NUM_BLOCKS, all_families, delete_blocks, every_family, random_ids, tiny_model

IDS = random_ids(3, 12)


def nll(model):
    with torch.no_grad():
        logprobs = model(IDS).logits[:, :-1].log_softmax(-1)
    return -float(logprobs.gather(2, IDS[:, 1:, None]).double().sum())


@all_families
def test_loss_without_each_block_is_the_loss_of_the_model_without_it(family):
    model = tiny_model(family)
    whole, without = skip_losses(Backbone(model), IDS, range(NUM_BLOCKS))
    assert float(whole.sum()) == pytest.approx(nll(model), rel=1e-5)
    for block in range(NUM_BLOCKS):
        expected = nll(delete_blocks(model, {block}))
        assert float(without[block].sum()) == pytest.approx(expected, rel=1e-5)
    assert len({round(float(loss.sum()), 3) for loss in without.values()}) == NUM_BLOCKS


def test_blocks_removed_before_stay_removed():
    model = tiny_model()
    whole, without = skip_losses(Backbone(model), IDS, [1, 4], removed=[2, 3])
    assert float(whole.sum()) == pytest.approx(nll(delete_blocks(model, {2, 3})), rel=1e-5)
    assert set(without) == {1, 4}
    for block in (1, 4):
        removed = nll(delete_blocks(model, {2, 3, block}))
        assert float(without[block].sum()) == pytest.approx(removed, rel=1e-5)


@every_family
def test_losses_of_a_batch_are_those_of_its_windows_and_of_their_beginnings(family):
    backbone = Backbone(tiny_model(family))
    whole, without = skip_losses(backbone, IDS, range(NUM_BLOCKS))
    for row, length in itertools.product(range(len(IDS)), (2, 7, 12)):
        alone, alone_without = skip_losses(backbone, IDS[row : row + 1, :length], range(NUM_BLOCKS))
        # atol: the batch's matrix products sum in another order.
        assert_close(alone[0], whole[row, : length - 1], atol=1e-4, rtol=1e-5)
        for block, losses in alone_without.items():
            assert_close(losses[0], without[block][row, : length - 1], atol=1e-4, rtol=1e-5)
    with torch.no_grad():
        windows = Windows.of(backbone, IDS)
        summed = windows.nll(windows.through(range(NUM_BLOCKS), windows.embedded))
    assert float(summed) == pytest.approx(float(whole.double().sum()))


@every_family
def test_block_influence_from_hidden_states_but_for_the_final_norm(family):
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
    influence = BlockInfluence(Backbone(model))
    influence.update(IDS[:2])
    influence.update(IDS[2:])
    assert_close(influence.scores().float(), torch.tensor(expected), atol=1e-5, rtol=0)


@every_family
def test_summary_cosine_against_models_without_each_block(family):
    model = tiny_model(family)

    def summary(one):
        caught = []
        hook = one.model.layers[-1].register_forward_hook(lambda m, i, out: caught.append(out))
        with torch.no_grad():
            one(IDS)
        hook.remove()
        last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
        return last.mean(1)

    whole = summary(model)
    expected = [
        float((1 - torch.cosine_similarity(whole, summary(delete_blocks(model, {b})))).mean())
        for b in range(NUM_BLOCKS)
    ]
    indicator = SummaryCosine(Backbone(model))
    indicator.update(IDS)
    assert_close(indicator.scores().float(), torch.tensor(expected), atol=1e-5, rtol=0)


def test_delta_ppl_against_models_without_each_block():
    model = tiny_model()
    indicator = DeltaPerplexity(Backbone(model))
    indicator.update(IDS[:1])
    indicator.update(IDS[1:])
    tokens = IDS[:, 1:].numel()
    whole = math.exp(nll(model) / tokens)
    rise = [math.exp(nll(delete_blocks(model, {b})) / tokens) - whole for b in range(NUM_BLOCKS)]
    assert min(rise) < 0, "a block that the model is better off without"
    assert_close(indicator.scores().float(), torch.tensor(rise), atol=1e-2, rtol=1e-4)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [
        {name: p.grad.clone() for name, p in layer.named_parameters()}
        for layer in model.model.layers
    ]


def test_gradient_indicators_against_transformers_own_loss():
    model = tiny_model("qwen2")
    samples = [gradients(model, IDS[i : i + 1]) for i in range(len(IDS))]
    taylor, fisher, norm = [], [], []
    for block, layer in enumerate(model.model.layers):
        weights = {name: p.detach() for name, p in layer.named_parameters()}
        summed = {name: sum(sample[block][name] for sample in samples) for name in weights}
        taylor.append(sum(float((w * summed[n]).abs().sum()) for n, w in weights.items()))
        fisher.append(sum(float((s[block][n] ** 2).sum()) for s in samples for n in weights))
        norm.append(sum(float((g**2).sum()) for g in summed.values()) ** 0.5)
    model.requires_grad_(False)
    for name, expected in (("taylor", taylor), ("fisher", fisher), ("grad-norm", norm)):
        indicator = build_indicator(name, Backbone(model))
        indicator.update(IDS[:2])
        resumed = build_indicator(name, Backbone(model))
        resumed.restore(indicator.state())
        resumed.update(IDS[2:])
        assert_close(resumed.scores().float(), torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", INDICATORS)
def test_every_indicator_goes_on_from_its_state(name):
    model = tiny_model()
    whole, half = (build_indicator(name, Backbone(model)) for _ in range(2))
    for batch in IDS.split(1):
        whole.update(batch)
    half.update(IDS[:1])
    rest = build_indicator(name, Backbone(model))
    rest.restore(half.state())
    for batch in IDS[1:].split(1):
        rest.update(batch)
    assert torch.equal(rest.scores(), whole.scores())
    assert rest.scores().shape == (NUM_BLOCKS,)


@pytest.mark.parametrize("name", ["taylor", "fisher", "grad-norm"])
def test_a_backward_pass_holds_one_gradient_at_a_time_and_leaves_the_callers(name):
    model = tiny_model()
    own = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}
    for parameter, gradient in own.items():
        parameter.grad = gradient
    indicator = build_indicator(name, Backbone(model))
    most, part = 0, indicator._part

    def counted(gradient):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.model.layers.parameters()))
        return part(gradient)

    indicator._part = counted
    indicator.update(IDS[:1])
    assert most == 1
    assert all(p.grad is own[p] and bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["taylor", "fisher", "grad-norm"])
def test_sums_of_gradients_are_in_the_hosts_memory(name):
    with PretendDevice():
        indicator = build_indicator(name, Backbone(move(tiny_model())))
        indicator.update(IDS.to("cuda"))
        scores = indicator.scores()
    assert {tensor.device.type for tensor in indicator.state().values()} == {"cpu"}
    whole = build_indicator(name, Backbone(tiny_model()))
    whole.update(IDS)
    assert torch.equal(scores, whole.scores())


def test_an_unknown_indicator_is_refused():
    with pytest.raises(PolicyError, match="expected one of delta-ppl, taylor"):
        build_indicator("magnitude", Backbone(tiny_model()))
