"""Budgets from deadlines and load, on an engine of discrete events."""

import math
from dataclasses import asdict
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buddy.errors import BudgetError
from buddy.serving.control.admission import AdmissionConfig
from buddy.serving.control.controller import HOLD_TOKENS, ControlConfig, Controller
from buddy.serving.control.metrics import ServingMetrics
from buddy.serving.control.pace import PROMPT_SHARE, Dues
from buddy.serving.control.protocol import (
    Control,
    Gauges,
    QueueView,
    RowView,
    StepReport,
    StepShape,
)
from buddy.serving.control.trim import Trim
from buddy.serving.request import GenerationRequest
from tests.budgets import auto, deadline, default, fixed
from tests.product.serving.simulated import (
    LEAST,
    Engine,
    L,
    Request,
    poisson,
    true_cost,
    true_seconds,
)

COST = true_cost()
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.06


def controller(engine=None, *, least=LEAST, itl_ms=None, ttft_ms=None, **more):
    return Controller(
        ControlConfig(num_blocks=L, min_blocks=least, itl_ms=itl_ms, **more),
        COST,
        ServingMetrics("tiny", L, 32),
        AdmissionConfig(ttft_ms=ttft_ms, max_queue=10_000),
        clock=(lambda: engine.now) if engine else (lambda: 0.0),
    )


def good(requests):
    """Answers within both promises."""
    return [
        sent
        for sent in requests
        if sent.done and sent.ttft_s <= SLO_TTFT_S and sent.itl_s <= SLO_ITL_S
    ]


def test_it_is_a_control():
    made: Control = controller()
    assert made.least_ms_per_token > 0
    assert b"vllm:num_requests_running" in made.metrics(
        Gauges(running=0, waiting=0, kept_prefixes=0, kept_tokens=0, cache_bytes=0, state="ready")
    )


def test_on_a_quiet_machine_deadlines_are_met():
    engine, rng = Engine(), Random(0)
    control = controller(engine)
    least_ms = control.least_ms_per_token
    requests, at = [], 0.0
    for _ in range(20):
        at += rng.expovariate(1.4)
        budget = deadline(ms_per_token=rng.uniform(1.35, 4.0) * least_ms, least=3, most=L)
        requests.append(Request(at_s=at, prompt=rng.randrange(8, 90), tokens=24, budget=budget))
    engine.run(control, requests)
    assert not any(sent.refused for sent in requests)
    met = [sent.itl_s <= sent.budget.ms_per_token / 1e3 for sent in requests]
    assert sum(met) >= 0.95 * len(met)
    # Not by running everything at the least: who has time runs deep.
    assert max(sent.blocks / len(sent.gaps) for sent in requests) > 0.9 * L
    mean = sum(sent.blocks for sent in requests) / sum(len(sent.gaps) for sent in requests)
    assert mean > 0.5 * L


def test_a_deadline_is_met_though_the_machine_is_slower_than_it_was():
    engine = Engine(slower=lambda now: 1.5)
    control = controller(engine)
    budget = deadline(ms_per_token=24.0, least=3, most=L)
    (sent,) = engine.run(control, [Request(at_s=0.0, prompt=40, tokens=300, budget=budget)])
    late = sum(gap > 0.024 for gap in sent.gaps[50:])
    assert late <= 0.05 * len(sent.gaps)
    assert sent.blocks / len(sent.gaps) < 0.9 * L  # at full depth it takes 29 ms


def test_contracts_are_never_lowered_and_elastic_rows_pay():
    engine = Engine()
    control = controller(engine, itl_ms=22.0)
    contracts = [Request(0.0, 20, 60, fixed(prefill=22, decode=22)) for _ in range(4)]
    elastic = [Request(0.0, 20, 60, default(least=3, most=L)) for _ in range(4)]
    engine.run(control, contracts + elastic)
    assert all(sent.blocks == 22 * len(sent.gaps) for sent in contracts)
    assert all(sent.blocks < 22 * len(sent.gaps) for sent in elastic)


def test_without_a_target_nothing_is_lowered():
    engine = Engine()
    requests = poisson(6.0, 0.0, 5.0)
    engine.run(controller(engine), requests)
    assert all(sent.blocks == L * len(sent.gaps) for sent in requests)


def test_a_deadline_does_not_lower_who_named_nothing_beside_it():
    engine = Engine()
    control = controller(engine)
    tight = deadline(ms_per_token=1.5 * control.least_ms_per_token, least=3, most=L)
    plain = [Request(0.0, 20, 40, default(least=3, most=L)) for _ in range(2)]
    chosen = [Request(0.0, 20, 40, auto(least=3, most=L)) for _ in range(2)]
    engine.run(control, [*plain, *chosen, Request(0.0, 20, 40, tight)])
    assert all(sent.blocks == L * len(sent.gaps) for sent in plain)
    assert all(sent.blocks < L * len(sent.gaps) for sent in chosen)


