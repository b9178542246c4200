"""Through lm-evaluation-harness: full depth is its own `hf` class, and runs can be resumed."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from buddy.errors import BudgetError, DataError, ModelError, PolicyError
from buddy.lab import lm_eval
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.evaluation.tasks import loading
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.lab.evaluation.tasks.loading import _local_manager, load_tasks
from buddy.lab.evaluation.tasks.tasks import run_tasks
from tests.tiny import random_ids, tiny_buddy
from tests.words import say, word_tokenizer


def words(count, seed):
    return say(*random_ids(1, count, seed=seed)[0].tolist())


def loglikelihoods(*documents):
    """Requests of one task, as lm-eval makes them: (context, answers ...) a document."""
    return [
        Instance(
            "loglikelihood",
            {},
            (context, f" {answer}"),
            place,
            metadata=("task", document, 1),
        )
        for document, (context, *answers) in enumerate(documents)
        for place, answer in enumerate(answers)
    ]


DOCUMENTS = [
    (words(8, 1), words(2, 2), words(3, 3)),
    (words(4, 4), words(1, 5), words(1, 6)),
    ("", words(4, 7)),
    (words(70, 8), words(2, 9)),  # longer than the context
]


@pytest.fixture
def model():
    return tiny_buddy()


def harness(model, **options):
    return BuddyLM(model, tokenizer=word_tokenizer(), **options)


def test_full_depth_is_lm_evals_own_class(model):
    ours, theirs = harness(model), HFLM(model.model, tokenizer=word_tokenizer(), batch_size=2)
    requests = loglikelihoods(*DOCUMENTS)
    for mine, yours in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert mine[0] == pytest.approx(yours[0], abs=2e-4)  # atol: sums in another order
        assert mine[1] == yours[1]
    rolling = [Instance("loglikelihood_rolling", {}, (words(150, 3),), 0)]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling), abs=2e-3
    )
    generate = [
        Instance("generate_until", {}, (words(n, n), {"until": ["w9"], "max_gen_toks": 6}), 0)
        for n in (5, 8, 3)
    ]
    assert ours.generate_until(generate) == theirs.generate_until(generate)


def test_a_budget_changes_the_answer_and_candidates_share_the_route(model):
    requests = loglikelihoods(*DOCUMENTS[:2])
    full = harness(model).loglikelihood(requests)
    lm = harness(model, budget="4 blocks", policy="routed")
    assert lm.loglikelihood(requests) != full
    assert [len(plans) for plans in lm.execution.values()] == [2]  # one plan a document
    leaky = harness(model, budget="4 blocks", policy="routed", route_on="full")
    leaky.loglikelihood(requests)
    assert [len(plans) for plans in leaky.execution.values()] == [4]  # one an answer


def test_a_leaking_route_takes_no_budget_of_the_answers_own(model, data):
    phased = plan_conditions(model, ["routed"], ["4 blocks", "prefill:1.0,decode:4 blocks"])
    with pytest.raises(BudgetError, match="not 6 and 4 blocks"):
        harness(model, route_on="full", policy="routed", budget="prefill:1.0,decode:4 blocks")
    seen = []
    lm = harness(model, route_on="full", on_sample=lambda: seen.append(1))
    with pytest.raises(BudgetError, match="leave --route-on full out"):
        run_tasks(lm, phased, load_tasks(["piqa"], data_dir=data))
    assert not seen


def test_the_kv_policy_is_that_of_scoring_too(model):
    options = {"budget": "prefill:4 blocks,decode:1.0", "policy": "routed"}
    by = {
        name: harness(model, kv_policy=name, **options).loglikelihood(loglikelihoods(DOCUMENTS[0]))
        for name in ("lazy", "zero")
    }
    assert by["lazy"] != by["zero"]


def test_windows_of_a_text_are_of_its_task(model):
    lm = harness(model, budget="4 blocks", policy="routed")
    texts = [
        Instance("loglikelihood_rolling", {}, (words(n, n),), 0, metadata=(task, n, 1))
        for n, task in ((150, "one"), (9, "other"), (80, "one"))
    ]
    found = lm.loglikelihood_rolling(texts)
    assert set(lm.execution) == {"one", "other"}
    assert all(len(plan) == 4 for plans in lm.execution.values() for plan in plans)
    alone = [
        harness(model, budget="4 blocks", policy="routed").loglikelihood_rolling([text])[0]
        for text in texts
    ]
    assert found == pytest.approx(alone, abs=1e-3)


def test_generation_runs_under_the_budget(model):
    lm = harness(model, budget="4 blocks", policy="routed")
    prompt = words(6, 1)
    [text] = lm.generate_until(
        [Instance("generate_until", {}, (prompt, {"until": ["nothing"], "max_gen_toks": 5}), 0)]
    )
    ids = word_tokenizer()(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, budget="4 blocks", max_new_tokens=5, do_sample=False)
    assert text == word_tokenizer().decode(out[0, ids.shape[1] :])


@pytest.fixture
def data(tmp_path):
    """PIQA in the tiny model's words: twelve rows."""
    folder = tmp_path / "data" / "piqa"
    folder.mkdir(parents=True)
    rows = [
        {"goal": words(5, n), "sol1": words(2, n + 50), "sol2": words(3, n + 90), "label": n % 2}
        for n in range(12)
    ]
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder.parent


