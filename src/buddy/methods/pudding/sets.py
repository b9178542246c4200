"""The sets of PuDDing: for each task and loss, the order in which the SLEB loop removes blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example, by_source
from buddy.depth.wide import widest_float
from buddy.errors import DataError, RecipeError, TrainingError
from buddy.files import plain_name
from buddy.methods.pudding.greedy import GreedyOrder, greedy_order
from buddy.methods.pudding.questions import Question
from buddy.methods.pudding.recipe import SetSettings, TaskLoss
from buddy.records import RunRecord, read_record
from buddy.resume import check_same, opened, sealed
from buddy.training.batches import collate, rows_identity
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans

KIND: Final = "importance-pudding"


@dataclass(frozen=True, slots=True)
class Search:
    """One set to search.

    Attributes:
        task: Source of the questions.
        loss: What is lowered.
        questions: That it is measured on.
    """

    task: str
    loss: TaskLoss
    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        """Name in logs and of the record."""
        return f"{plain_name(self.task)}-{self.loss}"


def plan_searches(settings: SetSettings, questions: Sequence[Question]) -> list[Search]:
    """A search for each task and loss.

    Raises:
        RecipeError: A task has no row.
        DataError: A question has no wrong answer, and a loss needs one.
    """
    by_task = by_source(questions)
    missing = [task for task in settings.tasks if task not in by_task]
    if missing:
        raise RecipeError(
            f"sets.tasks: no training row is of {missing[0]!r}: expected some of "
            f"{', '.join(sorted(by_task))}"
        )
    searches = []
    for task in settings.tasks or sorted(by_task):
        rows = tuple(by_task[task][: settings.items])
        if "margin" in settings.losses and not all(question.wrong for question in rows):
            raise DataError(
                f"a row of {task} has no wrong answers, which the loss margin compares with: write "
                'rows with buddy data --wrong, or set sets.losses=["likelihood"]'
            )
        searches += [Search(task, loss, rows) for loss in settings.losses]
    return searches


def weighted_answers(search: Search) -> list[tuple[Example, float]]:
    """Each answer that a search reads, and what its mean negative log-likelihood weighs.

    The cost of a set is the weighted sum over the number of questions.
    """
    if search.loss == "likelihood":
        return [(question.right, 1.0) for question in search.questions]
    return [
        pair
        for question in search.questions
        for pair in (
            (question.right, float(len(question.wrong))),
            *((wrong, -1.0) for wrong in question.wrong),
        )
    ]


@torch.no_grad()
def task_costs(
    backbone: Backbone,
    search: Search,
    sets: Bool[Tensor, "sets blocks"],
    *,
    batch_size: int,
) -> Float[Tensor, " sets"]:
    """The task loss of a model that runs each of these sets, in nats a token.

    Args:
        backbone: Runs the blocks; sets that begin alike share their beginning.
        search: Whose questions and loss.
        sets: True = run; the first block runs in each.
        batch_size: Answers at a time.
    """
    answers = sorted(weighted_answers(search), key=lambda pair: pair[0].num_tokens)
    sets = sets.to(backbone.device)
    costs = torch.zeros(len(sets), dtype=widest_float(backbone.device), device=backbone.device)
    for start in range(0, len(answers), batch_size):
        some = answers[start : start + batch_size]
        batch = collate([example for example, _ in some], backbone.device)
        every = sets[None].expand(len(some), -1, -1)
        with fast_passes(backbone):
            out = run_plans(backbone, 1, batch, lambda seen, every=every: every)  # type: ignore[misc]  # a default binds the loop's value
        losses = leaf_losses(backbone, out, batch)  # [answers, sets]
        weights = torch.tensor([weight for _, weight in some], device=backbone.device)
        costs += (losses * weights[:, None]).to(costs.dtype).sum(0)
    return costs.float() / len(search.questions)


def search_set(
    backbone: Backbone,
    search: Search,
    settings: SetSettings,
    path: Path,
    *,
    model: dict[str, Any],
    on_blocks: Callable[[int, int], None] = lambda done, rounds: None,
) -> tuple[int, ...]:
    """Search one order, or go on from the rounds that its record has.

    Args:
        backbone: The model.
        search: What is lowered, and on what.
        settings: Of the search.
        path: Record of the order, written after each round: `--policy static:FILE.json` reads it.
        model: Facts of the model.
        on_blocks: Told how many blocks are gone, and how many are to go.

    Returns:
        The middle blocks, each once.

    Raises:
        TrainingError: The record is of another search.
        ModelError: A loss is NaN.
    """
    most = backbone.num_blocks - 2
    rounds = most if settings.rounds is None else settings.rounds
    config = {
        "task": search.task,
        "loss": search.loss,
        "items": len(search.questions),
        "rows": rows_identity([answer for answer, _ in weighted_answers(search)]),
        "rounds": rounds,
        "batch_size": settings.batch_size,
        "dtype": str(backbone.dtype),
    }
    order, costs = _read(path, config, model)
    on_blocks(len(costs), rounds)
    if len(costs) == rounds:
        return tuple(order)
    known = list(costs)

    def keep(found: GreedyOrder) -> None:
        curve = [*known, *found.costs]
        found_so_far = {"removal_order": list(found.order), "costs": curve}
        results = sealed(found_so_far, config, model)
        RunRecord(kind=KIND, model=model, config=config, results=results).save(path)
        on_blocks(len(curve), rounds)

    return greedy_order(
        backbone.num_blocks,
        rounds - len(known),
        lambda sets: task_costs(backbone, search, sets, batch_size=settings.batch_size),
        begin=order[: len(known)],
        on_round=keep,
    ).order


def _read(
    path: Path, config: dict[str, Any], model: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Order and costs of an earlier run; nothing if there is none."""
    if not path.exists():
        return [], []
    record = read_record(path)
    advice = "delete it, or name another --out"
    check_same(
        {**record["config"], "model": record.get("model")},
        {**config, "model": model},
        f"the order in {path} is of another search",
        advice,
        TrainingError,
    )
    results: Any
    results, is_whole = opened(record["results"], config, model)
    order, costs = (results.get(name) for name in ("removal_order", "costs"))
    middle = list(range(1, model["num_blocks"] - 1))
    damaged = (
        not isinstance(order, list)
        or not isinstance(costs, list)
        or not all(type(block) is int for block in order)
        or sorted(order) != middle
        or not 0 < len(costs) <= config["rounds"]
        or set(results) != {"removal_order", "costs"}
        or is_whole is False  # a record of an older version has no checksum
    )
    if damaged:
        raise TrainingError(f"the order in {path} is damaged: {advice}")
    return order, costs
