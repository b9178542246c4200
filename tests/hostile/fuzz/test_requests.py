"""Bodies of requests: each is read, or refused as 400 in one line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy.serving.http.bodies import ChatBody, CompletionBody, read_body
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.unknown_fields import check_unknown, header_of
from tests.hostile.fuzz import FUZZ, JSON, damaged, only_ours

WHOLE = {
    ChatBody: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {"role": "assistant", "content": "Hello."},
        ],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "budget": {"prefill": 1.0, "decode": "mean:0.5"},
        "logit_bias": {"3": 1.5},
    },
    CompletionBody: {"prompt": ["Hi.", "Ho."], "n": 2, "seed": 3, "budget": "18 blocks"},
}


def answered(kind, content):
    error = only_ours(lambda: read_body(kind, content))
    if error is not None:
        assert isinstance(error, Refusal)
        assert 400 <= error.status < 500
        assert len(str(error)) < 2000
        assert len(error.param or "") < 200


def test_the_whole_bodies_are_read():
    for kind, body in WHOLE.items():
        assert read_body(kind, json.dumps(body).encode())


@pytest.mark.parametrize("name", ["\n", "x\x1b[31m", "x" * 100_000, "", " ", "x "])
@pytest.mark.parametrize("at", ["x", "stream_options", "budget"])
def test_a_name_of_any_kind_is_told_on_one_short_line(at, name):
    fields = {name: 1} if at == "x" else {at: {name: []}}
    content = json.dumps(WHOLE[ChatBody] | fields).encode()
    answered(ChatBody, content)
    if at == "budget":
        with pytest.raises(Refusal) as refused:
            read_body(ChatBody, content)
        assert str(refused.value).isprintable()
        return
    told = header_of(check_unknown(read_body(ChatBody, content)))
    assert 0 < len(told["X-Buddy-Ignored"]) < 100
    assert told["X-Buddy-Ignored"].isprintable()
    assert told["X-Buddy-Ignored"].isascii()
    assert told["X-Buddy-Ignored"].strip() == told["X-Buddy-Ignored"]  # no header may end in space


@FUZZ
@given(st.data(), st.sampled_from([*WHOLE]))
def test_damaged_bodies(data, kind):
    answered(kind, data.draw(damaged(json.dumps(WHOLE[kind]).encode())))


@FUZZ
@given(st.data(), st.sampled_from([*WHOLE]))
def test_bodies_of_other_values(data, kind):
    """Any value in the place of any other, at any depth."""

    def changed(value):
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(JSON)
        if isinstance(value, dict):
            return {key: changed(inner) for key, inner in value.items()}
        return [changed(inner) for inner in value] if isinstance(value, list) else value

    fields = st.sampled_from([*kind.model_fields, "x"])
    body = changed(WHOLE[kind])
    if isinstance(body, dict):
        body |= data.draw(st.dictionaries(fields, JSON, max_size=3))
    answered(kind, json.dumps(body).encode())
