"""The swap search against one that shares and bounds nothing; interrupted and resumed."""

import random

import pytest
import torch

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example
from buddy.errors import PolicyError, ResultError
from buddy.importance.forward import Windows
from buddy.importance.search.bounded import Pruning
from buddy.lab.search.nearby import NearbyLosses
from buddy.lab.search.passages import Passages, answers_alone
from buddy.lab.search.searched import swap_search
from tests.tiny import NUM_BLOCKS, delete_blocks, every_family, random_ids, tiny_model

ORDER = (3, 1, 4, 2)
DEPTHS = (5, 4, 3)
FEW = Pruning(bound_tokens=20)
IDS = random_ids(5, 9)


def examples():
    rows = [(4, 3), (9, 1), (1, 6), (5, 5), (2, 1)]
    return [
        Example(
            tuple(random_ids(1, prompt, seed=seed)[0].tolist()),
            tuple(random_ids(1, answer, seed=50 + seed)[0].tolist()),
            "made",
        )
        for seed, (prompt, answer) in enumerate(rows)
    ]


def text_loss(model, kept):
    """The loss by transformers."""
    with torch.no_grad():
        logits = delete_blocks(model, set(range(NUM_BLOCKS)) - set(kept))(IDS).logits[:, :-1]
    return -float(logits.log_softmax(-1).gather(2, IDS[:, 1:, None]).double().sum())


def answer_loss(model, kept):
    """The loss by transformers, answer after answer."""
    model, total = delete_blocks(model, set(range(NUM_BLOCKS)) - set(kept)), 0.0
    for example in examples():
        with torch.no_grad():
            logits = model(torch.tensor([[*example.prompt, *example.answer]])).logits[0]
        at = slice(len(example.prompt) - 1, len(example.prompt) + len(example.answer) - 1)
        target = torch.tensor(example.answer)
        total += float(torch.nn.functional.cross_entropy(logits[at], target, reduction="sum"))
    return total


def slow_search(loss_of, depth, seed=0):
    """The search as it is described, every loss computed by transformers."""
    kept = sorted(set(range(NUM_BLOCKS)) - set(ORDER[: NUM_BLOCKS - depth]))
    first = best = loss_of(kept)
    made = tried = 0
    while True:
        skipped = [block for block in range(NUM_BLOCKS) if block not in kept]
        swaps = [(out, back) for out in kept[1:-1] for back in skipped]
        random.Random(f"{seed} {depth} {made}").shuffle(swaps)
        for out, back in swaps:
            other = sorted({*kept, back} - {out})
            tried += 1
            if loss_of(other) < best:
                kept, best, made = other, loss_of(other), made + 1
                break
        else:
            return tuple(kept), first, best, made, tried


def summary(one):
    return one.blocks, one.first_loss, one.loss, one.swaps, one.tried


@every_family
@pytest.mark.parametrize("kind", ["text", "answers"])
def test_the_search_finds_what_a_slow_search_finds(family, kind):
    model = tiny_model(family)
    text = Passages(IDS) if kind == "text" else answers_alone(examples())
    slow = text_loss if kind == "text" else answer_loss
    found = swap_search(Backbone(model), text, ORDER, DEPTHS, batch=2, pruning=FEW)
    made = 0
    for depth in DEPTHS:
        blocks, first, best, swaps, tried = slow_search(lambda kept: slow(model, kept), depth)
        searched = found[depth]
        assert (searched.blocks, searched.swaps, searched.tried) == (blocks, swaps, tried)
        assert searched.first_loss == pytest.approx(first, rel=1e-5)
        assert searched.loss == pytest.approx(best, rel=1e-5)
        assert len(searched.blocks) == depth
        made += swaps
    assert made > 0


@pytest.mark.parametrize(
    "pruning",
    [
        Pruning(bound_tokens=None),
        Pruning(bound_tokens=1),
        # Room for three residuals of 2 x 9 x 32 floats, and for none.
        Pruning(bound_tokens=20, keep_bytes=3 * 2 * 9 * 32 * 4),
        Pruning(bound_tokens=None, keep_bytes=0),
    ],
)
def test_bounds_and_memory_change_no_result(pruning):
    backbone = Backbone(tiny_model("qwen3"))
    expected = swap_search(backbone, Passages(IDS), ORDER, DEPTHS, batch=2, pruning=FEW)
    assert swap_search(backbone, Passages(IDS), ORDER, DEPTHS, batch=2, pruning=pruning) == expected


