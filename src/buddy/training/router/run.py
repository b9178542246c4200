"""A run of stage 1 from its recipe to a checkpoint: logs, evaluation, state, resuming."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from buddy.backbone.fingerprint import base_fingerprint
from buddy.checkpoint.listed_files import MANIFEST, check_files
from buddy.checkpoint.manifest import read_manifest
from buddy.checkpoint.resolve import load_tokenizer
from buddy.data.examples import Example, check_source, read_all
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import RecipeError, ResultError, TrainingError
from buddy.model import BuddyForCausalLM
from buddy.records import RunRecord, read_record
from buddy.training.batches import draw_rows
from buddy.training.card import stage_1_card
from buddy.training.log import RouteCounts, TrainingLog, need_tensorboard
from buddy.training.router.evaluate import Evaluation, evaluate
from buddy.training.router.model import build_model, check_recipe
from buddy.training.router.orders import fit_orders
from buddy.training.router.recipe import OWN_PRIORS, BudgetSettings, Recipe
from buddy.training.router.start import start_router
from buddy.training.router.trainer import JointTrainer, StepReport, budget_range
from buddy.training.schedule import open_steps
from buddy.training.state import (
    CHECKPOINT,
    RECORD,
    STATE,
    check_folder,
    load_state,
    make_folder,
    save_state,
)

_COLLAPSE = (
    "the router has collapsed: one plan for every validation prompt at each budget below full "
    "depth; it routes no better than its prior. Raise optim.router_learning_rate, or try another "
    "router.relaxation or router.method. (If data.validation has one kind of input, add others.)"
)

_OPEN = ("steps", "epochs", "decay_steps")
"""Settings that may change under a constant rate, until it falls."""
_NEWER = (("optim", "average"), ("optim", "prompt_loss"), ("budget", "curriculum_steps"))
"""Settings that states of older versions do not have; 0 is what was done before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Whom a run tells how it goes."""

    started: Callable[[int, int], None] = lambda step, steps: None
    """Steps done by an earlier run, and steps in all."""
    stepped: Callable[[StepReport], None] = lambda report: None
    """After every step."""
    evaluated: Callable[[int, list[Evaluation]], None] = lambda step, found: None
    """After every evaluation."""
    warned: Callable[[str], None] = lambda text: None
    """When something looks wrong."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between the methods that are trained by one loop."""

    build: Callable[[Any, Any], BuddyForCausalLM] = build_model
    """From a recipe and a device to the model that is trained."""
    trainer: type[JointTrainer] = JointTrainer
    """Takes the steps."""
    evaluate: Callable[..., tuple[list[Evaluation], RouteCounts]] = evaluate
    """From the model, rows and budgets."""


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
) -> Path:
    """Train LoRA and router together by a recipe; see `train_as`.

    Raises:
        BuddyError: As there.
    """
    return train_as(Kind(), recipe, out, resume=resume, listener=listener)


def train_as(
    kind: Kind,
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
) -> Path:
    """Train by a recipe.

    Args:
        kind: The method.
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/`, `log.jsonl`, `tensorboard/`, the training state and the
            record.
        resume: Go on from the state in `out`, if there is one.
        listener: Told how it goes, on the main process.

    Returns:
        The Buddy checkpoint's folder.

    Raises:
        RecipeError: A setting does not fit.
        DataError: A data file is missing, empty or malformed.
        TrainingError: The run cannot begin, or not go on.
    """
    check_folder(out, resume)
    _check_places(recipe)
    check_recipe(recipe)
    accelerator = Accelerator()
    with accelerator.main_process_first():  # the others find the model in the cache
        model = kind.build(recipe, accelerator.device)
    tokenizer = load_tokenizer(recipe.model.name)
    listener, left_out = listener or Listener(), list[str]()
    examples, validation = (
        read_all(sources, tokenizer, max_tokens=recipe.data.max_tokens, note=left_out.append)
        for sources in (recipe.data.train, recipe.data.validation)
    )
    if accelerator.is_main_process:
        for note in (*notes_on_dtype(model.backbone), *left_out):
            listener.warned(note)
    start_router(model, examples, spread=recipe.router.spread, seed=recipe.optim.seed)
    if recipe.router.orders:
        fit_orders(model, examples, recipe.router.orders, recipe.optim.seed)
    trainer = kind.trainer(
        model,
        recipe,
        examples,
        process=(accelerator.process_index, accelerator.num_processes),
        reduce=lambda tensor: accelerator.reduce(tensor, "sum"),
        gather=gather_object if accelerator.num_processes > 1 else list,
    )
    identity = _identity(recipe, model, examples)
    if trainer.teacher is not None:
        identity["taught_by"] = trainer.teacher.facts()
    drawn = draw_rows(validation, recipe.log.evaluate_rows, recipe.optim.seed)
    run = _Run(recipe, out, model, trainer, drawn, identity, listener)
    run.evaluate = kind.evaluate
    run.left_out = left_out
    run.is_main = accelerator.is_main_process
    make_folder(out)
    accelerator.wait_for_everyone()
    run.go(resume)
    if run.is_main:
        with run.saved_weights():
            model.card = stage_1_card(recipe, len(examples), run.found)
            model.eval().save_pretrained(out / CHECKPOINT)
            run.record().save(out / RECORD)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return out / CHECKPOINT


