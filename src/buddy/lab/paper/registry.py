"""The tables by name, and how one is made again from beginning to end."""

import difflib
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

from buddy.errors import DataError, ResultError
from buddy.lab.paper.run import Run, check_model
from buddy.lab.paper.table import COMMONSENSE_FILES, Collected, Table
from buddy.records import RunRecord

_SMALL_MODEL: Final = (
    "The paper measures models of 7 to 13 billion parameters on an A100 with the whole test sets; "
    "there every method is tuned on Alpaca, and here static methods are not tuned at all. What is "
    "kept is of the same weights at full depth, and in the paper of its dense model."
)
_PROMPTS: Final = ("alpaca/train", "samsum/validation")
_TRAINED: Final = (
    "The paper trains Llama-2-7B for two epochs of Alpaca and reports accuracy; quick runs take "
    "200 steps of 4 short rows, one seed, and report the answers' cross-entropy."
)


def _ablation(shows: str, *, minutes: float, has_prior: bool = False) -> Table:
    """A table of short runs that differ in one setting; priors are measured on WikiText-2."""
    return Table(
        shows=f"ablation: {shows}",
        module="ablations",
        minutes=minutes,
        measured=False,
        full="the paper's recipe, and the eight tasks",
        files=("alpaca/train", "wikitext2/valid.txt") if has_prior else ("alpaca/train",),
        from_hub=not has_prior,
        figures=("panels",),
        differs=_TRAINED,
    )


TABLES: Final[dict[str, Table]] = {
    "accuracy": Table(
        shows="accuracy of each method on the eight tasks, and what is kept of full depth's",
        module="accuracy",
        minutes=9.0,
        full="four depths and all rows",
        files=COMMONSENSE_FILES,
        methods=True,
        figures=("panels",),
        differs=_SMALL_MODEL,
    ),
    "gsm8k": Table(
        shows="GSM8K, exact match, of each method at two depths",
        module="accuracy",
        minutes=16.0,
        full="all rows",
        files=("gsm8k/test", "gsm8k/train"),
        methods=True,
        figures=("panels",),
        differs=_SMALL_MODEL,
    ),
    "speed": Table(
        shows="prefill and decode speed on Alpaca and SAMSum prompts, 128 new tokens",
        module="speed",
        minutes=5.0,
        full="eleven rounds",
        files=_PROMPTS,
        methods=True,
        figures=("panels",),
        differs="The paper times eager PyTorch on an A100; prompts here all have the median length "
        "of their set, and speed-ups are over this model's own full depth.",
    ),
    "breakdown": Table(
        shows="where the time of a pass over 5 x 256 tokens goes",
        module="breakdown",
        minutes=3.0,
        full="eleven rounds",
        rows=False,
        figures=("breakdown",),
        differs="The paper times Llama-2-7B on an A100, and has no KV fill; prompts here are "
        "random tokens.",
    ),
    "training-cost": Table(
        shows="hours of both stages by the paper's recipe",
        module="training_cost",
        minutes=2.0,
        full="100 steps of each stage are timed",
        files=("alpaca/train",),
        rows=False,
        figures=("bars",),
        differs="The paper trained on an A100 to the end; here some steps are timed, and their "
        "mean stands for all steps of the paper's recipe.",
    ),
    "context": _ablation("the router reads keys, values or both", minutes=12.0),
    "prior": _ablation("no prior, delta-PPL, cosine or Taylor", minutes=20.0, has_prior=True),
    "omega": _ablation("weight of the prior, 0.01 to 1", minutes=25.0, has_prior=True),
    "start-layer": _ablation("block whose cache the router reads, 1 to 4", minutes=16.0),
    "observations": Table(
        shows="a block's importance by input and by context length",
        module="observations",
        minutes=5.0,
        full="48 inputs of 256 tokens, contexts of 256 to 512",
        files=("wikitext2/valid.txt", "ptb/valid.txt"),
        from_hub=False,
        figures=("ranks", "context"),
        differs="The paper observes a Llama model; quick runs have fewer and shorter inputs.",
    ),
    "paths": Table(
        shows="distinct inference paths by depth, Alpaca and SAMSum",
        module="paths",
        minutes=1.0,
        full="1000 prompts of each",
        files=_PROMPTS,
        model="router",
        figures=("panels",),
        differs="The paper routes what Llama models generate; here the rows' own answers are fed, "
        "so that a path is counted at each of their tokens.",
    ),
    "heatmap": Table(
        shows="how often each block runs, four depths on the eight tasks",
        module="heatmap",
        minutes=2.0,
        full="all rows",
        files=COMMONSENSE_FILES,
        model="router",
        figures=("heatmap",),
        differs="The paper's model is larger; a question is routed with its right answer's "
        "wording where a task puts the candidates into the prompt.",
    ),
    "reuse": Table(
        shows="ROUGE on SAMSum: route recomputed at each token, or reused",
        module="reuse",
        minutes=1.0,
        full="four depths and all dialogues of the split",
        files=("samsum/validation",),
        model="router",
        figures=("panels",),
        differs="The paper summarises with Llama models and its own prompt.",
    ),
    "grpo": Table(
        shows="reward, entropy and budget while the Budget Predictor learns",
        module="grpo",
        minutes=4.0,
        full="10,000 steps of 2 prompts by the paper's settings",
        files=("alpaca/train",),
        model="router",
        rows=False,
        figures=("predictor",),
        differs="The paper's cost weight is 0.05; quick runs have 12, because here no block is "
        "worth saving under 0.05, and measure 96 prompts of at most 128 tokens at every depth.",
    ),
    "budgets": Table(
        shows="budgets that the predictor picks, by task, in five intervals",
        module="budgets",
        minutes=1.0,
        full="all rows",
        files=(*COMMONSENSE_FILES, "gsm8k/test", "mmlu/test", "mmlu/dev", *_PROMPTS),
        model="predictor",
        figures=("bars",),
        differs="The paper's intervals are not given: here they are fifths of full depth; "
        "questions have no examples before them.",
    ),
}


