"""A run of one table: its folder, its model, and steps that are not taken twice.

A step is a command of ours, run as a process of its own, or a call of a library function. Each
leaves a RunRecord in the folder. A later run uses it if it is of the same command or settings, and
of the same model; else it says what to delete.
"""

import functools
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy.errors import ModelError, ResultError
from buddy.hub.progress import Progress
from buddy.lab.paper.methods import ComparedMethod
from buddy.records import RunRecord, read_record
from buddy.resume import differing

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM

_OWN = ("processes", "measured_prior")
"""What the record of a training run has beside its recipe."""


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
    """Of each task or set of prompts; those of the settings where None."""
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
    on_progress: Progress | None = None
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
        if path.exists():
            self._check_command(path, command, model)
        else:
            self._process(command)
        return self._kept(name, read_record(path))

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
        record = folder / "record.json"
        write_text(file, recipe)
        if record.exists():
            found = read_record(record)
            recipes = {k: v for k, v in found["config"].items() if k not in _OWN}
            models = dict(found.get("model") or {})
            for what, saved, wanted in (
                ("recipe", recipes, asdict(read_recipe(kind, file))),
                ("model", models, _parts(_facts(model), "predictor")),
            ):
                changed = differing({k: saved.get(k) for k in wanted}, wanted)
                if changed:
                    raise _other(folder, f"another {what}, with other {', '.join(changed)}")
        else:
            self._process([command, str(file), "--out", str(folder), "--resume"])
        self._kept(name, read_record(record))
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
        told = {"step": name, "model": self.request.model, "data": data and str(data)}
        config = {**told, **({} if dtype is None else {"dtype": dtype}), **settings}
        if path.exists():
            record = read_record(path)
            changed = differing(record["config"], config)
            changed += differing(_parts(record.get("model")), _parts(self.model().facts()))
            if changed:
                raise _other(path, f"other settings: {', '.join(changed)}")
        else:
            self.say(name)
            RunRecord(
                kind="reproduce-step", config=config, results=work(), model=self.model().facts()
            ).save(path)
        results: dict[str, Any] = self._kept(name, read_record(path))["results"]
        return results

    def _kept(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        told = {key: record.get(key) for key in ("kind", "command", "commit")}
        self._steps.append({"name": name, **told})
        return record

    def _check_command(self, path: Path, command: Sequence[str], model: str) -> None:
        record, wanted = read_record(path), shlex.join(["buddy", *command])
        if record.get("command") != wanted:
            raise _other(path, f"another command, `{record.get('command')}` and not `{wanted}`")
        changed = differing(_parts(record.get("model")), _parts(_facts(model)))
        if changed:
            raise _other(path, f"another model, with other {', '.join(changed)}")

    def _process(self, command: Sequence[str]) -> None:
        """Run a command of ours; what it prints goes to stderr."""
        shown = shlex.join(["buddy", *command])
        self.say(shown)
        done = subprocess.run(
            [sys.executable, "-m", "buddy", *command],
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == 130:
            raise KeyboardInterrupt
        if done.returncode:
            raise ResultError(
                f"`{shown}` ended with exit code {done.returncode}: mend what it says, and the "
                "same command goes on; finished steps are kept"
            )


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _other(path: Path, what: str) -> ResultError:
    return ResultError(f"{path} is of {what}: delete it to measure again, or name another --out")


@functools.lru_cache(maxsize=8)
def _facts(model: str) -> dict[str, Any]:
    """What tells a model from others."""
    from buddy.model import BuddyForCausalLM

    return BuddyForCausalLM.from_pretrained(model, device="cpu").facts()


def _parts(facts: Any, *trained: str) -> dict[str, Any]:
    """What is loaded, but for what a run trains; a prior may be measured in passing."""
    left_out = {"prior", *trained}
    return {name: one for name, one in dict(facts or {}).items() if name not in left_out}


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
