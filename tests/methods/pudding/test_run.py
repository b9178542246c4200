"""The training of PuDDing: costs, targets and fit against slow references, and whole runs."""

import json

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.data.examples import Example
from buddy.errors import BuddyError, DataError, RecipeError, ResultError, TrainingError
from buddy.methods.pudding.fit import PuddingFit, evaluate_fit
from buddy.methods.pudding.greedy import greedy_order
from buddy.methods.pudding.policy import PuddingConfig, PuddingPolicy
from buddy.methods.pudding.questions import Question
from buddy.methods.pudding.recipe import FitSettings, SetSettings
from buddy.methods.pudding.run import train_pudding
from buddy.methods.pudding.sets import Search, plan_searches, search_set, task_costs
from buddy.methods.pudding.targets import Targets, measure, measure_targets, set_masks
from buddy.training.methods import read_method
from buddy.training.run import RunListener
from tests.product.policies.made import ORDERS
from tests.tiny import NUM_BLOCKS, delete_blocks, random_ids, tiny_model
from tests.words import say, word_tokenizer

KEPT = ((0, 1, 2, 3, 4, 5), (0, 2, 3, 5), (0, 1, 4, 5), (0, 5))
CONFIG = PuddingConfig(num_blocks=NUM_BLOCKS, width=16, orders=ORDERS, depths=(3, 5), hidden=8)


def tokens(count, seed):
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def question(seed, wrong=2, task="task"):
    """Answers of other lengths, so that a mean is told from a sum."""
    prompt = tokens(3 + seed % 4, seed)
    answers = [tokens(1 + (seed + n) % 3, 100 * seed + n) for n in range(wrong + 1)]
    right, *others = (Example(prompt, answer, task) for answer in answers)
    return Question(right, tuple(others))


QUESTIONS = tuple(question(seed, wrong=1 + seed % 3) for seed in range(5))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def backbone(model):
    return BuddyForCausalLM(model).backbone


