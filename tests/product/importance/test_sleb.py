"""The SLEB search against searches that share and bound nothing; interrupted and resumed."""

import math

import pytest
import torch

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError, PolicyError, ResultError
from buddy.importance.forward import Windows
from buddy.importance.search.bounded import MARGIN_NATS, Cheapest, Losses, Pruning, likeliest
from buddy.importance.search.sleb import sleb_search
from tests.disks import full_disk
from tests.product.importance.sleb_naive import sleb_search_whole
from tests.tiny import (
    NUM_BLOCKS,
    VOCAB,
    delete_blocks,
    every_family,
    random_ids,
    tiny_model,
)

ROUNDS = NUM_BLOCKS - 2
FEW = Pruning(bound_tokens=4)


def biased(model):
    """Gives the head a bias, which no family here has."""
    head = torch.nn.Linear(model.lm_head.in_features, VOCAB)
    head.weight.data.copy_(model.lm_head.weight)
    torch.nn.init.normal_(head.bias)
    model.lm_head = head
    return model


def peaked(model, scale=4.0):
    """Makes the next token as predictable as text makes it; else no bound is near its loss."""
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def sampled(model, rows, tokens):
    """Text that the model itself finds likely."""
    return model.generate(
        random_ids(rows, 1), max_new_tokens=tokens - 1, min_new_tokens=tokens - 1, do_sample=True
    )


def transformers_search(model, ids, rounds):
    """Every candidate a model of its own, run by transformers."""
    gone, nll = [], []
    for _ in range(rounds):
        losses = {}
        for block in set(range(1, NUM_BLOCKS - 1)) - set(gone):
            with torch.no_grad():
                logprobs = delete_blocks(model, {*gone, block})(ids).logits[:, :-1].log_softmax(-1)
            losses[block] = -float(logprobs.gather(2, ids[:, 1:, None]).double().mean())
        gone.append(min(losses, key=losses.get))
        nll.append(losses[gone[-1]])
    return tuple(gone), nll


@every_family
def test_the_search_finds_what_every_slower_search_finds(family):
    model, ids = tiny_model(family), random_ids(5, 9)
    found = sleb_search(Backbone(model), ids, ROUNDS, batch=2, pruning=FEW)
    assert found == sleb_search_whole(Backbone(model), ids, ROUNDS, batch=2)
    order, nll = transformers_search(model, ids, ROUNDS)
    assert found.order == order
    assert found.nll[1:] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "pruning",
    [
        Pruning(bound_tokens=1),
        Pruning(bound_tokens=20),
        Pruning(bound_tokens=None),
        Pruning(),
        # Room for three of a batch's residuals of 2 x 9 x 32 floats, and for none.
        Pruning(bound_tokens=20, keep_bytes=3 * 2 * 9 * 32 * 4),
        Pruning(bound_tokens=20, keep_bytes=0),
    ],
)
def test_bounds_and_memory_change_no_result(seed, pruning):
    model, ids = tiny_model("qwen3", seed=seed), random_ids(5, 9, seed=seed)
    expected = sleb_search_whole(Backbone(model), ids, ROUNDS, batch=2)
    assert sleb_search(Backbone(model), ids, ROUNDS, batch=2, pruning=pruning) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_model, lambda: biased(tiny_model())])
def test_a_bound_over_any_part_of_the_vocabulary_is_never_above_the_loss(make, dtype):
    torch.manual_seed(0)
    backbone = Backbone(make().to(dtype))
    windows = Windows.of(backbone, random_ids(3, 40))
    with torch.no_grad():
        hidden = windows.through(range(NUM_BLOCKS), windows.embedded)
        losses = windows.token_losses(hidden)
        for size in (0, 1, 5, 20, VOCAB):
            part = torch.cat([torch.randperm(VOCAB)[:size], windows.targets]).unique()
            bound = windows.token_losses(hidden, part)
            # Of a single token: no more than rounding of the model's own number format.
            slack = 1e-5 if dtype == torch.float32 else 0.05
            assert (bound <= losses + slack).all()
            assert float(bound.mean()) <= float(losses.mean()) + MARGIN_NATS
            assert size == VOCAB or float(bound.mean()) < float(losses.mean())


def test_the_bounds_tokens_are_the_likeliest_and_the_targets():
    backbone = Backbone(tiny_model())
    windows = Windows.of(backbone, random_ids(3, 12))
    with torch.no_grad():
        hidden = windows.through(range(NUM_BLOCKS), windows.embedded)
        mean = backbone.logits(hidden[:, :-1]).softmax(-1).mean((0, 1))
        chosen = likeliest(windows, hidden, 7).tolist()
    assert chosen == sorted({*mean.topk(7).indices.tolist(), *windows.targets.tolist()})