def find_table(name: str) -> Table:
    """A table by its name.

    Raises:
        ResultError: There is none; the nearest names are told.
    """
    if name in TABLES:
        return TABLES[name]
    near = difflib.get_close_matches(name.lower(), TABLES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(TABLES)};"
    raise ResultError(f"no table {name!r}: {hint} `buddy reproduce --list` shows them all")


def default_folder(name: str, full: bool) -> Path:
    """Where a table's steps go if nothing is said."""
    return Path("runs/reproduce") / (f"{name}-full" if full else name)


def check_request(run: Run) -> None:
    """Refuse what would fail later: data or a package that is missing, methods, the model.

    Raises:
        DataError: Data are missing.
        ResultError: matplotlib is missing, or the table takes no methods or rows.
        ModelError: The model lacks what the table is about.
    """
    request = run.request
    table = find_table(request.table)
    if request.methods and not table.methods:
        having = ", ".join(name for name, other in TABLES.items() if other.methods)
        raise ResultError(f"table {request.table} takes no --method: only {having} do")
    if request.rows is not None and not table.rows:
        raise ResultError(f"table {request.table} draws no rows: leave --rows out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ResultError(
            'figures need matplotlib, which is not installed: pip install "buddy-llm[plots]"'
        )
    check_data(request.table, request.data_dir)
    check_model(run.outline(), request.model, table.model)


def check_data(name: str, data_dir: Path | None) -> None:
    """Refuse a data folder that lacks a file of a table.

    Raises:
        DataError: A file is missing, or the data can only come from a folder.
    """
    table = find_table(name)
    files = [file if file.endswith(".txt") else f"{file}.jsonl" for file in table.files]
    if data_dir is None:
        if table.from_hub or not files:
            return
        raise DataError(f"table {name} needs {', '.join(files)} in a folder: name it by --data-dir")
    missing = [file for file in files if not (data_dir / file).is_file()]
    if missing:
        hub = "; or leave out --data-dir, to take them from the hub" if table.from_hub else ""
        raise DataError(
            f"table {name} needs {', '.join(missing)} in {data_dir}: put the data there in "
            f"lm-eval's field names, a JSON object a line{hub}"
        )


def reproduce(run: Run) -> tuple[Collected, list[Path]]:
    """Take the steps of a table, write its record and draw its figures.

    Returns:
        The table, and the files that were written: the record, then the figures.

    Raises:
        BuddyError: As `check_request` and the steps.
    """
    from buddy.files import check_writable

    request = run.request
    table = find_table(request.table)
    check_request(run)
    request.out.mkdir(parents=True, exist_ok=True)
    path = run.path(f"{request.table}.json")
    check_writable(path)
    module = importlib.import_module(f"buddy.lab.paper.tables.{table.module}")
    collected: Collected = module.collect(run)
    sentences = [table.differs, *([collected.differs] if collected.differs else [])]
    record = RunRecord(
        kind=f"reproduce-{request.table}",
        model=None if collected.facts is None else dict(collected.facts),
        config={
            "table": request.table,
            "model": request.model,
            "full": request.full,
            "dtype": request.dtype,
            "data": "hub" if request.data_dir is None else "local",
            **collected.settings,
            "steps": run.steps,
        },
        results={**collected.results, "differs": sentences},
    )
    record.save(path)
    return collected, [path, *draw_figures(table, path)]


def draw_figures(table: Table, record: Path) -> list[Path]:
    """The figures of a record, beside it."""
    from buddy.lab.plots.figures import draw
    from buddy.lab.plots.output import save_figure
    from buddy.records import read_record

    read: dict[str, Any] = read_record(record)
    made = []
    for figure in table.figures:
        name = record.stem if len(table.figures) == 1 else f"{record.stem}-{figure}"
        path = record.with_name(f"{name}.png")
        save_figure(draw(figure, [read], width=_width(figure, read)), path)
        made.append(path)
    return made


def _width(figure: str, record: dict[str, Any]) -> float:
    """Side by side, panels need more than a column."""
    from buddy.lab.plots.figures import COLUMN_INCHES

    wide = figure == "panels" and len(record["results"]["panels"]) > 1
    return 2 * COLUMN_INCHES if wide else COLUMN_INCHES
