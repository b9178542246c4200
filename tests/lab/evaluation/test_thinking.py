"""Evaluations that generate take budgets by phase and limits of thinking, exact in each phase."""

import json

import pytest
from lm_eval.api.instance import Instance
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.budget.thinking import ThinkingMarks
from buddy.cli.main import app
from buddy.errors import BudgetError, PolicyError, PromptError
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.rouge.rouge import RougeConfig, ask_all, run_rouge
from buddy.lab.evaluation.rouge.samsum import Dialogue
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.evaluation.tasks.harness import BuddyLM
from tests.lab.evaluation.task_rows import ROWS, write
from tests.product.cli.test_thinking import thinking_tokenizer
from tests.tiny import random_router, tiny_model
from tests.words import say

PROMPT, THINK, ANSWER = 6, 3, 5
BUDGET = f"prompt:{PROMPT} blocks,think:{THINK} blocks,answer:{ANSWER} blocks"
TEMPLATE = "{{ messages[-1]['content'] }} <think>{% if not enable_thinking %} </think>{% endif %}"


@pytest.fixture
def model():
    made = BuddyForCausalLM(tiny_model(), policy="static:1,2,3,4", engine="general")
    made.thinking_marks = ThinkingMarks.of(thinking_tokenizer())
    return made


@pytest.fixture
def ran(model):
    """How many tokens each block ran in each pass, counted at the blocks themselves."""
    passes = []
    model.backbone.blocks[0].register_forward_pre_hook(lambda *_: passes.append(0))
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda _, args, out: add(passes, args[0].shape[:2].numel()))
    return passes


def add(passes, tokens):
    passes[-1] += tokens


def generations(*texts):
    return [
        Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": 8}), n, ("gsm", n, 1))
        for n, text in enumerate(texts)
    ]


def test_a_generation_runs_each_phase_at_its_budget(model, ran):
    # Of equal length, as pads of a prompt are computed beside it.
    texts = [f"{say(3, 4, 5)} <think>", say(9, 8, 7, 5), f"{say(11, 3, 2)} <think>"]
    lm = BuddyLM(model, tokenizer=thinking_tokenizer(), budget=BUDGET, thinking_tokens=3)
    answers = lm.generate_until(generations(*texts))
    (counts,) = lm.phases.values()
    blocks = sum(sum(count.blocks.values()) for count in counts)
    assert sum(ran) == PROMPT * 12 + blocks
    for count in counts:
        assert count.blocks.get("think", 0) == THINK * count.tokens.get("think", 0)
        assert count.blocks["answer"] == ANSWER * count.tokens["answer"]
        assert sum(count.tokens.values()) == 7  # the last one is not fed
    assert [count.tokens.get("think", 0) for count in counts][::2] == [3, 3]
    assert not any("think>" in answer for answer in answers)
    assert lm.depth("gsm") == pytest.approx(blocks / 21)


def test_what_ran_is_that_of_its_own_prompt_however_lm_eval_sorts(model):
    texts = [say(3), f"{say(4, 5, 6, 7)} <think>", say(9, 8)]

    def counts_of(*texts):
        lm = BuddyLM(model, tokenizer=thinking_tokenizer(), budget=BUDGET, thinking_tokens=3)
        lm.generate_until(generations(*texts))
        return lm.phases["gsm"]

    together = counts_of(*texts)
    assert [count.tokens.get("think", 0) > 0 for count in together] == [False, True, False]
    assert together == [count for text in texts for count in counts_of(text)]


def test_a_log_gives_back_what_each_phase_ran(model, tmp_path):
    path, found = tmp_path / "log.jsonl", []
    for _ in range(2):
        with SampleLog(path, {}) as log:
            lm = BuddyLM(model, tokenizer=thinking_tokenizer(), budget=BUDGET, log=log)
            found.append((lm.generate_until(generations(f"{say(3)} <think>")), lm.phases))
    assert found[0] == found[1]
    assert found[0][1]["gsm"][0].tokens["think"] > 0


@pytest.mark.parametrize("setting", [{"budget": BUDGET}, {"thinking_tokens": 4}])
def test_given_answers_have_no_phases(model, setting):
    lm = BuddyLM(model, tokenizer=thinking_tokenizer(), **setting)
    scored = [Instance("loglikelihood", {}, ("w3", " w4"), 0, metadata=("piqa", 0, 1))]
    with pytest.raises(BudgetError, match="log-likelihoods are of given answers"):
        lm.loglikelihood(scored)


def test_beams_are_counted_without_phases_and_refused_with_them(model):
    beams = generations(say(3, 4), say(5, 6))
    for request in beams:
        request.args[1]["num_beams"] = 2
    lm = BuddyLM(model, tokenizer=thinking_tokenizer(), budget="4 blocks")
    lm.generate_until(beams)
    assert [len(plan) for plan in lm.execution["gsm"]] == [4, 4]
    with pytest.raises(BudgetError, match="choose tasks without num_beams"):
        BuddyLM(model, tokenizer=thinking_tokenizer(), budget=BUDGET).generate_until(beams)


