"""What cannot be is refused with the right status, in OpenAI's shape, on one line."""

import json

import httpx
import pytest

from buddy.serving.http.guards import Patience
from buddy.serving.request import Failed
from tests.product.serving.serving import served, until
from tests.product.serving.test_budget_rules import WRONG

CHAT = {"messages": [{"role": "user", "content": "w10"}], "max_tokens": 2}
COMPLETION = {"prompt": "w10", "max_tokens": 2}


@pytest.fixture(scope="module")
def running():
    with served(has_predictor=False, patience=Patience(body_bytes=300_000)) as running:
        yield running


@pytest.fixture
def client(running):
    with httpx.Client(base_url=running.url, timeout=10) as client:
        yield client


def refusal(response, status=400):
    """The error of a refusal, which has OpenAI's fields and one line."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    return error


def test_wrong_budgets_of_every_kind_are_400(client, running):
    before = len(running.engine.seen)
    for budget, _ in WRONG:
        try:
            body = json.dumps({**CHAT, "budget": budget})
        except ValueError:
            continue
        error = refusal(
            client.post(
                "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
        )
        assert error["param"].startswith("budget"), (budget, error)
    assert len(running.engine.seen) == before


TEMPLATE_OPTION = "chat_template_kwargs.chat_template"
THINKING, GENERATION = "chat_template_kwargs.enable_thinking", "add_generation_prompt"
FIELDS = [
    ("chat", {"messages": []}, "messages"),
    ("chat", {"drafts": "depth"}, "drafts"),
    ("completion", {"drafts": True}, "drafts"),
    ("chat", {"messages": "w10"}, "messages"),
    ("chat", {"messages": [{"role": "user"}]}, "messages.0.content"),
    ("chat", {"messages": [{"role": "wizard", "content": "w"}]}, "messages.0.role"),
    ("chat", {"messages": [{"role": "function", "content": "w"}]}, "messages.0.role"),
    ("chat", {"messages": [{"role": "tool"}]}, "messages.0.content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": "w", "tool_call_id": "7"}]},
        "messages.0.tool_call_id",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": "w", "reasoning_content": "w"}]},
        "messages.0.reasoning_content",
    ),
    ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
    ),
    ("chat", {"messages": [{"role": "user", "content": "w13 w13"}]}, "messages"),
    ("chat", {"messages": None}, "messages"),
    ("chat", {"temperature": "0.5"}, "temperature"),
    ("chat", {"temperature": -1}, "temperature"),
    ("chat", {"temperature": 2.5}, "temperature"),
    ("chat", {"temperature": True}, "temperature"),
    ("chat", {"top_p": -0.1}, "top_p"),
    ("chat", {"temprature": 0}, "temprature"),
    ("chat", {"store": True}, "store"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}, TEMPLATE_OPTION),
    ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, THINKING),
    ("chat", {"chat_template_kwargs": {"enable_thinking": "false"}}, THINKING),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, GENERATION),
    ("chat", {"min_tokens": -1}, "min_tokens"),
    ("chat", {"min_tokens": 3}, "min_tokens"),
    ("chat", {"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
    ("chat", {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ("chat", {"stop_token_ids": [97]}, "stop_token_ids"),
    ("chat", {"skip_special_tokens": 1}, "skip_special_tokens"),
    ("chat", {"mirostat": 2}, "mirostat"),
    ("chat", {"guided_json": {}, "guided_choice": ["w"]}, "guided_choice"),
    ("chat", {"max_new_tokens": 7}, "max_new_tokens"),
    ("chat", {f"field_{i}": 1 for i in range(65)}, "field_0"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.function",
    ),
    ("chat", {"messages": [CHAT["messages"][0]] * 4097}, "messages"),
    ("chat", {"stop": "<s>\n"}, "stop"),
    ("chat", {"top_k": -2}, "top_k"),
    ("chat", {"min_p": 2}, "min_p"),
    ("chat", {"presence_penalty": 3}, "presence_penalty"),
    ("chat", {"frequency_penalty": "a"}, "frequency_penalty"),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty"),
    ("chat", {"repetition_penalty": 5e-324}, "repetition_penalty"),
    ("chat", {"logit_bias": {"w": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"97": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"7": 101}}, "logit_bias.7"),
    ("chat", {"seed": 1.5}, "seed"),
    ("chat", {"seed": 2**80}, "seed"),
    ("chat", {"stop": ""}, "stop"),
    ("chat", {"stop": ["a"] * 17}, "stop"),
    ("chat", {"stop": 7}, "stop"),
    ("chat", {"n": 0}, "n"),
    ("chat", {"n": 17}, "n"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_tokens": 10**9}, "max_tokens"),
    ("chat", {"stream": "yes"}, "stream"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat", {"functions": [{}]}, "functions"),
    ("chat", {"model": 7}, "model"),
    ("chat", {"model": "tiny@much"}, "model"),
    ("completion", {"prompt": ""}, "prompt"),
    ("completion", {"prompt": []}, "prompt"),
    ("completion", {"prompt": [[]]}, "prompt.0"),
    ("completion", {"prompt": [97]}, "prompt"),
    ("completion", {"prompt": [-1]}, "prompt.0"),
    ("completion", {"prompt": ["w9", 9]}, "prompt.1"),
    ("completion", {"prompt": {"text": "w9"}}, "prompt"),
    ("completion", {"prompt": "w9 " * 300}, "max_tokens"),
    ("completion", {"prompt": ["w9"] * 40, "n": 4}, "n"),
    ("completion", {"max_tokens": 0}, "max_tokens"),
    ("completion", {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ("completion", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("completion", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("completion", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ("chat", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ("chat", {"echo": True}, "echo"),
    ("completion", {"prompt": [[9] * 250] * 64, "echo": True, "logprobs": 20}, "logprobs"),
    ("completion", {"prompt": [[9] * 250] * 64, "prompt_logprobs": 20}, "prompt_logprobs"),
    ("completion", {"suffix": "w9"}, "suffix"),
    ("completion", {"best_of": 3}, "best_of"),
    ("completion", {"logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "w9 \ud800"}, "prompt"),
        ("completions", {"prompt": ["w9", "w9 \udc00"]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "w9 \ud83d"}]}, "messages"),
    ],
)
def test_half_a_character_is_400_and_says_where(client, path, body, param):
    headers = {"Content-Type": "application/json"}
    error = refusal(client.post(f"/v1/{path}", content=json.dumps(body), headers=headers))
    assert error["message"].startswith("character 4 of the text is half a character")
    assert error["param"] == param


@pytest.mark.parametrize(("kind", "change", "param"), FIELDS, ids=[str(f[1])[:40] for f in FIELDS])
def test_a_known_field_with_a_wrong_value_is_400_and_named(client, running, kind, change, param):
    before = len(running.engine.seen)
    path, body = {
        "chat": ("/v1/chat/completions", CHAT),
        "completion": ("/v1/completions", COMPLETION),
    }[kind]
    assert refusal(client.post(path, json={**body, **change}))["param"] == param
    assert len(running.engine.seen) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 3000,
        b"{" + b'"a":' * 900,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": ' + b"9" * 3900 + b"}",
        b'{"prompt": "w9", "temperature": Infinity}',
    ],
    ids=range(13),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_any_bytes_are_400(client, path, content):
    refusal(client.post(path, content=content, headers={"Content-Type": "application/json"}))


def test_a_form_is_no_json(client):
    """A page of somebody's can make a browser send it without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = client.post(
            "/v1/completions", content=json.dumps(COMPLETION), headers={"Content-Type": kind}
        )
        assert "application/json" in refusal(response)["message"]


