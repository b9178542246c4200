"""Plans from token ids: strict, nested, worked by hand, and told apart by their salts."""

from itertools import pairwise

import numpy as np
import pytest

from buddy_vllm.errors import BudgetError, ExportError
from buddy_vllm.export import Export
from buddy_vllm.plan import Plan, Planner
from exported import NUM_BLOCKS, ORDER, write_export


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed")
    write_export(folder, policy="routed", predictor=True, weights=False)
    return Planner.of_folder(folder)


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    write_export(folder, policy="static", weights=False)
    return Planner.of_folder(folder)


def prompts(rows):
    draw = np.random.default_rng(7)
    return [draw.integers(0, 512, draw.integers(1, 40)).tolist() for _ in range(rows)]


def test_every_plan_runs_exactly_its_budget(routed, static):
    for ids in prompts(50):
        for blocks in range(3, NUM_BLOCKS + 1):
            for planner in (routed, static):
                found = planner.plan(f"{blocks} blocks", ids).blocks
                assert len(found) == blocks
                assert list(found) == sorted(set(found))
                assert {0, NUM_BLOCKS - 1} <= set(found)


def test_a_larger_budget_keeps_a_superset(routed, static):
    for ids in prompts(50):
        for planner in (routed, static):
            sets = [set(planner.plan(f"{n} blocks", ids).blocks) for n in range(3, NUM_BLOCKS + 1)]
            assert all(a < b for a, b in pairwise(sets))


def test_a_static_plan_leaves_out_the_first_of_the_order(static):
    for gone in range(4):
        blocks = set(range(NUM_BLOCKS)) - set(ORDER[:gone])
        assert set(static.plan(f"{NUM_BLOCKS - gone} blocks", [5]).blocks) == blocks


def test_a_routed_plan_depends_on_the_prompt(routed):
    assert len({routed.plan(0.6, ids).blocks for ids in prompts(50)}) > 2
    assert len({len(routed.plan("auto", ids).blocks) for ids in prompts(50)}) > 1


def by_hand(**tensors):
    return Planner(
        Export(
            num_blocks=5,
            revision="r",
            policy="routed",
            pinned=(0, 4),
            order=None,
            router={"decay": 0.5},
            predictor=None,
            tensors={
                f"router.{name}": np.array(rows, np.float32) for name, rows in tensors.items()
            },
        )
    )


def test_rows_are_pooled_by_decay():
    # Tokens 0, 1, 1 at decay 0.5 weigh 1/4, 1/2, 1 of 7/4: block 1 has 1/7, block 2 has 6/7.
    planner = by_hand(table=[[1, 0, 0], [0, 1, 0]], offset=[0, 0, 0.5])
    assert planner.plan("3 blocks", [0, 1, 1]).blocks == (0, 2, 4)
    assert planner.plan("3 blocks", [0]).blocks == (0, 1, 4)
    assert planner.plan("4 blocks", [0, 1, 1]).blocks == (0, 2, 3, 4)


def test_equal_scores_keep_the_shallower_block():
    planner = by_hand(table=[[0, 0, 0]], offset=[1, 1, 1])
    assert planner.plan("3 blocks", [0]).blocks == (0, 1, 4)
    assert planner.plan("4 blocks", [0]).blocks == (0, 1, 2, 4)


def test_the_newest_token_and_the_head_count():
    # silu(0) = 0 leaves the offset; silu(20) is 20 to 1e-7.
    planner = by_hand(
        table=[[0], [0]], last=[[0], [20]], bias=[0], up=[[0], [0], [1]], offset=[1, 0, 0]
    )
    assert planner.plan("3 blocks", [1, 0]).blocks == (0, 1, 4)
    assert planner.plan("3 blocks", [0, 1]).blocks == (0, 3, 4)


@pytest.mark.parametrize("ids", [None, []])
def test_a_prompt_without_ids_is_refused_where_they_decide(routed, static, ids):
    with pytest.raises(BudgetError, match="there are none"):
        routed.plan(0.6, ids)
    with pytest.raises(BudgetError, match="there are none"):
        routed.plan("auto", ids)
    assert routed.plan(None, ids).blocks == tuple(range(NUM_BLOCKS))
    assert routed.plan(1.0, ids).blocks == tuple(range(NUM_BLOCKS))
    assert len(static.plan(0.6, ids).blocks) == 4


def test_an_id_outside_of_the_table_is_refused(routed):
    for wrong in (-1, 512, 2**40):
        with pytest.raises(BudgetError, match="outside of the vocabulary of 512"):
            routed.plan(0.6, [3, wrong])


def test_auto_without_a_predictor_is_refused(static):
    with pytest.raises(BudgetError, match="needs a Budget Predictor"):
        static.plan("auto", [3])


def test_a_salt_tells_plans_revisions_and_callers_apart():
    plan, other = Plan((0, 1, 5), 6), Plan((0, 2, 5), 6)
    salts = [
        *(plan.salt(None, "r"), other.salt(None, "r"), plan.salt(None, "s")),
        *(plan.salt("mine", "r"), plan.salt("yours", "r")),
    ]
    assert len(set(salts)) == len(salts)
    assert plan.salt("mine", "r") == Plan((0, 1, 5), 6).salt("mine", "r")


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(ExportError, match="serve a local folder that `buddy export` wrote"):
        Planner.of_folder(tmp_path)
    write_export(tmp_path, weights=False)
    (tmp_path / "buddy" / "routing.safetensors").write_bytes(b"x")
    with pytest.raises(ExportError, match="has changed since the export"):
        Planner.of_folder(tmp_path)