def _check_places(recipe: Recipe) -> None:
    """Refuse a recipe that names what is not there, before a model is fetched for it."""
    for source in (*recipe.data.train, *recipe.data.validation):
        check_source(source)
    prior = recipe.router.prior
    if prior not in OWN_PRIORS:
        try:
            read_record(Path(prior))
        except ResultError as error:
            raise RecipeError(
                f"router.prior: {error}; "
                f"`buddy importance {recipe.model.name} --out {prior}` makes one"
            ) from error
    for one in recipe.router.orders:
        read_record(Path(one.record))
    if recipe.lora.start is not None:
        start = Path(recipe.lora.start)
        check_files(start, read_manifest(start).files)
    if recipe.log.tensorboard:
        need_tensorboard()


def _identity(
    recipe: Recipe, model: BuddyForCausalLM, examples: Sequence[Example]
) -> dict[str, Any]:
    """All that the result of a run depends on; how it is logged is not part of it."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt, example.answer)).encode())
    settings = asdict(recipe)
    settings.pop("log")
    if recipe.teacher.name is None:
        settings.pop("teacher")
    for table, key in _NEWER:
        if settings[table][key] == 0:
            settings[table].pop(key)
    if recipe.optim.schedule == "constant":
        for open_one in _OPEN:
            settings["optim"].pop(open_one)
    return {
        **settings,
        "base": base_fingerprint(model.model),
        "rows": digest.hexdigest(),
        "files": {str(path): _digest(path) for path in _named_files(recipe)},
    }


def _named_files(recipe: Recipe) -> Iterator[Path]:
    """What the recipe names beside rows and the base model: another content is another run."""
    if recipe.router.prior not in OWN_PRIORS:
        yield Path(recipe.router.prior)
    yield from (Path(one.record) for one in recipe.router.orders)
    _, _, argument = recipe.router.policy.partition(":")
    if argument.endswith(".json"):
        yield Path(argument)
    if recipe.lora.start is not None:
        yield Path(recipe.lora.start) / MANIFEST  # it has the digests of all others


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error


class _Run:
    """The loop over steps, and what happens between them."""

    is_main = True
    left_out: Sequence[str] = ()
    evaluate: Callable[..., tuple[list[Evaluation], RouteCounts]]

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        model: BuddyForCausalLM,
        trainer: JointTrainer,
        validation: list[Example],
        identity: dict[str, Any],
        listener: Listener,
    ) -> None:
        self.recipe, self.out, self.model, self.trainer = recipe, out, model, trainer
        self.validation, self.identity, self.listener = validation, identity, listener
        self.routes = RouteCounts()
        self.found: list[Evaluation] = []
        self.budgets = budget_range(
            BudgetSettings(choices=recipe.log.evaluate_budgets), model.num_blocks
        )
        self.seconds = 0.0

    def go(self, resume: bool) -> None:
        """Take all steps that are left."""
        begun = 0
        state = load_state(self.out / STATE, **self._saved()) if resume else None
        if state is not None:
            begun, extra = state
            self.seconds = float(extra["seconds"])
            self._check_length(begun, extra)
            self.routes = RouteCounts.of(extra.get("plans", []))
            self.found = [Evaluation(**one) for one in extra.get("evaluation", [])]
        if not self.is_main:
            for step in range(begun, self.trainer.steps):
                self.trainer.step(step)
            return
        self.listener.started(begun, self.trainer.steps)
        log = TrainingLog(self.out, begun, tensorboard=self.recipe.log.tensorboard)
        with closing(log):
            if self.left_out and begun == 0:
                log.write(0, "data", left_out=self.left_out)
            for step in range(begun, self.trainer.steps):
                self._step(log, step)
            if not self.found:  # a state of an older version has none
                self._evaluate(log, self.trainer.steps)

    def _step(self, log: TrainingLog, step: int) -> None:
        report = self.trainer.step(step)
        self.seconds += report.seconds
        self.routes.add(report.plans)
        self.listener.stepped(report)
        settings, last = self.recipe.log, report.step == self.trainer.steps
        if report.step % settings.every == 0 or last:
            self._log(log, report)
        if last or (settings.evaluate_every and report.step % settings.evaluate_every == 0):
            self._evaluate(log, report.step)
        if last or report.step % settings.save_every == 0:
            extra = {
                "seconds": self.seconds,
                "length": self._length(),
                "plans": self.routes.to_json(),
                "evaluation": [asdict(one) for one in self.found],
            }
            save_state(self.out / STATE, step=report.step, extra=extra, **self._saved())

    def _length(self) -> list[int]:
        """Steps in all, and those of them that any longer run begins with."""
        return [self.trainer.steps, open_steps(self.recipe.optim, self.trainer.steps)]

    def _check_length(self, begun: int, extra: dict[str, Any]) -> None:
        """Refuse a run of another length once the rate of either has begun to fall."""
        now = self._length()
        then = extra.get("length", now)  # a state of an older version has none
        if then == now or begun <= min(then[1], now[1]):
            return
        raise TrainingError(
            f"{self.out / STATE} has {begun:,} steps, {max(0, begun - then[1]):,} of them at a "
            f"falling rate, and cannot become a run of {now[0]:,} whose rate falls from step "
            f"{now[1]:,} on: expected the {then[0]:,} that it was begun with"
            + ("" if begun > then[1] else ", or more")
        )

    def saved_weights(self) -> AbstractContextManager[None]:
        """Within it the model has the weights that are evaluated and saved."""
        mean = self.trainer.mean
        return nullcontext() if mean is None else mean.in_place()

    def _saved(self) -> dict[str, Any]:
        mean = self.trainer.mean
        means = {} if mean is None else {f"mean.{name}": w for name, w in mean.values.items()}
        return {
            "identity": self.identity,
            "parameters": {**self.trainer.parameters, **means},
            "optimizer": self.trainer.optimizer,
        }

    def _log(self, log: TrainingLog, report: StepReport) -> None:
        blocks = self.model.num_blocks
        log.write(
            report.step,
            "train",
            loss=report.loss,
            by_budget={str(b): loss for b, (loss, _) in sorted(report.by_budget.items())},
            tokens_per_s=report.num_tokens / report.seconds,
            learning_rate=self.trainer.optimizer.param_groups[0]["lr"],
            router_grad_norm=report.router_grad_norm,
            rows=self.routes.num_rows,
            distinct_plans=self.routes.num_distinct,
            distinct_budgets=len(self.routes.plans),
            mask_entropy=self.routes.mask_entropy(blocks),
            execution=dict(zip(map(str, range(blocks)), self.routes.rates(blocks), strict=True)),
        )
        self.routes = RouteCounts()

    def _evaluate(self, log: TrainingLog, step: int) -> None:
        if not self.validation:
            return
        with self.saved_weights():
            self.found, routes = self.evaluate(self.model, self.validation, self.budgets)
        for one in self.found:
            log.write(step, f"evaluation/{one.blocks}", **asdict(one))
        self.listener.evaluated(step, self.found)
        if self.model.router is not None and routes.collapsed(self.model.num_blocks):
            log.write(step, "warning", text=_COLLAPSE)
            self.listener.warned(_COLLAPSE)

    def record(self) -> RunRecord:
        """What was run, and how it ended."""
        return RunRecord(
            kind="training",
            model=self.model.facts(),
            config={
                **asdict(self.recipe),
                "processes": self.trainer.num_processes,
                "taught_by": self.identity.get("taught_by"),
                "measured_prior": self.model.prior_facts,
            },
            results={
                "steps": self.trainer.steps,
                "seconds": self.seconds,
                "rows": len(self.trainer.order.examples),
                "left_out": list(self.left_out),
                "trained_parameters": sum(p.numel() for p in self.trainer.parameters.values()),
                "evaluation": [asdict(one) for one in self.found],
            },
        )
