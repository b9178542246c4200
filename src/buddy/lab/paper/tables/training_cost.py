"""Hours of both stages by the paper's recipe: some steps are timed, and stand for all."""

from typing import Any, Final

from buddy.lab.paper.inputs import ALPACA_ROWS
from buddy.lab.paper.published.read import read_paper
from buddy.lab.paper.recipes import HELD_OUT, alpaca, stage_2, template_of, to_toml, weights
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

EPOCHS: Final = 2
BATCH: Final = 8
PREDICTOR_STEPS: Final = 10_000
STEPS: Final = 6
_FULL_STEPS: Final = 100


def collect(run: Run) -> Collected:
    """Time stage 1, then stage 2 on the checkpoint that it leaves."""
    from buddy.records import read_record
    from buddy.training.predictor.recipe import BudgetRecipe
    from buddy.training.router.recipe import Recipe

    steps = _FULL_STEPS if run.request.full else STEPS
    first = run.train("stage-1", "train", _recipe(run, steps), Recipe, model=run.base())
    checkpoint = str(first / "checkpoint")
    second = run.train(
        "stage-2",
        "train-budget",
        stage_2(run, checkpoint, steps=steps),
        BudgetRecipe,
        model=checkpoint,
    )
    results = [read_record(folder / "record.json")["results"] for folder in (first, second)]
    seconds = [result["seconds"] / result["steps"] for result in results]
    all_steps = (EPOCHS * ALPACA_ROWS // BATCH, PREDICTOR_STEPS)
    hours = [each * count / 3600 for each, count in zip(seconds, all_steps, strict=True)]
    theirs = read_paper("training-cost")
    name = run.base()
    paper = [[float(row["fine_tuning_h"]), float(row["predictor_h"])] for row in theirs]
    rows: list[dict[str, Any]] = [{"label": f"{name}, here", "values": hours}]
    rows += [
        {"label": f"{row['model']}, paper", "values": own}
        for row, own in zip(theirs, paper, strict=True)
    ]
    body = [(row["label"], *(f"{each:.2f}" for each in row["values"])) for row in rows]
    return Collected(
        results={
            "seconds_per_step": seconds,
            "steps_in_all": list(all_steps),
            "hours": hours,
            "bars": {"x_label": "Hours", "parts": ["fine-tuning", "predictor"], "rows": rows},
            "paper": theirs,
        },
        sheets=(Sheet.of("Hours of training", ("model", "fine-tuning", "predictor"), body),),
        facts=read_record(second / "record.json")["model"],
        settings={"timed_steps": steps},
        differs=f"One step took {seconds[0]:.2f} s and {seconds[1]:.2f} s, and "
        f"{all_steps[0]:,} and {all_steps[1]:,} steps are counted.",
    )


def _recipe(run: Run, steps: int) -> str:
    """The paper's stage 1, stopped early."""
    room = int(run.outline().config.max_position_embeddings)
    return to_toml(
        {
            "model": weights(run, run.base()),
            "data": {
                "max_tokens": min(512, room),
                "train": [alpaca(run, HELD_OUT, HELD_OUT + BATCH * steps, template_of(run.base()))],
            },
            "router": {"prior": "none"},  # which costs no time
            "optim": {"steps": steps, "batch_size": BATCH},
            "log": {"every": 1, "evaluate_every": 0, "tensorboard": False},
        }
    )