def evaluated(model, data, log=None, on_sample=lambda: None, **options):
    lm = harness(model, batch_size=2, log=log, on_sample=on_sample)
    loaded = load_tasks(["piqa"], data_dir=data, **options)
    conditions = plan_conditions(model, ["routed", "mine=static:2,3"], ["1.0", "4 blocks"])
    return run_tasks(lm, conditions, loaded, **options)


def test_every_condition_has_its_figures_and_a_standard_error(model, data):
    out = evaluated(model, data)
    by = {(p["label"], p["blocks"], p["metric"]): p for p in out["points"]}
    assert set(by) == {
        (label, blocks, metric)
        for label, blocks in (("full", 6), ("routed", 4), ("mine", 4))
        for metric in ("acc", "acc_norm")
    }
    for point in by.values():
        share, n = point["value"], point["samples"]
        assert n == 12
        # The sample variance divides by n - 1.
        assert point["stderr"] == pytest.approx((share * (1 - share) / (n - 1)) ** 0.5)
    rates = {e["label"]: e["rates"] for e in out["execution"]}
    assert rates["mine"] == [1, 1, 0, 0, 1, 1]
    assert sum(rates["routed"]) == pytest.approx(4)
    assert any(0 < rate < 1 for rate in rates["routed"])


def test_an_interrupted_run_goes_on_and_ends_the_same(model, data, tmp_path):
    whole = evaluated(model, data)
    seen = []

    def stop():
        seen.append(1)
        if len(seen) == 20:
            raise KeyboardInterrupt

    path = tmp_path / "log"
    with SampleLog(path, {}) as log, pytest.raises(KeyboardInterrupt):
        evaluated(model, data, log, stop)
    with SampleLog(path, {}) as log:
        kept = log.num_samples
        assert 18 <= kept < 36
        assert evaluated(model, data, log) == whole
    with SampleLog(path, {}) as log:
        # 12 rows under 3 conditions: what was said, and what it was worth.
        assert log.num_samples == 72


def test_limit_takes_the_first_rows(model, data):
    assert {p["samples"] for p in evaluated(model, data, limit=5)["points"]} == {5}


def test_wrong_tasks_and_data_are_refused(data, monkeypatch):
    monkeypatch.setattr(loading, "_manager", FewTasks)
    with pytest.raises(DataError, match=r"no local data for task 'piqqa'.*piqa"):
        load_tasks(["piqqa"], data_dir=data)
    with pytest.raises(DataError, match="lm-eval has no task piqqa"):
        load_tasks(["piqqa"], data_dir=None)
    with pytest.raises(DataError, match=r"boolq/validation.jsonl cannot be read"):
        load_tasks(["boolq"], data_dir=data)
    file = data / "piqa" / "validation.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[0], json.dumps({"goal": "w3", "sol1": "w4", "label": 0})]))
    with pytest.raises(DataError, match=r"line 2, has no field sol2"):
        load_tasks(["piqa"], data_dir=data)
    file.write_text("{not json\n")
    with pytest.raises(DataError, match=r"line 1, is no JSON"):
        load_tasks(["piqa"], data_dir=data)
    file.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        load_tasks(["piqa"], data_dir=data)