@pytest.mark.parametrize("rows", [1, 12, 28])
def test_at_a_constant_load_depth_moves_by_a_block_at_most(rows):
    engine = Engine(seed=rows)
    control = controller(engine, itl_ms=1e3 * SLO_ITL_S * 0.7)
    requests = [Request(0.0, 32, 10_000, default(least=3, most=L)) for _ in range(rows)]
    engine.run(control, requests, until_s=4.5)
    settled = [depth for now, depth, _ in engine.depths if now > 2.5]
    # Contexts grow, so depth may fall for good; what it never does is swing.
    assert all(late - min(settled[:at]) <= 1 for at, late in enumerate(settled) if at)
    assert settled[-1] == L if rows == 1 else settled[-1] < L or rows < 20


def test_full_depth_is_back_within_five_seconds_of_an_overload():
    engine = Engine()
    control = controller(engine, itl_ms=1e3 * SLO_ITL_S, ttft_ms=1e3 * SLO_TTFT_S)
    heavy = poisson(45.0, 0.0, 2.5)
    light = poisson(1.0, 2.5, 9.0, seed=1)
    engine.run(control, heavy + light)
    assert min(depth for now, depth, _ in engine.depths if 1 < now < 2.5) < 0.6 * L
    assert all(depth == L for now, depth, _ in engine.depths if now > 7.5)


@pytest.mark.parametrize("tokens", [5, 30])
def test_a_few_tokens_that_all_come_early_are_enough_to_raise_the_cap(tokens):
    trim = Trim(least=3, most=L)
    trim.close(0.0, L)
    trim.add([0.2] * 40, SLO_ITL_S)
    trim.close(0.5, L)
    assert trim.cap < 0.5 * L
    for window in range(1, 11):
        trim.add([0.015] * tokens, SLO_ITL_S)
        trim.close(0.5 + 0.5 * window, trim.cap)
    assert trim.cap == L


def test_a_few_tokens_of_which_one_is_late_wait_for_more():
    trim = Trim(least=3, most=L)
    trim.close(0.0, L)
    trim.add([0.015] * 4 + [0.2], SLO_ITL_S)
    trim.close(0.5, L)
    assert trim.cap == L


def test_accepted_requests_keep_the_promise_at_three_times_the_load():
    engine = Engine()
    control = controller(engine, itl_ms=1e3 * SLO_ITL_S, ttft_ms=1e3 * SLO_TTFT_S)
    requests = poisson(45.0, 0.0, 4.0)
    engine.run(control, requests)
    taken = [sent for sent in requests if not sent.refused]
    late = sorted(sent.ttft_s for sent in taken)[math.ceil(0.99 * len(taken)) - 1]
    assert late <= SLO_TTFT_S
    assert 0.1 * len(requests) < len(taken) < 0.7 * len(requests)
    assert all(1 <= sent.retry_s <= 60 for sent in requests if sent.refused)
    assert len(good(requests)) / 4 >= 0.9 * goodput(15.0, seconds=4.0)


@cache
def goodput(rate, budget=None, seconds=4.0):
    engine = Engine()
    control = controller(engine, itl_ms=1e3 * SLO_ITL_S, ttft_ms=1e3 * SLO_TTFT_S)
    return len(good(engine.run(control, poisson(rate, 0.0, seconds, budget=budget)))) / seconds


def test_elastic_requests_give_more_goodput_than_full_depth_alone():
    """Full depth alone serves about 5 of these a second within the promises."""
    full = fixed(prefill=L, decode=L)
    alone = max(goodput(5.0, full, seconds=10.0), goodput(7.5, full, seconds=10.0))
    assert 3.5 < alone < 5.7
    assert goodput(7.5, seconds=10.0) >= 1.3 * alone


def test_prompts_are_put_off_but_not_for_ever():
    engine = Engine()
    control = controller(engine, itl_ms=30.0)
    deep = [Request(0.0, 8, 150, fixed(prefill=L, decode=L)) for _ in range(8)]
    late = Request(0.2, 64, 8, fixed(prefill=L, decode=L))
    engine.run(control, [*deep, late])
    assert late.done
    assert 1.0 < late.ttft_s < 6.0


