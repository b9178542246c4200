"""Requests drawn from the server's own OpenAPI: no 5xx, and every answer is as it is described."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.product.serving.serving import served

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Schemathesis itself draws from `random`, which hypothesis seeds; it only warns against the habit.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies"
    ":hypothesis.errors.HypothesisDeprecationWarning"
)

POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
POSTS += ["/v1/responses"]
GETS = ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics"]
# What a drawn body asks for is mostly refused for one of these; without them more is answered.
OFTEN_REFUSED = ["model", "budget", "tools", "functions", "echo", "suffix", "best_of", "logit_bias"]
OFTEN_REFUSED += ["stream_options", "top_logprobs", "response_format", "max_tokens"]
OFTEN_REFUSED += ["max_completion_tokens", "chat_template_kwargs", "tool_choice", "min_tokens"]
OFTEN_REFUSED += ["stop_token_ids", "continue_final_message", "add_generation_prompt"]


@pytest.fixture(scope="module")
def running():
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def operations(running):
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    return {operation.ok().path: operation.ok() for operation in schema.get_all_operations()}


def test_every_route_is_drawn_from(operations):
    assert {path.split("{")[0] for path in operations} == {p.split("{")[0] for p in POSTS + GETS}


def answered(operation, mode, url, change=lambda case, draw: None, examples=40):
    """The statuses of answers to drawn requests, each of which is as it is described."""
    statuses = set()

    @seed(20)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data):
        case = data.draw(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        change(case, data.draw)
        response = case.call(base_url=url, timeout=20)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    check()
    return statuses


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_the_description_allows_is_answered_or_refused_as_described(
    operations, running, path
):
    def ask_for_less(case, draw):
        if isinstance(case.body, dict) and draw(st.booleans()):
            for name in OFTEN_REFUSED:
                case.body.pop(name, None)
            if path.startswith("/v1"):
                case.body["max_output_tokens" if "responses" in path else "max_tokens"] = 4
            if path == "/tokenize" and "prompt" in case.body:
                case.body.pop("messages", None)

    statuses = answered(operations[path], "positive", running.url, ask_for_less)
    assert {200, 400} <= statuses <= {200, 400, 404}


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_the_description_forbids_is_refused(operations, running, path):
    statuses = answered(operations[path], "negative", running.url)
    assert 400 in statuses
    assert 200 not in statuses


@pytest.mark.parametrize("path", GETS)
def test_what_is_only_read_is_as_described(operations, running, path):
    found = next(operation for name, operation in operations.items() if name.split(":")[0] in path)
    statuses = answered(found, "positive", running.url, examples=10)
    assert statuses <= {200, 400, 404}