def log_likelihood(model, example):
    """Mean over the answer, of a model as it is."""
    ids = torch.tensor([[*example.prompt, *example.answer]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, len(example.prompt) - 1 : -1].log_softmax(1)
    return logprobs.gather(1, torch.tensor(example.answer)[:, None]).mean()


def without(model, kept):
    return delete_blocks(model, set(range(NUM_BLOCKS)) - set(kept))


def masks(sets):
    made = torch.zeros(len(sets), NUM_BLOCKS, dtype=torch.bool)
    for row, kept in enumerate(sets):
        made[row, list(kept)] = True
    return made


def cost_by_hand(model, loss, kept):
    left, costs = without(model, kept), []
    for one in QUESTIONS:
        right = log_likelihood(left, one.right)
        wrong = [log_likelihood(left, each) for each in one.wrong]
        margin = len(wrong) * right - sum(wrong)
        costs.append(-right if loss == "likelihood" else -margin)
    return torch.stack(costs).mean()


@pytest.mark.parametrize("loss", ["likelihood", "margin"])
def test_a_task_loss_is_that_of_models_with_blocks_deleted(model, backbone, loss):
    found = task_costs(backbone, Search("task", loss, QUESTIONS), masks(KEPT), batch_size=3)
    expected = torch.stack([cost_by_hand(model, loss, kept) for kept in KEPT])
    # atol: batches of other sizes sum in another order.
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found.std() > 0.01


def test_a_search_that_is_stopped_goes_on_to_the_same_order(model, backbone, tmp_path):
    search, facts = Search("task", "margin", QUESTIONS), {"num_blocks": 6, "base": "b"}

    def order(path, on_blocks=lambda done, rounds: None, rounds=4):
        settings = SetSettings(rounds=rounds)
        return search_set(backbone, search, settings, path, model=facts, on_blocks=on_blocks)

    def stop(done, rounds):
        if done == 2:
            raise KeyboardInterrupt

    expected = greedy_order(
        6,
        4,
        lambda sets: torch.stack(
            [cost_by_hand(model, "margin", kept.nonzero()[:, 0].tolist()) for kept in sets]
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        order(tmp_path / "a.json", stop)
    told = []
    found = order(tmp_path / "a.json", lambda *news: told.append(news))
    assert found == expected.order
    assert told == [(2, 4), (3, 4), (4, 4)]
    record = json.loads((tmp_path / "a.json").read_text())["results"]
    assert_close(record["costs"], list(expected.costs), atol=1e-4, rtol=1e-4)
    told.clear()
    assert order(tmp_path / "a.json", lambda *news: told.append(news)) == found
    assert told == [(4, 4)]
    with pytest.raises(TrainingError, match=r"other rounds .was 4, is 2"):
        order(tmp_path / "a.json", rounds=2)
    whole = (tmp_path / "a.json").read_text()
    for damage in (
        {"removal_order": None},
        {"removal_order": [found[1], found[0], *found[2:]]},
        {"costs": [*record["costs"][:-1], 9.5]},
        {"checksum": None, "check": record["checksum"]},
    ):
        damaged = json.loads(whole)
        damaged["results"] = {**record, **damage}
        (tmp_path / "a.json").write_text(json.dumps(damaged))
        with pytest.raises(TrainingError, match="damaged: delete it"):
            order(tmp_path / "a.json")


def test_tasks_and_losses_give_a_search_each():
    rows = [question(n, task=task) for n, task in enumerate(["b", "x/a", "b", "c", "b", "x-a"])]
    found = plan_searches(SetSettings(items=2), rows)
    named = [one.name for one in found]
    assert named[:6] == [
        f"{task}-{loss}" for task in ("b", "c", "x-a") for loss in ("likelihood", "margin")
    ]
    assert named[6:] == [f"x-a-5356176b-{loss}" for loss in ("likelihood", "margin")]
    odd = Search("z" * 300 + "\0", "margin", ()).name
    assert len(odd) < 90
    assert odd.startswith("zzz")
    assert found[0].questions == (rows[0], rows[2])
    assert [one.task for one in plan_searches(SetSettings(tasks=("c",)), rows)] == ["c", "c"]
    with pytest.raises(RecipeError, match="no training row is of 'd': expected some of b, c"):
        plan_searches(SetSettings(tasks=("d",)), rows)
    plain = [question(0, wrong=0, task="plain")]
    with pytest.raises(DataError, match="row of plain has no wrong answers"):
        plan_searches(SetSettings(), plain)
    assert len(plan_searches(SetSettings(losses=("likelihood",)), plain)) == 1


def test_targets_are_the_answers_under_every_set_at_every_depth(model, backbone):
    examples = [one.right for one in QUESTIONS]
    _, found = measure(backbone, CONFIG, examples)
    for place, depth in enumerate(CONFIG.depths):
        for number, order in enumerate(ORDERS):
            kept = set(range(6)) - set(order[: 6 - depth])
            left = without(model, kept)
            expected = torch.stack([log_likelihood(left, one) for one in examples])
            # atol: batches of other sizes sum in another order.
            assert_close(found[:, place, number], expected, atol=1e-4, rtol=1e-4)
    assert set_masks(CONFIG).sum(1).tolist() == [3, 3, 3, 5, 5, 5]


def test_what_the_classifier_reads_is_the_prompt_alone_as_the_policy_reads_it(backbone):
    prompt = tokens(5, 1)
    rows = [Example(prompt, tokens(4, seed), "task") for seed in (7, 8, 9)]
    summaries, found = measure(backbone, CONFIG, rows)
    assert torch.equal(summaries[0], summaries[1])
    assert torch.equal(summaries[0], summaries[2])
    assert found.std(0).min() > 0.01
    alone, _ = measure(backbone, CONFIG, [Example(prompt, (5,), "task")])
    # atol: other shapes of a product sum in another order.
    assert_close(alone[0], summaries[0], atol=1e-6, rtol=1e-5)


def test_a_measurement_that_is_stopped_goes_on_from_what_is_there(backbone, tmp_path):
    examples = [one.right for one in QUESTIONS]

    def measured(path, **identity):
        return measure_targets(
            backbone, CONFIG, examples, path, batch_size=2, identity={"model": "m", **identity}
        )

    whole = measured(tmp_path / "a")
    again = measured(tmp_path / "a")
    assert torch.equal(whole.log_likelihoods, again.log_likelihoods)
    rows = sorted(examples, key=lambda one: one.num_tokens)
    assert_close(whole.log_likelihoods, measure(backbone, CONFIG, rows)[1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ResultError, match="other model"):
        measured(tmp_path / "a", model="other")


def kinds(count, seed):
    """Prompts of low words or of high ones, and which of the two."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 2, (count,), generator=generator)
    ids = torch.randint(2, 40, (count, 8), generator=generator)
    return ids + 50 * kind[:, None], kind


def test_the_fit_recovers_a_known_assignment(model, backbone):
    """Low words do best under the first set, high words under the last; it holds for new ones."""
    config = PuddingConfig(num_blocks=6, width=16, orders=ORDERS, depths=(4,), hidden=16)

    def made(count, seed):
        ids, kind = kinds(count, seed)
        examples = [Example(tuple(row.tolist()), (5,), "task") for row in ids]
        summaries, _ = measure(backbone, config, examples)
        likely = torch.full((count, 1, 3), -2.0)
        likely[torch.arange(count), 0, 2 * kind] = -1.0
        noise = torch.randn(likely.shape, generator=torch.Generator().manual_seed(seed))
        return ids, kind, Targets(summaries, likely + 0.1 * noise)

    _, _, targets = made(160, 0)
    fit = PuddingFit(config, targets, FitSettings(learning_rate=1e-2, epochs=20, warmup_steps=5))
    losses = [fit.step(step) for step in range(fit.steps)]
    assert fit.steps == 100
    assert losses[-1] < 0.3 * losses[0]
    ids, kind, held_out = made(60, 1)
    routed = BuddyForCausalLM(model, learned=fit.classifier())
    with torch.no_grad():
        plans = routed(ids, budget="4 blocks").plan.executed_sets
    wanted = [tuple(sorted(set(range(6)) - set(ORDERS[2 * one][:2]))) for one in kind.tolist()]
    right = sum(one == other for one, other in zip(plans, wanted, strict=True))
    assert right >= 54
    [found] = evaluate_fit(fit.classifier(), targets, held_out)
    assert sum(found.chosen.values()) == 60
    assert found.constant < found.log_likelihood <= found.best
    assert found.log_likelihood > -1.2


def test_the_fit_starts_at_what_is_best_for_all_prompts():
    likely = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    targets = Targets(torch.randn(9, 16), likely)
    part = PuddingFit(CONFIG, targets, FitSettings()).classifier()
    predicted = part(targets.summaries)
    assert_close(predicted, likely.mean(0).expand(9, -1, -1))


ROWS = """
method = "pudding"
[model]
name = "{folder}"
dtype = "float32"
[data]
train = [{{ path = "{folder}/rows.jsonl", stop = 24 }}]
validation = [{{ path = "{folder}/rows.jsonl", start = 24 }}]
max_tokens = 40
[sets]
items = 4
rounds = 2
[targets]
depths = ["4 blocks", "5 blocks"]
[optim]
epochs = 4
batch_size = 5
[log]
every = 3
save_every = 7
tensorboard = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pudding")
    tiny_model().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    lines = []
    for n in range(36):
        one = question(n, task=("first", "second")[n % 2])
        pairs = [
            {"prompt": say(*each.prompt), "completion": f" {say(*each.answer)}"}
            for each in (one.right, *one.wrong)
        ]
        lines.append({**pairs[0], "wrong": pairs[1:], "source": one.source})
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path / "recipe.toml").write_text(ROWS.format(folder=path))
    return path


def recipe_of(folder, *changes):
    method, recipe = read_method(folder / "recipe.toml", changes)
    assert method.name == "pudding"
    return recipe


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = CliRunner().invoke(app, ["train", str(folder / "recipe.toml"), "--out", str(out)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    return out, done


def test_a_run_leaves_a_checkpoint_that_chooses_among_its_sets(whole):
    out, done = whole
    assert done.stdout == f"{out / 'checkpoint'}\n"
    for words in ("blocks removed for first-margin", "training: 20/20", "5 blocks: ", "best of"):
        assert words in done.stderr
    names = [f"{task}-{loss}" for task in ("first", "second") for loss in ("likelihood", "margin")]
    assert sorted(path.stem for path in (out / "sets").iterdir()) == sorted(names)
    model = BuddyForCausalLM.from_pretrained(out / "checkpoint")
    assert isinstance(model.policy, PuddingPolicy)
    config = model.learned.config
    assert (config.depths, len(config.orders)) == ((4, 5), 4)
    ids = random_ids(9, 6)
    with torch.no_grad():
        ran = model(ids, budget=["4 blocks", "3 blocks", "5 blocks"] * 3)
    assert ran.executed_blocks.tolist() == [4, 3, 5] * 3
    record = json.loads((out / "record.json").read_text())
    assert record["results"]["sets"] == names
    assert record["results"]["orders"] == [list(order) for order in config.orders]
    assert record["model"] == model.facts()
    evaluated = record["results"]["evaluation"]
    assert [one["blocks"] for one in evaluated] == [4, 5]
    assert [sum(one["chosen"].values()) for one in evaluated] == [12, 12]
    assert "PuDDing" in (out / "checkpoint/README.md").read_text()
    # An order serves as a static policy, as in a training of adapters for one set.
    model.set_policy(f"static:{out / 'sets/first-margin.json'}")
    with torch.no_grad():
        static = model(ids, budget="4 blocks")
        model.set_policy("pudding:1")
        assert torch.equal(static.logits, model(ids, budget="4 blocks").logits)


def test_stopped_anywhere_and_resumed_a_run_ends_bit_for_bit_the_same(whole, folder, tmp_path):
    class Stopped(Exception):
        pass

    def stop_at(what, when):
        def told(name, done, total):
            if name.startswith(what) and done == when:
                raise Stopped

        def stepped(step, numbers):
            if what == "steps" and step == when:
                raise Stopped

        return RunListener(measured=told, stepped=stepped)

    recipe = recipe_of(folder)
    for what, when in (
        ("blocks removed for second-likelihood", 1),
        ("measuring training", 16),
        ("steps", 9),
    ):
        with pytest.raises(Stopped):
            train_pudding(recipe, tmp_path, resume=True, listener=stop_at(what, when))
    with pytest.raises(TrainingError, match="--resume"):
        train_pudding(recipe, tmp_path)
    train_pudding(recipe, tmp_path, resume=True)
    for name in ("log.jsonl", "checkpoint/routing.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole[0] / name).read_bytes()
    states = [folder / "state.safetensors" for folder in (tmp_path, whole[0])]
    mine, other = (safe_open(state, framework="pt") for state in states)
    assert mine.metadata() == other.metadata()  # with a checksum of all tensors; in any order


REFUSED = [
    ("sets.rounds=5", "SLEB can remove 0 to 4 of 6 blocks, got 5"),
    ("sets.losses=['loss']", "expected one of likelihood, margin"),
    ("sets.losses=[]", "losses must name"),
    ("sets.tasks=['none']", "no training row is of 'none'"),
    ("sets.items=0", "items must be at least 1"),
    ("targets.depths=['1.0']", "at full depth all sets are the same"),
    ("targets.depths=['9 blocks']", "9 blocks"),
    ("targets.depths=['auto']", "auto is for inference"),
    ("targets.depths=[]", "depths has no budget"),
    ("optim.learning_rate=0", "learning_rate must be above 0"),
    ("optim.epochs=0", "epochs must be at least 1"),
    ("classifier.hidden=0", "hidden must be at least 1"),
    ("data.max_tokens=999", "data.max_tokens must be at most 64"),
    ("data.train=[{path='nowhere.jsonl'}]", "nowhere.jsonl"),
    ("data.validation=[{path='rows.jsonl', repeat=2}]", "leave repeat out"),
    ("lora.rank=4", "unknown key lora"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_a_recipe_that_cannot_be_is_refused_in_one_line_and_leaves_nothing(
    folder, tmp_path, change, says
):
    with pytest.raises(BuddyError, match=says) as refused:
        train_pudding(recipe_of(folder, change), tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
