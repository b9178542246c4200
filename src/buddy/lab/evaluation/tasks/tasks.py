"""Tasks of lm-evaluation-harness under every condition, one log and one set of figures."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import lm_eval.tasks
from datasets import Dataset, DatasetDict
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from buddy.errors import DataError, reason, shown
from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.against import Against, EarlierCondition, mean_difference
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.execution import execution_rates
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS, LocalTask, read_split
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.model import BuddyForCausalLM

_BOOTSTRAPS = 1000
_SPLITS = {"training": "train", "validation": "validation", "test": "test"}
"""What lm-eval's tasks call a split, and the file that holds it."""
_PLACES: Final = (
    *("arc", "gsm8k", "hellaswag", "lambada", "mmlu/default", "openbookqa", "piqa", "siqa"),
    *("super_glue/boolq", "wikitext", "winogrande"),
)
"""Folders of lm-eval that have the tasks of `LOCAL_TASKS`, a few among hundreds."""
_ANSWER_TOKENS: Final = 256
"""Of an answer, where a task does not say how many: lm-eval's own number."""
OnCondition = Callable[[Condition], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleScores:
    """What a sample was worth, as it is logged."""

    task: str
    """Of lm-eval."""
    doc_id: int
    """Its number in the task."""
    scores: dict[str, float]
    """By metric."""


def load_tasks(
    names: Sequence[str],
    *,
    data_dir: Path | None,
    fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Build lm-eval's tasks, from a local folder or from the hub.

    Args:
        names: Tasks of lm-eval; with a folder, those of `LOCAL_TASKS`.
        data_dir: With `TASK/SPLIT.jsonl`; the hub if None.
        fewshot: Examples in each prompt; the task's own number if None.
        limit: Rows of each task that will be asked for; of local data, no more are prepared.

    Returns:
        As lm-eval's `TaskManager.load` does.

    Raises:
        DataError: No such task, or its data is missing, empty or lacks a field.
    """
    if data_dir is None:
        loaded = _load_hub(names)
    else:
        loaded = _load_served(
            spec for name in names for spec in _local_specs(name, data_dir, fewshot, limit)
        )
    for task in loaded["tasks"].values():
        if fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", fewshot or 0)
    if data_dir is not None:
        for name, task in loaded["tasks"].items():
            _check_shots(name, task)
    return loaded


def longest_answers(tasks: Mapping[str, Any]) -> int:
    """Most new tokens that a task lets a model write; 0 where none asks for text."""
    written = [one for one in tasks.values() if one.OUTPUT_TYPE == "generate_until"]
    asked = [dict(one.get_config("generation_kwargs") or {}) for one in written]
    return max((int(one.get("max_gen_toks", _ANSWER_TOKENS)) for one in asked), default=0)


def check_answers(model: BuddyForCausalLM, longest: int) -> None:
    """Refuse tasks whose answers leave a prompt no room.

    Args:
        model: Its context is looked at.
        longest: Most new tokens of an answer.

    Raises:
        DataError: The context holds no more than these.
    """
    room = model.config.max_position_embeddings
    if longest >= room:
        raise DataError(
            f"answers of up to {longest} tokens leave no room for a prompt in the model's context "
            f"of {room}: choose tasks of log-likelihoods, or a model with a longer context"
        )


def _check_shots(name: str, task: Any) -> None:
    """Refuse a task whose prompts want more examples than its local data have."""
    shots = task.get_config("num_fewshot")
    if not shots:
        return
    docs = list(task.fewshot_docs())
    found = len(docs)
    if task.get_config("fewshot_split") == task.get_config("test_split"):
        # lm-eval then draws none that equals the row that is asked.
        found = len({json.dumps(doc, sort_keys=True) for doc in docs}) - 1
    if found < shots:
        raise DataError(
            f"task {name} has {found} other rows for examples, and each prompt takes {shots}: give "
            "more rows, or ask for fewer by --fewshot"
        )


def load_training(names: Sequence[str], *, data_dir: Path | None) -> dict[str, Any]:
    """Build lm-eval's tasks for their training rows: `training_docs` of each gives them.

    Args:
        names: Tasks of lm-eval; with a folder, those of `LOCAL_TASKS`.
        data_dir: With `TASK/train.jsonl`; the hub if None.

    Returns:
        By name, lm-eval's tasks.

    Raises:
        DataError: No such task, it has no training rows, or they are missing, empty or lack a
            field.
    """
    if data_dir is None:
        loaded = _load_hub(names)["tasks"]
    else:
        loaded = _load_served(_training_spec(name, data_dir) for name in names)["tasks"]
    without = [name for name, task in loaded.items() if not task.has_training_docs()]
    if without:
        raise DataError(f"task {', '.join(without)} has no training rows: leave it out")
    return cast(dict[str, Any], loaded)


def _training_spec(name: str, data_dir: Path) -> dict[str, Any]:
    # SAMSum is no task of lm-eval, and has training rows.
    have = [*(task for task, one in LOCAL_TASKS.items() if one.shots == "train"), "samsum"]
    local = _find_local(name, have)
    if local.shots != "train":
        raise DataError(f"task {name} has no training rows: expected one of {', '.join(have)}")
    rows = read_split(data_dir, local.folder, "train", local.fields)
    # lm-eval builds no task without rows to evaluate: it is shown the same ones.
    splits = {"training_split": "train", "validation_split": "train", "test_split": None}
    return {"task": name, "custom_dataset": _serve({"train": rows}), **splits}


@functools.cache
def _manager() -> TaskManager:
    """It knows where each task's file is: finding that out takes seconds."""
    return TaskManager()


@functools.cache
def _local_manager() -> TaskManager:
    """It knows where the tasks of `LOCAL_TASKS` are."""
    folder = Path(lm_eval.tasks.__file__).parent
    places: list[str | Path] = [folder / one for one in _PLACES if (folder / one).is_dir()]
    manager = TaskManager(include_path=places, include_defaults=False)
    # Another release of lm-eval may keep them elsewhere.
    return manager if set(LOCAL_TASKS) <= set(manager.all_tasks) else _manager()


def _load_hub(names: Sequence[str]) -> dict[str, Any]:
    manager = _manager()
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise DataError(
            f"lm-eval has no task {', '.join(unknown)}: `lm_eval ls tasks` lists them; for "
            f"instance {', '.join(COMMONSENSE)}"
        )
    try:
        return {"tasks": cast(dict[str, Any], manager.load(list(names)))["tasks"]}
    except (OSError, RuntimeError) as error:  # no network, or no such data set
        raise DataError(
            f"the data of {', '.join(names)} cannot be had from the hub: {reason(error)}; give a "
            "local folder with --data-dir"
        ) from error


def _load_served(specs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    # Only a member of a group may change a part of a task that lm-eval knows.
    group = {"group": "local", "task": list(specs)}
    return {"tasks": cast(dict[str, Any], _local_manager().load([group]))["tasks"]}


def _local_specs(
    name: str, data_dir: Path, fewshot: int | None, limit: int | None
) -> Iterable[dict[str, Any]]:
    local = _find_local(name)
    splits = {local.split: read_split(data_dir, local.folder, local.split, local.fields)}
    wants_shots = bool(fewshot) or name in ("gsm8k", "mmlu")
    if wants_shots and local.shots:
        splits[local.shots] = read_split(data_dir, local.folder, local.shots, local.fields)
    # A split that is not there must not be asked for.
    absent = {f"{kind}_split": None for kind, split in _SPLITS.items() if split not in splits}
    if name != "mmlu":
        splits[local.split] = splits[local.split][:limit]
        return [{"task": name, "custom_dataset": _serve(splits), **absent}]
    subjects = sorted({row["subject"] for row in splits[local.split]})
    unknown = [one for one in subjects if f"mmlu_{one}" not in _local_manager().all_tasks]
    if unknown:
        raise DataError(f"mmlu has no subject {shown(unknown[0])}: expected one such as anatomy")
    return [
        {
            "task": f"mmlu_{subject}",
            "custom_dataset": _serve(
                {
                    split: [row for row in rows if row["subject"] == subject]
                    for split, rows in splits.items()
                }
            ),
        }
        for subject in subjects
    ]


def _find_local(name: str, serves: Iterable[str] = LOCAL_TASKS) -> LocalTask:
    local = LOCAL_TASKS.get(name)
    if local is None:
        raise DataError(
            f"no local data for task {name!r}: --data-dir serves {', '.join(serves)}; leave "
            "it out to take data from the hub"
        )
    return local


def _serve(splits: dict[str, list[Any]]) -> Callable[..., DatasetDict]:
    """What lm-eval calls instead of `datasets.load_dataset`."""
    return lambda **_: DatasetDict(
        {split: Dataset.from_list(rows) for split, rows in splits.items()}
    )


def run_tasks(
    lm: BuddyLM,
    conditions: Sequence[Condition],
    loaded: dict[str, Any],
    *,
    limit: int | None = None,
    seed: int = 1234,
    chat_template: bool = False,
    against: Against | None = None,
    on_condition: OnCondition = lambda condition: None,
) -> dict[str, Any]:
    """Evaluate every condition on every task.

    Args:
        lm: Its `log`, if any, keeps samples and gives back those it has.
        conditions: One after another.
        loaded: As `load_tasks` gives it.
        limit: At most this many rows of each task.
        seed: Of few-shot sampling.
        chat_template: Put each prompt into the tokenizer's chat template.
        against: An earlier run on the same rows, to take differences from.
        on_condition: Told when one begins.

    Returns:
        `points`, one a metric; `execution`, how often each block ran; and `against`, the
        difference from the earlier run.

    Raises:
        BudgetError: A condition cannot be measured as `lm` is set.
        ResultError: The earlier run is of other budgets or rows.
    """
    points: list[dict[str, Any]] = []
    execution: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    # Before anything is measured.
    for condition in conditions:
        lm.check_condition(condition)
    earlier_runs = [against.beside(one) if against is not None else [] for one in conditions]
    for condition, beside in zip(conditions, earlier_runs, strict=True):
        on_condition(condition)
        lm.set_condition(condition)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed)
        found = cast(
            dict[str, Any],
            evaluate(
                lm,
                loaded,
                limit=limit,
                bootstrap_iters=_BOOTSTRAPS,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,
            ),
        )
        sample_scores = _scores_by_sample(found["samples"])
        if lm.log is not None:
            _keep(lm.log, condition, sample_scores)
        plans = {task: lm.execution.get(task, []) for task in loaded["tasks"]}
        depths = {task: sum(map(len, ran)) / max(1, len(ran)) for task, ran in plans.items()}
        for earlier in beside:
            differences += _differences(condition, sample_scores, earlier, depths)
        points += _points(condition, found, depths)
        execution += execution_rates(condition, lm.execution, of_prompts=True)
    return {"points": points, "execution": execution, "against": differences}


def _scores_by_sample(samples: dict[str, list[dict[str, Any]]]) -> dict[str, SampleScores]:
    """What each sample was worth, by task and content: its number may be another question's."""
    found = {}
    for task, rows in samples.items():
        for row in rows:
            mark = f"{row['doc_id']} {row['filter']} {row['doc_hash']} {row['prompt_hash']}"
            suffix = "" if row["filter"] == "none" else f",{row['filter']}"
            # Some metrics of corpora are no number of one sample.
            told = {f"{name}{suffix}": row[name] for name in row["metrics"]}
            scores = {
                name: float(value)
                for name, value in told.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            found[f"{task} {mark}"] = SampleScores(task=task, doc_id=row["doc_id"], scores=scores)
    return found


def _keep(log: SampleLog, condition: Condition, sample_scores: dict[str, SampleScores]) -> None:
    """Log what is not there yet."""
    for mark, one in sample_scores.items():
        key = f"{condition.key} {mark}"
        if log.find(key, SampleScores) is None:
            log.add(key, **asdict(one))


def _differences(
    condition: Condition,
    sample_scores: dict[str, SampleScores],
    earlier: EarlierCondition,
    depths: dict[str, float],
) -> list[dict[str, Any]]:
    """Of each task and metric, and the averages: by how much this run is above the earlier one."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    theirs = earlier.rows(list(sample_scores), SampleScores)
    for own, other in zip(sample_scores.values(), theirs, strict=True):
        for metric in own.scores.keys() & other.scores.keys():
            pairs.setdefault((own.task, metric), []).append(
                (own.scores[metric], other.scores[metric])
            )
    points = []
    for (task, metric), both in sorted(pairs.items()):
        value, error = mean_difference(both)
        rest = {**condition.spent(depths[task]), **earlier.about}
        points.append(condition.point(task, metric, value, stderr=error, samples=len(both), **rest))
    return [*points, *({**one, **earlier.about} for one in _means(condition, points))]


def _points(
    condition: Condition, found: dict[str, Any], depths: dict[str, float]
) -> list[dict[str, Any]]:
    points = []
    for task, depth in depths.items():
        samples = found["n-samples"][task]["effective"]
        figures = found["results"][task]
        for name, value in figures.items():
            metric, comma, source = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{source}")
            points.append(
                condition.point(
                    task,
                    metric if source == "none" else name,
                    value,
                    stderr=error if isinstance(error, float) else None,
                    samples=samples,
                    **condition.spent(depth),
                )
            )
    return [*points, *_means(condition, points)]


def _means(condition: Condition, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The average of the commonsense tasks, each task alike; MMLU's over all its rows."""
    chosen = [one for one in points if COMMONSENSE.get(one["task"]) == one["metric"]]
    means = []
    if len(chosen) > 1:
        means.append(_mean(condition, "average", chosen, [1.0] * len(chosen)))
    subjects = [one for one in points if one["task"].startswith("mmlu_") and one["metric"] == "acc"]
    if subjects:
        weights = [float(one["samples"]) for one in subjects]
        means.append(_mean(condition, "mmlu", subjects, weights))
    return means


def _mean(
    condition: Condition, task: str, points: list[dict[str, Any]], weights: list[float]
) -> dict[str, Any]:
    total = sum(weights)
    pairs = list(zip(points, weights, strict=True))
    value = sum(one["value"] * weight for one, weight in pairs) / total
    # One that is not known, as of a single row, leaves that of the mean unknown.
    is_known = all(one["stderr"] is not None for one in points)
    errors = [one["stderr"] * weight for one, weight in pairs] if is_known else []
    depth = sum(one.get("mean_blocks", one["blocks"]) * weight for one, weight in pairs) / total
    return condition.point(
        task,
        "acc",
        value,
        stderr=math.hypot(*errors) / total if is_known else None,
        samples=sum(one["samples"] for one in points),
        tasks=[one["task"] for one in points],
        **condition.spent(depth),
    )
