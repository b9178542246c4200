"""Stage 2 from its recipe to a checkpoint with a Budget Predictor, resumable."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from buddy.data.examples import Example
from buddy.drawn import drawn_by
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.measured_constant import MeasuredConstant
from buddy.training.batches import (
    BatchOrder,
    check_context,
    check_rows,
    draw_rows,
    rows_identity,
)
from buddy.training.card import with_stage_2
from buddy.training.log import TrainingLog
from buddy.training.predictor.evaluation import PredictorEvaluation, evaluate_predictor
from buddy.training.predictor.loss_table import LossTable, measure_table
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.reward_model import (
    Prompts,
    RewardModel,
    StandardisedPrompts,
    folded,
    model_identity,
)
from buddy.training.predictor.rules import Rules
from buddy.training.predictor.trainer import PredictorStep, PredictorTrainer
from buddy.training.run import Rows, Run, RunListener, Steps
from buddy.training.summaries import Standard, draw_summaries

TRAIN_TABLE: Final = "train-losses.safetensors"
VALIDATION_TABLE: Final = "validation-losses.safetensors"
_COLLAPSE: Final = (
    "the predictor has collapsed: it chooses {blocks:g} blocks for every validation prompt. A "
    "constant budget would do the same; the weights of the reward (grpo.lambda_perf, "
    "grpo.lambda_cost) decide which depth pays, grpo.entropy and optim.learning_rate how soon it "
    "settles"
)


def train_budget(
    recipe: BudgetRecipe,
    out: Path,
    *,
    resume: bool = False,
    listener: RunListener | None = None,
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
    run = Run(recipe, out, resume=resume, listener=listener)
    model = run.load_model()
    check_context(recipe.data.max_tokens, model)
    live, rows = RewardModel(model), run.read_rows()
    run.warn([*notes_on_dtype(model.backbone), *rows.left_out])
    with drawn_by(recipe.optim.seed):
        predictor = BudgetPredictor(live.router.config, recipe.predictor).to(model.device)
    check_rows(rows.train, recipe.optim.batch_size)  # before anything is measured

    def measure(what: str, examples: list[Example], path: Path) -> LossTable:
        return measure_table(
            live,
            examples,
            path,
            lowest=predictor.lowest,
            batch_size=recipe.measure.batch_size,
            on_rows=lambda done, total: run.listener.measured(
                f"measuring {what} prompts", done, total
            ),
        )

    with run.claimed():
        prompts: Prompts = live
        seen, rules = rows.train, None
        if recipe.measure.precompute:
            seen = rows_of_steps(recipe, rows.train)
            prompts = table = measure("training", seen, out / TRAIN_TABLE)
            if rows.validation and len(table.examples) > 1:
                rules = Rules(table, recipe.grpo, predictor.lowest)
        drawn = draw_rows(rows.validation, recipe.log.evaluate_rows, recipe.optim.seed)
        validation = measure("validation", drawn, out / VALIDATION_TABLE) if drawn else None
        standard = None
        if recipe.optim.standardise:  # the same again when a run goes on
            standard = Standard.of(draw_summaries(prompts.summaries, seen, recipe.optim.seed))
            prompts = StandardisedPrompts(prompts, standard)
        trainer = PredictorTrainer(predictor, prompts, recipe, rows.train)
        identity = _identity(recipe, live, rows.train)
        steps = _PredictorSteps(run, trainer, identity, rows, standard, validation, rules)
        steps.go()
        return steps.finish()


def rows_of_steps(recipe: BudgetRecipe, examples: list[Example]) -> list[Example]:
    """The training rows that some step of a run sees, in their order: no other need be measured."""
    optim = recipe.optim
    order = BatchOrder(examples, optim.batch_size, optim.seed)
    if optim.steps > order.per_epoch:
        return examples
    drawn = {example for step in range(optim.steps) for example in order[step]}
    return [example for example in examples if example in drawn]


def _identity(recipe: BudgetRecipe, live: RewardModel, examples: list[Example]) -> dict[str, Any]:
    """All that the result of a run depends on; how it is logged is not part of it."""
    settings = asdict(recipe)
    settings.pop("log")
    return {**settings, "weights": model_identity(live), "rows": rows_identity(examples)}


class _PredictorSteps(Steps[BudgetRecipe, PredictorTrainer]):
    """The steps of a Budget Predictor."""

    def __init__(
        self,
        run: Run[BudgetRecipe],
        trainer: PredictorTrainer,
        identity: dict[str, Any],
        rows: Rows,
        standard: Standard | None,
        validation: LossTable | None,
        rules: Rules | None,
    ) -> None:
        super().__init__(run, trainer, identity, rows)
        self.evaluate_every = run.recipe.log.evaluate_every
        self._standard, self._validation, self._rules = standard, validation, rules
        self._evaluation: PredictorEvaluation | None = None
        self._seconds = 0.0
        self._window: list[PredictorStep] = []

    def step(self, step: int) -> dict[str, float]:
        """Take a step, counted from 0."""
        report = self.trainer.step(step)
        self._seconds += report.seconds
        self._window.append(report)
        return {"reward": report.reward, "entropy": report.entropy}

    def log_line(self) -> dict[str, Any]:
        """Means over the steps since the last line."""
        window, self._window = [asdict(report) for report in self._window], []
        return {
            name: sum(report[name] for report in window) / len(window)
            for name in window[0]
            if name != "step"
        }

    def evaluate(self, log: TrainingLog, step: int) -> None:
        """Evaluate on the validation table, and warn of a predictor that collapsed."""
        if self._validation is None:
            return
        predictor = folded(self.trainer.predictor, self._standard)
        evaluation = evaluate_predictor(
            predictor, self._validation, self.run.recipe.grpo, self._rules
        )
        self._evaluation = evaluation
        values = asdict(evaluation)
        for source, choices in values.pop("by_source").items():
            log.write(step, f"evaluation/{source}", **choices)
        for rule, comparison in values.pop("rules").items():
            log.write(step, f"beside/{rule}", **{**comparison, "by_source": None})
        log.write(step, "evaluation", **values)
        self.run.listener.reported(f"step {step}  {evaluation.describe()}")
        if evaluation.collapsed:
            text = _COLLAPSE.format(blocks=evaluation.blocks)
            log.write(step, "warning", text=text)
            self.run.listener.warned(text)

    @property
    def is_evaluated(self) -> bool:
        """Whether there is an evaluation."""
        return self._evaluation is not None

    def carried(self) -> dict[str, Any]:
        """Time, the steps since the last line of the log, and the last evaluation."""
        return {
            "seconds": self._seconds,
            "window": [asdict(report) for report in self._window],
            "evaluation": None if self._evaluation is None else asdict(self._evaluation),
        }

    def restore(self, begun: int, carried: dict[str, Any]) -> None:
        """Take up what a state carried."""
        self._seconds = float(carried["seconds"])
        self._window = [PredictorStep(**values) for values in carried["window"]]
        if carried["evaluation"] is not None:
            self._evaluation = PredictorEvaluation(**carried["evaluation"])

    def _measured_constant(self) -> MeasuredConstant | None:
        """What the last evaluation compared the predictor with, for the checkpoint."""
        if self._rules is None or self._evaluation is None or not self._evaluation.rules:
            return None
        return self._rules.measured(self._evaluation.rules)

    def finish(self) -> Path:
        """Write checkpoint and record: the model of stage 1, and the predictor."""
        recipe, trainer = self.run.recipe, self.trainer
        whole = self.run.load_as_saved()
        whole.predictor = folded(trainer.predictor, self._standard).eval().cpu()
        constant = whole.predictor.constant = self._measured_constant()
        whole.card = with_stage_2(whole.card, recipe, constant)
        if constant is not None and constant.is_as_good:
            self.run.listener.warned(constant.describe())
        return self.run.finish(
            whole,
            kind="training-budget",
            rows=self.rows,
            config={"num_blocks": trainer.predictor.num_blocks},
            results={
                "steps": self.steps,
                "seconds": self._seconds,
                "rows": len(self.rows.train),
                "trained_parameters": sum(p.numel() for p in trainer.parameters.values()),
                "evaluation": None if self._evaluation is None else asdict(self._evaluation),
                "curve": _curve(self.run.out),
            },
        )


def _curve(out: Path) -> dict[str, list[int] | list[float]]:
    """The log's training lines, side by side."""
    text = (out / "log.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]
    return {field.name: [line[field.name] for line in lines] for field in fields(PredictorStep)}
