"""Requests side by side are each what they would be alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from buddy.backbone.quantised import quantise_backbone
from buddy.serving.control.protocol import NoControl, Orders
from buddy.serving.request import Delta
from tests.budgets import auto, default, fixed
from tests.product.serving.made import (
    END,
    VOCAB,
    Bench,
    alone,
    byte_buddy,
    byte_tokenizer,
    prompts,
    request,
)


def mixed(count, seed, blocks=(3, 6)):
    draw = random.Random(seed)
    return [
        request(
            prompt,
            max_tokens=draw.randint(1, 6),
            budget=fixed(prefill=draw.randint(*blocks), decode=draw.randint(*blocks)),
            seed=draw.choice([None, 1, 2]),
        )
        for prompt in prompts(count, seed, 1, 12)
    ]


def check_blocks(asked, told):
    """Blocks that ran are the budget, at every token."""
    depths = [int(runs.sum()) for runs in told.runs]
    budget = asked.budget
    assert depths == [budget.prompt, *[budget.most] * (len(depths) - 1)]
    if told.ended:
        usage = told.finished.usage
        fed = budget.prompt * (len(asked.prompt) - usage.cached_tokens)
        assert usage.blocks_executed == fed + budget.most * (len(depths) - 1)
        assert usage.completion_tokens == len(depths)
        assert usage.blocks_per_token == sum(depths) / len(depths)
        assert usage.distinct_plans == len({runs.tobytes() for runs in told.runs})
        assert usage.budget_blocks == budget.most
        assert usage.lowered_from is None


@pytest.mark.parametrize(
    ("policy", "batch_route", "kv_policy"),
    [(None, "independent", "lazy"), ("static:2,3,4,1", "shared", "mask")],
)
def test_two_hundred_requests_that_join_leave_and_cancel(policy, batch_route, kv_policy):
    buddy = byte_buddy(policy, kv_policy=kv_policy)
    bench = Bench(buddy, batch_route=batch_route, chunk=7, kept_prefixes=3)
    draw = random.Random(4)
    todo, everyone, dropped = mixed(200, 3), [], set()
    while todo or bench.batcher.has_work:
        for _ in range(min(draw.choice([0, 0, 1, 3]), len(todo))):
            asked = todo.pop()
            everyone.append((bench.number, asked, bench.add(asked)))
        still = [entry for entry in everyone if not entry[2].ended and entry[0] not in dropped]
        if still and draw.random() < 0.15:
            number = draw.choice(still)[0]
            dropped.add(number)
            bench.batcher.cancel(number)
            assert all(row.number != number for row in bench.batcher.rows)
        bench.batcher.step()
    assert len(everyone) == 200
    assert len(dropped) > 20
    for number, asked, told in everyone:
        if told.tokens:
            check_blocks(asked, told)
        assert told.ended == (number not in dropped)
        if told.ended and number % 6 == 0:
            assert told.tokens == alone(buddy, asked)
            assert told.finished.reason == "length"


@pytest.mark.parametrize("policy", [None, "random:1", "static:2,3,4,1", "table"])
def test_the_size_of_parts_changes_nothing(policy):
    buddy = byte_buddy(None if policy == "table" else policy)
    if policy is None:
        buddy._tabulate = lambda policy: policy  # the router reads the cache: prompts stay whole
    asked = mixed(6, 5)
    found = []
    for chunk in (1, 4, 256):
        bench = Bench(buddy, chunk=chunk, batch_route="independent", kept_prefixes=0)
        told = bench.run(*asked)
        for wanted, heard in zip(asked, told, strict=True):
            check_blocks(wanted, heard)
        found.append([(heard.tokens, np.array(heard.runs).tolist()) for heard in told])
    assert found[0] == found[1] == found[2]
    assert [tokens for tokens, _ in found[0]] == [alone(buddy, wanted) for wanted in asked]


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("kv_policy", ["zero", "mask", "project", "lazy"])
def test_a_beginning_that_was_computed_before_changes_nothing(kv_policy, engine):
    buddy = byte_buddy("static:2,3,4,1", kv_policy=kv_policy, engine=engine)
    shared = prompts(1, 9, 12, 12)[0]
    ends = prompts(6, 10, 1, 5)
    first = [request(shared + end, budget=3 + at % 2) for at, end in enumerate(ends)]
    cold = Bench(buddy, kept_prefixes=0)
    warm = Bench(buddy, chunk=5)
    # A later turn: the prompt has an earlier answer in it.
    told = cold.run(*first)
    again = [
        request((*earlier.prompt, *heard.tokens, 7), budget=earlier.budget.most)
        for earlier, heard in zip(first, told, strict=True)
    ]
    fresh = told + cold.run(*again)
    kept = warm.run(*first)
    kept += warm.run(*again)
    assert [answer.tokens for answer in kept] == [answer.tokens for answer in fresh]
    cached = [answer.finished.usage.cached_tokens for answer in kept]
    assert cached[0] == 0
    assert all(count >= len(shared) for count in cached[2:6]), "four share with the first two"
    for turn, count in zip(again, cached[6:], strict=True):
        assert count == len(turn.prompt) - 2, "all but the last two tokens had been fed"
    for asked, heard in zip((*first, *again), kept, strict=True):
        check_blocks(asked, heard)


@pytest.mark.parametrize("engine", ["auto", "general"])
def test_a_seeded_prompt_begins_as_one_beside_it_that_is_seeded_and_as_no_other(engine):
    bench = Bench(byte_buddy("static:2,3,4,1", engine=engine))
    prompt = prompts(1, 2, 60, 60)[0]
    bench.run(request(prompt))
    asked = [request([*prompt[:-1], at], seed=5, temperature=0.9) for at in (1, 2)]
    (alone,) = bench.run(asked[1])
    company = bench.run(request(prompt), asked[0], replace(asked[1], is_first=False))
    cached = [answer.finished.usage.cached_tokens for answer in (alone, *company)]
    assert cached == [0, 59, 0, 32 if engine == "auto" else 0]
    assert company[2].tokens == alone.tokens


def in_format(number_format, engine):
    """The tiny model in another number format."""
    buddy = byte_buddy("static:2,3,4,1", engine=engine)
    if number_format != "float32":
        buddy.to(torch.bfloat16)
    if number_format == "int8":
        quantise_backbone(buddy.backbone, "int8")
    return buddy


class Drawn(NoControl):
    """Feeds another number of prompt tokens at each pass, as load makes it."""

    draw = random.Random(0)

    def decide(self, rows, queue):
        return Orders(prompt_tokens=self.draw.choice([1, 16, 33, 64, 200]))


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("number_format", ["float32", "bfloat16", "int8"])
def test_what_a_seed_gives_is_bit_equal_in_any_company(number_format, engine):
    buddy = in_format(number_format, engine)
    lengths = (1, 12, 15, 17, 31, 33, 47, 90, 100, 120)
    asked = [
        request(
            prompts(1, n, n, n)[0], 5, seed=n, temperature=0.8, top_logprobs=2, budget=3 + n % 4
        )
        for n in lengths
    ]
    others = [request(p, 6, temperature=0.8) for p in prompts(8, 12, 60, 120)]
    separately = [Bench(buddy, slots=128).run(wanted)[0] for wanted in asked]
    mixed = [*others[:4], *asked, *others[4:]]
    together = Bench(buddy, slots=128, control=Drawn()).run(*mixed)[4:-4]
    for single, company in zip(separately, together, strict=True):
        assert single.tokens == company.tokens
        assert [d.logprobs for d in single.deltas] == [d.logprobs for d in company.deltas]


def test_other_plans_share_no_beginning():
    bench = Bench(byte_buddy("static:2,3,4,1"))
    prompt = prompts(1, 2, 12, 12)[0]
    (first,) = bench.run(request(prompt, budget=4))
    (other,) = bench.run(request(prompt, budget=5))
    (same,) = bench.run(request(prompt, budget=4))
    assert [answer.finished.usage.cached_tokens for answer in (first, other, same)] == [0, 0, 11]
    assert same.tokens == first.tokens


def test_nothing_is_shared_with_requests_of_somebody_else():
    """How many tokens were cached, and how soon, would tell what others have asked."""
    bench = Bench(kept_prefixes=3)
    prompt = prompts(1, 9, 12, 12)[0]
    both = bench.run(request(prompt, owner="a"), request(prompt, owner="b"))
    later = [bench.run(request(prompt, owner=owner))[0] for owner in ("c", "a", "b", "")]
    cached = [told.finished.usage.cached_tokens for told in (*both, *later)]
    assert cached == [0, 0, 0, 11, 11, 0]
    assert len({tuple(told.tokens) for told in (*both, *later)}) == 1


def test_what_is_kept_is_bounded_and_the_oldest_goes():
    bench = Bench(kept_prefixes=2)
    first, two, three = prompts(3, 6, 10, 14)
    bench.run(request(first))
    bench.run(request(two))
    bench.run(request(first))
    bench.run(request(three))  # `two` goes
    assert bench.batcher.pool.kept == 2
    kept = [bench.run(request(p))[0].finished.usage.cached_tokens for p in (first, three)]
    assert kept == [len(first) - 1, len(three) - 1]
    assert bench.run(request(two))[0].finished.usage.cached_tokens == 0


def test_so_are_its_tokens_by_two_contexts():
    bench = Bench(kept_prefixes=8)
    for prompt in prompts(5, 0, 90, 100):
        bench.run(request(prompt, max_tokens=2))
        assert bench.batcher.pool.kept_tokens <= 2 * bench.buddy.backbone.context
    assert bench.batcher.pool.kept == 2


def test_cancelled_requests_free_their_rows_at_once():
    bench = Bench(rows=2, chunk=3, kept_prefixes=0)
    long = [request(p, max_tokens=50) for p in prompts(3, 1, 20, 20)]
    told = [bench.add(wanted) for wanted in long]
    bench.batcher.step()  # two are in their prompt, one waits
    assert len(bench.batcher.rows) == 2
    assert len(bench.batcher.waiting) == 1
    bench.batcher.cancel(2)
    bench.batcher.cancel(0)
    assert len(bench.batcher.rows) == 1
    assert not bench.batcher.waiting
    for _ in range(9):
        bench.batcher.step()
    assert told[1].tokens, "it decodes"
    bench.batcher.cancel(1)
    bench.batcher.cancel(1)
    assert not bench.batcher.has_work
    assert not bench.batcher.pool.session.sequences
    assert not any(answer.ended for answer in told)


def test_many_requests_leave_memory_as_it_was():
    bench = Bench(byte_buddy("random:2"), rows=3, kept_prefixes=2, chunk=6)
    sizes, kv = [], bench.batcher.pool.session.kv
    rows = kv.rows
    for round_ in range(4):
        bench.run(*mixed(12, 100 + round_ % 2))
        assert kv.rows == rows, "kept prefixes have had room from the start"
        assert len(bench.batcher.pool.session.sequences) <= 2
        assert kv.skipped.arena.counts[0] <= 2 * 30 * 6
        sizes.append((kv.rows, kv.capacity, len(kv.skipped.arena.stored[0])))
    assert sizes[:2] == sizes[2:]


def test_one_seed_is_one_text_alone_and_in_company():
    buddy = byte_buddy(predictor=True)
    seeded = [
        request(p, max_tokens=12, budget=budget, seed=5, temperature=0.9, top_p=0.9)
        for p, budget in zip(
            prompts(3, 8),
            (4, auto(least=3, most=6), default(least=3, most=5)),
            strict=True,
        )
    ]
    others = [request(p, temperature=1.0) for p in prompts(6, 12)]
    separately = [Bench(buddy).run(wanted)[0].tokens for wanted in seeded]
    together = Bench(buddy, chunk=5, control=Lower()).run(*others, *seeded)[-3:]
    assert [answer.tokens for answer in together] == separately
    assert len({tuple(tokens) for tokens in separately}) == 3
    reseeded = request(seeded[0].prompt, 12, seed=6, temperature=0.9, top_p=0.9)
    assert Bench(buddy).run(reseeded)[0].tokens != separately[0]


class Lower(NoControl):
    """Gives every row three blocks from its second token on."""

    def decide(self, rows, queue):
        return Orders(depths={row.number: 3 for row in rows if row.context}, prompt_tokens=64)


def test_control_may_lower_who_is_elastic_and_nobody_else():
    bench = Bench(byte_buddy(predictor=True), control=Lower())
    prompt = prompts(1, 3, 6, 6)[0]
    told = bench.run(
        request(prompt, budget=5),
        request(prompt, budget=default(least=2, most=5)),
        request(prompt, budget=default(least=4, most=6)),
        request(prompt, budget=default(least=2, most=5), seed=1),
    )
    depths = [[int(runs.sum()) for runs in answer.runs] for answer in told]
    assert depths == [[5] * 8, [5] + [3] * 7, [6] + [4] * 7, [5] * 8]
    usages = [answer.finished.usage for answer in told]
    assert [usage.lowered_from for usage in usages] == [None, 5, 6, None]
    assert [usage.source for usage in usages] == ["fixed", *["default"] * 3]
    assert [usage.budget_blocks for usage in usages] == [5, 5, 6, 5]


def test_auto_is_what_generate_chooses():
    buddy = byte_buddy(predictor=True)
    for prompt in prompts(4, 7):
        (told,) = Bench(buddy).run(request(prompt, budget=auto(least=1, most=6)))
        ids = torch.tensor([prompt])
        expected = buddy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            budget="auto",
            max_new_tokens=8,
            do_sample=False,
        )
        assert told.tokens == expected[0, len(prompt) :].tolist()
        assert told.finished.usage.source == "auto"


def test_ends_and_what_ignores_them():
    buddy = byte_buddy("static:2,3,4,1")
    prompt = prompts(1, 3)[0]
    (free,) = Bench(buddy).run(request(prompt, 12))
    end = free.tokens[5]
    place = free.tokens.index(end)
    (told,) = Bench(buddy, ends=(end, VOCAB - 1)).run(request(prompt, 12))
    assert told.tokens == free.tokens[:place]
    assert told.finished.reason == "stop"
    assert told.finished.usage.completion_tokens == place + 1
    (told,) = Bench(buddy, ends=(end,)).run(request(prompt, 12, ignore_eos=True))
    assert told.tokens == free.tokens


def test_the_first_token_counts_at_the_depth_of_the_prompt_that_made_it():
    budget = fixed(prefill=6, decode=3)
    short, three = Bench().run(
        request([1, 2], max_tokens=1, budget=budget), request([1, 2], max_tokens=3, budget=budget)
    )
    usage = short.finished.usage
    assert (usage.budget_blocks, usage.blocks_per_token) == (3, 6.0)
    assert three.finished.usage.blocks_per_token == (6 + 3 + 3) / 3


def test_a_client_that_fails_hurts_nobody_else():
    def breaks(event):
        raise RuntimeError("gone")

    bench = Bench()
    asked = mixed(3, 6)
    bench.add(asked[0], breaks)
    told = [bench.add(wanted) for wanted in asked[1:]]
    while bench.batcher.has_work:
        bench.batcher.step()
    assert [answer.tokens for answer in told] == [
        alone(bench.buddy, wanted) for wanted in asked[1:]
    ]


def test_broken_logits_fail_their_request_alone():
    buddy = byte_buddy("full", engine="general")
    with torch.no_grad():
        buddy.backbone.embedding.weight[7] = torch.nan
    bench = Bench(buddy)
    good, bad = bench.run(request([1, 2, 3], budget=6), request([1, 7, 3], budget=6))
    assert "not finite" in bad.failed
    assert len(good.tokens) == 8 or "not finite" in good.failed
    assert not bench.batcher.rows


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("kv_policy", ["zero", "mask", "project", "lazy"])
def test_a_row_keeps_no_nan_of_the_request_before_it(kv_policy, engine):
    buddy = byte_buddy("static:2,3,4,1", kv_policy=kv_policy, engine=engine)
    with torch.no_grad():
        buddy.backbone.embedding.weight[7] = torch.nan
    bench = Bench(buddy, kept_prefixes=0)
    budget = fixed(prefill=4, decode=6)
    asked = [request(prompt, budget=budget) for prompt in ([5, 9, 2], range(30, 60))]
    expected = [heard.tokens for heard in bench.run(*asked)]
    broken = [request([7] * 40, budget=6)] * 2
    assert all("not finite" in heard.failed for heard in bench.run(*broken))
    assert [heard.tokens for heard in bench.run(*asked)] == expected


def test_logprobs_come_with_tokens():
    bench = Bench()
    (told,) = bench.run(request([5, 6, 7], top_logprobs=3))
    for event in told.events:
        if isinstance(event, Delta):
            (logprobs,) = event.logprobs
            assert logprobs.token == event.tokens[0] == logprobs.top[0][0]
            assert logprobs.logprob == logprobs.top[0][1]
            assert len(logprobs.top) == 3
            assert 0 >= logprobs.top[0][1] >= logprobs.top[1][1] >= logprobs.top[2][1]
    (plain,) = bench.run(request([5, 6, 7]))
    assert plain.tokens == told.tokens


def test_nothing_ends_an_answer_before_its_least_tokens():
    """As transformers' `min_new_tokens` has it, for the model's end, stop tokens and strings."""
    buddy = byte_buddy("static:2,3,4,1")
    asked = request(b"hello", max_tokens=12)
    free = alone(buddy, asked)
    end = free[1]
    (short,) = Bench(buddy, ends=[end]).run(asked)
    assert short.tokens == free[: free.index(end)]
    ids = torch.tensor([asked.prompt])
    expected = buddy.generate(
        ids, budget="4 blocks", max_new_tokens=12, min_new_tokens=6, do_sample=False,
        eos_token_id=end,
    )[0, len(asked.prompt) :].tolist()  # fmt: skip
    expected = expected[:-1] if expected[-1] == end else expected
    for bench, more in (
        (Bench(buddy, ends=[end]), {}),
        (Bench(buddy), {"stop_tokens": frozenset({end})}),
    ):
        (told,) = bench.run(replace(asked, min_tokens=6, **more))
        assert told.tokens == expected
        assert end not in told.tokens[:6]
    letter = byte_tokenizer().convert_tokens_to_ids("a")
    letters = request(b"h", max_tokens=12, logit_bias={letter: 100.0}, stop=("a",))
    (told,) = Bench(buddy).run(replace(letters, min_tokens=6))
    assert (told.text, told.finished.reason) == ("a" * 6, "stop")


def test_special_tokens_are_text_where_they_are_asked_for():
    buddy = byte_buddy("static:2,3,4,1", vocab=END + 1)
    asked = request(b"h", max_tokens=4, logit_bias={END: 100.0})
    assert Bench(buddy).run(asked)[0].text == ""
    (told,) = Bench(buddy).run(replace(asked, shown_tokens=frozenset({END})))
    assert told.text == "</s>" * 4
