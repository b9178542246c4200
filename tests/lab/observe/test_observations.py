"""Ranks of each input and context: by hand, against inputs measured alone, and resumed."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError, ResultError
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.skipping import skip_losses
from buddy.lab.observe.agreement import halves, moved, over_inputs, rank_blocks, spearman
from buddy.lab.observe.inputs import EachInput, EachToken, spread
from buddy.lab.observe.observations import observe_context, observe_ranks
from buddy.resume import ResumeFile, fingerprint
from tests.tiny import NUM_BLOCKS, every_family, random_ids, tiny_model

IDS = random_ids(5, 12)


def test_rank_0_goes_first_and_of_equals_the_deeper():
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.0], [1.0, 1.0, 0.5, 1.0]])
    assert rank_blocks(scores).tolist() == [[2, 0, 3, 1], [3, 2, 0, 1]]
    assert rank_blocks(scores[:, None]).tolist() == [[[2, 0, 3, 1]], [[3, 2, 0, 1]]]


def test_spearman_by_hand():
    ranks = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3]])
    # 1 - 6 * 2 / (4 * 15) = 0.8; 1 - 6 * 18 / 60 = -0.8.
    expected = torch.tensor([[1.0, -1.0, 0.8], [-1.0, 1.0, -0.8], [0.8, -0.8, 1.0]])
    assert_close(spearman(ranks, ranks).float(), expected)


def permutations(rows, blocks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(blocks, generator=generator) for _ in range(rows)])


def test_inputs_that_agree_and_inputs_at_random():
    same = torch.arange(30).expand(40, 30)
    assert over_inputs(same)["spearman_between_inputs"] == pytest.approx(1)
    assert over_inputs(same)["rank_std"] == 0
    chance = over_inputs(permutations(200, 30))
    assert chance["spearman_between_inputs"] == pytest.approx(0, abs=0.02)
    assert chance["rank_std"] == pytest.approx(chance["rank_std_if_random"], rel=0.02)


def test_halves_tell_an_inputs_own_ranking_from_noise():
    own = permutations(40, 30)
    assert halves(own, own)["spearman_halves_same_input"] == pytest.approx(1)
    assert halves(own, own)["difference"] > 10 * halves(own, own)["difference_stderr"] > 0
    noise = halves(own, permutations(40, 30, seed=1))
    assert abs(noise["difference"]) < 3 * noise["difference_stderr"]


def test_blocks_that_move_are_found():
    generator = torch.Generator().manual_seed(0)
    base = torch.arange(30.0)
    early = base + torch.randn(60, 30, generator=generator)
    late = base + torch.randn(60, 30, generator=generator)
    late[:, 7] += 6
    found = moved(rank_blocks(early), rank_blocks(late))
    assert 7 in found["blocks_moved"]
    assert 0.8 < found["spearman_same_input"] < 1
    still = moved(rank_blocks(early), rank_blocks(early))
    assert still["blocks_moved"] == []
    assert still["rank_change"] == 0
    # Student's t with 59 degrees of freedom lies beyond 2 in 5.01 % of the cases; with 1 in 29.5 %.
    assert still["blocks_moved_by_chance"] == pytest.approx(0.0501 * 30, rel=1e-2)
    two = moved(rank_blocks(early[:2]), rank_blocks(early[:2]))
    assert two["blocks_moved_by_chance"] == pytest.approx(30 * 2 * math.atan(0.5) / math.pi)


@every_family
def test_a_context_scores_as_the_input_cut_to_it_alone(family):
    backbone = Backbone(tiny_model(family))
    contexts = (4, 7, 12)
    stretches = [(0, context) for context in contexts]
    fast, slow = EachToken(backbone), EachInput("delta-ppl", backbone, stretches)
    for batch in IDS.split(2):
        fast.update(batch)
        slow.update(batch)
    assert slow.scores().shape == (5, 3, NUM_BLOCKS)
    assert fast.rises(0, 12).std(0).min() > 0, "inputs differ"
    for place, context in enumerate(contexts):
        rises = fast.rises(0, context)
        # rtol: perplexities, in float32 logits summed in another order.
        assert_close(rises, slow.scores()[:, place], rtol=1e-3, atol=1e-2)


def test_a_stretch_is_the_tokens_between():
    backbone = Backbone(tiny_model())
    each = EachToken(backbone)
    each.update(IDS)
    whole, without = skip_losses(backbone, IDS, [3])
    # Losses begin with the second token: tokens 5 to 8 have losses 4 to 7.
    expected = without[3][:, 4:8].mean(1).exp() - whole[:, 4:8].mean(1).exp()
    assert_close(each.rises(5, 9)[:, 3].float(), expected, rtol=1e-4, atol=1e-3)


def test_ranks_are_those_of_each_input_alone():
    backbone = Backbone(tiny_model())
    for name in ("taylor", "block-influence", "delta-ppl"):
        found = observe(observe_ranks, name, backbone)
        for row, ids in enumerate(IDS.split(1)):
            indicator = build_indicator(name, backbone)
            indicator.update(ids)
            scores = indicator.scores()
            if name == "delta-ppl":
                perplexity = indicator.perplexity()
                scores = perplexity[:-1] - perplexity[-1]
            assert found["ranks"][row] == rank_blocks(scores).tolist()
            assert found["scores"][row] == pytest.approx(scores.tolist(), rel=1e-3, abs=1e-2)
        assert found["agreement"]["difference_stderr"] > 0


@pytest.mark.parametrize(
    ("observation", "contexts"), [(observe_ranks, ()), (observe_context, ([6, 12],))]
)
@pytest.mark.parametrize(("name", "factor"), [("delta-ppl", 1e5), ("grad-norm", torch.inf)])
def test_blocks_are_not_ranked_by_what_is_no_number(observation, contexts, name, factor):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    with pytest.raises(ModelError, match=r"importance of block 0 is not a finite number.*; load"):
        observe(observation, name, Backbone(model), *contexts)


def observe(observation, name, backbone, *contexts, path=None, ids=IDS, on_batch=None):
    file = ResumeFile(path, {"indicator": name, "contexts": contexts, "text": fingerprint(ids)})
    return observation(
        name,
        backbone,
        ids,
        *contexts,
        batch=2,
        file=file,
        on_batch=on_batch or (lambda done, total: None),
    )


def test_contexts_have_their_ranks_means_and_change():
    backbone = Backbone(tiny_model())
    fast = observe(observe_context, "delta-ppl", backbone, [4, 8, 12])
    slow = observe(observe_context, "taylor", backbone, [4, 8, 12])
    for found in (fast, slow):
        ranks = torch.tensor(found["input_ranks"]).double()
        assert ranks.shape == (5, 3, NUM_BLOCKS)
        assert_close(torch.tensor(found["ranks"]).double(), ranks.mean(0))
        assert_close(torch.tensor(found["stderr"]).double(), ranks.std(0) / 5**0.5)
        change = (ranks[:, -1] - ranks[:, 0]).abs().mean()
        assert found["growth"]["rank_change"] == pytest.approx(float(change))
    assert "stretches" not in slow
    assert fast["stretches"]["tokens"] == 4
    each = EachToken(backbone)
    each.update(IDS)
    change = rank_blocks(each.rises(8, 12)) - rank_blocks(each.rises(0, 4))
    assert fast["stretches"]["rank_change"] == pytest.approx(float(change.abs().double().mean()))


@pytest.mark.parametrize(
    ("observation", "contexts"), [(observe_ranks, ()), (observe_context, ([6, 12],))]
)
@pytest.mark.parametrize("name", ["delta-ppl", "taylor"])
def test_an_interrupted_observation_goes_on(tmp_path, monkeypatch, observation, contexts, name):
    monkeypatch.setattr("buddy.resume.SAVE_EVERY_S", 0.0)
    backbone, path = Backbone(tiny_model()), tmp_path / "partial"
    whole = observe(observation, name, backbone, *contexts)

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 4:
            raise Stop

    told = []
    with pytest.raises(Stop):
        observe(observation, name, backbone, *contexts, path=path, on_batch=stop)
    with pytest.raises(ResultError, match="another measurement"):
        observe(observation, name, backbone, *contexts, path=path, ids=IDS + 1)
    again = observe(
        observation,
        name,
        backbone,
        *contexts,
        path=path,
        on_batch=lambda done, total: told.append(done),
    )
    assert again == whole
    assert told == [2, 4, 5]
    # Finished, it is kept until the record is written: nothing is measured again.
    told.clear()
    observe(
        observation,
        name,
        backbone,
        *contexts,
        path=path,
        on_batch=lambda done, total: told.append(done),
    )
    assert told == [5]


def test_inputs_are_spread_over_the_text():
    windows = torch.arange(20).view(10, 2)
    assert spread(windows, 4)[:, 0].tolist() == [0, 6, 12, 18]
    assert torch.equal(spread(windows, 10), windows)
    pairs = itertools.pairwise(spread(windows, 7)[:, 0].tolist())
    assert all(after - before in (2, 4) for before, after in pairs)
    with pytest.raises(ResultError, match="10 windows of 2 tokens, less than the 11"):
        spread(windows, 11)
