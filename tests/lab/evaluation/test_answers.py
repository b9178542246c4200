"""Answer losses: routed from prompts, exchanged plans, and the figures made of them."""

import dataclasses
import math
import statistics

import pytest
import torch

from buddy.data.examples import Example
from buddy.depth.policy import OnlinePolicy
from buddy.errors import DataError
from buddy.lab.evaluation.answers import answers
from buddy.lab.evaluation.answers.answer_points import (
    Answered,
    answer_points,
    by_token,
    exchange_points,
)
from buddy.lab.evaluation.answers.answers import (
    GivenPlans,
    losses_under,
    others,
    rounds_of,
    run_answers,
)
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.samples import SampleLog
from tests.tiny import FAMILY_NAMES, NUM_BLOCKS, delete_blocks, random_ids, tiny_buddy, tiny_model

BLOCKS = 4


def each(prompt_tokens, other_tokens):
    """The same budget for prompts and answers."""
    return (BLOCKS,)


def tokens(count, *, seed):
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def example(prompt, answer, *, seed=0, source="a"):
    return Example(tokens(prompt, seed=seed), tokens(answer, seed=100 + seed), source)


EXAMPLES = [
    example(prompt, answer, seed=seed, source="ab"[seed % 2])
    for seed, (prompt, answer) in enumerate([(9, 3), (1, 1), (4, 7), (12, 1), (6, 2), (2, 9)] * 2)
]


def condition_of(model, spec="routed", blocks=BLOCKS):
    return plan_conditions(model, [spec], [f"{blocks} blocks"])[0]


def loss_of(logits, one):
    """Summed loss of an answer from the logits of prompt and answer."""
    at = slice(len(one.prompt) - 1, len(one.prompt) + len(one.answer) - 1)
    target = torch.tensor(one.answer)
    return float(torch.nn.functional.cross_entropy(logits[at], target, reduction="sum"))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_a_batch_gives_each_answer_the_loss_it_has_alone(family):
    model = tiny_buddy(family)
    found = losses_under(model, model.policy, each, EXAMPLES)
    for row, (nll, blocks, executed) in zip(EXAMPLES, found, strict=True):
        prompt = torch.tensor(row.prompt)
        plan = model(prompt[None], budget=f"{BLOCKS} blocks", use_cache=False).plan.executed_sets[0]
        assert blocks == plan
        assert executed == BLOCKS * (row.num_tokens - 1)
        skipped = set(range(NUM_BLOCKS)) - set(plan)
        whole = torch.tensor([[*row.prompt, *row.answer]])
        # rel: sums over a padded batch run in another order.
        logits = delete_blocks(model.model, skipped)(whole).logits[0]
        assert nll == pytest.approx(loss_of(logits, row), rel=1e-4, abs=1e-4)
    assert len({blocks for _, blocks, _ in found}) > 1  # the input decides


def test_the_answer_does_not_reach_the_route():
    model = tiny_buddy()
    other = [
        dataclasses.replace(own, answer=tokens(11, seed=7 + i)) for i, own in enumerate(EXAMPLES)
    ]
    found, changed = (losses_under(model, model.policy, each, e) for e in (EXAMPLES, other))
    assert [plan for _, plan, _ in found] == [plan for _, plan, _ in changed]
    assert all(a != b for (a, *_), (b, *_) in zip(found, changed, strict=True))


