"""`buddy route`: orders by group, confirmed on other rows; the router ranks as they do."""

import json
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.budget.blocks import least_blocks
from buddy.checkpoint import quick_prior
from buddy.checkpoint import resolve as resolving
from buddy.cli.main import app
from buddy.data.examples import Example, Source, by_source, read_examples
from buddy.data.mix import MIX, MIX_KINDS
from buddy.depth.select import select_blocks
from buddy.errors import BuddyError, DataError, ModelError, RecipeError, TrainingError
from buddy.training.answer_losses import Losses
from buddy.training.fast import fast_passes
from buddy.training.recipe import DataSettings, ModelSettings
from buddy.training.route.check import compare, order_sets
from buddy.training.route.fit import fit_router, new_router, rank_scores
from buddy.training.route.groups import (
    COMMON,
    FULL,
    PRIOR,
    ROUTED,
    Clusters,
    apart,
    split_groups,
)
from buddy.training.route.ledger import spread_levels
from buddy.training.route.losses import race_batches, set_losses
from buddy.training.route.measurements import SetMeasurements
from buddy.training.route.orders import OrderSearch, race, search_order
from buddy.training.route.recipe import FitSettings, LedgerFit, RouteRecipe, SearchSettings
from buddy.training.route.run import train_route
from buddy.training.run import Run, RunListener
from buddy.training.workers import Workers
from tests.product.training.examples import random_examples
from tests.product.training.made import save_stage_1, write_rows
from tests.tiny import NUM_BLOCKS, tiny_buddy, tiny_model
from tests.words import word_tokenizer


@torch.no_grad()
def test_sets_lose_what_the_model_loses_that_runs_them():
    buddy = tiny_buddy().eval()
    examples = random_examples(5, seed=2)
    sets = torch.ones(4, NUM_BLOCKS, dtype=torch.bool)
    sets[1, 1], sets[2, [2, 3]], sets[3, 1:5] = False, False, False
    with fast_passes(buddy.backbone):
        measured = set_losses(buddy.backbone, examples, sets[None])
    for column, blocks in enumerate(sets):
        gone = [block for block in range(NUM_BLOCKS) if not blocks[block]]
        if gone:
            buddy.set_policy("static:" + ",".join(map(str, gone)))
        for row, example in enumerate(examples):
            ids = torch.tensor([example.prompt + example.answer])
            logits = buddy(
                ids,
                budget=f"{int(blocks.sum())} blocks" if int(blocks.sum()) > 2 else None,
                use_cache=False,
            ).logits
            if int(blocks.sum()) < least_blocks(NUM_BLOCKS):
                continue
            nats = -logits[0].double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            expected = nats[len(example.prompt) - 1 :].sum()
            assert measured.nats[row, column] == pytest.approx(float(expected), rel=1e-4)
    assert measured.tokens.tolist() == [len(example.answer) for example in examples]


def additive(costs, noise=0.0, log=None, first=0.0):
    """Losses that a known price of each absent block adds up to; each row has noise of its own."""

    def measure(rows, sets):
        if log is not None:
            log.append(len(rows) * sets.shape[1])
        nats = []
        for row in rows:
            draw = torch.Generator().manual_seed(row.prompt[0])
            own = noise * torch.randn(len(costs), generator=draw, dtype=torch.float64)
            base = first if row.prompt[0] < 4 else 2.0
            lost = base + ((~sets[0]).double() * (costs + own)).sum(1)
            nats.append(lost * len(row.answer))
        tokens = torch.tensor([float(len(row.answer)) for row in rows], dtype=torch.float64)
        return Losses(torch.stack(nats), tokens)

    return measure


def numbered(count):
    return [Example((number, 1), (2,) * (1 + number % 3), "numbered") for number in range(count)]


COSTS = torch.tensor([9.0, 0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 9.0], dtype=torch.float64)


def test_a_race_ends_as_all_measurements_would_with_fewer_of_them():
    log, batches = [], race_batches(numbered(40), 4)
    sets = torch.ones(6, 8, dtype=torch.bool)
    for row in range(6):
        sets[row, row + 1] = False
    found = race(additive(COSTS, 0.2, log), batches, sets, 2.0)
    assert found.best == 1  # block 2
    assert found.num_measured == sum(log) < 0.6 * 40 * 6
    assert race(additive(COSTS, 0.2), batches, sets, 100.0).best == 1
    assert found.mean == pytest.approx(2.1, abs=0.3)
    for measured, cost in zip(found.behind, COSTS[1:7], strict=True):
        assert measured == pytest.approx(float(cost) - 0.1, abs=0.4)


