"""Depth by phase in the server's batch, and a limit of thinking."""

import random
from collections import Counter

from buddy.budget.resolved import ResolvedBudget
from buddy.budget.thinking import ThinkingLimit, ThinkingMarks
from tests.product.serving.made import Bench, byte_buddy, request

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


def phases_by_hand(prompt, tokens):
    """The phase of each token after a prompt, by a scan of its own."""
    marks = [token for token in prompt if token in (OPEN, CLOSE)]
    inside, phases = marks[-1:] == [OPEN], []
    for token in tokens:
        inside = token == OPEN or (inside and token != CLOSE)
        phases.append("think" if inside else "answer")
    return phases


def random_request(draw, number):
    """A prompt, blocks by phase, and the request; every fourth has one budget for all phases."""
    prompt = [draw.choice((OPEN, CLOSE, 70, 71)) for _ in range(draw.randint(1, 5))]
    numbers = [draw.randint(3, 6) for _ in range(3)] if number % 4 else [draw.randint(3, 6)] * 3
    # Greedy, as rows with a seed are not fed together; the penalty has marks come in turn.
    sampling = {"logit_bias": BIAS, "frequency_penalty": draw.choice((2.0, 8.0))}
    budget = phased(*numbers) if number % 4 else numbers[0]
    asked = request(prompt, draw.randint(1, 6), budget, **sampling)
    return prompt, dict(zip(("prompt", "think", "answer"), numbers, strict=True)), asked


def test_200_schedules_that_join_and_leave_run_what_each_phase_allows():
    """Blocks are counted at the blocks. No pass pads here: each prompt is fed by itself."""
    buddy, draw, ran = byte_buddy("static:2,3,4,1", engine="general"), random.Random(11), []
    for block in buddy.backbone.blocks:
        block.register_forward_hook(lambda _, args, out: ran.append(args[0].shape[:2].numel()))
    bench, running, seen, most = Bench(buddy, least_shared=99), {}, Counter(), 0
    while bench.number < 200 or bench.batcher.has_work:
        for _ in range(min(200 - bench.number, draw.choice((0, 2, 4, 6)))):
            number = bench.number
            prompt, budget, asked = random_request(draw, number)
            running[number] = (prompt, budget, bench.add(asked))
        if running and draw.random() < 0.1:  # a client leaves, wherever its request is
            number = draw.choice(list(running))
            bench.batcher.cancel(number)
            del running[number]
        before = {number: len(told.tokens) for number, (_, _, told) in running.items()}
        ran.clear()
        bench.batcher.step()
        expected, took_part = 0, 0
        for number, (prompt, budget, told) in list(running.items()):
            if len(told.tokens) > before[number]:
                phases = ["prompt", *phases_by_hand(prompt, told.tokens[:-1])]
                assert [int(runs.sum()) for runs in told.runs] == [budget[one] for one in phases]
                fed = len(prompt) if len(phases) == 1 else 1
                expected += budget[phases[-1]] * fed
                took_part += 1
                seen[phases[-1]] += 1
            if told.ended:
                del running[number]
        assert sum(ran) == expected
        most = max(most, took_part)
    assert min(seen[phase] for phase in ("prompt", "think", "answer")) > 50
    assert most == 8


def test_a_limit_closes_thinking_of_greedy_and_drawn_answers_alike():
    bench = Bench()
    requests = [
        request([70, OPEN], max_tokens=6, thinking=ThinkingLimit(MARKS, limit), **more)
        for limit in (0, 3)
        for more in ({}, {"temperature": 1.0, "seed": 5}, {"top_logprobs": 2})
    ]
    for each, answer in zip(requests, bench.run(*requests), strict=True):
        assert answer.tokens.index(CLOSE) <= each.thinking.tokens
