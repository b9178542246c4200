"""A run of PuDDing from its recipe to a checkpoint: sets, targets, classifier; resumable."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from buddy.data.examples import Example
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import RecipeError
from buddy.importance.search.sleb import check_rounds
from buddy.methods.pudding.card import with_pudding
from buddy.methods.pudding.fit import FitEvaluation, PuddingFit, evaluate_fit
from buddy.methods.pudding.policy import PuddingConfig
from buddy.methods.pudding.questions import Question, read_questions
from buddy.methods.pudding.recipe import PuddingRecipe
from buddy.methods.pudding.sets import Search, plan_searches, search_set
from buddy.methods.pudding.targets import Targets, measure_targets
from buddy.model import BuddyForCausalLM
from buddy.training.batches import check_context
from buddy.training.log import TrainingLog
from buddy.training.router.budgets import budget_range
from buddy.training.router.recipe import BudgetSettings
from buddy.training.run import Rows, Run, RunListener, Steps

SETS: Final = "sets"
"""Folder of the orders' records, within that of the run."""
TRAIN_TARGETS: Final = "train-targets.safetensors"
VALIDATION_TARGETS: Final = "validation-targets.safetensors"


def train_pudding(
    recipe: PuddingRecipe,
    out: Path,
    *,
    resume: bool = False,
    listener: RunListener | None = None,
) -> Path:
    """Search the sets, measure the targets, fit the classifier.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/`, `sets/`, the targets, `log.jsonl`, `tensorboard/`, the
            training state and the record.
        resume: Go on from the state in `out`, if there is one. Sets and targets always go on.
        listener: Told how it goes.

    Returns:
        The new checkpoint's folder: the model that was named, sets and classifier.

    Raises:
        RecipeError: A setting does not fit.
        ModelError: The model cannot be loaded, or its losses are not numbers.
        DataError: A data file is missing, empty or malformed.
        TrainingError: The run cannot begin, or not go on.
        ResultError: What an earlier run left is damaged or of another run, or cannot be written.
    """
    run = Run(recipe, out, resume=resume, listener=listener)
    depths = _check(recipe, BuddyForCausalLM.outline(run.named, policy="full"))
    rows = run.read_rows(read_questions)
    run.warn(rows.left_out)
    searches = plan_searches(recipe.sets, rows.train)
    model = run.load_model(policy="full", merge_adapter=True)
    run.warn(notes_on_dtype(model.backbone))
    with run.claimed():
        config = PuddingConfig(
            num_blocks=model.num_blocks,
            width=model.backbone.kv_width,
            orders=_search(model, searches, run),
            depths=depths,
            hidden=recipe.classifier.hidden,
        )
        measure = partial(_measure, model, config, run)
        targets = measure("training", rows.train, out / TRAIN_TARGETS)
        validation = None
        if rows.validation:
            validation = measure("validation", rows.validation, out / VALIDATION_TARGETS)
        settings = asdict(recipe)
        settings.pop("log")
        measured = {"weights": model.facts(), "orders": config.orders, "rows": len(targets)}
        fit = PuddingFit(config, targets, recipe.optim)
        steps = _FitSteps(run, fit, {**settings, **measured}, rows, targets, validation)
        steps.go()
        return steps.finish([search.name for search in searches])


def _check(recipe: PuddingRecipe, outline: BuddyForCausalLM) -> tuple[int, ...]:
    """Refuse what shows to be wrong before weights are fetched; the depths, in blocks."""
    check_context(recipe.data.max_tokens, outline)
    if recipe.sets.rounds is not None:
        check_rounds(recipe.sets.rounds, outline.num_blocks)
    blocks = budget_range(BudgetSettings(choices=recipe.targets.depths), outline.num_blocks)
    if max(blocks) == outline.num_blocks:
        raise RecipeError(
            "targets.depths: at full depth all sets are the same: name budgets below it"
        )
    return tuple(sorted(set(blocks)))


def _search(
    model: BuddyForCausalLM, searches: Sequence[Search], run: Run[PuddingRecipe]
) -> tuple[tuple[int, ...], ...]:
    """The order of each search, from its record where it is done."""
    folder, facts = run.out / SETS, model.facts()
    folder.mkdir(exist_ok=True)
    return tuple(
        search_set(
            model.backbone,
            search,
            run.recipe.sets,
            folder / f"{search.name}.json",
            model=facts,
            on_blocks=partial(run.listener.measured, f"blocks removed for {search.name}"),
        )
        for search in searches
    )


