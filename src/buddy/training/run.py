"""One training run, whatever it trains: prepare, step, evaluate, finish.

A `Run` is prepared from a recipe: it refuses what shows to be wrong before a model is fetched, and
reads the rows. `Steps` takes the steps that are left of it, and logs, evaluates and saves between
them. `Run.finish` writes the checkpoint and the record. Each stage says what its own step and its
own evaluation are; a stage that only fits has no steps.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from filelock import FileLock
from torch import Tensor

from buddy.checkpoint.resolve import Resolved, resolve
from buddy.data.examples import check_source, read_all
from buddy.errors import TrainingError
from buddy.hub.device import pick_device
from buddy.model import BuddyForCausalLM
from buddy.processes import check_alone
from buddy.records import RunRecord
from buddy.resume import check_same
from buddy.training.log import TrainingLog, need_tensorboard
from buddy.training.recipe import CheckpointSettings, DataSettings, ModelSettings, StepLogSettings
from buddy.training.state import (
    CHECKPOINT,
    LOCK,
    RECORD,
    STATE,
    WORDS,
    check_folder,
    claimed_folder,
    load_state,
    save_state,
)

_READ: Final = "rows"
"""Key under which a state carries digests of the rows that were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunListener:
    """Whom a run tells how it goes, on its main process alone."""

    measured: Callable[[str, int, int], None] = lambda what, done, total: None
    """What is measured before the first step, how much of it is done, and of how much."""
    started: Callable[[int, int], None] = lambda step, steps: None
    """Steps done by an earlier run, and steps in all."""
    stepped: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None
    """How many steps are done, after each of them, and its numbers by name, such as `loss`."""
    reported: Callable[[str], None] = lambda text: None
    """Lines about what was found, such as an evaluation."""
    warned: Callable[[str], None] = lambda text: None
    """What looks wrong."""
    finished: Callable[[Path], None] = lambda checkpoint: None
    """The folder of the checkpoint, once it is written."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a run reads.

    Attributes:
        train: Training rows.
        validation: Rows that nothing is trained on.
        left_out: Notes about rows that could not be used.
        tokenizer: Of the model.
    """

    train: list[Any]
    validation: list[Any]
    left_out: list[str]
    tokenizer: Any


@runtime_checkable
class RunRecipe(Protocol):
    """Tables that every recipe has."""

    @property
    def model(self) -> ModelSettings | CheckpointSettings:
        """The model that is trained, or measured."""

    @property
    def data(self) -> DataSettings:
        """Training and validation rows."""


@runtime_checkable
class SteppedRecipe(RunRecipe, Protocol):
    """What a recipe has beside, whose training takes steps."""

    @property
    def log(self) -> StepLogSettings:
        """Logs and states."""


SomeRecipe = TypeVar("SomeRecipe", bound=RunRecipe)


class Run(Generic[SomeRecipe]):
    """A run from its recipe to a checkpoint.

    Args:
        recipe: Everything that fixes the run.
        out: Folder of the checkpoint, the logs, the training state and the record.
        resume: Go on from the state in `out`, if there is one.
        listener: Told how it goes.
        shares: Processes that are launched side by side share its work.

    Raises:
        BuddyError: Several processes were launched for work that is not shared.
        DataError: A data file is missing.
        TrainingError: The folder cannot be had, or TensorBoard is wanted and not there.
    """

    def __init__(
        self,
        recipe: SomeRecipe,
        out: Path,
        *,
        resume: bool = False,
        listener: RunListener | None = None,
        shares: bool = False,
    ) -> None:
        if not shares:
            check_alone("this stage of training")
            pick_device(None)  # nothing is fetched where several are named
        self.recipe, self.out, self.resume = recipe, out, resume
        self.listener = listener or RunListener()
        self._lock, self._is_checked = FileLock(out / LOCK), False
        check_folder(out, resume)
        for source in (*recipe.data.train, *recipe.data.validation):
            check_source(source)
        if isinstance(recipe, SteppedRecipe) and recipe.log.tensorboard:
            need_tensorboard()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The run's folder, made and held alone; only once nothing of its recipe can be refused.

        Raises:
            TrainingError: It cannot be made, or another run holds it or was faster.
        """
        with claimed_folder(self.out, self._lock):
            if not self._is_checked:
                check_folder(self.out, self.resume)
                self._is_checked = True
            yield

    @cached_property
    def named(self) -> Resolved:
        """The model that the recipe names."""
        return resolve(self.recipe.model.name)

    def load_model(self, **options: Any) -> BuddyForCausalLM:
        """The model that the recipe names, frozen, in the recipe's dtype.

        Raises:
            ModelError: It cannot be loaded.
        """
        dtype = getattr(torch, self.recipe.model.dtype)
        device = pick_device(None)
        model = BuddyForCausalLM.from_pretrained(self.named, dtype=dtype, device=device, **options)
        model.eval().requires_grad_(False)
        return model

    def load_as_saved(self, **options: Any) -> BuddyForCausalLM:
        """The model again: a backbone that is written must be in the dtype that it was saved in."""
        return BuddyForCausalLM.from_pretrained(self.named, device="cpu", **options)

    def read_rows(self, read: Callable[..., list[Any]] = read_all) -> Rows:
        """Read all rows.

        Args:
            read: From sources and a tokenizer to rows, as `read_all`.

        Raises:
            DataError: A file is missing, empty or malformed.
        """
        data, left_out = self.recipe.data, list[str]()
        tokenizer = self.named.load_tokenizer()
        train, validation = (
            read(sources, tokenizer, max_tokens=data.max_tokens, note=left_out.append)
            for sources in (data.train, data.validation)
        )
        return Rows(train, validation, left_out, tokenizer)

    def warn(self, notes: Sequence[str]) -> None:
        """Tell the listener what looks wrong."""
        for note in notes:
            self.listener.warned(note)

    def finish(
        self,
        model: BuddyForCausalLM,
        *,
        kind: str,
        rows: Rows,
        results: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write checkpoint and record; returns the checkpoint's folder.

        Args:
            model: What is saved. A checkpoint with its own backbone gets the tokenizer too.
            kind: Of the record.
            rows: That were read.
            results: How the run ended.
            config: What the record says beside the recipe.

        Raises:
            CheckpointError: It cannot be written.
        """
        checkpoint = self.out / CHECKPOINT
        with self.claimed():
            tokenizer = None if model.origin.source else rows.tokenizer
            model.save_pretrained(checkpoint, tokenizer=tokenizer)
            RunRecord(
                kind=kind,
                model=model.facts(),
                config={**asdict(cast(Any, self.recipe)), **(config or {})},
                results={**results, "left_out": rows.left_out},
            ).save(self.out / RECORD)
        self.listener.finished(checkpoint)
        return checkpoint


