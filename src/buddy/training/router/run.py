"""Stage 1 from its recipe to a checkpoint, and the loop that methods with adapters share."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from buddy.checkpoint.listed_files import MANIFEST, check_files
from buddy.checkpoint.manifest import read_manifest
from buddy.data.examples import Example
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import RecipeError, ResultError, TrainingError
from buddy.hub.mapped_load import MappedWeights
from buddy.model import BuddyForCausalLM
from buddy.records import read_record
from buddy.training.batches import draw_rows, rows_identity
from buddy.training.card import stage_1_card
from buddy.training.log import RouteCounts, TrainingLog
from buddy.training.router.budgets import budget_range
from buddy.training.router.evaluate import Evaluation, describe, evaluate
from buddy.training.router.launch import check_launch, is_to_be_sharded, own_device
from buddy.training.router.model import build_model, check_recipe, has_router, is_fitted
from buddy.training.router.orders import fit_orders
from buddy.training.router.recipe import OWN_PRIORS, BudgetSettings, Recipe
from buddy.training.router.sharding import shard
from buddy.training.router.standardised import StandardisedInputs
from buddy.training.router.start import start_router
from buddy.training.router.trainer import JointTrainer, StepReport
from buddy.training.run import Rows, Run, RunListener, Steps
from buddy.training.schedule import open_steps
from buddy.training.state import CHECKPOINT, STATE

_COLLAPSE = (
    "the router has collapsed: one plan for every validation prompt at each budget below full "
    "depth; it routes no better than its prior. Raise optim.router_learning_rate, or try another "
    "router.relaxation or router.method. (If data.validation has one kind of input, add others.)"
)

_OPEN = ("steps", "epochs", "decay_steps")
"""Settings that may change under a constant rate, until it falls."""
_HOW = ("micro_batch_tokens", "activation_checkpointing", "fsdp")
"""Settings that say how a step is computed, and not what."""
_NEWER: Final[dict[tuple[str, str], Any]] = {
    ("model", "quant"): None,
    ("router", "standardise"): False,
    ("optim", "average"): 0.0,
    ("optim", "prompt_loss"): 0.0,
    ("budget", "curriculum_steps"): 0,
    ("budget", "each"): 1,
    ("budget", "sandwich"): False,
    ("lora", "depths"): (),
}
"""Settings that states of older versions do not have, and what was done before there were any."""


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """What differs between the methods that train adapters by one loop."""

    build: Callable[..., BuddyForCausalLM] = build_model
    """Makes the model that is trained, from a recipe, the base model, a device, and what maps the
    weights where they are to be shared."""
    trainer: type[JointTrainer] = JointTrainer
    """Takes the steps."""
    evaluate: Callable[..., tuple[list[Evaluation], RouteCounts]] = evaluate
    """Evaluates, from the model, rows and budgets."""

    def train(
        self,
        recipe: Any,
        out: Path,
        *,
        resume: bool = False,
        listener: RunListener | None = None,
    ) -> Path:
        """Train by a recipe.

        Args:
            recipe: Everything that fixes the run: a `Recipe`, or a method's own kind of it.
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
        accelerator = Accelerator()
        is_main = accelerator.is_main_process
        check_launch(accelerator)
        is_sharded = is_to_be_sharded(recipe, self.trainer, accelerator.num_processes)
        told = listener if is_main else None
        run = Run(recipe, out, resume=resume, listener=told, shares=True)
        _check_places(recipe)
        check_recipe(recipe, run.named)
        mapped = MappedWeights()
        build = partial(self.build, mapped=mapped) if is_sharded else self.build
        with accelerator.main_process_first():  # the others find the model in the cache
            device = own_device(accelerator)
            model = build(recipe, run.named, "cpu" if is_sharded else device)
        rows, evaluate, sharded, inputs = run.read_rows(), self.evaluate, None, None
        with ExitStack() as stack:
            if is_sharded:
                dtype = getattr(torch, recipe.model.dtype)
                sharded = shard(model, device, accelerator.num_processes, dtype, mapped)
                evaluate = partial(evaluate, sharded=sharded)
                context = recipe.router.planner.context_layer
                stack.enter_context(sharded.gathered(range(context)))
            run.warn([*notes_on_dtype(model.backbone), *rows.left_out])
            if not is_fitted(recipe, run.named):
                inputs = _start(model, rows.train, recipe)
        identity = _identity(recipe, model, rows.train)
        if has_router(run.named):  # of which the base model's fingerprint says nothing
            facts = model.facts()
            identity["routed_by"] = [facts.get("router"), facts.get("prior")]
        trainer = self.trainer(
            model,
            recipe,
            rows.train,
            process=(accelerator.process_index, accelerator.num_processes),
            reduce=lambda tensor: accelerator.reduce(tensor, "sum"),
            gather=gather_object if accelerator.num_processes > 1 else list,
            sharded=sharded,
        )
        steps = _AdapterSteps(run, trainer, evaluate, rows, identity, inputs)
        accelerator.wait_for_everyone()
        if is_main:
            with run.claimed():
                steps.go()
                steps.finish()
        else:
            steps.follow()
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return out / CHECKPOINT