def test_a_body_that_is_too_large_is_413_whether_it_says_so_or_not(client):
    large = {**CHAT, "user": "a" * 300_000}
    assert refusal(client.post("/v1/chat/completions", json=large), 413)["code"] == "body_too_large"

    def pieces():
        for _ in range(50):
            yield b" " * 10_000

    refusal(client.post("/v1/chat/completions", content=pieces()), 413)


def test_a_body_that_does_not_come_is_408():
    with served(patience=Patience(body_s=0.2)) as running, running.connect() as made:
        made.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        )
        assert made.recv(1000).startswith(b"HTTP/1.1 408")


def test_other_paths_and_methods(client):
    assert refusal(client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert refusal(client.get("/playground/..%2Fapp.py"), 404)
    response = client.get("/v1/completions")
    assert refusal(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_deadline_below_what_the_machine_reaches_is_400_with_what_it_reaches(client):
    response = client.post("/v1/chat/completions", json={**CHAT, "budget": {"ms_per_token": 0.5}})
    assert "at least 2" in refusal(response)["message"]


def test_a_full_queue_is_429_with_retry_after_and_nothing_of_the_request_stays():
    with (
        served(max_rows=1, max_queue=1, step_s=0.05) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        long = {**COMPLETION, "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=long):
            until(lambda: running.engine.in_flight == 1)
            for stream in (False, True):
                response = client.post(
                    "/v1/completions", json={**COMPLETION, "n": 2, "stream": stream}
                )
                assert refusal(response, 429)["type"] == "rate_limit_error"
                assert response.headers["retry-after"] == "3"
                assert response.headers["content-type"] == "application/json"
            assert running.engine.in_flight == 1
        until(lambda: running.engine.in_flight == 0)


def test_more_answers_than_the_server_ever_holds_are_400_and_not_try_again():
    with (
        served(max_rows=2, max_queue=3) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        for path, body in [
            ("completions", {**COMPLETION, "prompt": ["w9"] * 6}),
            ("completions", {**COMPLETION, "prompt": ["w9"] * 3, "n": 2}),
            ("chat/completions", {**CHAT, "n": 6}),
        ]:
            error = refusal(client.post(f"/v1/{path}", json=body))
            assert (
                "6 answers in one request are more than this server holds (5)" in error["message"]
            )
            assert error["param"] == "n"
        assert client.post("/v1/completions", json={**COMPLETION, "n": 5}).status_code == 200


def test_a_draining_server_takes_nothing_and_says_so():
    with served() as running, httpx.Client(base_url=running.url) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        running.engine.drain()
        response = client.post("/v1/completions", json=COMPLETION)
        assert refusal(response, 503)["code"] == "unavailable"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200


def test_a_failed_engine_reaches_every_client():
    with served(step_s=0.02) as running, httpx.Client(base_url=running.url, timeout=10) as client:
        long = {**COMPLETION, "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: {")
            running.engine.fail()
            left = [line.removeprefix("data: ") for line in events if line]
        error = json.loads(left[-1])["error"]
        assert (error["message"], error["code"]) == ("the engine has failed", "engine_failed")
        assert client.get("/ready").status_code == client.get("/health").status_code == 503
        refusal(client.post("/v1/completions", json=COMPLETION), 503)
        assert not running.service.under_way


def test_an_answer_that_fails_whole_is_500():
    with served(step_s=0.5) as running, httpx.Client(base_url=running.url, timeout=10) as client:
        submit = running.engine.submit

        def submitted(request, deliver):
            number = submit(request, deliver)
            deliver(Failed(message="the row was lost"))
            return number

        running.engine.submit = submitted
        response = client.post("/v1/completions", json={**COMPLETION, "n": 2})
        assert refusal(response, 500)["message"] == "the row was lost"
        until(lambda: running.engine.in_flight == 0)


def test_an_answer_that_fails_by_a_field_is_400_and_names_it():
    with served(step_s=0.5) as running, httpx.Client(base_url=running.url, timeout=10) as client:
        submit = running.engine.submit

        def submitted(request, deliver):
            number = submit(request, deliver)
            deliver(Failed(message="the text cannot go on", param="response_format"))
            return number

        running.engine.submit = submitted
        error = refusal(client.post("/v1/completions", json=COMPLETION))
        assert (error["message"], error["param"]) == ("the text cannot go on", "response_format")


def test_without_keys_another_host_name_is_refused(client):
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", ""):
        refusal(client.get("/v1/models", headers={"Host": host}), 403)
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:80"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_metrics_are_the_engines(client):
    response = client.get("/metrics")
    assert response.text.startswith("# TYPE buddy_requests gauge\nbuddy_requests 0\n# HELP buddy_")
    assert response.headers["content-type"].startswith("text/plain; version=")