@pytest.mark.parametrize("first", [0.0, 9.0])
def test_candidates_are_compared_on_the_rows_that_they_share(first):
    """Batches differ far more than blocks: those that left after an easy one are not cheap."""
    costs = torch.tensor([9.0, *(1 + i if i % 2 else 0.1 for i in range(20)), 9.0]).double()
    rows = sorted(numbered(24), key=lambda row: row.prompt)
    batches = [rows[start : start + 4] for start in range(0, 24, 4)]
    found = OrderSearch()
    for _ in range(6):
        found.step(additive(costs, 0.02, first=first), batches, 22, candidates=4, leave=2.0)
    assert all(costs[block] == costs[1] for block in found.removed)


def test_one_row_decides_nothing():
    sets = torch.ones(2, 8, dtype=torch.bool)
    sets[0, 1], sets[1, 2] = False, False
    rows = numbered(9)

    def measure(some, sets):
        nats = [[0.0, 1.0] if row.prompt[0] == 0 else [5.0, 1.0] for row in some]
        nats = torch.tensor(nats, dtype=torch.float64)[:, : sets.shape[1]]
        return Losses(nats, torch.ones(len(some), dtype=torch.float64))

    assert race(measure, [[row] for row in rows], sets, 2.0).best == 1
    _, error = measure(rows[:1], sets[None]).behind(torch.zeros(1).double())
    assert bool(error.isinf().all())


def test_losses_that_are_no_numbers_are_refused():
    buddy = tiny_buddy()
    buddy.backbone.blocks[2].mlp.down_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="not a number"):
        set_losses(buddy.backbone, random_examples(2), torch.ones(1, 1, 6, dtype=torch.bool))


def search(path, measure, *, lead_from="some", **changes):
    settings = {"num_blocks": 8, "rounds": 4, "candidates": 3, "leave": 2.0} | changes
    model = {"num_blocks": 8, "base": "some"}
    rows = race_batches(numbered(24), 4)
    identity = {"rows": "some", "lead_from": lead_from}
    return search_order(measure, rows, path, identity=identity, model=model, **settings)


def test_the_cheapest_blocks_go_first(tmp_path):
    found = search(tmp_path / "order.json", additive(COSTS, 0.05))
    assert found.removed == [2, 6, 4, 1]
    assert found.means == pytest.approx([1.7, 1.8, 2.0, 2.3, 2.8], abs=0.2)


def together(costs, pair, saved):
    """As `additive`, but two blocks are cheap once both are gone, and neither is alone."""
    plain = additive(costs, 0.05)

    def measure(rows, sets):
        lost = plain(rows, sets)
        both = (~sets[0][:, list(pair)]).all(1)
        return Losses(lost.nats - saved * both * lost.tokens[:, None], lost.tokens)

    return measure


def test_an_order_to_beat_leads_to_blocks_that_are_cheap_together(tmp_path):
    measure = together(COSTS, (1, 5), 1.1)  # 0.5 + 0.7 alone, 0.1 together
    greedy = search(tmp_path / "greedy.json", measure, rounds=3)
    assert greedy.removed == [2, 6, 4]
    led = search(tmp_path / "led.json", measure, rounds=3, lead=(5, 1, 2))
    assert led.removed == [5, 1, 2]
    assert led.means[2] < greedy.means[2]
    assert led.means[3] < greedy.means[3]
    worse = search(tmp_path / "worse.json", additive(COSTS, 0.05), rounds=3, lead=(5, 3, 1))
    assert worse.removed == greedy.removed


def test_an_order_goes_on_from_one_to_beat(tmp_path):
    found = search(tmp_path / "led.json", together(COSTS, (1, 5), 1.1), lead=(5, 1, 3, 4))
    assert found.removed[:3] == [5, 1, 2]  # and not 3