class FewTasks(TaskManager):
    """Knows the tasks that are named alone: reading lm-eval's own thousands takes ten seconds."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, include_defaults=False)


@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_the_launcher_lets_lm_eval_find_the_class_by_its_name(model, data, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder, include_backbone=True, tokenizer=word_tokenizer())
    task = tmp_path / "words.yaml"
    task.write_text(
        "task: words\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{validation: {data}/piqa/validation.jsonl}}, "
        f"cache_dir: {tmp_path}/data}}\n"
        "output_type: multiple_choice\n"
        "validation_split: validation\n"
        'doc_to_text: "Question: {{goal}}\\nAnswer:"\n'
        "doc_to_target: label\n"
        'doc_to_choice: "{{[sol1, sol2]}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    command = ["lm_eval", "run", "--model", "buddy"]
    command += ["--model_args", f"pretrained={folder},budget=0.67,policy=routed"]
    command += ["--tasks", str(task), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", FewTasks)
    monkeypatch.delitem(model_registry._objs, "buddy")  # importing BuddyLM has put it there
    lm_eval.main()
    [file] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["words"]["acc,none"]
    points = evaluated(model, data)["points"]
    [expected] = [p["value"] for p in points if (p["label"], p["metric"]) == ("routed", "acc")]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("route_on", ["prompt", "full"])
def test_an_answer_longer_than_the_context_is_refused_by_its_row(model, route_on):
    ours = harness(model, route_on=route_on)
    held = [(words(4, 1), words(2, 2)), (words(4, 3), words(64, 4))]
    assert len(ours.loglikelihood(loglikelihoods(*held))) == 2
    requests = loglikelihoods(*held, (words(4, 5), words(3, 6), words(65, 7)))
    with pytest.raises(DataError, match=r"task, row 2: answer 2 of 2 has 65 tokens.*holds 64"):
        ours.loglikelihood(requests)


def test_an_unknown_route_or_setting_is_refused(model):
    with pytest.raises(PolicyError, match="route_on must be one of prompt, full"):
        BuddyLM(model, tokenizer=word_tokenizer(), route_on="answer")
    with pytest.raises(PolicyError, match="no setting budgt: expected one of add_bos_token, bud"):
        BuddyLM(model, tokenizer=word_tokenizer(), budgt=0.5)


@pytest.mark.parametrize(
    "ignored",
    [
        {"peft": "an/adapter"},
        {"delta": "some/deltas"},
        {"revision": "v2"},
        {"subfolder": "inner"},
        {"gguf_file": "model.gguf"},
        {"softmax_dtype": "float64"},
        {"mixed_precision_dtype": "bfloat16"},
        {"parallelize": True},
        {"tp_plan": "auto"},
        {"autogptq": True},
        {"logits_cache": False},
        {"backend": "seq2seq"},
        {"device": "cpu"},
        {"dtype": "float16"},
        {"kwargs": 1},
        {"batch_size": "auto:x"},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_what_lm_eval_would_take_and_buddy_not_do_is_refused_by_name(model, ignored):
    [name] = ignored
    with pytest.raises(PolicyError, match=name) as caught:
        harness(model, **ignored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"batch_size": "auto:4"}, 16),
        ({"batch_size": "auto"}, 16),
        ({"batch_size": "3"}, 3),
        ({"batch_size": "auto", "max_batch_size": 2}, 2),
        ({"revision": "main", "peft": None, "trust_remote_code": True, "subfolder": ""}, 16),
    ],
    ids=str,
)
def test_batches_of_any_form_and_settings_that_ask_for_nothing(model, asked, size):
    requests = loglikelihoods(*DOCUMENTS[:2])
    ours = harness(model, **asked)
    assert ours.batch_size == size
    assert len(ours.loglikelihood(requests)) == 4


def test_a_tokenizer_is_read_where_it_is_named(model, tmp_path):
    own, other = word_tokenizer(), word_tokenizer()
    other.add_tokens("w4 w5")
    for name, tokenizer in (("own", own), ("other", other)):
        model.save_pretrained(tmp_path / name, include_backbone=True, tokenizer=tokenizer)
    for given, tokens in ((None, 2), (str(tmp_path / "other"), 1), (other, 1)):
        ours = BuddyLM(str(tmp_path / "own"), tokenizer=given)
        assert len(ours.tok_encode("w4 w5")) == tokens
    with pytest.raises(ModelError, match="no model named 'nonsense'"):
        BuddyLM(str(tmp_path / "own"), tokenizer="nonsense")


@pytest.mark.parametrize("dtype", ["foat32", "int8", "float33"])
def test_a_number_format_that_is_none_is_refused(dtype):
    with pytest.raises(PolicyError, match="dtype must be auto or such as bfloat16"):
        BuddyLM("no-such-model", dtype=dtype)


def teardown_module():
    torch.set_num_threads(1)


def test_local_tasks_are_found_without_a_look_at_all_of_lm_evals():
    assert {"mmlu_anatomy", *LOCAL_TASKS} <= set(_local_manager().all_tasks)
    assert len(_local_manager().all_tasks) < 200
