"""The plugin in vLLM: full depth is vLLM's own, and a plan is a plan whatever goes on around it.

Each engine takes about half a minute to start, so each is asked many things.
"""

import math
import os
import random

import pytest

from engines import run_engine
from exported import NUM_BLOCKS, VOCAB, write_export

pytest.importorskip("vllm", reason="vLLM is not installed here")

BUDGETS = ("3 blocks", "4 blocks", "5 blocks", 1.0, "3 blocks", "auto", 0.7, None)
CLOSE = 1e-4
"""Most difference of logprobs: sums are taken in another order."""


def prompts(rows, *, least=1, most=60, seed=0):
    draw = random.Random(seed)
    return [
        [draw.randrange(2, VOCAB) for _ in range(draw.randint(least, most))] for _ in range(rows)
    ]


def ask(ids, budget=None, *, max_tokens=8):
    made = {"ids": ids, "max_tokens": max_tokens}
    return made if budget is None else {**made, "budget": budget}


PROMPTS = prompts(32)
FULL = [ask(ids) for ids in PROMPTS]
MIXED = [ask(ids, BUDGETS[row % len(BUDGETS)]) for row, ids in enumerate(PROMPTS)]
LONG = [ask(row["ids"], row.get("budget"), max_tokens=40) for row in MIXED[:16]]
SHARED = prompts(1, least=128, most=128, seed=5)[0]
PREFIXES = [
    [ask([*SHARED, 7], "3 blocks")],
    [ask([*SHARED, 7], "4 blocks")],  # another plan: nothing is shared
    [ask([*SHARED, 9], "3 blocks")],
    [ask([*SHARED, 7], "4 blocks")],
    [ask([*SHARED, 7], "3 blocks")],
]


def same(found, expected, *, close=CLOSE):
    assert [answer["tokens"] for answer in found] == [answer["tokens"] for answer in expected]
    for ours, other in zip(found, expected, strict=True):
        for mine, theirs in zip(ours["logprobs"], other["logprobs"], strict=True):
            assert math.isclose(mine, theirs, abs_tol=close), (ours, other)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family) / "model"
    return write_export(folder, family=family, policy="routed", predictor=True)


@pytest.fixture(scope="module")
def plain(model, family, tmp_path_factory):
    return run_engine(model, tmp_path_factory.mktemp("plain"), [FULL], plain=family)


@pytest.fixture(scope="module")
def routed(model, tmp_path_factory):
    alone = [[row] for row in MIXED]
    batches = [FULL, MIXED, LONG, *PREFIXES, *alone]
    return run_engine(model, tmp_path_factory.mktemp("routed"), batches)


def test_full_depth_is_vllms_own(plain, routed):
    # 1e-6: the same operations on the same rows, in batches of the same make.
    same(routed["batches"][0], plain["batches"][0], close=1e-6)
    assert len({tuple(answer["tokens"]) for answer in plain["batches"][0]}) > 16


def test_mixed_budgets_in_one_batch_equal_each_alone(routed):
    mixed, alone = routed["batches"][1], routed["batches"][3 + len(PREFIXES) :]
    same(mixed, [answers[0] for answers in alone])
    full = routed["batches"][0]
    changed = [answer["tokens"] != two["tokens"] for answer, two in zip(mixed, full, strict=True)]
    cut = [answer["buddy"]["blocks"] < NUM_BLOCKS for answer in mixed]
    assert sum(changed) > sum(cut) / 2
    assert not any(is_changed and not two for is_changed, two in zip(changed, cut, strict=True))


def test_each_request_runs_the_blocks_of_its_budget(routed):
    wanted = {"3 blocks": 3, "4 blocks": 4, "5 blocks": 5, 1.0: 6, 0.7: 4, None: 6}
    for row, answer in enumerate(routed["batches"][1]):
        budget = BUDGETS[row % len(BUDGETS)]
        if budget != "auto":
            assert answer["buddy"]["blocks"] == wanted[budget]
    chosen = {answer["buddy"]["blocks"] for answer in routed["batches"][1][5::8]}
    assert chosen <= set(range(3, NUM_BLOCKS + 1))


def test_what_is_reported_is_what_the_worker_counted(routed):
    reported = sum(
        answer["buddy"]["blocks_executed"] for batch in routed["batches"] for answer in batch
    )
    assert routed["preemptions"] == 0
    assert routed["tally"] == reported


def test_a_prefix_is_shared_by_requests_of_one_plan_alone(routed):
    first, other, longer, again, last = (
        batch[0] for batch in routed["batches"][3 : 3 + len(PREFIXES)]
    )
    # Four blocks of 32 tokens; a routed plan may differ where the prompt's end does.
    assert (first["cached"], other["cached"]) == (0, 0)
    assert (again["cached"], last["cached"]) == (128, 128)
    assert longer["cached"] in (0, 128)
    same([last, again], [first, other])
    assert first["tokens"] != other["tokens"]


once = pytest.mark.parametrize("family", ["llama"], indirect=True)
"""What happens around a plan is the same for each family, and each engine takes a while."""


@once
def test_chunked_prefill_changes_nothing(model, routed, tmp_path):
    options = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "max_num_seqs": 16}
    chunked = run_engine(model, tmp_path, [MIXED], **options)
    same(chunked["batches"][0], routed["batches"][1])


@once
def test_preemption_changes_nothing(model, routed, tmp_path):
    few = run_engine(
        model, tmp_path, [LONG], num_gpu_blocks_override=14, enable_prefix_caching=False
    )
    assert few["preemptions"] > 0
    same(few["batches"][0], routed["batches"][2])


needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


@once
@needs_two
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_change_nothing(model, routed, ranks, tmp_path):
    split = run_engine(model, tmp_path, [MIXED], ranks=2, **{ranks: 2})
    same(split["batches"][0], routed["batches"][1])
