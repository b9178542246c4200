"""Depth by phase in the server's batch, and a limit of thinking."""

import random

from buddy.budget.resolved import ResolvedBudget
from buddy.budget.thinking import ThinkingLimit, ThinkingMarks
from tests.product.serving.made import Bench, request

OPEN, CLOSE = 65, 66
MARKS = ThinkingMarks("A", "B", OPEN, CLOSE)
BIAS = {OPEN: 8.0, CLOSE: 8.0}


def phased(prompt, think, answer):
    return ResolvedBudget(
        kind="fixed", least=answer, most=answer, prefill=prompt, think=think, marks=MARKS
    )


def random_phases(draw, max_tokens=6):
    budget = [draw.randint(3, 6) for _ in range(3)]
    prompt = [draw.choice((OPEN, CLOSE, 70, 71)) for _ in range(4)]
    sampling = {"temperature": 1.0, "seed": draw.randint(0, 999), "logit_bias": BIAS}
    return budget, request(prompt, max_tokens=max_tokens, budget=phased(*budget), **sampling)


def test_random_schedules_of_joined_rows_run_what_each_phase_allows_and_a_seed_holds():
    bench, draw = Bench(), random.Random(7)
    batch = [random_phases(draw) for _ in range(8)]
    told = bench.run(*(each for _, each in batch))
    seen = set()
    for (budget, each), answer in zip(batch, told, strict=True):
        inside, expected = MARKS.is_open(each.prompt), [budget[0]]
        spent = {"prompt": budget[0] * 4}
        for token in answer.tokens[:-1]:
            inside = token == OPEN or (inside and token != CLOSE)
            expected.append(budget[1] if inside else budget[2])
            phase = "think" if inside else "answer"
            spent[phase] = spent.get(phase, 0) + expected[-1]
            seen.add(phase)
        assert [int(runs.sum()) for runs in answer.runs] == expected
        usage = answer.finished.usage
        assert {name: part.blocks_executed for name, part in usage.phases.items()} == spent
        assert usage.blocks_executed == sum(spent.values())
        (alone,) = Bench().run(each)
        assert alone.tokens == answer.tokens
    assert seen == {"think", "answer"}


def test_a_limit_closes_thinking_of_greedy_and_drawn_answers_alike():
    bench = Bench()
    requests = [
        request([70, OPEN], max_tokens=6, thinking=ThinkingLimit(MARKS, limit), **more)
        for limit in (0, 3)
        for more in ({}, {"temperature": 1.0, "seed": 5}, {"top_logprobs": 2})
    ]
    for each, answer in zip(requests, bench.run(*requests), strict=True):
        assert answer.tokens.index(CLOSE) <= each.thinking.tokens