def test_what_sets_share_is_run_once_and_few_losses_are_computed():
    """Else the test above would pass without any sharing."""
    losses = NearbyLosses(Backbone(tiny_model()), Passages(IDS).split(2), FEW)
    base = (0, 1, 2, 4, 5)
    whole = losses.rebase(base)
    batches, ran = 3, 5 * 3
    assert (losses.blocks_run, losses.exact_losses) == (ran, batches)
    # Block 3 comes and 4 goes: 3 and 5 run.
    changed = losses.below((0, 1, 2, 3, 5), float("inf"))
    assert losses.blocks_run - ran == 2 * batches
    assert losses.exact_losses == 2 * batches
    assert losses.below((0, 1, 2, 3, 5), changed) is None
    # No more than the first batch, and no loss, where that alone is too much.
    ran, exact = losses.blocks_run, losses.exact_losses
    assert losses.below((0, 1, 2, 3, 5), 1.0) is None
    assert (losses.blocks_run - ran, losses.exact_losses) == (2, exact)
    assert losses.below(base, float("inf")) == whole


@every_family
@torch.no_grad()
def test_pads_after_an_answer_change_nothing(family):
    backbone, text = Backbone(tiny_model(family)), answers_alone(examples())
    assert text.num_targets == sum(len(example.answer) for example in examples())
    widths = [part.ids.shape[1] for part in text.split(2)]
    assert widths == [10, 7, 3]  # as wide as each batch's longest
    windows = Windows.of(backbone, text.ids, text.counted)
    loss = float(windows.nll(windows.through(range(NUM_BLOCKS), windows.embedded)))
    assert loss == pytest.approx(answer_loss(tiny_model(family), range(NUM_BLOCKS)), rel=1e-5)
    assert windows.num_targets == text.num_targets


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_after", [0, 1, 4, 9, 14])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_search_stopped_anywhere_goes_on_with_nothing_tried_twice(tmp_path, stop_after, error):
    backbone, file, text = Backbone(tiny_model()), tmp_path / "partial", Passages(IDS)
    whole, ran = [], []
    expected = swap_search(
        backbone, text, ORDER, DEPTHS, batch=2, on_try=lambda *news: whole.append(news)
    )
    assert len(whole) > 15

    def search(on_try, passages=text, **options):
        return swap_search(
            backbone, passages, ORDER, DEPTHS, batch=2, resume=file, on_try=on_try, **options
        )

    def stop(*news):
        ran.append(news)
        if len(ran) == stop_after + 1:
            raise error

    with pytest.raises(error):
        search(stop)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    ignore = [].append
    for other in ({"seed": 1}, {"identity": {"model": "other"}}):
        with pytest.raises(ResultError, match="another measurement"):
            search(ignore, **other)
    masked = Passages(IDS, torch.ones(5, 8, dtype=torch.bool))
    with pytest.raises(ResultError, match="another measurement"):
        search(ignore, passages=masked)
    again = []
    assert search(lambda *news: again.append(news)) == expected
    assert ran + again == whole
    # Finished, it is kept until the record is written: nothing is tried again.
    assert search(lambda *news: pytest.fail("tried again")) == expected
    assert list(tmp_path.iterdir()) == [file]


def test_a_number_of_exchanges_is_the_most_that_are_tried_at_each_depth():
    backbone = Backbone(tiny_model())
    told = []
    found = swap_search(
        backbone,
        Passages(IDS),
        ORDER,
        (4, 6, 3),
        max_swaps=2,
        on_try=lambda depth, one: told.append(depth),
    )
    assert {depth: best.tried for depth, best in found.items()} == {4: 2, 6: 0, 3: 2}
    assert told == [4] * 3 + [6] + [3] * 3
    none = swap_search(backbone, Passages(IDS), ORDER, (4,), max_swaps=0)[4]
    assert none.blocks == (0, 2, 4, 5)  # the order's own set
    assert none.first_loss == none.loss == pytest.approx(text_loss(tiny_model(), none.blocks))


def test_blocks_that_the_order_does_not_name_never_go():
    found = swap_search(Backbone(tiny_model()), Passages(IDS), (3, 1), (5, 4))
    assert all({0, 2, 4, 5} <= set(best.blocks) for best in found.values())


@pytest.mark.parametrize(
    ("order", "depths", "says"),
    [
        ((3, 3), (5,), "each block once"),
        ((9,), (5,), "from 0 to 5"),
        ((3, 1), (3,), "from 4, the fewest"),
        (ORDER, (7,), "to 6 blocks, got 7"),
        (ORDER, (4, 4), "different numbers"),
        (ORDER, (), "got none"),
    ],
)
def test_what_cannot_be_searched_is_refused(order, depths, says):
    with pytest.raises(PolicyError, match=says):
        swap_search(Backbone(tiny_model()), Passages(IDS), order, depths)
