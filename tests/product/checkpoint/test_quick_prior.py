"""Any model runs at any budget: its order is measured once, when a budget first needs one."""

import itertools
import json
import logging
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from buddy import BuddyForCausalLM
from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.budget.blocks import least_blocks
from buddy.budget.source import ConstantBudget, PhasedBudget
from buddy.checkpoint import quick_prior
from buddy.checkpoint.resolve import load_tokenizer
from buddy.errors import BudgetError, CheckpointError, PolicyError, PromptError
from buddy.importance.indicators.cosine import SummaryCosine
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.routing.prior import normalise_prior
from tests.tiny import (
    NUM_BLOCKS,
    VOCAB,
    all_families,
    every_family,
    random_ids,
    random_router,
    tiny_model,
)

IDS = random_ids(2, 7)
LEAST = least_blocks(NUM_BLOCKS)
TEXT = quick_prior.sample_text()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache of quick priors."""
    monkeypatch.setattr(quick_prior, "cache_home", lambda: tmp_path / "home")
    return tmp_path / "home" / "priors"


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """The beginning of the text."""
    monkeypatch.setattr(quick_prior, "sample_text", lambda: TEXT[:1500])


def text_tokenizer():
    """A token for each of the commonest words of the text, and one for all others."""
    common = [word for word, _ in Counter(TEXT.split()).most_common(VOCAB - 3)]
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "<unk>", *common])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<s>"
    )


def save(folder, family="llama", seed=0):
    tiny_model(family, seed=seed).save_pretrained(folder)
    text_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "tiny")


@pytest.fixture
def passes(monkeypatch):
    """The windows that were measured."""
    made, measure = [], quick_prior.summary_cosine
    monkeypatch.setattr(
        quick_prior, "summary_cosine", lambda *given: made.append(given) or measure(*given)
    )
    return made


def executed(model, budget):
    with torch.no_grad():
        return model(IDS, budget=budget).plan.executed_sets[0]


def all_sets(model):
    return [executed(model, f"{blocks} blocks") for blocks in range(LEAST, NUM_BLOCKS + 1)]


@all_families
def test_every_budget_runs_exactly_and_a_larger_one_keeps_what_a_smaller_one_runs(
    family, tmp_path, home
):
    model = BuddyForCausalLM.from_pretrained(save(tmp_path / family, family))
    for blocks in (NUM_BLOCKS, *range(LEAST, NUM_BLOCKS)):
        with torch.no_grad():
            out = model(IDS, budget=[f"{blocks} blocks", "1.0"])
        assert out.executed_blocks.tolist() == [blocks, NUM_BLOCKS]
    sets = [set(blocks) for blocks in all_sets(model)]
    assert sets[0] > {0, NUM_BLOCKS - 1}
    assert [len(blocks) for blocks in sets] == list(range(LEAST, NUM_BLOCKS + 1))
    assert all(small < large for small, large in itertools.pairwise(sets))
    with torch.no_grad():
        generated = model.generate(IDS, budget=["3 blocks", 0.7], max_new_tokens=3)
    assert generated.shape == (2, 10)


@every_family
def test_it_is_the_cosine_of_buddy_importance_on_the_same_tokens(family, tmp_path, home):
    model = BuddyForCausalLM.from_pretrained(save(tmp_path / family, family))
    windows = quick_prior.quick_windows(load_tokenizer(tmp_path / family), 64)
    indicator = SummaryCosine(Backbone(model.model))
    for window in windows:
        indicator.update(window[None])
    expected = indicator.scores()
    assert torch.equal(model.prior, normalise_prior(expected[1:-1]))
    [path] = home.iterdir()
    assert path.stem == base_fingerprint(model.model)
    record = json.loads(path.read_text())
    assert record["results"]["importance"] == expected.tolist()
    assert tuple(record["results"]["removal_order"]) == model.policy.removal_order
    used = BuddyForCausalLM.from_pretrained(tmp_path / family, policy=f"static:{path}")
    assert all_sets(used) == all_sets(model)


def test_full_depth_and_policies_that_need_no_prior_measure_nothing(folder, home, passes):
    model = BuddyForCausalLM.from_pretrained(folder)
    assert model.policy_spec == "static"
    assert executed(model, None) == executed(model, 1.0) == tuple(range(NUM_BLOCKS))
    assert model.prior_facts is None
    for policy in ("random", "static:1,2,3", "full"):
        model.set_policy(policy)
        executed(model, 1.0 if policy == "full" else 0.6)
    routed = BuddyForCausalLM(
        model.model, prior=model.resources.prior, router=random_router(model.model)
    )
    executed(routed, 0.6)
    assert (passes, home.exists()) == ([], False)
    model.set_policy("static")
    with pytest.raises(BudgetError, match="is outside"):
        executed(model, "1 blocks")
    assert passes == []
    executed(model, 0.6)
    assert len(passes) > 1
    assert len(model.prior_facts["sha256"]) == 64


def test_it_is_measured_once_for_the_same_weights_wherever_they_lie(
    folder, home, passes, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "buddy")
    first = BuddyForCausalLM.from_pretrained(folder)
    assert first.policy.describe() == "static, order measured when a budget first needs it"
    sets = all_sets(first)
    assert first.policy.describe() == ("static, order measured now by a quick cosine pass (cached)")
    [said] = caplog.messages
    assert "buddy route searches better ones" in said
    measured = len(passes)
    copied = save(tmp_path / "elsewhere")
    for options in ({}, {"dtype": torch.bfloat16}, {"quant": "int8"}):
        again = BuddyForCausalLM.from_pretrained(copied, **options)
        assert all_sets(again) == sets
        assert again.policy.describe() == "static, order of a quick cosine pass (cached)"
    assert again.prior_facts["sha256"] == first.prior_facts["sha256"]
    assert len(passes) == measured
    assert len(caplog.messages) == 1
    executed(BuddyForCausalLM.from_pretrained(save(tmp_path / "other", seed=1)), 0.5)
    assert len(passes) == 2 * measured
    assert len(list(home.iterdir())) == 2


def change(**fields):
    def damage(path):
        record = json.loads(path.read_text())
        for name, value in fields.items():
            part, _, key = name.partition("__")
            record[part] = {**record[part], key: value} if key else value
        path.write_text(json.dumps(record))

    return damage


def as_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_text(""), "is no JSON"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "is no JSON"),
        (lambda path: path.write_text("[]"), "is no RunRecord"),
        (as_folder, "cannot be read"),
        (change(config=[]), "is no RunRecord"),
        (change(results=[]), "is no RunRecord"),
        (change(config__fingerprint="0" * 64), "another model, text or measurement"),
        (change(config__text_sha256="0" * 64), "another model, text or measurement"),
        (change(config__num_blocks=7), "another model, text or measurement"),
        (change(results__importance=None), "lacks the importance of 6 blocks"),
        (change(results__importance=[0.1] * 5), "lacks the importance of 6 blocks"),
        (change(results__importance=[True] * 6), "no number"),
        (change(results__importance=[10**400] * 6), "no number"),
        (change(results__importance=[float("nan")] * 6), "is no JSON"),
    ],
)
def test_a_damaged_cache_is_measured_anew_and_says_so(folder, home, passes, caplog, damage, says):
    first = BuddyForCausalLM.from_pretrained(folder)
    sets, measured = all_sets(first), len(passes)
    [path] = home.iterdir()
    written = json.loads(path.read_text())["results"]
    damage(path)
    again = BuddyForCausalLM.from_pretrained(folder)
    assert all_sets(again) == sets
    assert len(passes) == 2 * measured
    assert says in caplog.messages[0]
    assert "measured anew" in caplog.messages[0]
    if path.is_file():
        assert json.loads(path.read_text())["results"] == written
    else:
        assert "(not cached)" in again.policy.describe()


def test_a_cache_that_cannot_be_written_costs_another_pass_and_nothing_else(
    folder, home, passes, caplog
):
    home.parent.mkdir()
    home.write_text("a file in the folder's place")
    model = BuddyForCausalLM.from_pretrained(folder)
    assert len(set(all_sets(model))) == NUM_BLOCKS - 2
    assert "order measured now by a quick cosine pass (not cached)" in model.policy.describe()
    assert "is not kept" in caplog.messages[-1]


def test_two_processes_at_once_agree_and_leave_one_whole_record(folder, tmp_path):
    code = (
        "import sys, torch; from buddy import BuddyForCausalLM; "
        f"model = BuddyForCausalLM.from_pretrained({str(folder)!r}); "
        "print('ready', flush=True); sys.stdin.readline(); "
        "model.prior; print(model.policy.removal_order)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "BUDDY_HOME": str(tmp_path / "home")},
        )
        for _ in range(2)
    ]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    ended = [one.communicate(timeout=300) for one in both]
    assert [err for _, err in ended] == ["", ""]
    assert ended[0][0] == ended[1][0]
    [path] = (tmp_path / "home" / "priors").iterdir()
    order = json.loads(path.read_text())["results"]["removal_order"]
    assert ended[0][0].strip() == str(tuple(order))


def test_without_a_tokenizer_full_depth_runs_and_less_says_what_is_missing(tmp_path, home):
    tiny_model().save_pretrained(tmp_path / "mute")
    model = BuddyForCausalLM.from_pretrained(tmp_path / "mute")
    assert executed(model, 1.0) == tuple(range(NUM_BLOCKS))
    with pytest.raises(CheckpointError, match="the tokenizer in"):
        executed(model, 0.5)
    model.set_policy("random")
    assert len(executed(model, 0.5)) == 3


def test_a_model_that_computes_nan_is_not_ordered(folder, home):
    model = BuddyForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.backbone.blocks[2].parameters()).fill_(torch.nan)
    with pytest.raises(PolicyError, match="no finite number"):
        executed(model, 0.5)
    assert not home.exists()


def test_a_checkpoint_keeps_a_prior_that_is_known_and_measures_nothing_to_be_written(
    folder, home, passes, tmp_path
):
    model = BuddyForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "before")
    assert passes == []
    sets = all_sets(model)
    model.save_pretrained(tmp_path / "after")
    measured = len(passes)
    for path in home.iterdir():
        path.unlink()
    after = BuddyForCausalLM.from_pretrained(tmp_path / "after")
    assert all_sets(after) == sets
    assert after.policy.describe() == "static, prior of the checkpoint"
    assert len(passes) == measured
    before = BuddyForCausalLM.from_pretrained(tmp_path / "before")
    assert before.policy_spec == "static"
    assert all_sets(before) == sets
    assert len(passes) == 2 * measured


def test_an_adapted_model_has_an_order_of_its_own(folder, home, tmp_path):
    base = BuddyForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(base.model, LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    made = BuddyForCausalLM(adapted.eval(), policy="random", origin=base.origin)
    made.save_pretrained(tmp_path / "adapted", include_backbone=False)
    plain = BuddyForCausalLM.from_pretrained(folder)
    options = ({"merge_adapter": True}, {"merge_adapter": False})
    loaded = [
        BuddyForCausalLM.from_pretrained(tmp_path / "adapted", policy="static", **one)
        for one in options
    ]
    priors = [model.prior for model in (plain, *loaded)]
    assert not torch.equal(priors[0], priors[1])
    assert torch.equal(priors[1], priors[2])
    assert len(list(home.iterdir())) == 2


def test_what_is_compared_is_measured_before_it_runs(folder, home, passes):
    model = BuddyForCausalLM.from_pretrained(folder, policy="random")
    told = []
    for budget, phases in (("1.0", 0), ("prefill:1.0,decode:0.5", 1)):
        for condition in plan_conditions(model, ("static",), (budget,)):
            condition.prepare(lambda *news: told.append(news))
        assert bool(told) == bool(phases)
    stages, done, total = zip(*told, strict=True)
    assert set(stages) == {"measure"}
    assert list(done) == list(range(1, total[0] + 1))
    assert condition.source == PhasedBudget(NUM_BLOCKS, ConstantBudget(3))
    measured = len(passes)
    assert len(condition.policy.removal_order) == NUM_BLOCKS - 2
    assert len(passes) == measured


def test_each_window_begins_as_the_tokenizer_begins_a_text():
    tokenizer = text_tokenizer()
    plain = quick_prior.quick_windows(tokenizer, 50)
    assert [len(window) for window in plain] == [50] * quick_prior.WINDOWS
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    begun = quick_prior.quick_windows(tokenizer, 50)
    assert all(int(window[0]) == 1 and len(window) == 50 for window in begun)
    assert torch.equal(begun[0][1:], plain[0][:49])


def test_the_windows_are_far_apart_in_the_text(monkeypatch):
    monkeypatch.setattr(quick_prior, "sample_text", lambda: TEXT)

    class Numbered:
        """Every word is its own place, so that a window says where it is from."""

        bos_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": list(range(len(text.split())))}

    words = len(TEXT.split())
    windows = quick_prior.quick_windows(Numbered(), 50)
    starts = [int(window[0]) for window in windows]
    assert all(
        window.tolist() == list(range(at, at + 50))
        for window, at in zip(windows, starts, strict=True)
    )
    assert {b - a for a, b in itertools.pairwise(starts)} == {words // 50 // 4 * 50}
    assert starts[0] == 0
    (short,) = quick_prior.quick_windows(Numbered(), 10 * words)
    assert len(short) == words


def test_the_text_is_plain_and_its_code_runs():
    assert 1300 < len(TEXT.split()) < 1600
    code = TEXT.split("```python\n")[1].split("```")[0]
    exec(code, {})


@pytest.mark.parametrize("makes", ["no tokens", "unknown tokens"])
def test_a_tokenizer_of_another_model_is_one_line(home, folder, makes):
    made = text_tokenizer()
    if makes == "no tokens":
        made.backend_tokenizer.normalizer = Replace(Regex(r"[\s\S]"), "")
        error, says = PolicyError, "makes no tokens of a text; correct it, or name --policy random"
    else:
        made.add_tokens(["er"])  # beyond the model's vocabulary
        assert made("er")["input_ids"] == [VOCAB]
        error, says = PromptError, f"a token id is not one of the model's {VOCAB}"
    made.save_pretrained(folder)
    with pytest.raises(error, match=says) as caught:
        assert BuddyForCausalLM.from_pretrained(folder).prior is None
    assert "\n" not in str(caught.value)
