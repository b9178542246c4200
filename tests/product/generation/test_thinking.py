"""Depth by phase, exact in each, and a limit of thinking that ends with the family's own mark."""

import random

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.budget.thinking import ThinkingLimit, ThinkingMarks, ThinkingWatch
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.step import Step
from buddy.errors import BuddyError
from buddy.generation.thinking import ThinkingProcessor
from tests.tiny import NUM_BLOCKS, random_ids, tiny_model

OPEN, CLOSE, STOP = 90, 91, 92
MARKS = ThinkingMarks("<think>", "</think>", OPEN, CLOSE, frozenset({STOP}))


@pytest.fixture(scope="module")
def buddy():
    made = BuddyForCausalLM(tiny_model(), policy="static:1,2,3,4", engine="general")
    made.thinking_marks = MARKS
    return made


def of_phases(prompt, think, answer):
    return {name: f"{n} blocks" for name, n in zip(("prompt", "think", "answer"),
            (prompt, think, answer), strict=True)}  # fmt: skip


def depths_by_hand(prompt, tokens, budget):
    """Blocks of each token after a prompt, by a scan of its own."""
    inside, depths = False, []
    for place, token in enumerate([*prompt, *tokens]):
        if token == OPEN:
            inside = True
        elif token == CLOSE:
            inside = False
        if place >= len(prompt):
            depths.append(budget[1] if inside else budget[2])
    return depths


@torch.no_grad()
def test_200_random_schedules_run_exactly_what_each_phase_allows(buddy):
    ran = []
    hooks = [
        block.register_forward_hook(lambda _, args, out: ran.append(args[0].shape[:2].numel()))
        for block in buddy.backbone.blocks
    ]
    draw = random.Random(4711)
    phases = set()
    try:
        for _ in range(200):
            rows = draw.randint(1, 3)
            budgets = [[draw.randint(3, NUM_BLOCKS) for _ in range(3)] for _ in range(rows)]
            ids = [[draw.choice((OPEN, CLOSE, 5, 6, 7)) for _ in range(7)] for _ in range(rows)]
            session = buddy.new_session(rows, 8)
            for budget in budgets:
                session.join(*buddy.read_sources(of_phases(*budget), None, 1))
            expected = [
                [budget[0] * 3, *depths_by_hand(row[:3], row[3:], budget)]
                for row, budget in zip(ids, budgets, strict=True)
            ]
            for step, (first, last) in enumerate([(0, 3), *((at, at + 1) for at in range(3, 7))]):
                ran.clear()
                fed = [token for row in ids for token in row[first:last]]
                out = run_step(
                    buddy.backbone,
                    buddy.inference_policy(),
                    session,
                    Step(
                        sequence_ids=list(session.sequences),
                        feed=Feed(token_ids=torch.tensor(fed), counts=(last - first,) * rows),
                    ),
                )
                mine = out.executed.view(rows, -1).sum(1).tolist()
                assert mine == [row[step] for row in expected]
                assert sum(ran) == sum(mine)
            phases |= {sequence.note for sequence in session.sequences.values()}
    finally:
        for hook in hooks:
            hook.remove()
    assert phases == {True, False}


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_generate_spends_each_phase_as_asked(buddy, options):
    ids = torch.cat([random_ids(1, 4), torch.tensor([[OPEN]])], 1)
    torch.manual_seed(0)
    trace = DepthTrace()
    out = buddy.generate(
        ids,
        budget=of_phases(6, 3, 5),
        thinking_tokens=3,
        max_new_tokens=8,
        trace=trace,
        **{"do_sample": False, **options},
    )[0, 5:]
    assert out.tolist().index(CLOSE) <= 3
    if "num_beams" not in options:  # beams may have been exchanged on the way
        fed = out[: len(trace.steps) - 1].tolist()
        ran = [step.executed[0] for step in trace.steps]
        assert ran == [6, *depths_by_hand([OPEN], fed, (6, 3, 5))]
    assert {step.executed[0] for step in trace.steps[1:]} == {3, 5}


