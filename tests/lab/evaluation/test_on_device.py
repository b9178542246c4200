"""Evaluation on a GPU, pretended or real: no mixed devices, and the figures of the CPU."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.budget.source import ConstantBudget
from buddy.depth.prior import Prior
from buddy.lab.evaluation.answers.answers import run_answers
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.perplexity import WindowedText, run_perplexity
from buddy.lab.evaluation.rouge.rouge import RougeConfig, ask_all, run_rouge
from buddy.lab.evaluation.rouge.samsum import Dialogue
from buddy.lab.evaluation.speed.speed import SpeedConfig, measure_speed
from buddy.lab.evaluation.tasks.scoring import ask, score
from buddy.lab.observe.observations import observe_context, observe_ranks
from buddy.resume import ResumeFile
from tests import gpu
from tests.lab.evaluation.test_answers import EXAMPLES
from tests.product.policies.made import gated
from tests.tiny import random_ids, tiny_buddy
from tests.words import say, word_tokenizer

pytestmark = pytest.mark.usefixtures("gpu")
TALKS = [range(3, 12), range(20, 27), (9, 8, 7)]
SPECS, BUDGETS = ["routed", "random:3"], ["4 blocks", "1.0"]


def on_both(work, make=lambda: tiny_buddy(engine="general", predictor=True)):
    """What the work gives of a model on the CPU, and of one that is on the device."""
    expected = work(make())
    with gpu.on_gpu():
        made = work(gpu.move(make()))
    return made, expected


def assert_same(made, expected):
    """The same results, but for the order of sums."""
    # atol: a relative error of sums near zero, such as differences.
    gpu.assert_same(_numbers(made), _numbers(expected), atol=1e-5, rtol=1e-4)


def _numbers(results):
    """What numbers are in results, by place; all else must be equal."""
    found = {}

    def walk(value, place):
        if isinstance(value, dict):
            for name, part in value.items():
                walk(part, (*place, str(name)))
        elif isinstance(value, list | tuple):
            for at, part in enumerate(value):
                walk(part, (*place, str(at)))
        elif isinstance(value, float):
            found["/".join(place)] = value
        else:
            found["/".join((*place, repr(value)))] = 0.0

    walk(results, ())
    return found


def test_answers():
    def work(model):
        conditions = plan_conditions(model, SPECS, BUDGETS)
        return run_answers(model, conditions, EXAMPLES[:5], batch=3, shuffle_seed=3)

    assert_same(*on_both(work))


@pytest.mark.parametrize("method", [None, "d-llm"])
def test_perplexity(method):
    def work(model):
        text = WindowedText(name="words", ids=random_ids(3, 9), stride=4)
        specs = [method] if method else SPECS
        conditions = plan_conditions(model, specs, [] if method else BUDGETS)
        return run_perplexity(model, conditions, text, batch=2)

    if method is None:
        assert_same(*on_both(work))
    else:
        assert_same(*on_both(work, lambda: gated(method, engine="general")))


def test_rouge():
    dialogues = [Dialogue(f"d{n}", say(*ids), say(*ids[:3])) for n, ids in enumerate(TALKS)]
    config = RougeConfig(batch=2, max_new_tokens=3)

    def work(model):
        conditions = plan_conditions(model, ["routed"], ["3 blocks"])
        batches = ask_all(model, word_tokenizer(), dialogues, config)
        return run_rouge(model, word_tokenizer(), conditions, batches, config)

    assert_same(*on_both(work))


@pytest.mark.parametrize("source", [ConstantBudget(4), None])
def test_candidates_of_questions(source):
    shapes = [(9, 1, 1), (4, 3, 1), (1, 2)]
    asked = []
    for seed, (context, *answers) in enumerate(shapes):
        before = tuple(random_ids(1, context, seed=seed)[0].tolist())
        after = [tuple(random_ids(1, n, seed=50 + seed + n)[0].tolist()) for n in answers]
        asked += ask([(before, answer) for answer in after], context=64)

    def work(model):
        scored = score(model, model.policy, source, asked)
        return [[each.loglikelihoods, each.greedy, each.blocks] for each in scored]

    assert_same(*on_both(work))


def test_observations(tmp_path):
    def work(model):
        found = []
        for name, measure in (("ranks", observe_ranks), ("context", observe_context)):
            file = ResumeFile(tmp_path / f"{name}-{model.device.type}.safetensors", {})
            contexts = [[2, 4]] if name == "context" else []
            indicator, ids = "delta-ppl", random_ids(3, 8)
            found.append(
                measure(
                    indicator, model.backbone, ids, *contexts, batch=2, file=file,
                    on_batch=lambda done, total: None,
                )
            )  # fmt: skip
        return found

    assert_same(*on_both(work))


def test_speed(monkeypatch):
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 7)
    prompts, config = random_ids(2, 5).view(1, 2, 5), SpeedConfig(rounds=1, new_tokens=2)

    def work(model):
        conditions = plan_conditions(model, ["static"], ["4 blocks"])
        return measure_speed(model, conditions, prompts, config)

    def make():
        model = tiny_buddy(engine="general")
        prior = Prior(torch.tensor([0.4, 0.1, 0.3, 0.2]))
        return BuddyForCausalLM(model.model, prior=prior, engine="general")

    made, expected = on_both(work, make)
    assert made["peak_memory_bytes"] == 7
    assert [sorted(cell) for cell in made["cells"]] == [sorted(cell) for cell in expected["cells"]]
