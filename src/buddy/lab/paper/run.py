"""A run of one table: its folder, its model, and steps that are not taken twice.

A step is a command of ours, run as a process of its own, or a call of a library function. Each
leaves a RunRecord in the folder. A later run uses it if it is of the same command or settings, and
of the same model; else it says what to delete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy.errors import ModelError
from buddy.hub.progress import OnFetch
from buddy.lab.paper.methods import ComparedMethod
from buddy.lab.steps import (
    check_same_model,
    facts_of,
    measured_record,
    refuse_others,
    run_buddy,
    shown_command,
    trained_record,
)
from buddy.records import RunRecord, read_record
from buddy.resume import differing

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM

_IN_PASSING = ("prior",)
"""A part of the model that a step may have measured in passing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a caller asks for."""

    table: str
    """Name."""
    model: str
    """Preset, hub id, folder, GGUF file or Buddy checkpoint."""
    out: Path
    """Folder of the steps, the record and the figures."""
    data_dir: Path | None = None
    """Folder with the data; the hub where None."""
    full: bool = False
    """Whether the paper's settings are wanted."""
    rows: int | None = None
    """Rows of each task or set of prompts; those of the settings where None."""
    dtype: str | None = None
    """`bfloat16` or `float32`; as saved, or as recipes have it, if None."""
    methods: tuple[ComparedMethod, ...] = ()
    """Beside the table's own."""


@dataclass(slots=True)
class Run:
    """The steps of one table.

    Attributes:
        request: What was asked for.
        say: Told what happens, a line at a time.
        on_progress: Told of fetches.
    """

    request: Request
    say: Callable[[str], None] = lambda line: None
    on_progress: OnFetch | None = None
    _steps: list[dict[str, Any]] = field(default_factory=list)
    _model: "BuddyForCausalLM | None" = None

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was run, for the record: names, commands and commits."""
        return list(self._steps)

    def path(self, name: str) -> Path:
        """A file of this run."""
        return self.request.out / name

    def rows(self, quick: int, full: int | None) -> int | None:
        """How many rows are taken; None for all."""
        return self.request.rows or (full if self.request.full else quick)

    def data(self) -> tuple[str, ...]:
        """The data folder, as commands take it."""
        folder = self.request.data_dir
        return () if folder is None else ("--data-dir", str(folder))

    def model(self) -> "BuddyForCausalLM":
        """The model, its adapter merged; loaded once."""
        if self._model is None:
            from buddy.hub.loading import named_dtype
            from buddy.model import BuddyForCausalLM

            self._model = BuddyForCausalLM.from_pretrained(
                self.request.model,
                dtype=named_dtype(self.request.dtype),
                merge_adapter=True,
                on_progress=self.on_progress,
            )
        return self._model

    def on(self, model: str) -> "Run":
        """The same run on another model; its steps are noted here too."""
        request = replace(self.request, model=model)
        return Run(request, self.say, self.on_progress, self._steps)

    def outline(self) -> "BuddyForCausalLM":
        """The model without its weights."""
        return _outline(self.request.model)

    def base(self) -> str:
        """What the base model is called: another name only where the model is a checkpoint."""
        from buddy.checkpoint.resolve import resolve

        return resolve(self.request.model).base.name

    def buddy(self, name: str, *arguments: str, model: str) -> dict[str, Any]:
        """The record of a command that takes `--out FILE`; it is run if need be.

        Args:
            name: Of the file, without its suffix.
            *arguments: All others.
            model: That it measures.

        Raises:
            ResultError: The command failed, or what is there is of another one.
        """
        path = self.path(f"{name}.json")
        dtype = () if self.request.dtype is None else ("--dtype", self.request.dtype)
        command = [*arguments, *dtype, "--out", str(path)]
        record = measured_record(path, command)
        if record is None:
            self._process(command)
            record = read_record(path)
        else:
            check_same_model(path, record, facts_of(model), _IN_PASSING)
        return self._note(name, record)

    def train(self, name: str, command: str, recipe: str, kind: type[Any], *, model: str) -> Path:
        """The folder of a finished training run; it is begun or gone on with if need be.

        Args:
            name: Of the folder; the recipe goes beside it.
            command: `train` or `train-budget`.
            recipe: TOML.
            kind: Of the recipe.
            model: That the recipe names.

        Raises:
            ResultError: The command failed, or what is there is of another recipe or model.
        """
        from buddy.files import write_text
        from buddy.settings import read_recipe

        folder, file = self.path(name), self.path(f"{name}.toml")
        write_text(file, recipe)
        record = trained_record(folder, read_recipe(kind, file))
        if record is None:
            self._process([command, str(file), "--out", str(folder), "--resume"])
            record = read_record(folder / "record.json")
        else:
            before = facts_of(model)
            trained = set(record.get("model") or {}) - before.keys()
            check_same_model(folder, record, before, {*_IN_PASSING, "predictor", *trained})
        self._note(name, record)
        return folder

    def measure(
        self, name: str, settings: Mapping[str, Any], work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The results of a library call on `model()`; it is made if need be.

        Args:
            name: Of the file, without its suffix.
            settings: All that the results depend on, besides the model.
            work: Gives the results.

        Raises:
            ResultError: What is there is of other settings or another model.
        """
        path = self.path(f"{name}.json")
        data, dtype = self.request.data_dir, self.request.dtype
        step = {"step": name, "model": self.request.model, "data": data and str(data)}
        config = {**step, **({} if dtype is None else {"dtype": dtype}), **settings}
        if path.exists():
            record = read_record(path)
            refuse_others(path, "other settings:", differing(record["config"], config))
            check_same_model(path, record, self.model().facts(), _IN_PASSING)
        else:
            self.say(name)
            facts = self.model().facts()
            RunRecord(kind="reproduce-step", config=config, results=work(), model=facts).save(path)
        results: dict[str, Any] = self._note(name, read_record(path))["results"]
        return results

    def _note(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        """Note a step for the record of the table."""
        facts = {key: record.get(key) for key in ("kind", "command", "commit")}
        self._steps.append({"name": name, **facts})
        return record

    def _process(self, command: Sequence[str]) -> None:
        self.say(shown_command(command))
        run_buddy(command)


def _outline(name: str) -> "BuddyForCausalLM":
    from buddy.model import BuddyForCausalLM

    return BuddyForCausalLM.outline(name)


def check_model(model: "BuddyForCausalLM", name: str, needs: str) -> None:
    """Refuse a model that lacks what a table is about.

    Raises:
        ModelError: It has no router, or no Budget Predictor.
    """
    if needs != "any" and model.router is None:
        raise ModelError(
            f"{name} has no trained router, and this table is about one: name a checkpoint of "
            "`buddy train` by --model"
        )
    if needs == "predictor" and model.predictor is None:
        raise ModelError(
            f"{name} has no Budget Predictor, and this table is about one: name a checkpoint of "
            "`buddy train-budget` by --model"
        )