def _start(
    model: BuddyForCausalLM, examples: Sequence[Example], recipe: Recipe
) -> StandardisedInputs | None:
    """Start the router; what stands before it while it learns, if anything does."""
    settings, seed = recipe.router, recipe.optim.seed
    standard = start_router(model, examples, spread=settings.spread, seed=seed)
    if settings.orders:
        fit_orders(model, examples, settings.orders, seed)
    if not settings.standardise:
        return None
    assert model.router is not None  # the recipe has seen to both
    assert standard is not None
    return StandardisedInputs(model.router.decision, standard)


def _check_places(recipe: Recipe) -> None:
    """Refuse a recipe that names what is not there, before a model is fetched for it."""
    prior = recipe.router.prior
    if prior not in OWN_PRIORS:
        try:
            read_record(Path(prior))
        except ResultError as error:
            raise RecipeError(
                f"router.prior: {error}; "
                f"`buddy importance {recipe.model.name} --out {prior}` makes one"
            ) from error
    for order in recipe.router.orders:
        read_record(Path(order.record))
    if recipe.lora.start is not None:
        start = Path(recipe.lora.start)
        check_files(start, read_manifest(start).files)


def _identity(
    recipe: Recipe, model: BuddyForCausalLM, examples: Sequence[Example]
) -> dict[str, Any]:
    """All that the result of a run depends on; how it is logged is not part of it."""
    settings = asdict(recipe)
    settings.pop("log")
    for name in _HOW:
        settings["optim"].pop(name)
    if recipe.teacher.name is None:
        settings.pop("teacher")
    for (table, key), before in _NEWER.items():
        if settings[table][key] == before:
            settings[table].pop(key)
    if recipe.optim.schedule == "constant":
        for name in _OPEN:
            settings["optim"].pop(name)
    part, policy = model.learned, recipe.router.policy.partition(":")[0]
    chosen_by = part is not None and part.policy == policy  # and not what is trained
    learned = {"learned": model.facts()["learned"]} if chosen_by else {}
    return {
        **settings,
        **learned,
        "base": model.base_fingerprint,
        "rows": rows_identity(examples),
        "files": {str(path): _digest(path) for path in _named_files(recipe)},
    }


def _named_files(recipe: Recipe) -> Iterator[Path]:
    """What the recipe names beside rows and the base model: another content is another run."""
    if recipe.router.prior not in OWN_PRIORS:
        yield Path(recipe.router.prior)
    yield from (Path(order.record) for order in recipe.router.orders)
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


