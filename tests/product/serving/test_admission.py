"""Who is let in, and what those are told who are not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy.errors import BudgetError
from buddy.serving.control.admission import Admission, AdmissionConfig, Refused, shown_ms
from buddy.serving.control.pace import Pace, predict_ttft
from buddy.serving.control.protocol import QueueView
from buddy.serving.control.trim import Trim, percentile
from buddy.serving.request import GenerationRequest
from tests.budgets import deadline, default, fixed

PACE = Pace(step_s=0.05, prompt_tokens_per_s=1000.0, tokens_per_answer=40.0, rows=8, fixed_s=0.1)


def queue(size=0, prompt_tokens=0, oldest_s=0.0, running=0, prompt_tokens_running=0):
    return QueueView(
        size=size,
        prompt_tokens=prompt_tokens,
        oldest_s=oldest_s,
        running=running,
        prompt_tokens_running=prompt_tokens_running,
    )


def request(prompt=100, budget=None):
    budget = budget or default(least=3, most=30)
    return GenerationRequest(prompt=(5,) * prompt, max_tokens=8, budget=budget)


def test_the_first_token_waits_for_prompts_and_for_a_row():
    assert predict_ttft(100, queue(), PACE) == pytest.approx(0.1 + 0.1)
    waiting = queue(size=2, prompt_tokens=500, running=3, prompt_tokens_running=400)
    assert predict_ttft(100, waiting, PACE) == pytest.approx(1.0 + 0.1)
    # All rows taken: an answer takes 2 s, so one of eight rows is free every 0.25 s.
    full = queue(size=3, prompt_tokens=30, running=8)
    assert predict_ttft(100, full, PACE) == pytest.approx(4 * 0.25 + 0.1 + 0.1)


def test_a_promise_that_cannot_be_kept_is_not_made():
    admission = Admission(AdmissionConfig(ttft_ms=1000.0))
    admission.check(request(), queue(prompt_tokens=500, size=1), PACE, 0.0)
    with pytest.raises(Refused, match="1 s are promised") as refused:
        admission.check(request(), queue(prompt_tokens=5000, size=5), PACE, 0.0)
    assert refused.value.reason == "ttft"
    assert refused.value.retry_after_s == 5  # 5.2 s less the 0.8 s that may be used


def test_where_nothing_runs_or_waits_a_late_answer_is_better_than_none():
    admission = Admission(AdmissionConfig(ttft_ms=100.0))
    admission.check(request(5000), queue(), PACE, 0.0)
    for busy in (queue(running=1), queue(size=1)):
        with pytest.raises(Refused, match="are promised"):
            admission.check(request(5000), busy, PACE, 0.0)


def test_answers_that_are_asked_for_at_once_do_not_break_the_promise_made_for_the_first():
    admission = Admission(AdmissionConfig(ttft_ms=1000.0, max_queue=8))
    crowded = queue(prompt_tokens=5000, size=7, running=8)
    admission.check(replace(request(), is_first=False), crowded, PACE, 0.0)
    with pytest.raises(Refused, match="1 s are promised"):
        admission.check(request(), crowded, PACE, 0.0)
    with pytest.raises(Refused, match="at most 8 may"):
        admission.check(replace(request(), is_first=False), queue(size=8, running=8), PACE, 0.0)


def test_without_a_promise_only_the_queue_counts():
    admission = Admission(AdmissionConfig(max_queue=4, max_age_s=10.0))
    admission.check(request(), queue(size=3, prompt_tokens=10**6, running=8), PACE, 0.0)
    with pytest.raises(Refused, match="at most 4 may") as refused:
        admission.check(request(), queue(size=4, running=8), PACE, 0.0)
    assert refused.value.reason == "queue_full"
    with pytest.raises(Refused, match="has waited 11 s") as refused:
        admission.check(request(), queue(size=1, oldest_s=11.0, running=8), PACE, 0.0)
    assert refused.value.reason == "queue_age"


def test_a_queue_of_none_lets_in_what_finds_a_free_row():
    admission = Admission(AdmissionConfig(max_queue=0))
    admission.check(request(), queue(running=7), PACE, 0.0)
    with pytest.raises(Refused):
        admission.check(request(), queue(running=8), PACE, 0.0)


def test_who_will_find_a_free_row_takes_no_place_in_the_queue():
    admission = Admission(AdmissionConfig(max_queue=4))
    for running in range(9):
        admission.check(request(), queue(size=11 - running, running=running), PACE, 0.0)
        with pytest.raises(Refused, match="4 requests wait already"):
            admission.check(request(), queue(size=12 - running, running=running), PACE, 0.0)


def test_a_deadline_below_what_is_reached_names_what_is():
    budget = deadline(ms_per_token=4.0, least=3, most=30)
    with pytest.raises(BudgetError, match=r"at least 7\.3 ms here at 3 blocks"):
        Admission(AdmissionConfig()).check(request(budget=budget), queue(), PACE, 7.21)
    Admission(AdmissionConfig()).check(request(budget=budget), queue(), PACE, 4.0)


def test_a_prompt_that_is_scored_counts_as_what_its_logits_cost():
    admission = Admission(AdmissionConfig(ttft_ms=1000.0))
    busy = replace(queue(size=1, prompt_tokens=300, running=1), head_blocks=12.0)
    plain = request(prompt=300, budget=fixed(prefill=6, decode=6))
    admission.check(plain, busy, PACE, 0.0)  # 0.7 s
    with pytest.raises(Refused, match=r"about 1\.3 s"):  # each token costs three
        admission.check(replace(plain, prompt_logprobs=0), busy, PACE, 0.0)


@given(st.floats(0.01, 1e5))
def test_what_is_shown_is_enough(milliseconds):
    assert milliseconds <= float(shown_ms(milliseconds)) <= milliseconds + max(0.11, 1)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.floats(0, 1e6),
    st.integers(1, 64),
    st.floats(0, 1e7),
)
def test_retry_after_is_from_1_to_60_seconds(size, tokens, oldest_s, running, rate):
    pace = Pace(step_s=0.05, prompt_tokens_per_s=rate, tokens_per_answer=40.0, rows=8, fixed_s=0.1)
    admission = Admission(AdmissionConfig(ttft_ms=100.0, max_queue=0, max_age_s=1.0))
    view = queue(size=size, prompt_tokens=tokens, oldest_s=oldest_s, running=running)
    with pytest.raises(Refused) as refused:
        admission.check(request(prompt=10**4), view, pace, 0.0)
    assert 1 <= refused.value.retry_after_s <= 60


def closed(trim, now, ratios, depth=30):
    trim.add(ratios, 1.0)
    assert trim.close(now, depth)
    return trim.cap


def test_late_tokens_lower_the_cap_and_early_ones_raise_it_after_two_windows():
    trim = Trim(9, 30)
    assert closed(trim, 0.0, [1.01] * 20) == 29
    assert not trim.close(0.4, 29)
    assert closed(trim, 0.5, [1.5] * 20, 20) == 15  # well above: half of what would close the gap
    assert closed(trim, 1.0, [0.9] * 20) == 15
    assert closed(trim, 1.5, [0.79] * 20) == 15
    assert closed(trim, 2.0, [0.79] * 20) == 16
    assert closed(trim, 2.5, [0.79] * 20) == 16
    assert closed(trim, 3.0, [0.9] * 20) == 16
    assert closed(trim, 3.5, [9.0] * 20) == 9  # never below the least
    for place in range(6):
        closed(trim, 4.0 + place / 2, [])
    assert trim.cap == 30  # nothing runs: full depth is back


def test_the_percentile_is_that_of_the_nearest_rank():
    assert percentile([float(number) for number in range(100)], 0.95) == 94.0
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.95) == 0.0


def test_one_stall_among_few_tokens_lowers_nothing_and_many_stalls_lower_a_block():
    trim = Trim(9, 30)
    assert closed(trim, 0.0, [0.9] * 7 + [6.0]) == 30
    assert closed(trim, 0.5, [0.9] * 12) == 30  # one late token of twenty
    assert closed(trim, 1.0, [0.9] * 18 + [6.0] * 2) == 29
    assert closed(trim, 1.5, [6.0]) == 29
    for place in range(4):
        closed(trim, 2.0 + place / 2, [])
    assert trim.cap == 9  # though few, they were all there was


def test_after_a_reset_nothing_of_before_counts():
    trim = Trim(9, 30)
    assert closed(trim, 0.0, [2.0] * 20) == 15
    trim.add([6.0] * 40, 1.0)
    trim.reset()
    assert closed(trim, 0.5, []) == 30