def test_an_interrupted_search_goes_on_to_the_same_order(tmp_path):
    whole, calls = search(tmp_path / "whole.json", additive(COSTS, 0.3)), []
    plain = additive(COSTS, 0.3)

    def interrupted(rows, sets):
        calls.append(rows)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return plain(rows, sets)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "part.json", interrupted)
    assert 0 < len(json.loads((tmp_path / "part.json").read_text())["results"]["removal_order"]) < 4
    assert search(tmp_path / "part.json", plain) == whole


@pytest.mark.parametrize(
    "change",
    [{"rounds": 5}, {"candidates": 4}, {"leave": 1.0}, {"lead_from": "others"}],
    ids=lambda change: next(iter(change)),
)
def test_the_record_of_another_search_is_refused(tmp_path, change):
    path = tmp_path / "order.json"
    search(path, additive(COSTS))
    with pytest.raises(TrainingError, match=next(iter(change))):
        search(path, additive(COSTS), **change)


@pytest.mark.parametrize(
    "damage", [{"removal_order": [2, 6, 4]}, {"nats": []}, {"checksum": None}], ids=str
)
def test_a_damaged_record_is_refused(tmp_path, damage):
    path = tmp_path / "order.json"
    search(path, additive(COSTS))
    record = json.loads(path.read_text())
    record["results"] |= damage
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingError, match="damaged"):
        search(path, additive(COSTS))


def test_parts_share_no_prompt():
    rows = [*numbered(50), *random_examples(30)]
    settings = SearchSettings(rows=15, confirm_rows=12, check_rows=9, answer_tokens=1)
    for validation in ([], numbered(60)[40:] * 3):
        train, check = apart(rows * 2, validation)
        assert len(check) == len(validation) // 3
        made = (by_source(train), by_source(check))
        groups = split_groups(*made, settings, prompts=20, seed=1)
        parts = [
            [row.prompt for row in part]
            for group in groups.values()
            for part in (group.search, group.confirm, group.check)
        ]
        assert sum(map(len, parts)) == len(set().union(*parts))
        checked = {row.prompt for group in groups.values() for row in group.check}
        for group in groups.values():
            assert not checked & {row.prompt for row in group.fit}
            assert len(group.fit) == 20
        assert groups == split_groups(*made, settings, prompts=20, seed=1)
    assert [len(part) for part in parts[3:]] == [12, 9, 9]


def test_short_answers_are_searched_on_more_rows():
    short = [Example((number, 1), (2,) * 3, "short") for number in range(200)]
    long = [Example((number, 2), (2,) * 30, "long") for number in range(200)]
    settings = SearchSettings(rows=20, confirm_rows=10, answer_tokens=120)
    parts = split_groups({"short": short, "long": long}, {}, settings, prompts=9, seed=0)
    assert [len(parts[kind].search) for kind in ("short", "long")] == [40, 20]
    assert [len(parts[kind].confirm) for kind in ("short", "long")] == [20, 10]
    few = split_groups({"short": short[:50]}, {}, settings, prompts=9, seed=0)["short"]
    assert (len(few.search), len(few.confirm), len(few.check)) == (20, 15, 15)


def test_a_prompt_with_other_answers_is_one_prompt():
    rows = [replace(row, answer=(3,) * n) for row in numbered(5) for n in (1, 2, 3)]
    train, check = apart(rows, rows[:3])
    assert [row.prompt for row in train] == [row.prompt for row in numbered(5)[1:]]
    assert check == rows[:1]


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="9 different prompts of 'few'"):
        split_groups({"few": numbered(9)}, {}, SearchSettings(), prompts=9, seed=0)
    many = {str(name): numbered(10) for name in range(65)}
    with pytest.raises(DataError, match="65 sources"):
        split_groups(many, {}, SearchSettings(), prompts=9, seed=0)
    for name in ("prior", "all prompts", "routed", "full depth"):
        with pytest.raises(DataError, match=f"called '{name}'"):
            apart([replace(row, source=name) for row in numbered(2)], [])


def test_prompts_that_look_alike_are_one_group():
    draw = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(4, 12, generator=draw)
    wanted = torch.arange(4).repeat(30)
    points = centres[wanted] + 0.3 * torch.randn(120, 12, generator=draw)
    mine = Clusters.of(points, 4, seed=0)(points)
    assert len({(int(a), int(b)) for a, b in zip(mine, wanted, strict=True)}) == 4
    some = torch.cat([points[:45], points[60:63]])
    few = Clusters.of(some, 6, seed=0)
    assert len(few.centres) <= 4
    assert torch.bincount(few(some)).min() >= 10
    assert len(Clusters.of(points[:3], 6, seed=0).centres) == 1


