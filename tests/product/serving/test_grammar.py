"""Text under a grammar is of the grammar, or cut off."""

import json

import pytest

from buddy.serving.request import Grammar
from buddy.serving.rows.grammar import GrammarError, GrammarMaker
from tests.product.serving.made import END, VOCAB, Bench, byte_tokenizer, request

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bé"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def check(value):
    assert set(value) == {"name", "size", "kind"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 0 <= value["size"] <= 99
    assert value["kind"] in ("a", "bé")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_writes_what_the_schema_says(maker, buddy, temperature):
    grammar = Grammar(schema=json.dumps(SCHEMA))
    bench = Bench(buddy, ends=(END,))
    asked = [
        request([seed, 2], 100, temperature=temperature, seed=seed, grammar=grammar)
        for seed in range(6)
    ]
    told = [bench.add(asked_request, grammar=maker.compile(grammar)) for asked_request in asked]
    plain = bench.add(request([1, 2], 8))
    while bench.batcher.has_work:
        bench.batcher.step()
    for answer in told:
        assert answer.finished.reason == "stop"
        check(json.loads(answer.text))
    assert plain.tokens == Bench(buddy).run(request([1, 2], 8))[0].tokens


def test_any_object_is_an_object_or_cut_off(maker, buddy):
    bench = Bench(buddy, ends=(END,))
    told = [
        bench.add(request([seed], 60, temperature=1.0, seed=seed), grammar=maker.compile(Grammar()))
        for seed in range(8)
    ]
    while bench.batcher.has_work:
        bench.batcher.step()
    for answer in told:
        assert answer.text.startswith("{")
        if answer.finished.reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
    assert any(answer.finished.reason == "length" for answer in told)


def test_what_is_allowed_is_never_outside_the_grammar(maker):
    state = maker.compile(Grammar(schema='{"const": "he"}'))
    text = byte_tokenizer()
    for token in text('"he"').input_ids:
        allowed = (~state.forbidden()).nonzero()[:, 0].tolist()
        assert token in allowed
        assert all('"he"'.find(text.decode([token])) >= 0 for token in allowed)
        assert END not in allowed
        state.take(token)
    assert state.is_done
    with pytest.raises(GrammarError, match="not allowed"):
        maker.compile(Grammar()).take(text("x").input_ids[0])


def test_a_bias_against_all_that_may_follow_fails_the_request_alone(maker, buddy):
    bench = Bench(buddy, ends=(END,))
    grammar = maker.compile(Grammar())
    brace = byte_tokenizer()("{").input_ids[0]
    bad = bench.add(request([1], logit_bias={brace: -float("inf")}), grammar=grammar)
    good = bench.add(request([1]))
    while bench.batcher.has_work:
        bench.batcher.step()
    assert "no token may follow" in bad.failed
    assert len(good.tokens) == 8


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "no JSON"),
        ("3", "cannot be followed"),
        ('{"type": "nothing"}', "cannot be followed"),
        ('{"$ref": "#/nowhere"}', "cannot be followed"),
        ('{"type": "string", "pattern": "["}', "regex parse error: . .*unclosed"),
    ],
)
def test_a_schema_that_is_none_is_refused_in_one_line(maker, schema, said):
    with pytest.raises(GrammarError, match=said) as caught:
        maker.compile(Grammar(schema=schema))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_said_when_a_grammar_is_asked_for():
    maker = GrammarMaker(object(), VOCAB, [END])
    maker.prepare()
    with pytest.raises(GrammarError, match="can be followed with this model's tokenizer"):
        maker.compile(Grammar())


ENDLESS = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
]


@pytest.mark.parametrize("schema", ENDLESS, ids=range(3))
def test_a_schema_without_end_is_refused_at_once_and_on_one_line(maker, schema):
    with pytest.raises(GrammarError, match="the schema cannot be followed") as refused:
        maker.compile(Grammar(schema=json.dumps(schema)))
    assert "\n" not in str(refused.value)


def test_an_answer_that_its_grammar_ends_is_the_requests_fault_and_nobody_elses(maker, buddy):
    state = maker.compile(Grammar())
    state.forbidden = _too_complex
    bench = Bench(buddy)
    told, other = bench.add(request([1], 4), grammar=state), bench.add(request([1, 2], 4))
    while bench.batcher.has_work:
        bench.batcher.step()
    assert (told.events[-1].message, told.events[-1].param) == ("too complex", "response_format")
    assert other.finished.reason == "length"


def _too_complex():
    raise GrammarError("too complex")