class _AdapterSteps(Steps[Recipe, JointTrainer]):
    """The steps that train adapters, and a router or a method's part with them."""

    def __init__(
        self,
        run: Run[Recipe],
        trainer: JointTrainer,
        evaluate: Callable[..., tuple[list[Evaluation], RouteCounts]],
        rows: Rows,
        identity: dict[str, Any],
        inputs: StandardisedInputs | None,
    ) -> None:
        recipe = run.recipe
        if trainer.teacher not in (None, trainer.model):
            identity["taught_by"] = trainer.teacher.facts()
        super().__init__(run, trainer, identity, rows)
        self._recipe, self._model, self._evaluate = recipe, trainer.model, evaluate
        self.evaluate_every = recipe.log.evaluate_every
        self._validation = draw_rows(rows.validation, recipe.log.evaluate_rows, recipe.optim.seed)
        self._budgets = budget_range(
            BudgetSettings(choices=recipe.log.evaluate_budgets), trainer.model.num_blocks
        )
        self._inputs = inputs
        self._report: StepReport | None = None
        self._routes = RouteCounts()
        self._evaluations: list[Evaluation] = []
        self._seconds = 0.0

    def step(self, step: int) -> dict[str, float]:
        """Take a step, counted from 0."""
        report = self._report = self.trainer.step(step)
        self._seconds += report.seconds
        self._routes.add(report.plans)
        return {"loss": report.loss, "tokens_per_s": report.num_tokens / report.seconds}

    def log_line(self) -> dict[str, Any]:
        """The last step's losses, and the routes since the last line."""
        blocks, report, routes = self._model.num_blocks, self._report, self._routes
        assert report is not None  # a line follows a step
        self._routes = RouteCounts()
        return {
            "loss": report.loss,
            "by_budget": {str(b): loss for b, (loss, _) in sorted(report.by_budget.items())},
            "tokens_per_s": report.num_tokens / report.seconds,
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "router_grad_norm": report.router_grad_norm,
            "rows": routes.num_rows,
            "distinct_plans": routes.num_distinct,
            "distinct_budgets": len(routes.plans),
            "mask_entropy": routes.mask_entropy(blocks),
            "execution": dict(zip(map(str, range(blocks)), routes.rates(blocks), strict=True)),
        }

    def evaluate(self, log: TrainingLog, step: int) -> None:
        """Evaluate with the weights that would be saved, and warn of a router that collapsed."""
        if not self._validation:
            return
        routes = self._measure()
        for evaluation in self._evaluations:
            log.write(step, f"evaluation/{evaluation.blocks}", **asdict(evaluation))
        self.run.listener.reported(describe(step, self._evaluations))
        is_learnt = self._model.router is not None and self._recipe.optim.router_learning_rate != 0
        if is_learnt and routes.collapsed(self._model.num_blocks):
            log.write(step, "warning", text=_COLLAPSE)
            self.run.listener.warned(_COLLAPSE)

    def _measure(self) -> RouteCounts:
        with self._saved_weights():
            self._evaluations, routes = self._evaluate(self._model, self._validation, self._budgets)
        return routes

    def accompany(self) -> None:
        """Evaluate along with the main process, which runs no block alone where it has a share."""
        if self.trainer.sharded is not None and self._validation:
            self._measure()

    @property
    def is_evaluated(self) -> bool:
        """Whether there is an evaluation."""
        return bool(self._evaluations)

    def carried(self) -> dict[str, Any]:
        """Time, length, routes since the last line of the log, and the last evaluation."""
        return {
            "seconds": self._seconds,
            "length": self._length(),
            "plans": self._routes.to_json(),
            "evaluation": [asdict(evaluation) for evaluation in self._evaluations],
        }

    def restore(self, begun: int, carried: dict[str, Any]) -> None:
        """Take up what a state carried; states of older versions carry less.

        Raises:
            TrainingError: The run is to have another length, and its rate has begun to fall.
        """
        self._seconds = float(carried["seconds"])
        self._check_length(begun, carried)
        self._routes = RouteCounts.of(carried.get("plans", []))
        self._evaluations = [Evaluation(**values) for values in carried.get("evaluation", [])]

    def tensors(self) -> dict[str, Tensor]:
        """What is trained, its mean over steps, and what its inputs are measured against."""
        mean, inputs = self.trainer.mean, self._inputs
        tensors = dict(self.trainer.parameters)
        if mean is not None:
            tensors |= {f"mean.{name}": w for name, w in mean.values.items()}
        if inputs is not None:
            standard = inputs.standard
            tensors |= {"standard.mean": standard.mean, "standard.deviation": standard.deviation}
        return tensors

    def finish(self) -> None:
        """Write checkpoint and record, of the weights that were evaluated."""
        recipe, trainer, model = self._recipe, self.trainer, self._model
        with self._saved_weights():
            model.card = stage_1_card(recipe, len(self.rows.train), self._evaluations)
            self.run.finish(
                model.eval(),
                kind="training",
                rows=self.rows,
                config={
                    "processes": trainer.num_processes,
                    "taught_by": self.identity.get("taught_by"),
                    "measured_prior": model.prior_facts,
                },
                results={
                    "steps": self.steps,
                    "seconds": self._seconds,
                    "rows": len(self.rows.train),
                    "trained_parameters": sum(p.numel() for p in trainer.parameters.values()),
                    "evaluation": [asdict(evaluation) for evaluation in self._evaluations],
                },
            )

    def _length(self) -> list[int]:
        """Steps in all, and those of them that any longer run begins with."""
        return [self.steps, open_steps(self._recipe.optim, self.steps)]

    def _check_length(self, begun: int, carried: dict[str, Any]) -> None:
        """Refuse a run of another length once the rate of either has begun to fall."""
        now = self._length()
        then = carried.get("length", now)  # a state of an older version has none
        if then == now or begun <= min(then[1], now[1]):
            return
        raise TrainingError(
            f"{self.run.out / STATE} has {begun:,} steps, {max(0, begun - then[1]):,} of them at a "
            f"falling rate, and cannot become a run of {now[0]:,} whose rate falls from step "
            f"{now[1]:,} on: expected the {then[0]:,} that it was begun with"
            + ("" if begun > then[1] else ", or more")
        )

    @contextmanager
    def _saved_weights(self) -> Iterator[None]:
        """Give the model the weights that are evaluated and saved, within the context."""
        with ExitStack() as stack:
            if self.trainer.mean is not None:
                stack.enter_context(self.trainer.mean.in_place())
            if self._inputs is not None:
                stack.enter_context(self._inputs.folded())
            yield


train: Final = TrainingMethod().train
"""Trains LoRA and router together by a recipe."""