def test_summaries_are_what_follows_thinking_and_each_phase_is_counted(model, ran):
    tokenizer, config = thinking_tokenizer(), RougeConfig(max_new_tokens=8, thinking_tokens=2)
    tokenizer.chat_template = TEMPLATE
    asked = [Dialogue(str(n), say(3 + n, 5), say(7)) for n in range(3)]
    batches = ask_all(model, tokenizer, asked, config, {"enable_thinking": True})
    (condition,) = plan_conditions(model, (), (BUDGET,), thinking=True)
    texts = []

    def score(summary, text):
        texts.append(text)
        return dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.5)

    results = run_rouge(model, tokenizer, [condition], batches, config, score=score)
    (phases,) = {json.dumps(point["phases"]) for point in results["points"]}
    phases = json.loads(phases)
    assert phases["think"] == {"tokens": 6, "blocks_executed": 6 * THINK}
    assert phases["answer"]["blocks_executed"] == ANSWER * phases["answer"]["tokens"]
    prompts = sum(len(prompt.ids) for batch in batches for prompt in batch)
    fed = sum(phase["blocks_executed"] for phase in phases.values())
    assert sum(ran) == len(results["execution"]) * (PROMPT * prompts + fed)
    assert len(texts) == 3 * len(results["execution"])
    assert not any("think>" in text for text in texts)
    assert results["points"][0]["mean_blocks"] > THINK
    assert results["points"][0]["budget"] == BUDGET


def test_answers_that_are_given_refuse_phases_of_thinking_plainly(model):
    with pytest.raises(BudgetError, match="this measures what is given: name one number or"):
        plan_conditions(model, (), (BUDGET,), means=True, auto=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that may think, with room for an answer of GSM8K, and rows of tasks."""
    path = tmp_path_factory.mktemp("thinking")
    hf_model = tiny_model()
    hf_model.config.max_position_embeddings = 512
    router = random_router(hf_model)
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = TEMPLATE
    made = BuddyForCausalLM(hf_model, router=router, policy="routed")
    made.save_pretrained(path / "model", tokenizer=tokenizer)
    for split in ("test", "train"):
        write(path, "gsm8k", [ROWS["gsm8k"]], split)
    write(path, "piqa", [ROWS["piqa"]], "validation")
    return path


def evaluate(folder, out, command, *arguments):
    given = ["--data-dir", str(folder), "--out", str(out), "-b", BUDGET, *arguments]
    return CliRunner().invoke(app, ["eval", *command, "-m", str(folder / "model"), *given])


def test_gsm8k_by_phase_on_the_command_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(BuddyLM, "max_gen_toks", 16)  # a test needs no 256 tokens
    out = tmp_path / "gsm8k.json"
    asked = ("--chat-template", "--template-option", "enable_thinking=true", "--fewshot", "0")
    done = evaluate(folder, out, ["gsm8k"], *asked, "--thinking-tokens", "5")
    assert done.exit_code == 0, done.output
    assert "prompt:6,think:3,answer:5" in done.stderr
    record = json.loads(out.read_text())
    assert record["config"]["thinking_tokens"] == 5
    assert record["config"]["template_options"] == {"enable_thinking": True}
    point = record["results"]["points"][0]
    assert point["budget"] == BUDGET
    phases = point["phases"]
    assert phases["think"] == {"tokens": 5, "blocks_executed": 5 * THINK}
    assert phases["answer"]["tokens"] > 5
    assert phases["answer"]["blocks_executed"] == ANSWER * phases["answer"]["tokens"]


@pytest.mark.parametrize(
    ("command", "arguments", "error", "says"),
    [
        (["tasks", "--task", "piqa"], (), BudgetError, "this measures what is given"),
        (
            ["tasks", "--task", "piqa"],
            ("--thinking-tokens", "3"),
            PolicyError,
            "task piqa scores answers that are given",
        ),
        (
            ["gsm8k", "--fewshot", "0"],
            ("--template-option", "enable_thinking=true"),
            PromptError,
            "--template-option needs --chat-template",
        ),
        (
            ["gsm8k", "--fewshot", "0"],
            ("--chat-template", "--template-option", "effort=3"),
            PromptError,
            "--template-option effort: the model's chat template has no such variable",
        ),
    ],
)
def test_what_would_not_be_obeyed_is_refused(folder, tmp_path, command, arguments, error, says):
    done = evaluate(folder, tmp_path / "out.json", command, *arguments)
    assert isinstance(done.exception, error), done.output
    assert says in str(done.exception)
