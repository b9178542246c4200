"""Tasks of lm-evaluation-harness, built from a local folder or from the hub."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import lm_eval.tasks
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from buddy.errors import DataError, reason, shown
from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS, LocalTask, read_split
from buddy.model import BuddyForCausalLM

_SPLITS = {"training": "train", "validation": "validation", "test": "test"}
"""What lm-eval's tasks call a split, and the file that holds it."""
_PLACES: Final = (
    *("arc", "gsm8k", "hellaswag", "lambada", "mmlu/default", "openbookqa", "piqa", "siqa"),
    *("super_glue/boolq", "wikitext", "winogrande"),
)
"""Folders of lm-eval that have the tasks of `LOCAL_TASKS`, a few among hundreds."""
_ANSWER_TOKENS: Final = 256
"""Longest answer where a task does not say one: lm-eval's own number."""


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
    written = [task for task in tasks.values() if task.OUTPUT_TYPE == "generate_until"]
    settings = [dict(task.get_config("generation_kwargs") or {}) for task in written]
    return max((int(own.get("max_gen_toks", _ANSWER_TOKENS)) for own in settings), default=0)


def scored(tasks: Mapping[str, Any]) -> list[str]:
    """Names of the tasks that score given answers, and let a model write nothing."""
    return [name for name, task in tasks.items() if task.OUTPUT_TYPE != "generate_until"]


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
    rows = len(docs)
    if task.get_config("fewshot_split") == task.get_config("test_split"):
        # lm-eval then draws none that equals the row that is asked.
        rows = len({json.dumps(doc, sort_keys=True) for doc in docs}) - 1
    if rows < shots:
        raise DataError(
            f"task {name} has {rows} other rows for examples, and each prompt takes {shots}: give "
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
    have = [*(task for task, local in LOCAL_TASKS.items() if local.shots == "train"), "samsum"]
    local = _find_local(name, have)
    if local.shots != "train":
        raise DataError(f"task {name} has no training rows: expected one of {', '.join(have)}")
    rows = read_split(data_dir, local.folder, "train", local.fields)
    # lm-eval builds no task without rows to evaluate: it is shown the same ones.
    splits = {"training_split": "train", "validation_split": "train", "test_split": None}
    return {"task": name, "custom_dataset": _serve({"train": rows}), **splits}


@functools.cache
def _manager() -> TaskManager:
    """A manager that knows where each task's file is: finding that out takes seconds."""
    return TaskManager()


@functools.cache
def _local_manager() -> TaskManager:
    """A manager that knows where the tasks of `LOCAL_TASKS` are."""
    folder = Path(lm_eval.tasks.__file__).parent
    places: list[str | Path] = [folder / place for place in _PLACES if (folder / place).is_dir()]
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
    unknown = [name for name in subjects if f"mmlu_{name}" not in _local_manager().all_tasks]
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