def test_few_candidates_need_their_loss():
    """Else the test above would pass without any pruning."""
    model = peaked(tiny_model(seed=1))
    torch.manual_seed(0)
    ids = sampled(model, 8, 12)
    cheapest = Cheapest(Backbone(model), ids.split(2), Pruning(bound_tokens=40))
    cheapest.whole_loss()
    losses = Losses.unknown(NUM_BLOCKS, 4)
    candidates = range(1, NUM_BLOCKS - 1)
    block, loss = cheapest.find(candidates, (), losses)
    assert 4 <= cheapest.exact_losses < 4 * len(candidates)
    assert loss == sum(losses.exact[block].tolist())
    known = ~losses.exact.isnan()
    assert int(known.sum()) == cheapest.exact_losses
    assert (losses.bound[known] <= losses.exact[known]).all()


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_after", [0, 1, 5, 12, 13, 20])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_search_stopped_anywhere_goes_on_with_nothing_run_twice(tmp_path, stop_after, error):
    backbone, ids, file = Backbone(tiny_model()), random_ids(5, 9), tmp_path / "partial"
    whole, ran = [], []
    expected = sleb_search(
        backbone, ids, ROUNDS, batch=2, pruning=FEW, on_candidate=lambda *news: whole.append(news)
    )

    def search(on_candidate, model=backbone, text=ids, on_round=lambda *news: None, **identity):
        return sleb_search(
            model,
            text,
            ROUNDS,
            batch=2,
            pruning=FEW,
            resume=file,
            identity=identity,
            on_candidate=on_candidate,
            on_round=on_round,
        )

    def stop(done, total):
        ran.append((done, total))
        if len(ran) == stop_after + 1:
            raise error

    with pytest.raises(error):
        search(stop)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for other in ({"text": ids + 1}, {"seed": 1}):
        with pytest.raises(ResultError, match="another measurement"):
            search(ran.append, **other)
    again, rounds = [], []
    found = search(lambda *news: again.append(news), on_round=lambda *news: rounds.append(news))
    assert found == expected
    # The first news of the second run is where the first stopped.
    assert ran + again[1:] == whole
    assert rounds == list(zip(range(1, ROUNDS + 1), found.order, found.nll[1:], strict=True))
    # Finished, it is kept until the record is written: nothing is run again.
    assert search(lambda *news: pytest.fail("run again")) == expected
    assert list(tmp_path.iterdir()) == [file]


def test_more_rounds_go_on_from_fewer(tmp_path):
    backbone, ids, file = Backbone(tiny_model()), random_ids(5, 9), tmp_path / "partial"

    def stop(number, block, nll):
        if number == 3:
            raise Stop

    with pytest.raises(Stop):
        sleb_search(backbone, ids, ROUNDS, resume=file, on_round=stop)
    two = sleb_search(backbone, ids, 2, resume=file)
    assert two == sleb_search(backbone, ids, 2)
    assert len(two.nll) == 3


@pytest.mark.parametrize("content", [b"nonsense", b""])
def test_a_damaged_resume_file_is_refused_and_left_alone(tmp_path, content):
    file = tmp_path / "partial"
    file.write_bytes(content)
    with pytest.raises(ResultError, match="damaged"):
        sleb_search(Backbone(tiny_model()), random_ids(2, 9), 1, resume=file)
    assert file.read_bytes() == content


def test_a_full_disk_is_one_line_and_leaves_what_was_found(tmp_path):
    backbone, ids, file = Backbone(tiny_model()), random_ids(5, 9), tmp_path / "partial"

    def stop(number, block, nll):
        raise Stop

    with pytest.raises(Stop):
        sleb_search(backbone, ids, ROUNDS, resume=file, on_round=stop)
    before = file.read_bytes()
    with full_disk(50), pytest.raises(ResultError, match=r"partial cannot be written: File too"):
        sleb_search(backbone, ids, ROUNDS, resume=file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_searched_is_refused():
    backbone, ids = Backbone(tiny_model()), random_ids(2, 9)
    assert sleb_search(backbone, ids, 0).order == ()
    with pytest.raises(PolicyError, match="0 to 4 of 6"):
        sleb_search(backbone, ids, 5)
    with pytest.raises(PolicyError, match="bound_tokens"):
        Pruning(bound_tokens=0)
    with pytest.raises(PolicyError, match="keep_bytes"):
        Pruning(keep_bytes=-1)
    broken = tiny_model()
    broken.model.layers[3].mlp.down_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ModelError, match="not a number"):
        sleb_search(Backbone(broken), ids, 1)