def test_given_plans_are_run_as_given():
    model = tiny_buddy()
    plans = [(0, 1, 3, 5), (0, 2, 3, 5), (1, 2, 3, 4)]
    found = losses_under(model, GivenPlans(plans, NUM_BLOCKS), each, EXAMPLES[:3])
    assert [plan for _, plan, _ in found] == plans
    for row, plan, (nll, *_) in zip(EXAMPLES, plans, found, strict=False):
        skipped = set(range(NUM_BLOCKS)) - set(plan)
        whole = torch.tensor([[*row.prompt, *row.answer]])
        with torch.no_grad():
            logits = delete_blocks(tiny_model(), skipped)(whole).logits[0]
        assert nll == pytest.approx(loss_of(logits, row), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("within", ["all", "source"])
def test_each_input_gets_the_plan_of_another_and_each_plan_is_given_once(within):
    sources = ["a", "b", "a", "c", "b", "a", "b"]
    chosen = others(sources, within, 5)
    alone = {3} if within == "source" else set()
    assert set(chosen) == set(chosen.values()) == set(range(7)) - alone
    assert all(place != other for place, other in chosen.items())
    same = [sources[place] == sources[other] for place, other in chosen.items()]
    assert all(same) == (within == "source")
    assert chosen == others(sources, within, 5)
    assert any(others(sources, within, seed) != chosen for seed in range(6, 9))


def test_the_cost_of_another_inputs_plan_is_the_difference_of_the_losses():
    model = tiny_buddy()
    condition = condition_of(model)
    found = run_answers(model, [condition], EXAMPLES, batch=5, shuffle_seed=3)
    own = losses_under(model, model.policy, each, EXAMPLES)
    sources = [example.source for example in EXAMPLES]
    for within in ("all", "source"):
        chosen = others(sources, within, 3)
        plans = [own[chosen[i]][1] for i in range(len(EXAMPLES))]
        other = losses_under(model, GivenPlans(plans, NUM_BLOCKS), each, EXAMPLES)
        rises = [b - a for (a, *_), (b, *_) in zip(own, other, strict=True)]
        points = {
            (gap["task"], gap["metric"]): gap
            for gap in found["exchanged"]
            if gap["within"] == within
        }
        for task in ("all", "a", "b"):
            mine = [i for i, source in enumerate(sources) if task in ("all", source)]
            lengths = [len(EXAMPLES[i].answer) for i in mine]
            point = points[task, "nll"]
            expected = sum(rises[i] for i in mine) / sum(lengths)
            assert point["value"] == pytest.approx(expected, abs=1e-4)
            changed = [own[i][1] != plans[i] for i in mine]
            assert point["changed"] == sum(changed) / len(mine) > 0
            means = [rises[i] / n for i, n in zip(mine, lengths, strict=True)]
            by_answer = points[task, "answer_nll"]
            assert by_answer["value"] == pytest.approx(statistics.fmean(means), abs=1e-4)
            error = statistics.stdev(means) / math.sqrt(len(means))
            assert by_answer["stderr"] == pytest.approx(error, abs=1e-4)


def test_points_and_execution_by_source():
    model = tiny_buddy()
    conditions = plan_conditions(model, ["routed", "static:2,3"], ["1.0", f"{BLOCKS} blocks"])
    found = run_answers(model, conditions, EXAMPLES, batch=4, shuffle_seed=0)
    tasks = [(point["label"], point["task"], point["metric"]) for point in found["points"]]
    assert len(tasks) == len(set(tasks)) == 3 * 3 * 2
    plans = {entry["label"]: entry for entry in found["execution"] if entry["task"] == "all"}
    assert {label: plan["inputs"] for label, plan in plans.items()} == dict.fromkeys(plans, 12)
    assert plans["static:2,3"]["rates"] == [1, 1, 0, 0, 1, 1]
    assert plans["full"]["distinct_plans"] == plans["static:2,3"]["distinct_plans"] == 1
    assert plans["routed"]["distinct_plans"] > 1
    # One set of blocks for all: nothing to exchange.
    assert {gap["label"] for gap in found["exchanged"]} == {"routed"}
    assert [rounds_of(condition, shuffle=True) for condition in conditions] == [1, 3, 1]
    assert rounds_of(conditions[1], shuffle=False) == 1
    assert "exchanged" in found
    assert run_answers(model, conditions, EXAMPLES)["exchanged"] == []


def test_a_stopped_run_goes_on_with_nothing_run_twice(tmp_path):
    model = tiny_buddy()
    conditions = plan_conditions(model, ["routed", "static:2,3"], [f"{BLOCKS} blocks"])
    whole = run_answers(model, conditions, EXAMPLES, batch=1, shuffle_seed=1)
    path, done = tmp_path / "log.jsonl", []

    def stop(condition, count):
        done.append(count)
        if sum(done) >= 17:
            raise KeyboardInterrupt

    def run(log, **options):
        return run_answers(model, conditions, EXAMPLES, batch=1, shuffle_seed=1, log=log, **options)

    with SampleLog(path, {}) as log, pytest.raises(KeyboardInterrupt):
        run(log, on_answers=stop)
    with SampleLog(path, {}) as log:
        before = log.num_samples
        # 12 under their own plans and some of those under others'; equal plans are shared.
        assert 12 < before <= 17
        told = []
        assert run(log, on_answers=lambda condition, count: told.append(count)) == whole
        assert told[0] == 12
        assert sum(told) == 12 * 4
        after = log.num_samples
    keys = [line.partition('"key": ')[2].split('", ')[0] for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == after + 1


def test_a_log_gives_back_what_it_holds(tmp_path):
    model = tiny_buddy()
    conditions = [condition_of(model)]
    with SampleLog(tmp_path / "log.jsonl", {}) as log:
        found = run_answers(model, conditions, EXAMPLES, shuffle_seed=1, log=log)
        broken = tiny_buddy("qwen3")  # would give other losses
        assert run_answers(broken, conditions, EXAMPLES, shuffle_seed=1, log=log) == found


def test_no_input_is_run_twice_under_one_plan(monkeypatch):
    model, ran = tiny_buddy(), []

    def counting(model, policy, budgets, examples):
        found = losses_under(model, policy, budgets, examples)
        ran.extend((row, plan) for row, (_, plan, _) in zip(examples, found, strict=True))
        return found

    monkeypatch.setattr(answers, "losses_under", counting)
    run_answers(model, [condition_of(model)], EXAMPLES, shuffle_seed=2)
    assert len(EXAMPLES) < len(ran) == len(set(ran)) < 3 * len(EXAMPLES)


def test_plans_of_one_example_cannot_be_exchanged():
    model = tiny_buddy()
    with pytest.raises(DataError, match="2 examples or more, got 1"):
        run_answers(model, [condition_of(model)], EXAMPLES[:1], shuffle_seed=0)


def test_plans_are_not_exchanged_where_no_input_decides_its_own():
    model = tiny_buddy()
    fixed = condition_of(model, "static:3,1")
    with pytest.raises(DataError, match=f"no plans can be exchanged.* got static:3,1 at {BLOCKS};"):
        run_answers(model, [fixed], EXAMPLES, shuffle_seed=0)
    assert run_answers(model, [fixed, condition_of(model)], EXAMPLES, shuffle_seed=0)["exchanged"]
    (online,) = plan_conditions(tiny_buddy(policy=HalfRun(NUM_BLOCKS)))
    with pytest.raises(DataError, match="no plans can be exchanged"):
        run_answers(model, [online], EXAMPLES, shuffle_seed=0)


def test_the_error_of_a_mean_by_token_is_that_of_a_ratio():
    # By hand: ratio 12 / 6 = 2; residuals 2 - 2*2 = -2, 4 - 2*1 = 2, 6 - 2*3 = 0; so
    # sqrt((4 + 4) * 3 / 2) / 6.
    value, error = by_token([(2.0, 2), (4.0, 1), (6.0, 3)])
    assert value == 2.0
    assert error == pytest.approx(math.sqrt(12) / 6)
    # All of one length: the error of a plain mean.
    value, error = by_token([(2.0, 2), (4.0, 2), (9.0, 2)])
    assert error == pytest.approx(statistics.stdev([1.0, 2.0, 4.5]) / math.sqrt(3))
    assert by_token([(3.0, 2)]) == (1.5, None)


class HalfRun(OnlinePolicy):
    """Runs block 2 for the tokens at even positions."""

    name, governed = "half", (2,)

    def begin(self, new):
        return new.position % 2 == 0

    def keep(self, state, block, hidden):
        return state

    def describe(self):
        return "half"


def test_the_depth_of_a_policy_that_decides_by_token_is_counted():
    model = tiny_buddy(policy=HalfRun(NUM_BLOCKS))
    (condition,) = plan_conditions(model)
    found = run_answers(model, [condition], EXAMPLES[:4])
    fed = [example.num_tokens - 1 for example in EXAMPLES[:4]]
    expected = NUM_BLOCKS - 1 + sum((n + 1) // 2 for n in fed) / sum(fed)
    for part in ("points", "execution"):
        (mean,) = {result["mean_blocks"] for result in found[part] if result["task"] == "all"}
        assert mean == pytest.approx(expected)


def test_points_are_worked_by_hand():
    condition = condition_of(tiny_buddy())
    own = [Answered(6.0, 2, (0, 5), "a"), Answered(1.0, 1, (0, 5), "b")]
    points = {(p["task"], p["metric"]): p for p in answer_points(condition, own)}
    assert points["all", "nll"]["value"] == pytest.approx(7 / 3)
    assert points["all", "answer_nll"]["value"] == 2.0
    assert points["a", "nll"]["value"] == 3.0
    assert points["b", "nll"]["stderr"] is None
    assert points["all", "nll"]["tokens"] == 3
    other = [Answered(7.0, 2, (0, 4), "a"), Answered(1.0, 1, (0, 5), "b")]
    pairs = list(zip(own, other, strict=True))
    points = {(p["task"], p["metric"]): p for p in exchange_points(condition, pairs, "all")}
    assert points["all", "nll"]["value"] == pytest.approx(1 / 3)
    assert points["all", "answer_nll"]["value"] == 0.25
    assert [points[task, "nll"]["changed"] for task in ("all", "a", "b")] == [0.5, 1.0, 0.0]
    assert exchange_points(condition, [], "source") == []


def test_a_prompt_at_a_depth_of_its_own_is_that_of_decoding():
    """Answers fed at once, and token by token as decoding feeds them."""
    model, examples = tiny_buddy(), EXAMPLES[:2]

    def budgets(prompt, rest):
        return (6,) * prompt + (4,) * len(rest)

    found = losses_under(model, model.policy, budgets, examples)
    for (nll, plan, _), example in zip(found, examples, strict=True):
        ids = torch.tensor([example.prompt])
        options = {"budget": "4 blocks", "prefill_budget": "6 blocks", "reroute": "prefill"}
        total, session = 0.0, None
        for token in example.answer:
            with torch.no_grad():
                out = model(ids, cache=session, kv_policy="project", **options)
            session = out.cache
            total -= float(out.logits[0, -1].log_softmax(-1)[token])
            ids = torch.tensor([[token]])
        assert nll == pytest.approx(total, rel=1e-4)
        if len(example.answer) > 1:
            assert len(plan) == 4