def test_drafts_keep_the_limit(buddy):
    ids = torch.cat([random_ids(1, 4), torch.tensor([[OPEN]])], 1)
    options = {"thinking_tokens": 4, "max_new_tokens": 10, "do_sample": False}
    plain = buddy.generate(ids, **options)
    assert plain[0, 5:].tolist().index(CLOSE) <= 4
    assert torch.equal(buddy.generate(ids, draft_budget="3 blocks", **options), plain)


@pytest.mark.parametrize(
    ("limit", "thought", "ends"),
    [
        (0, [5, 5], 0),
        (8, [5] * 12, 8),
        (8, [5, STOP, *[5] * 10], 8),  # too early
        (8, [5, 5, 5, 5, 5, STOP, 5, 5], 6),
        (8, [5, 5, 5, 5, 5, 5, STOP, 5], 7),
        (4, [OPEN] * 9, 4),  # a mark that opens what is open is a thought
        (1000, [5] * 935 + [STOP] + [5] * 100, 936),
        (1000, [5] * 934 + [STOP] + [5] * 100, 1000),
    ],
)
def test_thinking_ends_with_a_sentence_near_the_limit_and_else_at_it(limit, thought, ends):
    watch = ThinkingWatch(ThinkingLimit(MARKS, limit), is_open=False)
    assert watch.closes is None
    watch, taken = watch.after(OPEN), 0
    while watch.closes is None:
        watch = watch.after(thought[taken])
        taken += 1
    assert (taken, watch.closes) == (ends, CLOSE)
    assert watch.after(CLOSE).closes is None


def scanned(limit, prompt, answer):
    """The closing mark where it is due, found by a scan of the whole answer."""
    watch = ThinkingWatch(limit, is_open=MARKS.is_open(prompt))
    for token in answer:
        watch = watch.after(token)
    return watch.closes


def test_a_processor_follows_new_tokens_alone_and_finds_what_a_scan_finds(monkeypatch):
    draw, limit, taken = random.Random(5), ThinkingLimit(MARKS, 3), []
    prompts = [[5, OPEN], [5, 6]]
    processor = ThinkingProcessor(limit, torch.tensor(prompts))
    answers = [[] for _ in range(4)]  # two of each prompt
    for _ in range(300):
        if draw.random() < 0.2 and answers[0]:  # beams change places
            answers[:2] = [list(draw.choice(answers[:2])) for _ in range(2)]
        if draw.random() < 0.2:  # drafts are taken back
            cut = draw.randint(0, min(3, len(answers[0])))
            answers = [answer[: len(answer) - cut] for answer in answers]
        for answer in answers:
            answer.append(draw.choice((OPEN, CLOSE, STOP, 5, 6)))
        ids = torch.tensor([prompts[at // 2] + answer for at, answer in enumerate(answers)])
        scores = processor(ids, torch.zeros(4, 97))
        for at, answer in enumerate(answers):
            found = CLOSE if scores[at].isneginf().any() else None
            assert found == scanned(limit, prompts[at // 2], answer)
            assert found is None or scores[at, CLOSE] == 0
    ids = torch.cat([ids, torch.full((4, 1), 7)], 1)
    after = ThinkingWatch.after
    monkeypatch.setattr(ThinkingWatch, "after", lambda *given: taken.append(1) or after(*given))
    processor(ids, torch.zeros(4, 97))
    assert len(taken) == 4  # the new token of each row


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"budget": {"prompt": 1.0, "think": 0.5, "answer": 1.0}},
            "a budget for think needs marks",
        ),
        ({"thinking_tokens": 4}, "this model's chat template has none"),
    ],
)
def test_a_model_without_marks_refuses_both_by_name(options, says):
    plain = BuddyForCausalLM(tiny_model(), policy="static:1,2,3,4")
    with pytest.raises(BuddyError, match=says) as caught:
        plain.generate(random_ids(1, 4), max_new_tokens=2, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokens", [-1, 2.5, True, "4"])
def test_a_limit_that_is_none_is_refused(buddy, tokens):
    with pytest.raises(BuddyError, match="thinking_tokens must be a whole number"):
        buddy.generate(random_ids(1, 4), max_new_tokens=2, thinking_tokens=tokens)