def test_scores_rank_as_the_order_does():
    order = (3, 1, 4, 2)
    scores = torch.nn.functional.pad(rank_scores(order, 6)[None], (1, 1))
    for blocks in range(3, 7):
        plan = select_blocks(scores, torch.tensor([blocks])).mask[0]
        assert {block for block in range(6) if not plan[block]} == set(order[: 6 - blocks])


def test_the_router_gives_each_group_its_order():
    buddy = tiny_buddy()
    router = new_router(buddy, (1, 2, 3, 4), FitSettings(), 0)
    width = router.config.summary_width
    draw = torch.Generator().manual_seed(1)
    centres = {"a": torch.randn(width, generator=draw), "b": torch.randn(width, generator=draw)}
    orders = {"a": (4, 3, 2, 1), "b": (2, 4, 1, 3)}
    views = {n: c + 0.1 * torch.randn(2, 20, width, generator=draw) for n, c in centres.items()}
    assert fit_router(router, views, orders, FitSettings(steps=200), seed=0) > 0.99
    for name, centre in centres.items():
        unseen = centre + 0.1 * torch.randn(20, width, generator=draw)
        scores = router.decision.fuse(router.decision(unseen))
        assert (scores.argsort(1) + 1 == torch.tensor(orders[name])).all(), name


def test_prompts_alone_weigh_as_much_as_with_parts_of_their_answers():
    buddy = tiny_buddy()
    router = new_router(buddy, (1, 2, 3, 4), FitSettings(), 0)
    width = router.config.summary_width
    # What is seen of a prompt alone is that of the other group's answers: three to two at half.
    alone, later = torch.zeros(width), torch.ones(width)
    views = {
        "a": torch.stack([alone, later, later, later])[:, None].expand(-1, 8, -1),
        "b": torch.stack([later, alone, alone, alone])[:, None].expand(-1, 8, -1),
    }
    orders = {"a": (4, 3, 2, 1), "b": (1, 2, 3, 4)}
    assert fit_router(router, views, orders, FitSettings(steps=50), seed=0) == pytest.approx(0.5)


def test_gains_are_paired_and_the_single_order_is_chosen_in_hindsight():
    orders = {COMMON: (1, 2, 3, 4), "y": (4, 3, 2, 1)}
    columns, _ = order_sets({PRIOR: (2, 1, 3, 4), **orders}, [4], 6)
    columns += [(ROUTED, 4), (FULL, 6)]
    tokens = torch.tensor([1.0, 1.0], dtype=torch.float64)

    def of(*rows):
        return Losses(torch.tensor(rows, dtype=torch.float64), tokens)

    # prior, all prompts, y, routed, full depth
    losses = {
        "a": of((5, 1, 3, 1, 1), (5, 2, 4, 2, 0)),
        "b": of((5, 4, 2, 2, 0), (5, 6, 3, 4, 1)),
    }
    plans = torch.tensor([[1, 1, 0, 0, 1, 1]] * 2 + [[1, 0, 0, 1, 1, 1]] * 2, dtype=torch.bool)
    found = compare(losses, columns, 4, {"a": COMMON, "b": "y"}, plans)
    assert (found.single_name, found.single) == ("y", 3.0)
    assert found.full == 0.5
    assert found.routed == pytest.approx(2.25)
    assert found.gain == pytest.approx(0.75)
    assert (found.searched, found.searched_gain) == pytest.approx((3.25, 1.0))
    # a gains 2 and 2, b 0 and -1: b's deviations are a half, and the mean is of two sources.
    assert found.gain_error == pytest.approx((2 * 2 * 0.5**2) ** 0.5 / 2 / 2)
    assert found.distinct_plans == 2
    assert found.by_source["a"]["wrong"] == pytest.approx(2.0)
    assert found.hindsight == pytest.approx((1.5 + 2.5) / 2)