def test_what_the_machine_cannot_reach_is_refused_with_what_it_can():
    control = controller()
    queue = QueueView(size=0, prompt_tokens=0, oldest_s=0.0)
    request = GenerationRequest(
        prompt=(5,) * 64, max_tokens=8, budget=deadline(ms_per_token=1.0, least=3, most=L)
    )
    with pytest.raises(BudgetError, match="ms per token or more") as refused:
        control.admit(request, queue)
    named = float(str(refused.value).split("ask for ")[1].split(" ms")[0])
    assert control.least_ms_per_token <= named <= control.least_ms_per_token * 1.2
    budget = deadline(ms_per_token=named, least=3, most=L)
    control.admit(GenerationRequest(prompt=(5,) * 64, max_tokens=8, budget=budget), queue)


def test_a_least_budget_that_the_model_has_not_is_refused():
    with pytest.raises(BudgetError, match="31 blocks and the model has 30"):
        ControlConfig(num_blocks=L, min_blocks=31)


@st.composite
def budgets(draw):
    least = draw(st.integers(3, L))
    most = draw(st.integers(least, L))
    return draw(
        st.sampled_from(
            [
                fixed(prefill=L, decode=most),
                auto(least=least, most=most),
                default(least=least, most=most),
                deadline(ms_per_token=draw(st.floats(0.1, 500)), least=least, most=most),
            ]
        )
    )


@st.composite
def row_views(draw, number):
    budget = draw(budgets())
    if budget.is_contract:
        wanted = depth = budget.most
    else:
        wanted = draw(st.integers(budget.least, budget.most))
        depth = draw(st.integers(budget.least, wanted))
    return RowView(
        number=number,
        budget=budget,
        wanted=wanted,
        depth=depth,
        steps=draw(st.integers(0, 20)),
        context=draw(st.integers(0, 2000)),
        is_elastic=not budget.is_contract and draw(st.booleans()),
        prompt_left=draw(st.sampled_from([0, 0, 0, 7, 900])),
    )


@st.composite
def passes(draw):
    rows = [draw(row_views(number)) for number in range(draw(st.integers(1, 6)))]
    queue = QueueView(
        size=draw(st.integers(0, 9)),
        prompt_tokens=draw(st.integers(0, 5000)),
        oldest_s=draw(st.floats(0, 100)),
    )
    gaps = tuple(draw(st.lists(st.floats(0, 3), max_size=4)))
    return rows, queue, draw(st.floats(0, 2)), gaps


@settings(max_examples=40, deadline=None)
@given(
    least=st.integers(3, L),
    itl_ms=st.none() | st.floats(0.01, 1000),
    each=st.lists(passes(), min_size=1, max_size=5),
)
def test_whatever_comes_contracts_stand_and_no_row_leaves_its_bounds(least, itl_ms, each):
    now = 0.0
    control = controller(least=least, itl_ms=itl_ms)
    control._clock = lambda: now
    decoded: set[int] = set()
    for rows, queue, seconds, gaps in each:
        orders = control.decide(rows, queue)
        for number, depth in orders.depths.items():
            row = rows[number]
            assert row.is_elastic
            assert itl_ms is not None or not row.budget.is_default
            assert min(max(row.budget.least, least), row.wanted) <= depth <= row.wanted
            assert row.steps >= HOLD_TOKENS or number not in decoded
        assert 0 <= orders.prompt_tokens <= 512
        assert orders.prompt_tokens > 0 or any(not row.prompt_left for row in rows)
        assert least <= control.cap <= L
        decoded = {row.number for row in rows if not row.prompt_left}
        now += seconds
        control.report(
            StepReport(
                rows=len(decoded),
                union=max(row.depth for row in rows),
                row_blocks=sum(row.depth for row in rows if not row.prompt_left),
                block_context=sum(row.depth * row.context for row in rows if not row.prompt_left),
                prompt_lanes=0,
                prompt_blocks=0,
                seconds=seconds,
                gaps_s=gaps,
            )
        )


def served(rate, rows, budget=None, seconds=20.0, **more):
    """Requests in so many rows, under both promises."""
    engine = Engine(most_rows=rows)
    control = controller(engine, itl_ms=1e3 * SLO_ITL_S, ttft_ms=1e3 * SLO_TTFT_S, max_rows=rows)
    return engine.run(control, poisson(rate, 0.0, seconds, budget=budget, **more))


def test_depth_falls_where_rows_are_too_few_before_anybody_is_refused():
    """Eight rows at full depth keep the target with ease, and serve no more than 5 a second."""
    full = served(7.0, 8, fixed(prefill=L, decode=L))
    assert max(sent.itl_s for sent in full if sent.done) < 0.8 * SLO_ITL_S
    assert sum(sent.refused is not None for sent in full) > 0.2 * len(full)
    elastic = served(7.0, 8)
    assert len(good(elastic)) == len(elastic)
    mean = sum(sent.blocks for sent in elastic) / sum(len(sent.gaps) for sent in elastic)
    assert 1.3 * LEAST < mean < 0.7 * L  # and no deeper than that takes


