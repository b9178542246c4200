"""Prefill and decode speed on Alpaca and SAMSum prompts, beside the paper's dynamic methods."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from buddy.data.examples import Example
from buddy.errors import PolicyError
from buddy.lab.paper.levels import BUDGETS, budget_at, level
from buddy.lab.paper.methods import ComparedMethod, by_model, check_labels
from buddy.lab.paper.panels import REMOVED, line, number, panel, removed, removed_by
from buddy.lab.paper.published.read import ABLATED, Row, read_paper
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

if TYPE_CHECKING:
    from torch import Tensor

    from buddy.model import BuddyForCausalLM

NEW_TOKENS: Final = 128
ROUNDS: Final = 3
_FULL_ROUNDS: Final = 11
PHASES: Final = ("prefill", "decode")
_SETS: Final = {"alpaca": "Alpaca", "samsum": "SAMSum"}
DENSE: Final = "Dense"
TRANSFORMERS: Final = "transformers"


def collect(run: Run) -> Collected:
    """Time every method, each set of prompts and each model in a step of its own."""
    methods = _methods(run)
    rounds = _FULL_ROUNDS if run.request.full else ROUNDS
    rows = run.rows(100, 300)
    new_tokens = _new_tokens(run)
    cells: list[dict[str, Any]] = []
    facts: dict[str, Any] | None = None
    groups = by_model(methods, run.request.model)
    for place, (model, own) in enumerate(groups.items()):
        part = run if model == run.request.model else run.on(model)
        for prompts in _SETS:
            settings = {
                "prompts": prompts,
                "rows": rows,
                "rounds": rounds,
                "new_tokens": new_tokens,
                "policies": [[method.label, method.policy] for method in own],
            }
            name = f"speed-{prompts}" if place == 0 else f"speed-{prompts}-{place}"
            results = part.measure(name, settings, _timing(part, own, prompts, rows, rounds))
            cells += [
                {**cell, "prompts": prompts}
                for cell in results["cells"]
                if place == 0 or cell["method"] not in (DENSE, TRANSFORMERS)
            ]
        if len(groups) == 1:
            facts = part.model().facts()
    theirs = read_paper("speed")
    return Collected(
        results={"cells": cells, "panels": _panels(cells, theirs), "paper": theirs},
        sheets=tuple(_sheet(cells, theirs, prompts) for prompts in _SETS),
        facts=facts,
        settings={"rounds": rounds, "new_tokens": new_tokens, "rows": rows},
        differs=""
        if new_tokens == NEW_TOKENS
        else f"The model's context leaves room for {new_tokens} new tokens.",
    )


def _new_tokens(run: Run) -> int:
    """Length of a generation: at most half of the context."""
    return min(NEW_TOKENS, int(run.outline().config.max_position_embeddings) // 2)


def _methods(run: Run) -> list[ComparedMethod]:
    own = [] if run.outline().router is None else [ComparedMethod(label="Buddy", policy="routed")]
    methods = [
        *own,
        ComparedMethod(label="Random, new each step", policy="random:0"),
        *run.request.methods,
    ]
    check_labels(methods)
    return methods


def _timing(
    run: Run, methods: Sequence[ComparedMethod], prompts: str, rows: int | None, rounds: int
) -> Any:
    def measure() -> dict[str, Any]:
        from buddy.lab.evaluation.speed.speed import SpeedConfig

        config = SpeedConfig(new_tokens=_new_tokens(run), rounds=rounds)
        return time_methods(run.model(), methods, _prompts(run, prompts, rows, rounds), config)

    return measure


def time_methods(
    model: "BuddyForCausalLM", methods: Sequence[ComparedMethod], prompts: "Tensor", config: Any
) -> dict[str, Any]:
    """The cells of a speed measurement, each with its method's label.

    A method that decides while it runs keeps no budget, and is timed in a measurement of its own;
    its cells have the mean depth.
    """
    from buddy.lab.evaluation.conditions import plan_conditions
    from buddy.lab.evaluation.speed.speed import measure_speed
    from buddy.policies.registry import build_policy

    specs = {own.label: own.policy or model.policy_spec or "static" for own in methods}
    for label, spec in specs.items():
        twin = next(name for name, other in specs.items() if other == spec)
        if twin != label:
            raise PolicyError(
                f"{twin!r} and {label!r} are one policy of one model, {spec}: leave one out"
            )
    online = {n: s for n, s in specs.items() if build_policy(s, model.resources).is_online}
    cells: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for group, budgets in (
        ({n: specs[n] for n in specs if n not in online}, BUDGETS),
        (online, ("1.0",)),
    ):
        if not group:
            continue
        conditions = plan_conditions(model, [f"{n}={s}" for n, s in group.items()], budgets)
        for condition in conditions:
            condition.prepare(lambda stage, done, total: None)
        measured = measure_speed(model, conditions, prompts, config)
        labels = {spec: label for label, spec in group.items()}
        is_first = not cells
        for cell in measured["cells"]:
            is_dense = cell["policy"] == "full"
            theirs = cell["label"] == TRANSFORMERS
            if (is_dense or theirs) and not is_first:
                continue
            label = TRANSFORMERS if theirs else DENSE if is_dense else labels[cell["policy"]]
            cells.append({**cell, "method": label})
        rounds += measured["rounds"]
    return {"cells": cells, "rounds": rounds, "config": asdict(config)}


def _prompts(run: Run, name: str, rows: int | None, rounds: int) -> "Tensor":
    """Prompts of at least the median length, cut to it, one a round: [rounds, 1, tokens]."""
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.paper.inputs import read_alpaca, read_samsum

    tokenizer = load_tokenizer(run.request.model)
    longest = run.model().config.max_position_embeddings - _new_tokens(run)
    read = read_alpaca if name == "alpaca" else read_samsum
    return cut(read(run.request.data_dir, tokenizer, rows, longest), rounds)


def cut(examples: Sequence[Example], rounds: int) -> "Tensor":
    """Prompts, as many as rounds, all of the median length: [rounds, 1, tokens]."""
    import torch

    length = int(statistics.median_low([len(example.prompt) for example in examples]))
    long = [row.prompt[:length] for row in examples if len(row.prompt) >= length]
    return torch.tensor([long[place % len(long)] for place in range(rounds)])[:, None]


def _sheet(cells: Sequence[dict[str, Any]], theirs: Sequence[Row], prompts: str) -> Sheet:
    own = [cell for cell in cells if cell["prompts"] == prompts]
    body = []
    for key in dict.fromkeys(map(_row_of, own)):
        by_phase = {c["phase"]: c for c in own if _row_of(c) == key}
        name, blocks = key
        if blocks is None:  # it keeps no budget: prompts have a mean depth, and new tokens another
            paper: dict[str, str] = {}
            row: list[object] = [
                name,
                " / ".join(f"{by_phase[phase]['mean_blocks']:.1f}" for phase in PHASES),
            ]
        else:
            paper = _reported(theirs, prompts, name, blocks, num_blocks=own[0]["num_blocks"])
            row = [name, blocks]
        for phase in PHASES:
            row += [
                f"{by_phase[phase]['tokens_per_s']:,.0f}",
                f"{by_phase[phase]['speedup_own_dense']:.2f}",
                paper.get(phase, ""),
            ]
        body.append(row)
    compared = ("over dense", "paper")
    columns = ("method", "blocks", "prefill", *compared, "decode", *compared)
    context = own[0]["context"]
    title = f"{_SETS[prompts]} prompts of {context} tokens, tokens/s"
    return Sheet.of(title, columns, body)


def _row_of(cell: dict[str, Any]) -> tuple[str, int | None]:
    return cell["method"], None if "mean_blocks" in cell else cell["blocks"]


def _reported(
    theirs: Sequence[Row], prompts: str, method: str, blocks: int, *, num_blocks: int
) -> dict[str, str]:
    """The paper's speed-ups at the same share of blocks."""
    own = [row for row in theirs if row["prompts"] == prompts]
    wanted = budget_at(blocks, num_blocks)
    dense = next(row for row in own if row["method"] == DENSE)
    for row in own:
        if row["method"] == method and level(row, own) == wanted:
            return {phase: f"{float(row[phase]) / float(dense[phase]):.2f}" for phase in PHASES}
    return {}


def _panels(cells: Sequence[dict[str, Any]], theirs: Sequence[Row]) -> list[dict[str, Any]]:
    panels = []
    for prompts, title in _SETS.items():
        rows = [row for row in theirs if row["prompts"] == prompts]
        dense = next(row for row in rows if row["method"] == DENSE)
        for phase in PHASES:
            own = [
                cell
                for cell in cells
                if (cell["prompts"], cell["phase"]) == (prompts, phase)
                and cell["method"] not in (DENSE, TRANSFORMERS)
            ]
            lines = [
                line(
                    name,
                    [cell for cell in own if cell["method"] == name],
                    removed,
                    number("speedup_own_dense"),
                )
                for name in dict.fromkeys(cell["method"] for cell in own)
            ]
            lines += [
                line(
                    name,
                    [row for row in rows if row["method"] == name],
                    removed_by(ABLATED),
                    number(phase, over=float(dense[phase])),
                    paper=True,
                )
                for name in dict.fromkeys(row["method"] for row in rows if row is not dense)
            ]
            panels.append(panel(f"{title}, {phase}", REMOVED, "Speed-up over dense", lines))
    return panels