def test_work_side_by_side_ends_with_the_first_failure():
    torch.set_num_threads(2)
    workers, done = Workers(torch.device("cpu")), []

    def work(item):
        if item == 1:
            raise ValueError("no")
        workers.check()
        done.append(item)
        return item

    with pytest.raises(ValueError, match="no"):
        workers.map(work, range(3))
    with pytest.raises(InterruptedError):
        workers.check()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    again = Workers(torch.device("cpu"))
    assert again.map(lambda item: item**2, range(5)) == [0, 1, 4, 9, 16]


def save_base(folder):
    """A base model's folder, as its makers would publish it."""
    tiny_model("qwen3").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


@pytest.fixture
def recipe(tmp_path):
    save_base(tmp_path / "base")
    lines = []
    for seed, source in enumerate(("one", "two")):
        path = write_rows(tmp_path / f"{source}.jsonl", 24, seed=seed)
        lines += [{**json.loads(line), "source": source} for line in path.read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return RouteRecipe(
        model=ModelSettings(name=str(tmp_path / "base"), dtype="float32"),
        data=DataSettings(train=(Source(path=str(tmp_path / "rows.jsonl")),), max_tokens=40),
        search=SearchSettings(batch_size=4, candidates=2, depths=(0.8, 0.6)),
        fit=FitSettings(steps=20),
    )


def results(folder):
    return json.loads((folder / "record.json").read_text())["results"]


@torch.no_grad()
def test_a_whole_run_leaves_full_depth_as_it_was(recipe, tmp_path):
    checkpoint = train_route(recipe, tmp_path / "out")
    base = BuddyForCausalLM.from_pretrained(recipe.model.name)
    routed = BuddyForCausalLM.from_pretrained(checkpoint)
    assert routed.policy.name == "routed"
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(routed(ids).logits, base(ids).logits)
    assert routed(ids, budget="4 blocks").executed_blocks.tolist() == [4, 4]
    routed.set_policy(f"static:{tmp_path / 'out' / 'orders' / 'one.json'}")
    assert routed(ids, budget="4 blocks").executed_blocks.tolist() == [4, 4]
    found = results(tmp_path / "out")
    assert sorted(found["orders"]) == [COMMON, "one", "two"]
    assert found["common"] in found["orders"]
    for chosen in found["confirmed"].values():
        assert chosen["order"] in found["orders"]
        assert not (chosen["is_kept"] and chosen["order"] == found["common"])
    assert all(sorted(order) == [1, 2, 3, 4] for order in found["orders"].values())
    assert [table["blocks"] for table in found["tables"]["groups"]] == [5, 4]
    assert "a router" in (checkpoint / "README.md").read_text()


@torch.no_grad()
def test_a_whole_run_spends_means_by_a_ledger(recipe, tmp_path):
    checkpoint = train_route(recipe, tmp_path / "out")
    found = results(tmp_path / "out")["ledger"]
    assert found["levels"] == [4, 5, 6]
    assert [(row["mean"], row["prompt"]) for row in found["means"]] == [(5, 5), (5, 6)]
    routed = BuddyForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert routed.ledger.levels == (4, 5, 6)
    ids = torch.tensor([[5, 6, 7]])
    assert routed(ids, budget="mean:5 blocks").executed_blocks.tolist() == [5]
    # The slow way: each source's answers of the check, decoded a token at a time.
    rows = read_examples(recipe.data.train[0], word_tokenizer(), max_tokens=40)
    groups = split_groups(
        by_source(rows), {}, recipe.search, prompts=recipe.fit.prompts, seed=recipe.seed
    )
    for case in found["means"]:
        means = []
        for group in groups.values():
            lost = tokens = 0
            for row in group.check:
                out = routed(
                    torch.tensor([row.prompt]), budget="mean:5 blocks",
                    prefill_budget=f"{case['prompt']} blocks",
                )  # fmt: skip
                for fed, target in zip(row.answer, row.answer[1:], strict=False):
                    out = routed(
                        torch.tensor([[fed]]), cache=out.cache, budget="mean:5 blocks",
                    )  # fmt: skip
                    lost -= float(out.logits[0, -1].double().log_softmax(-1)[target])
                    tokens += 1
            means.append(lost / tokens)
        assert case["both"] == pytest.approx(sum(means) / 2, abs=2e-3)
        assert case["gain"] == pytest.approx(case["routed"] - case["both"], abs=1e-9)


def test_a_ledger_is_left_out_where_none_is_asked_or_no_answer_is_fed(recipe, tmp_path):
    none = replace(recipe, ledger=LedgerFit(rows=0))
    checkpoint = train_route(none, tmp_path / "none")
    assert results(tmp_path / "none")["ledger"] is None
    assert BuddyForCausalLM.from_pretrained(checkpoint).ledger is None
    path = tmp_path / "rows.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    words = [{**line, "completion": line["completion"].split()[0]} for line in lines]
    path.write_text("\n".join(map(json.dumps, words)))
    warned = []
    train_route(recipe, tmp_path / "words", listener=RunListener(warned=warned.append))
    assert results(tmp_path / "words")["ledger"] is None
    assert any("no ledger: fewer than 4 answers" in text for text in warned)


def test_levels_are_spread_from_the_least_to_all():
    assert spread_levels(18, 30, 7) == (18, 20, 22, 24, 26, 28, 30)
    assert spread_levels(4, 6, 7) == (4, 5, 6)
    assert spread_levels(14, 24, 2) == (14, 24)


def test_an_interrupted_run_goes_on_to_the_same_record(recipe, tmp_path):
    train_route(recipe, tmp_path / "whole")
    for stage in (
        "searching orders",
        "confirming orders",
        "checking orders",
        "fitting a ledger",
        "checking the ledger",
    ):

        def stop(what, done, total, stage=stage):
            if what == stage and done > total // 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_route(recipe, tmp_path / "part", listener=RunListener(measured=stop))
    train_route(recipe, tmp_path / "part")
    assert results(tmp_path / "part") == results(tmp_path / "whole")


def test_rows_of_one_source_are_grouped_by_what_the_router_sees(recipe, tmp_path):
    search = replace(recipe.search, groups=2)
    train_route(replace(recipe, search=search), tmp_path / "out")
    assert set(results(tmp_path / "out")["orders"]) == {COMMON, "group 1", "group 2"}


def test_more_groups_than_the_prompts_make_are_refused(recipe, tmp_path):
    search = replace(recipe.search, groups=5)  # of 10 prompts or more, and there are 48
    wrong = r"search.groups must be at most [1-4], as 48 different prompts .*, got 5: ask for fewer"
    with pytest.raises(RecipeError, match=wrong):
        train_route(replace(recipe, search=search), tmp_path / "out")
    assert not (tmp_path / "out" / "orders").exists()


def test_too_few_rows_are_refused_before_the_model_is_loaded(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "load_model", lambda run, **options: pytest.fail("loaded"))
    path = write_rows(tmp_path / "few.jsonl", 5, seed=9)
    data = replace(recipe.data, train=(*recipe.data.train, Source(path=str(path))))
    with pytest.raises(DataError, match=r"5 different prompts of .*few"):
        train_route(replace(recipe, data=data), tmp_path / "out")


def test_a_single_group_is_searched_once(recipe, tmp_path):
    told = []
    search = replace(recipe.search, groups=1)
    listener = RunListener(measured=lambda *done: told.append(done))
    train_route(replace(recipe, search=search), tmp_path / "out", listener=listener)
    assert list(results(tmp_path / "out")["orders"]) == [COMMON]
    assert told[-1][1] == told[-1][2]
    assert [done for what, done, _ in told if what == "fitting the router"] == list(range(1, 21))


def test_rows_of_no_group_are_checked_apart(recipe, tmp_path):
    path = write_rows(tmp_path / "other.jsonl", 12, seed=9)
    data = replace(recipe.data, validation=(Source(path=str(path)),))
    train_route(replace(recipe, data=data), tmp_path / "out")
    (table, _) = results(tmp_path / "out")["tables"]["others"]
    assert next(iter(table["by_source"].values()))["answers"] == 12


def test_changed_settings_are_measured_anew_and_said(recipe, tmp_path):
    warnings = []
    train_route(recipe, tmp_path / "out")
    fewer = replace(recipe, search=replace(recipe.search, check_rows=3))
    train_route(fewer, tmp_path / "out", listener=RunListener(warned=warnings.append))
    assert any("checking orders: measured anew" in text for text in warnings)
    note = "had another search: this one replaces it when it ends"
    assert f"the finished run in {tmp_path / 'out'} {note}" in warnings
    table = results(tmp_path / "out")["tables"]["groups"][0]
    assert {row["answers"] for row in table["by_source"].values()} == {3}


def test_the_folder_of_another_kind_of_run_is_refused(recipe, tmp_path):
    record = {"kind": "training-ledger", "config": {}, "results": {}, "model": None}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "record.json").write_text(json.dumps(record))
    with pytest.raises(TrainingError, match="another kind of run"):
        train_route(recipe, tmp_path / "out")


