"""ROUGE on SAMSum: answers as `generate` makes them, differences taken answer by answer."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import PromptError
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.rouge.rouge import RougeConfig, ask_all, rouge_scorer, run_rouge
from buddy.lab.evaluation.rouge.rouge_points import Answer, Logged, to_results, ways_of
from buddy.lab.evaluation.rouge.samsum import Dialogue, prompt_ids, read_answer
from buddy.lab.evaluation.samples import SampleLog
from tests.tiny import random_router, tiny_buddy, tiny_model
from tests.words import say, word_tokenizer

TOKENS = 6
CONFIG = RougeConfig(batch=2, max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def model():
    plain = tiny_model()
    router = random_router(plain, summary="ema", ema_decay=0.5)
    return BuddyForCausalLM(plain, router=router)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def dialogues():
    texts = [range(3, 12), range(20, 27), range(40, 55), (9, 8, 7), range(60, 71)]
    return [Dialogue(f"d{i}", say(*ids), say(*ids[:3])) for i, ids in enumerate(texts)]


def run(model, tokenizer, dialogues, *, policies=("routed",), config=CONFIG, **options):
    conditions = plan_conditions(model, policies, ("3 blocks",))
    batches = ask_all(model, tokenizer, dialogues, config)
    return run_rouge(model, tokenizer, conditions, batches, config, **options)


def logged_run(path, model, tokenizer, dialogues, **options):
    with SampleLog(path, {}) as log:
        results = run(model, tokenizer, dialogues, log=log, **options)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return results, {line.pop("key"): line for line in lines}


def test_answers_are_those_of_generate_alone_both_ways(model, tokenizer, dialogues, tmp_path):
    _, logged = logged_run(tmp_path / "log.jsonl", model, tokenizer, dialogues)
    assert len(logged) == 2 * len(dialogues)
    changed = 0
    for dialogue in dialogues:
        ids = torch.tensor([prompt_ids(tokenizer, dialogue.text)])
        for way in ("step", "prefill"):
            trace = DepthTrace()
            out = model.generate(
                ids,
                budget="3 blocks",
                reroute=way,
                trace=trace,
                max_new_tokens=TOKENS,
                do_sample=False,
            )
            (entry,) = (
                e for key, e in logged.items() if key.startswith(f"routed@3 {way} {dialogue.id} ")
            )
            text = read_answer(tokenizer, out[0, ids.shape[1] :].tolist())
            # A row alone has no pads: batching does not change it.
            assert entry["text"] == text
            assert entry["scores"] == rouge_scorer()(dialogue.summary, text)
            del entry["checksum"]
            answer = Answer.from_log(Logged(**entry))
            plans = [step.plans[0] for step in trace.steps]
            assert answer.plans == {plan: plans.count(plan) for plan in plans}
            assert asdict(answer.to_log()) == entry
            changed += len(answer.plans) > 1
    assert changed > 0, "plans never change: the two ways would be one"


def test_recompute_and_reuse_are_told_apart(model, tokenizer, dialogues):
    results = run(model, tokenizer, dialogues)
    points = {(point["metric"], point["reroute"]): point for point in results["points"]}
    assert set(points) == {
        (metric, way) for metric in ("rouge1", "rouge2", "rougeL") for way in ("step", "prefill")
    }
    recompute, reuse = results["execution"]
    assert (recompute["label"], reuse["label"]) == ("routed, recompute", "routed, reuse")
    assert reuse["distinct_plans_per_answer"] == 1 < recompute["distinct_plans_per_answer"]
    for entry in results["execution"]:
        assert entry["inputs"] == len(dialogues)
        assert entry["rates"][0] == entry["rates"][-1] == pytest.approx(1)
        assert sum(entry["rates"]) == pytest.approx(3)  # the budget, whatever ran
    for difference in results["differences"]:
        metric = difference["metric"]
        gain = points[metric, "step"]["value"] - points[metric, "prefill"]["value"]
        assert difference["value"] == pytest.approx(gain)
        assert (difference["reroute"], difference["minus"]) == ("step", "prefill")


def test_what_the_input_has_no_say_in_is_answered_once(model, tokenizer, dialogues, tmp_path):
    policies = ("static:3,2,1,4", "same=static:2,3,1,4", "random")
    results, logged = logged_run(
        tmp_path / "log.jsonl", model, tokenizer, dialogues, policies=policies
    )
    ways = {(point["label"], point["reroute"]) for point in results["points"]}
    assert ways == {
        ("static:3,2,1,4", None),
        ("same", None),
        ("random", "step"),
        ("random", "prefill"),
    }
    assert {gap["label"] for gap in results["differences"]} == {"random"}
    # The two orders remove the same three blocks, so they share their samples.
    assert len(logged) == 3 * len(dialogues)
    (full,) = plan_conditions(model)
    assert ways_of(full) == (None,)


def test_an_interrupted_run_goes_on_to_the_same_figures(
    model, tokenizer, dialogues, tmp_path, monkeypatch
):
    path, calls = tmp_path / "log.jsonl", []
    expected = run(model, tokenizer, dialogues)

    def stop(condition, answers):
        calls.append(answers)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logged_run(path, model, tokenizer, dialogues, on_answers=stop)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 4
    # Killed while it wrote a batch: that batch is made again whole.
    path.write_text("\n".join(lines[:-1]) + "\n")
    seen = []
    results, logged = logged_run(
        path, model, tokenizer, dialogues, on_answers=lambda condition, n: seen.append(n)
    )
    assert results == expected
    assert seen == [2, 2, 1, 2, 2, 1]
    assert len(logged) == 2 * len(dialogues)

    def never(*_, **__):
        raise AssertionError("an answer was made again")

    monkeypatch.setattr(BuddyForCausalLM, "generate", never)
    assert logged_run(path, model, tokenizer, dialogues)[0] == expected


def test_other_data_is_not_taken_from_the_log(model, tokenizer, dialogues, tmp_path):
    path = tmp_path / "log.jsonl"
    logged_run(path, model, tokenizer, dialogues)
    other = [Dialogue(dialogue.id, dialogue.text, "w5") for dialogue in dialogues]
    results, _ = logged_run(path, model, tokenizer, other)
    assert results["points"] == run(model, tokenizer, other)["points"]


def test_scores_by_hand():
    found = rouge_scorer()("The cat sat on the mat.", "the cats sat")
    # With stems three of three words and of six; two of two pairs and of five.
    assert found == pytest.approx({"rouge1": 2 / 3, "rouge2": 4 / 7, "rougeL": 2 / 3})
    assert rouge_scorer()("The cat", "") == dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)


def made(score, **plans):
    counts = {tuple(int(b) for b in plan[1:]): count for plan, count in plans.items()}
    return Answer("", dict.fromkeys(("rouge1", "rouge2", "rougeL"), score), counts)


def test_figures_by_hand(model):
    (condition,) = plan_conditions(model, ("routed",), ("3 blocks",))
    answers = {
        "step": [made(0.5, p015=3, p025=1), made(0.9, p025=2), made(0.1, p015=1)],
        "prefill": [made(0.4, p015=4), made(0.6, p045=2), made(0.1, p015=1)],
    }
    results = to_results(condition, answers)
    first = results["points"][0]
    assert (first["metric"], first["reroute"], first["samples"]) == ("rouge1", "step", 3)
    assert first["value"] == pytest.approx(0.5)
    assert first["stderr"] == pytest.approx(0.4 / math.sqrt(3))
    # Differences 0.1, 0.3, 0.0: mean 4/30, sum of squared deviations 14/300.
    (difference, *_) = results["differences"]
    assert difference["value"] == pytest.approx(4 / 30)
    assert difference["stderr"] == pytest.approx(math.sqrt(14 / 300 / 2 / 3))
    recompute, reuse = results["execution"]
    # Of each answer's tokens: 3/4, 0 and 1 ran block 1; 1/4, 1 and 0 block 2.
    assert recompute["rates"] == pytest.approx([1, 7 / 12, 5 / 12, 0, 0, 1])
    assert recompute["distinct_plans"] == 2
    assert recompute["distinct_plans_per_answer"] == pytest.approx(4 / 3)
    assert recompute["tokens_per_answer"] == pytest.approx(7 / 3)
    assert reuse["rates"] == pytest.approx([1, 2 / 3, 0, 0, 1 / 3, 1])
    single = to_results(condition, {None: [made(0.5, p015=1)]})
    assert {point["stderr"] for point in single["points"]} == {None}
    assert single["differences"] == []


def test_an_answer_ends_where_its_template_ends_a_turn(dialogues):
    model, tokenizer = tiny_buddy(), word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <s> {% endfor %}"
    model.generation_config.eos_token_id = 7
    run(model, tokenizer, dialogues[:1])
    assert model.generation_config.eos_token_id == [7, 1]


def test_what_follows_the_end_does_not_count(tokenizer, dialogues):
    plain = tiny_model()
    model = BuddyForCausalLM(plain, router=random_router(plain, summary="ema", ema_decay=0.5))
    ids = torch.tensor([prompt_ids(tokenizer, dialogues[0].text)])
    tokens = model.generate(ids, budget="3 blocks", max_new_tokens=TOKENS, do_sample=False)
    new = tokens[0, ids.shape[1] :].tolist()
    end = next(i for i in range(1, TOKENS) if new[i] not in new[:i])
    plain.generation_config.eos_token_id = [new[end], 1]
    texts = {}

    def score(summary, answer):
        texts[summary] = answer
        return dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)

    results = run(model, tokenizer, dialogues[:1], score=score)
    assert results["execution"][0]["tokens_per_answer"] == end + 1
    # The other rows of its batch go on; its own answer stays as long as it was.
    run(
        model, tokenizer, dialogues, config=RougeConfig(batch=5, max_new_tokens=TOKENS), score=score
    )
    alone = {}
    for dialogue in dialogues:
        run(model, tokenizer, [dialogue], score=lambda s, a: alone.__setitem__(s, a) or score(s, a))
    assert alone == texts


def test_settings_of_published_models_do_not_make_it_less_greedy(tokenizer, dialogues):
    plain = tiny_model("qwen2.5")
    model = BuddyForCausalLM(plain, policy="random")
    expected = run(model, tokenizer, dialogues, policies=("random",))
    plain.generation_config.update(do_sample=True, temperature=0.7, repetition_penalty=1.8)
    assert run(model, tokenizer, dialogues, policies=("random",)) == expected


def test_what_does_not_fit_is_refused_before_anything_runs(model, tokenizer, dialogues):
    long = Dialogue("long", say(*range(3, 80)), "w3")
    with pytest.raises(PromptError, match="dialogue long makes a prompt of"):
        ask_all(model, tokenizer, [*dialogues, long], CONFIG)
    batches = ask_all(model, tokenizer, dialogues, CONFIG)
    lengths = [len(asked.ids) for batch in batches for asked in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_the_callers_model_keeps_its_policy_and_the_kv_policy_is_taken(
    model, tokenizer, dialogues, monkeypatch
):
    policy = model.policy
    run(model, tokenizer, dialogues[:1])
    assert model.policy is policy
    seen = []
    new_session = BuddyForCausalLM.new_session

    def watch(self, batch, slots, kv_policy=None):
        seen.append(kv_policy)
        return new_session(self, batch, slots, kv_policy)

    monkeypatch.setattr(BuddyForCausalLM, "new_session", watch)
    run(model, tokenizer, dialogues[:1], config=RougeConfig(kv_policy="mask", max_new_tokens=2))
    assert set(seen) == {"mask"}
