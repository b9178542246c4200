"""One ranking for a batch: every row keeps its budget, and few blocks are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from buddy import DepthTrace
from buddy.depth.select import select_blocks
from buddy.depth.share import share_ranking
from tests.tiny import random_ids, tiny_buddy

finite = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.lists(finite, min_size=6, max_size=6), min_size=2, max_size=5), st.data())
def test_rows_are_nested_and_each_runs_its_budget(rows, data):
    scores = torch.tensor(rows)
    budgets = data.draw(st.lists(st.integers(3, 6), min_size=len(rows), max_size=len(rows)))
    shared = share_ranking(scores, (0, -1), torch.ones(len(rows), dtype=torch.bool))
    mask = select_blocks(shared, torch.tensor(budgets)).mask
    assert mask.sum(1).tolist() == budgets
    assert int(mask.any(0).sum()) == max(budgets)


def test_rows_count_alike_whatever_the_size_of_their_scores():
    first = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0, 9.0]])
    other = torch.tensor([[9.0, 4.0, 3.0, 1.0, 2.0, 9.0]])
    both = share_ranking(torch.cat([first, other]), (0, -1), torch.tensor([True, True]))
    scaled = share_ranking(torch.cat([1000 * first, other]), (0, -1), torch.tensor([True, True]))
    torch.testing.assert_close(both, scaled)


def test_a_batch_decodes_under_one_ranking():
    buddy = tiny_buddy(summary="ema", ema_decay=0.5)
    ids = random_ids(3, 6)
    budgets = ["3 blocks", "4 blocks", "5 blocks"]
    with torch.no_grad():
        shared = buddy(ids, budget=budgets, batch_route="shared")
        apart = buddy(ids, budget=budgets)
    small, middle, large = map(set, shared.plan.executed_sets)
    assert small < middle < large
    assert shared.executed_blocks.tolist() == [3, 4, 5]
    assert apart.plan.executed_sets != shared.plan.executed_sets
    alone = buddy.generate(ids[:1], budget=budgets[0], max_new_tokens=6, do_sample=False)
    in_batch = buddy.generate(
        ids[:1], budget=budgets[0], max_new_tokens=6, do_sample=False, batch_route="shared"
    )
    assert torch.equal(in_batch, alone)


def test_a_row_that_has_ended_has_no_say():
    scores = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0, 9.0], [9.0, 4.0, 3.0, 1.0, 2.0, 9.0]])
    shared = share_ranking(scores, (0, -1), torch.tensor([True, False]))
    alone = share_ranking(scores[:1], (0, -1), torch.tensor([True]))
    assert torch.equal(shared[:1], alone)
    assert torch.equal(shared[1], shared[0])


def test_what_an_ended_row_is_fed_changes_no_other():
    buddy = tiny_buddy(summary="ema", ema_decay=0.5)
    for seed in range(4):
        ids = random_ids(2, 6, seed=seed)
        options = {"budget": "3 blocks", "max_new_tokens": 12, "do_sample": False}
        free = buddy.generate(ids, batch_route="shared", **options)
        end = int(free[1, 7])  # ends the second row early
        found = []
        for pad in (0, 3, 20, 60):
            trace = DepthTrace()
            text = buddy.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # no id of a prompt is a pad
                batch_route="shared",
                eos_token_id=end,
                pad_token_id=pad,
                trace=trace,
                **options,
            )
            found.append((text[0].tolist(), [step.plans[0] for step in trace.steps]))
        assert all(plans == found[0] for plans in found)