def _digest(rows: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


@runtime_checkable
class Trainer(Protocol):
    """What takes steps, as far as a run has to know it."""

    @property
    def steps(self) -> int:
        """Steps of the run."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What is trained, by name."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of these parameters, in this order."""


SomeSteppedRecipe = TypeVar("SomeSteppedRecipe", bound=SteppedRecipe)
SomeTrainer = TypeVar("SomeTrainer", bound=Trainer)


class Steps(ABC, Generic[SomeSteppedRecipe, SomeTrainer]):
    """The steps of a run, resumable: a state in the folder says how far it has come.

    Args:
        run: That was prepared.
        trainer: Takes the steps.
        identity: All that the result depends on; a state of another identity is refused.
        rows: That are trained on.

    Attributes:
        evaluate_every: Steps between two evaluations; 0 = at the end alone.
    """

    evaluate_every = 0

    def __init__(
        self,
        run: Run[SomeSteppedRecipe],
        trainer: SomeTrainer,
        identity: dict[str, Any],
        rows: Rows,
    ) -> None:
        self.run, self.trainer, self.rows, self.steps = run, trainer, rows, trainer.steps
        self.identity = identity
        self._read = {
            "data": {"train": _digest(rows.train), "validation": _digest(rows.validation)}
        }

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Take a step, counted from 0; returns its numbers for whoever watches."""

    @abstractmethod
    def log_line(self) -> dict[str, Any]:
        """What a line of the log says of the steps since the last one."""

    @abstractmethod
    def evaluate(self, log: TrainingLog, step: int) -> None:
        """Evaluate after a step, into the log, where there are rows for it."""

    @property
    @abstractmethod
    def is_evaluated(self) -> bool:
        """Whether the end has an evaluation, of this run or of the state that it went on from."""

    @abstractmethod
    def carried(self) -> dict[str, Any]:
        """Plain values that a state carries along."""

    @abstractmethod
    def restore(self, begun: int, carried: dict[str, Any]) -> None:
        """Take up what `carried` gave when `begun` steps were done."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a state holds beside the optimiser's moments."""
        return self.trainer.parameters

    def begin(self) -> int:
        """Steps done by an earlier run, whose state is taken up.

        Raises:
            TrainingError: The state is damaged, or of another run.
        """
        if not self.run.resume:
            return 0
        path = self.run.out / STATE
        return load_state(path, steps=self.steps, restore=self._restore, **self._saved())

    def _restore(self, begun: int, carried: dict[str, Any]) -> None:
        read = carried.get(_READ, self._read)  # a state of an older version has none
        check_same(
            read,
            self._read,
            f"{self.run.out / STATE} {WORDS.other}",
            WORDS.otherwise,
            TrainingError,
        )
        self.restore(begun, carried)

    def go(self) -> None:
        """Take all steps that are left."""
        with self.run.claimed():
            self._go()

    def _go(self) -> None:
        begun, settings = self.begin(), self.run.recipe.log
        self.run.listener.started(begun, self.steps)
        with closing(TrainingLog(self.run.out, begun, tensorboard=settings.tensorboard)) as log:
            if self.rows.left_out and begun == 0:
                log.write(0, "data", left_out=self.rows.left_out)
            for step in range(begun, self.steps):
                numbers = self.step(step)
                self.run.listener.stepped(step + 1, numbers)
                self._between(log, step + 1)
            if not self.is_evaluated:  # a state of an older version has no evaluation
                self.evaluate(log, self.steps)

    def follow(self) -> None:
        """Take all steps that are left, as a process that writes nothing."""
        for step in range(self.begin(), self.steps):
            self.step(step)

    def _between(self, log: TrainingLog, done: int) -> None:
        settings, last = self.run.recipe.log, done == self.steps
        if last or done % settings.every == 0:
            log.write(done, "train", **self.log_line())
        if last or (self.evaluate_every and done % self.evaluate_every == 0):
            self.evaluate(log, done)
        if last or done % settings.save_every == 0:
            extra = {**self.carried(), _READ: self._read}
            save_state(self.run.out / STATE, step=done, extra=extra, **self._saved())

    def _saved(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "parameters": self.tensors(),
            "optimizer": self.trainer.optimizer,
        }
