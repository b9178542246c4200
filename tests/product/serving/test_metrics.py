"""Prometheus' text: names, sums that agree with what was told, and few labels."""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from buddy.serving.control.metrics import REJECTIONS, SOURCES, ServingMetrics, Tally
from buddy.serving.control.protocol import Gauges, StepReport
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.request import Usage

NOW = Gauges(running=3, waiting=2, kept_prefixes=1, kept_tokens=40, cache_bytes=4096, state="ready")


def step(rows=2, gaps=(0.02, 0.04), firsts=(0.3,), seconds=0.018, lanes=16):
    return StepReport(
        rows=rows,
        union=30,
        row_blocks=30 * rows,
        block_context=900,
        prompt_lanes=lanes,
        prompt_blocks=30 * lanes,
        seconds=seconds,
        drafted=4,
        accepted=2,
        draft_blocks=12,
        gaps_s=gaps,
        firsts_s=firsts,
    )


def usage(source="auto", blocks=17.5, lowered=None, cached=10):
    return Usage(
        prompt_tokens=50,
        cached_tokens=cached,
        completion_tokens=20,
        blocks_executed=1000,
        budget_blocks=18,
        blocks_per_token=blocks,
        distinct_plans=1,
        source=source,
        lowered_from=lowered,
    )


def samples(metrics):
    """Samples by name and labels, but for the model's."""
    return {
        (
            sample.name,
            *sorted(v for k, v in sample.labels.items() if k != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(metrics.render(NOW).decode())
        for sample in family.samples
    }


@pytest.fixture
def metrics():
    return ServingMetrics("tiny", 30, 8)


def test_what_was_told_is_what_is_written(metrics):
    for _ in range(5):
        metrics.step(step(), 0.08)
    metrics.ended("stop", usage(), 1.4)
    metrics.ended("length", usage("deadline", 12.0, lowered=20), 2.0)
    metrics.ended("cancelled", None, 0.3)
    metrics.rejected("ttft")
    metrics.depth_cap = 22
    found = samples(metrics)
    assert found["vllm:num_requests_running",] == 3
    assert found["vllm:num_requests_waiting",] == 2
    assert found["vllm:kv_cache_usage_perc",] == 3 / 8
    assert found["vllm:generation_tokens_total",] == 5 * (3 + 2)
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 5 * 4
    assert found["vllm:spec_decode_num_accepted_tokens_total",] == 5 * 2
    assert found["vllm:prompt_tokens_total",] == 100
    assert found["vllm:prefix_cache_queries_total",] == 100
    assert found["vllm:prefix_cache_hits_total",] == 20
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_success_total", "abort"] == 1
    for name in ("inter_token_latency", "time_per_output_token"):
        assert found[f"vllm:{name}_seconds_count",] == 10
        assert found[f"vllm:{name}_seconds_sum",] == pytest.approx(0.3)
        assert found[f"vllm:{name}_seconds_bucket", "0.02"] == 5  # at most, as Prometheus counts
        assert found[f"vllm:{name}_seconds_bucket", "0.04"] == 10
    assert found["vllm:time_to_first_token_seconds_count",] == 5
    assert found["vllm:e2e_request_latency_seconds_sum",] == pytest.approx(3.4)
    assert found["buddy_blocks_total",] / found["buddy_tokens_total",] == 30
    assert found["buddy_draft_blocks_total",] == 60
    assert found["buddy_prefill_tokens_total",] == 80
    assert found["buddy_lowered_requests_total",] == 1
    assert found["buddy_rejected_requests_total", "ttft"] == 1
    assert found["buddy_blocks_per_token_sum", "auto"] == 17.5
    assert found["buddy_blocks_per_token_bucket", "12.0", "deadline"] == 1
    assert found["buddy_blocks_per_token_bucket", "11.0", "deadline"] == 0
    assert found["buddy_cost_error_bucket", "0.05"] == 0
    assert found["buddy_cost_error_bucket", "0.1"] == 5
    assert found["buddy_step_seconds_sum",] == pytest.approx(0.09)
    assert found["buddy_depth_cap",] == 22
    assert found["buddy_engine_state", "ready"] == 1
    assert found["buddy_engine_state", "failed"] == 0


def test_each_way_to_name_a_budget_has_a_depth(metrics):
    rules = BudgetRules(num_blocks=30, has_predictor=True, means=(15, 30))
    forms = (None, 0.6, {"mean": 0.7}, "auto", {"ms_per_token": 12})
    sources = [rules.read(form, None, None).kind for form in forms]
    assert sorted(sources) == sorted(SOURCES)
    for source in sources:
        metrics.ended("stop", usage(source), 1.0)
    found = samples(metrics)
    for source in sources:
        assert found["buddy_blocks_per_token_count", source] == 1


def test_no_label_grows_with_what_clients_send(metrics):
    before = len(samples(metrics))
    for reason in REJECTIONS:
        metrics.rejected(reason)
    for place in range(50):
        metrics.ended("stop", usage("fixed", 3.0 + place % 27), 0.1 * place)
        metrics.step(step(seconds=0.001 * (place + 1)), place / 10)
    assert len(samples(metrics)) == before
    assert before < 400


def test_a_tally_counts_into_the_bucket_that_ends_at_or_above_a_value():
    tally = Tally([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        tally.add(value)
    assert tally.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert tally.sum == 14.0


def test_a_step_of_32_rows_is_counted_in_far_less_than_it_takes(metrics):
    wide = step(rows=32, gaps=(0.02,) * 32)
    started = time.process_time()
    for _ in range(200):
        metrics.step(wide, 0.1)
    assert (time.process_time() - started) / 200 < 2e-3  # with every call checked by beartype


def test_the_dashboard_names_only_metrics_that_exist(metrics):
    metrics.step(step(), 0.1)
    names = {name for name, *_ in samples(metrics)}
    path = Path(__file__).parents[3] / "docs" / "grafana.json"
    board = json.loads(path.read_text())
    asked = set()
    for panel in board["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            found = re.findall(r"(?:vllm:|buddy_)\w+", target["expr"])
            assert found
            asked |= set(found)
    assert asked <= names
    assert len(asked) > 20
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
