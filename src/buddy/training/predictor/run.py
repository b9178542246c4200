"""A run of stage 2 from its recipe to a checkpoint with a Budget Predictor, resumable."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from buddy.checkpoint.resolve import load_tokenizer
from buddy.data.examples import Example, check_source, read_all
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.model import BuddyForCausalLM
from buddy.records import RunRecord
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.training.batches import check_context, draw_rows
from buddy.training.card import with_stage_2
from buddy.training.log import TrainingLog, need_tensorboard
from buddy.training.predictor.evaluation import PredictorEvaluation, evaluate_predictor
from buddy.training.predictor.loss_table import LossTable, measure_table
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.reward_model import RewardModel, model_identity, rows_identity
from buddy.training.predictor.standardise import (
    Standard,
    StandardisedPrompts,
    draw_summaries,
    folded,
)
from buddy.training.predictor.trainer import PredictorStep, PredictorTrainer
from buddy.training.state import (
    CHECKPOINT,
    RECORD,
    STATE,
    check_folder,
    load_state,
    make_folder,
    save_state,
)

TRAIN_TABLE: Final = "train-losses.safetensors"
VALIDATION_TABLE: Final = "validation-losses.safetensors"
_COLLAPSE: Final = (
    "the predictor has collapsed: it chooses {blocks:g} blocks for every validation prompt. A "
    "constant budget would do the same; the weights of the reward (grpo.lambda_perf, "
    "grpo.lambda_cost) decide which depth pays, grpo.entropy and optim.learning_rate how soon it "
    "settles"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetListener:
    """Whom a run tells how it goes."""

    measured: Callable[[str, int, int], None] = lambda what, done, rows: None
    """Rows of the training or validation table that are done, and how many there are."""
    started: Callable[[int, int], None] = lambda step, steps: None
    """Steps done by an earlier run, and steps in all."""
    stepped: Callable[[PredictorStep], None] = lambda report: None
    """After every step."""
    evaluated: Callable[[int, PredictorEvaluation], None] = lambda step, found: None
    """After every evaluation."""
    warned: Callable[[str], None] = lambda text: None
    """When something looks wrong."""


def train_budget(
    recipe: BudgetRecipe,
    out: Path,
    *,
    resume: bool = False,
    listener: BudgetListener | None = None,
) -> Path:
    """Train a Budget Predictor for a checkpoint of stage 1.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/`, `log.jsonl`, `tensorboard/`, the tables of losses, the
            training state and the record.
        resume: Go on from the state in `out`, if there is one. Tables always go on.
        listener: Told how it goes.

    Returns:
        The new checkpoint's folder: that of stage 1, and the predictor.

    Raises:
        RecipeError: A setting does not fit.
        ModelError: The checkpoint cannot be loaded.
        DataError: A data file is missing, empty or malformed.
        TrainingError: The run cannot begin, or not go on.
    """
    listener = listener or BudgetListener()
    check_folder(out, resume)
    for source in (*recipe.data.train, *recipe.data.validation):
        check_source(source)
    if recipe.log.tensorboard:
        need_tensorboard()
    model = BuddyForCausalLM.from_pretrained(
        recipe.model.name, dtype=getattr(torch, recipe.model.dtype)
    )
    model.eval().requires_grad_(False)
    check_context(recipe.data.max_tokens, model)
    live, tokenizer = RewardModel(model), load_tokenizer(recipe.model.name)
    left_out: list[str] = []
    examples, held_out = (
        read_all(sources, tokenizer, max_tokens=recipe.data.max_tokens, note=left_out.append)
        for sources in (recipe.data.train, recipe.data.validation)
    )
    for note in (*notes_on_dtype(model.backbone), *left_out):
        listener.warned(note)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.optim.seed)
        predictor = BudgetPredictor(live.router.config, recipe.predictor).to(model.device)
    # Before anything is measured: a recipe that cannot run should say so at once.
    trainer = PredictorTrainer(predictor, live, recipe, examples)
    make_folder(out)
    tables = _Tables(live, predictor.lowest, recipe.measure.batch_size, listener)
    if recipe.measure.precompute:
        trainer.prompts = tables.measure("training", examples, out / TRAIN_TABLE)
    held_out = draw_rows(held_out, recipe.log.evaluate_rows, recipe.optim.seed)
    validation = (
        tables.measure("validation", held_out, out / VALIDATION_TABLE) if held_out else None
    )
    standard = _standardise(trainer, examples) if recipe.optim.standardise else None
    identity = _identity(recipe, model, examples)
    run = _Run(recipe, out, trainer, standard, validation, identity, listener)
    run.left_out = left_out
    run.go(resume)
    # Loaded again: a backbone that is written must be in the dtype that it was saved in.
    whole = BuddyForCausalLM.from_pretrained(recipe.model.name, device="cpu")
    whole.predictor = folded(predictor, standard).eval().cpu()
    whole.card = with_stage_2(whole.card, recipe)
    whole.save_pretrained(out / CHECKPOINT, tokenizer=None if whole.origin.source else tokenizer)
    run.record(whole).save(out / RECORD)
    return out / CHECKPOINT


def _standardise(trainer: PredictorTrainer, examples: list[Example]) -> Standard:
    """Let the trainer learn from standardised summaries; the same again when a run goes on."""
    seed = trainer.recipe.optim.seed
    standard = Standard.of(draw_summaries(trainer.prompts, examples, seed))
    trainer.prompts = StandardisedPrompts(trainer.prompts, standard)
    return standard


def _identity(
    recipe: BudgetRecipe, model: BuddyForCausalLM, examples: list[Example]
) -> dict[str, Any]:
    """All that the result of a run depends on; how it is logged is not part of it."""
    settings = asdict(recipe)
    settings.pop("log")
    return {**settings, "weights": model_identity(model), "rows": rows_identity(examples)}


@dataclass(frozen=True, slots=True)
class _Tables:
    live: RewardModel
    lowest: int
    batch_size: int
    listener: BudgetListener

    def measure(self, what: str, examples: list[Example], path: Path) -> LossTable:
        return measure_table(
            self.live,
            examples,
            path,
            lowest=self.lowest,
            batch_size=self.batch_size,
            on_rows=lambda done, rows: self.listener.measured(what, done, rows),
        )


class _Run:
    """The loop over steps, and what happens between them."""

    left_out: Sequence[str] = ()

    def __init__(
        self,
        recipe: BudgetRecipe,
        out: Path,
        trainer: PredictorTrainer,
        standard: Standard | None,
        validation: LossTable | None,
        identity: dict[str, Any],
        listener: BudgetListener,
    ) -> None:
        self.recipe, self.out, self.trainer, self.standard = recipe, out, trainer, standard
        self.validation, self.identity, self.listener = validation, identity, listener
        self.found: PredictorEvaluation | None = None
        self.seconds = 0.0
        self.window: list[PredictorStep] = []

    def go(self, resume: bool) -> None:
        """Take all steps that are left."""
        begun = 0
        state = load_state(self.out / STATE, **self._saved()) if resume else None
        if state is not None:
            begun, extra = state
            self.seconds = float(extra["seconds"])
            self.window = [PredictorStep(**one) for one in extra["window"]]
            if extra["evaluation"] is not None:
                self.found = PredictorEvaluation(**extra["evaluation"])
        self.listener.started(begun, self.trainer.steps)
        log = TrainingLog(self.out, begun, tensorboard=self.recipe.log.tensorboard)
        with closing(log):
            if self.left_out and begun == 0:
                log.write(0, "data", left_out=self.left_out)
            for step in range(begun, self.trainer.steps):
                self._step(log, step)

    def _step(self, log: TrainingLog, step: int) -> None:
        report = self.trainer.step(step)
        self.seconds += report.seconds
        self.window.append(report)
        self.listener.stepped(report)
        settings, last = self.recipe.log, report.step == self.trainer.steps
        if report.step % settings.every == 0 or last:
            log.write(report.step, "train", **_mean(self.window))
            self.window = []
        if last or (settings.evaluate_every and report.step % settings.evaluate_every == 0):
            self._evaluate(log, report.step)
        if last or report.step % settings.save_every == 0:
            extra = {
                "seconds": self.seconds,
                "window": [asdict(one) for one in self.window],
                "evaluation": None if self.found is None else asdict(self.found),
            }
            save_state(self.out / STATE, step=report.step, extra=extra, **self._saved())

    def _saved(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "parameters": self.trainer.parameters,
            "optimizer": self.trainer.optimizer,
        }

    def _evaluate(self, log: TrainingLog, step: int) -> None:
        if self.validation is None:
            return
        predictor = folded(self.trainer.predictor, self.standard)
        found = evaluate_predictor(predictor, self.validation, self.recipe.grpo)
        self.found = found
        values = asdict(found)
        for source, choices in values.pop("by_source").items():
            log.write(step, f"evaluation/{source}", **choices)
        log.write(step, "evaluation", **values)
        self.listener.evaluated(step, found)
        if found.collapsed:
            text = _COLLAPSE.format(blocks=found.blocks)
            log.write(step, "warning", text=text)
            self.listener.warned(text)

    def record(self, model: BuddyForCausalLM) -> RunRecord:
        """What was run, and how it ended."""
        return RunRecord(
            kind="training-budget",
            model=model.facts(),
            config={**asdict(self.recipe), "num_blocks": self.trainer.predictor.num_blocks},
            results={
                "steps": self.trainer.steps,
                "seconds": self.seconds,
                "rows": len(self.trainer.order.examples),
                "left_out": list(self.left_out),
                "trained_parameters": sum(p.numel() for p in self.trainer.parameters.values()),
                "evaluation": None if self.found is None else asdict(self.found),
                "curve": _curve(self.out),
            },
        )


def _mean(window: list[PredictorStep]) -> dict[str, float]:
    values = [asdict(one) for one in window]
    return {
        name: sum(one[name] for one in values) / len(values) for name in values[0] if name != "step"
    }


def _curve(out: Path) -> dict[str, list[int] | list[float]]:
    """The log's training lines, side by side."""
    text = (out / "log.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]
    return {field.name: [line[field.name] for line in lines] for field in fields(PredictorStep)}
