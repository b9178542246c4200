"""A run of PuDDing from its recipe to a checkpoint: sets, targets, classifier; resumable."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from buddy.checkpoint.resolve import load_tokenizer
from buddy.data.examples import Example, check_source
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import RecipeError
from buddy.importance.search.sleb import check_rounds
from buddy.methods.pudding.fit import FitEvaluation, PuddingFit, evaluate_fit
from buddy.methods.pudding.policy import PuddingConfig
from buddy.methods.pudding.questions import Question, read_questions
from buddy.methods.pudding.recipe import PuddingRecipe
from buddy.methods.pudding.sets import Search, plan_searches, search_set
from buddy.methods.pudding.targets import Targets, measure_targets
from buddy.model import BuddyForCausalLM
from buddy.records import RunRecord
from buddy.training.batches import check_context
from buddy.training.card import with_pudding
from buddy.training.log import TrainingLog, need_tensorboard
from buddy.training.methods import RunListener
from buddy.training.router.recipe import BudgetSettings
from buddy.training.router.trainer import budget_range
from buddy.training.state import (
    CHECKPOINT,
    RECORD,
    STATE,
    check_folder,
    load_state,
    make_folder,
    save_state,
)

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
    listener = listener or RunListener()
    check_folder(out, resume)
    for source in (*recipe.data.train, *recipe.data.validation):
        check_source(source)
    if recipe.log.tensorboard:
        need_tensorboard()
    depths = _check(recipe, BuddyForCausalLM.outline(recipe.model.name, policy="full"))
    tokenizer = load_tokenizer(recipe.model.name)
    left_out: list[str] = []
    questions, held_out = (
        read_questions(sources, tokenizer, max_tokens=recipe.data.max_tokens, note=left_out.append)
        for sources in (recipe.data.train, recipe.data.validation)
    )
    for note in left_out:
        listener.warned(note)
    searches = plan_searches(recipe.sets, questions)
    model = BuddyForCausalLM.from_pretrained(
        recipe.model.name,
        dtype=getattr(torch, recipe.model.dtype),
        policy="full",
        merge_adapter=True,
    )
    for note in notes_on_dtype(model.backbone):
        listener.warned(note)
    model.eval().requires_grad_(False)
    make_folder(out)
    facts = model.facts()
    config = PuddingConfig(
        num_blocks=model.num_blocks,
        width=model.backbone.kv_width,
        orders=_search(model, searches, recipe, out, facts, listener),
        depths=depths,
        hidden=recipe.classifier.hidden,
    )
    measurer = _Measurer(model, config, recipe, facts, listener)
    targets = measurer.measure("training", questions, out / TRAIN_TARGETS)
    validation = (
        measurer.measure("validation", held_out, out / VALIDATION_TARGETS) if held_out else None
    )
    fit = PuddingFit(config, targets, recipe.optim)
    settings = asdict(recipe)
    settings.pop("log")
    identity = {**settings, "weights": facts, "orders": config.orders, "rows": len(targets)}
    run = _Run(recipe, out, fit, targets, validation, identity, listener)
    run.left_out = left_out
    run.go(resume)
    # Loaded again: a backbone that is written must be in the dtype that it was saved in.
    whole = BuddyForCausalLM.from_pretrained(recipe.model.name, device="cpu", policy="full")
    whole.learned = fit.classifier()
    whole.set_policy(whole.default_policy())
    names = [search.name for search in searches]
    whole.card = with_pudding(whole.card, recipe.model.name, recipe.data.train, names, depths)
    whole.save_pretrained(out / CHECKPOINT, tokenizer=None if whole.origin.source else tokenizer)
    run.record(whole, names).save(out / RECORD)
    return out / CHECKPOINT


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
    model: BuddyForCausalLM,
    searches: Sequence[Search],
    recipe: PuddingRecipe,
    out: Path,
    facts: dict[str, Any],
    listener: RunListener,
) -> tuple[tuple[int, ...], ...]:
    (out / SETS).mkdir(exist_ok=True)
    return tuple(
        search_set(
            model.backbone,
            one,
            recipe.sets,
            out / SETS / f"{one.name}.json",
            model=facts,
            on_blocks=lambda done, rounds, name=one.name: listener.measured(  # type: ignore[misc]  # a default binds the loop's value
                f"blocks removed for {name}", done, rounds
            ),
        )
        for one in searches
    )


class _Measurer:
    """Measures targets on one model."""

    def __init__(
        self,
        model: BuddyForCausalLM,
        config: PuddingConfig,
        recipe: PuddingRecipe,
        facts: dict[str, Any],
        listener: RunListener,
    ) -> None:
        self._backbone, self._config, self._listener = model.backbone, config, listener
        self._batch_size = recipe.targets.batch_size
        self._identity = {"measured": "pudding-targets", "model": facts, "dtype": str(model.dtype)}

    def measure(self, what: str, questions: Sequence[Question], path: Path) -> Targets:
        examples: list[Example] = [one.right for one in questions]
        return measure_targets(
            self._backbone,
            self._config,
            examples,
            path,
            batch_size=self._batch_size,
            identity=self._identity,
            on_rows=lambda done, rows: self._listener.measured(
                f"measuring {what} prompts", done, rows
            ),
        )


class _Run:
    """The loop over steps, and what happens between them."""

    left_out: Sequence[str] = ()

    def __init__(
        self,
        recipe: PuddingRecipe,
        out: Path,
        fit: PuddingFit,
        targets: Targets,
        validation: Targets | None,
        identity: dict[str, Any],
        listener: RunListener,
    ) -> None:
        self.recipe, self.out, self.fit, self.targets = recipe, out, fit, targets
        self.validation, self.identity, self.listener = validation, identity, listener
        self.window: list[float] = []
        self.found: list[FitEvaluation] = []

    def go(self, resume: bool) -> None:
        """Take all steps that are left."""
        begun = 0
        state = load_state(self.out / STATE, **self._saved()) if resume else None
        if state is not None:
            begun, extra = state
            self.window = [float(loss) for loss in extra["window"]]
        self.listener.started(begun, self.fit.steps)
        log = TrainingLog(self.out, begun, tensorboard=self.recipe.log.tensorboard)
        with closing(log):
            if self.left_out and begun == 0:
                log.write(0, "data", left_out=list(self.left_out))
            for step in range(begun, self.fit.steps):
                self._step(log, step)
            if self.validation is not None:
                self._evaluate(log, self.validation)

    def _step(self, log: TrainingLog, step: int) -> None:
        loss, done = self.fit.step(step), step + 1
        self.window.append(loss)
        self.listener.stepped(done, loss)
        last = done == self.fit.steps
        if done % self.recipe.log.every == 0 or last:
            log.write(done, "train", loss=sum(self.window) / len(self.window))
            self.window = []
        if done % self.recipe.log.save_every == 0 or last:
            extra = {"window": self.window}
            save_state(self.out / STATE, step=done, extra=extra, **self._saved())

    def _saved(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "parameters": self.fit.parameters,
            "optimizer": self.fit.optimizer,
        }

    def _evaluate(self, log: TrainingLog, held_out: Targets) -> None:
        self.found = evaluate_fit(self.fit.classifier(), self.targets, held_out)
        for one in self.found:
            values = asdict(one)
            log.write(self.fit.steps, f"evaluation/{one.blocks}", **values)
            self.listener.told(
                f"{one.blocks} blocks: {len(one.chosen)} sets chosen for {len(held_out)} prompts, "
                f"mean log-likelihood {one.log_likelihood:.4f}; best constant set "
                f"{one.constant:.4f}, best of each {one.best:.4f}"
            )
            if len(one.chosen) == 1 and len(held_out) > 1:
                text = (
                    f"at {one.blocks} blocks the classifier chooses one set for every validation "
                    "prompt: a static order would do the same"
                )
                log.write(self.fit.steps, "warning", text=text)
                self.listener.warned(text)

    def record(self, model: BuddyForCausalLM, sets: Sequence[str]) -> RunRecord:
        """What was run, and how it ended."""
        return RunRecord(
            kind="training-pudding",
            model=model.facts(),
            config=asdict(self.recipe),
            results={
                "steps": self.fit.steps,
                "rows": len(self.targets),
                "left_out": list(self.left_out),
                "trained_parameters": sum(p.numel() for p in self.fit.parameters.values()),
                "sets": list(sets),
                "orders": [list(order) for order in self.fit.classifier().config.orders],
                "mean_log_likelihoods": self.targets.log_likelihoods.mean(0).tolist(),
                "evaluation": [asdict(one) for one in self.found],
            },
        )
