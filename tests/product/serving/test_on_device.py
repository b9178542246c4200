"""Requests that join and leave on a GPU, pretended or real: no mixed devices, the CPU's answers."""

from fractions import Fraction

import pytest

from buddy.serving.request import Grammar
from buddy.serving.rows.grammar import GrammarMaker
from tests.budgets import auto, fixed, on_average
from tests.gpu import move, on_gpu
from tests.product.generation.test_ledger_budget import random_ledger
from tests.product.serving.made import (
    END,
    VOCAB,
    Bench,
    byte_buddy,
    byte_tokenizer,
    prompts,
    request,
)

pytestmark = pytest.mark.usefixtures("gpu")
SEEDED = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}


def served(buddy, asked, late, **options):
    """What requests are told that join at once, and later; one leaves."""
    bench = Bench(buddy, chunk=6, rows=4, **options)
    told = [bench.add(each) for each in asked]
    for _ in range(2):
        bench.batcher.step()
    bench.batcher.cancel(1)
    told += [bench.add(each) for each in late]
    while bench.batcher.has_work:
        bench.batcher.step()
    return [(each.tokens, [list(runs) for runs in each.runs]) for each in told], [
        each.finished.usage for each in told if each.ended
    ]


MODELS = {
    "routed": {},
    "cache": {"context_layer": 2, "summary": "mean+last"},
    "static": {"policy": "static:2,3,4,1", "kv_policy": "mask"},
    "random": {"policy": "random:1", "kv_policy": "zero"},
    "auto": {"predictor": True, "kv_policy": "project"},
}


@pytest.mark.parametrize("batch_route", ["shared", "independent"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_join_and_leave(model, batch_route):
    first, second = prompts(2, most=9)
    asked = [
        request(first, 3, budget=auto(3, 6) if model == "auto" else 4),
        request(second, 6, budget=5),
        request(first[:5], 3, **SEEDED),
    ]
    late = [
        request(second + first, 2, budget=fixed(prefill=6, decode=4), top_logprobs=2),
        request(first + second[:2], 2, budget=on_average(4, 4, Fraction(9, 2))),
        request(second[:4], 3, seed=5, temperature=1.0, repetition_penalty=1.2),
    ]

    def buddy():
        made = byte_buddy(engine="general", **MODELS[model])
        made.ledger = random_ledger()
        return made

    expected = served(buddy(), asked, late, batch_route=batch_route)
    with on_gpu():
        made = served(move(buddy()), asked, late, batch_route=batch_route)
    assert made == expected
    if model in ("routed", "static"):  # whose plans do not wait for the cache
        assert any(usage.cached_tokens for usage in made[1])


def test_a_grammar_masks_logits_where_they_are():
    pytest.importorskip("llguidance")
    grammar = Grammar(schema='{"enum": ["abc", "abd", "b"]}')
    compiled = GrammarMaker(byte_tokenizer(), VOCAB, [END]).compile

    def texts(buddy):
        bench = Bench(buddy, rows=2, ends=(END,))
        asked = [request([1, 2], 9, grammar=grammar), request([3], 9, grammar=grammar, **SEEDED)]
        told = [bench.add(each, grammar=compiled(grammar)) for each in asked]
        while bench.batcher.has_work:
            bench.batcher.step()
        return [each.text for each in told]

    expected = texts(byte_buddy("static:2,3,4,1", engine="general"))
    with on_gpu():
        made = texts(move(byte_buddy("static:2,3,4,1", engine="general")))
    assert made == expected