def _measure(
    model: BuddyForCausalLM,
    config: PuddingConfig,
    run: Run[PuddingRecipe],
    what: str,
    questions: Sequence[Question],
    path: Path,
) -> Targets:
    """The targets of some questions, from their file as far as it has them."""
    examples: list[Example] = [question.right for question in questions]
    return measure_targets(
        model.backbone,
        config,
        examples,
        path,
        batch_size=run.recipe.targets.batch_size,
        identity={
            "measured": "pudding-targets",
            "model": model.facts(),
            "dtype": str(model.dtype),
        },
        on_rows=partial(run.listener.measured, f"measuring {what} prompts"),
    )


class _FitSteps(Steps[PuddingRecipe, PuddingFit]):
    """The steps of the classifier; it is evaluated at the end alone."""

    def __init__(
        self,
        run: Run[PuddingRecipe],
        fit: PuddingFit,
        identity: dict[str, Any],
        rows: Rows,
        targets: Targets,
        validation: Targets | None,
    ) -> None:
        super().__init__(run, fit, identity, rows)
        self._targets, self._validation = targets, validation
        self._window: list[float] = []
        self._evaluations: list[FitEvaluation] = []

    def step(self, step: int) -> dict[str, float]:
        """Take a step, counted from 0."""
        self._window.append(self.trainer.step(step))
        return {"loss": self._window[-1]}

    def log_line(self) -> dict[str, Any]:
        """The mean loss since the last line."""
        window, self._window = self._window, []
        return {"loss": sum(window) / len(window)}

    def evaluate(self, log: TrainingLog, step: int) -> None:
        """Evaluate on the validation targets, and warn of a choice that is none."""
        if self._validation is None:
            return
        self._evaluations = evaluate_fit(self.trainer.classifier(), self._targets, self._validation)
        num_prompts = len(self._validation)
        for evaluation in self._evaluations:
            blocks, num_sets = evaluation.blocks, len(evaluation.chosen)
            log.write(step, f"evaluation/{blocks}", **asdict(evaluation))
            self.run.listener.reported(
                f"{blocks} blocks: {num_sets} sets chosen for {num_prompts} prompts, "
                f"mean log-likelihood {evaluation.log_likelihood:.4f}; best constant set "
                f"{evaluation.constant:.4f}, best of each {evaluation.best:.4f}"
            )
            if num_sets == 1 and num_prompts > 1:
                text = (
                    f"at {blocks} blocks the classifier chooses one set for every validation "
                    "prompt: a static order would do the same"
                )
                log.write(step, "warning", text=text)
                self.run.listener.warned(text)

    @property
    def is_evaluated(self) -> bool:
        """Whether there is an evaluation; no state carries one."""
        return bool(self._evaluations)

    def carried(self) -> dict[str, Any]:
        """The losses since the last line of the log."""
        return {"window": self._window}

    def restore(self, begun: int, carried: dict[str, Any]) -> None:
        """Take up what a state carried."""
        self._window = [float(loss) for loss in carried["window"]]

    def finish(self, sets: Sequence[str]) -> Path:
        """Write checkpoint and record: the model that was named, sets and classifier."""
        recipe, part = self.run.recipe, self.trainer.classifier()
        whole = self.run.load_as_saved(policy="full")
        whole.put_part(part)
        name, sources, depths = recipe.model.name, recipe.data.train, part.config.depths
        whole.card = with_pudding(whole.card, name, sources, sets, depths)
        return self.run.finish(
            whole,
            kind="training-pudding",
            rows=self.rows,
            results={
                "steps": self.steps,
                "rows": len(self._targets),
                "trained_parameters": sum(p.numel() for p in self.trainer.parameters.values()),
                "sets": list(sets),
                "orders": [list(order) for order in part.config.orders],
                "mean_log_likelihoods": self._targets.log_likelihoods.mean(0).tolist(),
                "evaluation": [asdict(evaluation) for evaluation in self._evaluations],
            },
        )