def test_a_model_that_has_a_router_is_refused(recipe, tmp_path):
    save_stage_1(tmp_path / "stage1")
    model = replace(recipe.model, name=str(tmp_path / "stage1"))
    with pytest.raises(RecipeError, match="has a trained router already"):
        train_route(replace(recipe, model=model), tmp_path / "out")


def test_depths_that_the_model_has_not_are_refused(recipe, tmp_path):
    search = replace(recipe.search, depths=(0.8, 0.2))
    with pytest.raises(RecipeError, match=r"search\.depths: of 6 blocks"):
        train_route(replace(recipe, search=search), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run_command(*arguments):
    return CliRunner().invoke(app, ["route", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_shows_what_routing_gains(recipe, tmp_path):
    rows, out = recipe.data.train[0].path, tmp_path / "out"
    few = ("--set", "fit.steps=20", "--set", "search.rows=6", "--set", "search.check_rows=6")
    done = run_command(recipe.model.name, "--rows", rows, "--out", out, *few)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out}/checkpoint\n"
    shown = done.stderr
    prose = ("Nats a token", "Gains are", "Of the ledger", "warning:")  # a terminal folds it
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith(prose))
    for text in ("5 of 6 blocks", "prompts", "single", "routed", "mean", "all prompts", "both"):
        assert text in shown
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["search"]["rows"] == 6
    again = run_command(recipe.model.name, "--rows", rows, "--out", out, *few)
    assert again.stdout == done.stdout


def test_the_command_looks_a_model_up_once_and_never_names_itself(
    recipe, tmp_path, monkeypatch, caplog
):
    looked_up = Counter()

    def counted(where, name):
        own = getattr(where, name)

        def call(*arguments, **options):
            looked_up[name] += 1
            return own(*arguments, **options)

        monkeypatch.setattr(where, name, call)

    counted(BuddyForCausalLM, "outline")
    counted(resolving, "find_model")
    counted(resolving, "read_tokenizer")
    monkeypatch.setattr(SetMeasurements, "measure", lambda *_: 1 / 0)  # the order is known by then
    monkeypatch.setattr(quick_prior, "cache_home", lambda: tmp_path / "home")
    caplog.set_level(logging.INFO, "buddy")
    rows = recipe.data.train[0].path
    done = run_command(recipe.model.name, "--rows", rows, "--out", tmp_path / "out")
    assert isinstance(done.exception, ZeroDivisionError), done.output
    (said,) = (text for text in caplog.messages if text.startswith("measuring a quick order"))
    assert "buddy route" not in said
    # The second tokenizer is the quick order's, which reads a text of its own.
    assert looked_up == {"outline": 1, "find_model": 1, "read_tokenizer": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--check", "rows.jsonl"), "--check needs --rows"),
        (("--rows", "none.jsonl"), "none.jsonl cannot be read"),
        (("--set", "search.wors=3"), "wors"),
        (("--set", "search.depths=[0.5, 0.7]"), "search.depths must be one at least and fall"),
        (("--set", "search.rows=1"), "at least 2"),
        (("--set", "seed=-1"), "seed must be at least 0"),
        (("--set", "model.name=other"), "--set model.name: the command has an argument"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_does_not_fit_is_refused_by_name(recipe, tmp_path, arguments, message):
    done = run_command(recipe.model.name, "--out", tmp_path / "out", *arguments)
    assert isinstance(done.exception, BuddyError)
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_rows_that_ship_are_of_the_kinds_that_it_groups():
    examples = read_examples(
        Source(path=MIX, template="alpaca"), word_tokenizer(), max_tokens=10_000
    )
    assert sorted(by_source(examples)) == sorted(MIX_KINDS)