def test_depth_stays_where_rows_are_free():
    assert all(sent.blocks == L * len(sent.gaps) for sent in served(2.0, 8))


def test_nobody_is_refused_for_prompts_that_a_lower_depth_has_room_for():
    requests = served(2.0, 32, prompt=600)
    assert len(good(requests)) == len(requests)


@pytest.mark.parametrize(("rows", "depth"), [(1, L), (3, LEAST)])
def test_a_tight_deadline_leaves_prompts_a_quarter_of_the_time(rows, depth):
    """Whatever it was promised: its tokens are late by a third at most while prompts wait."""
    engine = Engine()
    control = controller(engine, ttft_ms=9e3)  # which that share keeps: nobody is refused
    least_s = control.least_ms_per_token / 1e3
    tight = deadline(ms_per_token=1.3e3 * least_s, least=LEAST, most=L)
    hasty = [Request(0.0, 8, 220, tight) for _ in range(rows)]
    budget = fixed(prefill=depth, decode=LEAST)
    others = [Request(0.3, 100, 2, budget) for _ in range(2)]
    engine.run(control, [*hasty, *others])
    one = StepShape(union=depth, prompt_lanes=100, prompt_blocks=100 * depth)
    waited_s = max(sent.first_s for sent in others) - 0.3 - 1.0  # a second for a row
    assert waited_s < 2 * true_seconds(one) / (0.7 * PROMPT_SHARE)
    assert max(sent.itl_s for sent in hasty) < 1.3 * least_s / (1 - PROMPT_SHARE)


def drafting(budget, itl_ms=None, **report):
    """A controller that was told of passes of a row, and what it says before the next."""
    control = controller(itl_ms=itl_ms)
    row = RowView(
        number=0,
        budget=budget,
        wanted=L,
        depth=L,
        steps=0,
        context=50,
        is_elastic=False,
        prompt_left=0,
    )
    shape, queue = StepShape.of_rows([L], [51]), QueueView(size=0, prompt_tokens=0, oldest_s=0.0)
    for _ in range(30):
        control.decide([row], queue)
        control.report(StepReport(**asdict(shape), **report))
    return control, control.decide([row], queue)


def test_few_blocks_draft_where_nobody_was_promised_the_time_between_tokens():
    for budget, itl_ms, allows in (
        (fixed(L), None, True),
        (fixed(L), 60.0, False),
        (deadline(40.0, LEAST, L), None, False),
    ):
        _, orders = drafting(budget, itl_ms, seconds=0.01)
        assert orders.allows_draft_passes == allows


def test_what_drafts_take_is_not_learned_as_what_passes_do():
    plain, _ = drafting(fixed(L), seconds=0.01, gaps_s=(0.011,))
    drafted, _ = drafting(fixed(L), seconds=0.01, gaps_s=(0.018,), draft_s=0.007, draft_blocks=20)
    untold, _ = drafting(fixed(L), seconds=0.01, gaps_s=(0.018,))
    assert drafted.pace.step_s == pytest.approx(plain.pace.step_s, rel=1e-6)
    assert untold.pace.step_s > plain.pace.step_s + 0.003


def passes_of(dues, count, prompt_s=0.2):
    """Passes of 0.1 s beside which a prompt waits: whether each fed it."""
    fed = []
    for _ in range(count):
        fed.append(dues.pays(prompt_s, waits=True))
        dues.add(0.1 + prompt_s * fed[-1], prompt_s * fed[-1])
    return fed


def test_prompts_get_their_share_and_no_more():
    fed = passes_of(Dues(), 700)
    share = 0.2 * sum(fed) / (0.1 * len(fed) + 0.2 * sum(fed))
    assert share == pytest.approx(PROMPT_SHARE, rel=0.05)


def test_nothing_is_owed_for_time_in_which_no_prompt_waited():
    dues = Dues()
    first = passes_of(dues, 30).index(True)
    dues.add(60.0, 0.0)
    assert not dues.pays(0.2, waits=False)
    dues.add(60.0, 0.0)
    assert passes_of(dues, 30).index(True) == first


def test_what_was_fed_because_it_had_room_is_not_counted_against_later_prompts():
    dues = Dues()
    first = passes_of(Dues(), 30).index(True)
    for _ in range(50):
        assert not dues.pays(5.0, waits=True)
        dues.add(0.3, 0.2)
    assert passes_of(dues, 30).index(True) == first
