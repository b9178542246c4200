r"""Can one model take the place of many? Arms of one model for all depths, against one for each.

All arms have the same order of blocks, learning rate, rows of a step and passes of them over the
blocks, and the same steps but for those called longer, which see as many more rows. `tuned for one
depth` is a model for each depth, which spends all of its steps there, and `one depth, longer` is
that with the steps of `longer`. The others are one model:

    uniform             every count of blocks from half of them on, drawn evenly
    low depths          the same, the lower half drawn three times as often
    these depths        the depths that are measured, and full depth, drawn evenly
    same rows           four budgets of each example in a step, of a quarter of the examples
    sandwich            the same, two of them the largest and the smallest
    own teacher         full depth teaches what it says, in a pass without gradients at each step
    knows the depth     each rank of an adapter has a scale by depth
    knows these depths  the same, under the draws of `these depths`
    longer              `these depths`, with about as many rows at each as the model of it has

What is compared is the loss of unseen rows, row by row, by pairs of seeds. A run that is there is
used, one that was interrupted goes on, and several processes may share a folder if `--only` gives
them different arms; the same command without it collects. Before each run it says what is left.

    python benchmarks/one_for_many.py recipes/one-for-many.toml \
        --out results/training/one-for-many.json
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ablations import trained
from learning import gain, losses, mean_losses

from buddy import BuddyForCausalLM
from buddy.lab import experiment
from buddy.records import read_record
from buddy.settings import read_recipe
from buddy.training.router.budgets import budget_range
from buddy.training.router.recipe import OWN_TEACHER, Recipe

ONE = "tuned for one depth"
LONGER, ONE_LONGER = "longer", "one depth, longer"
ALONE = (ONE, ONE_LONGER)
ARMS = (
    "uniform",
    "low depths",
    "these depths",
    "same rows",
    "sandwich",
    "own teacher",
    "knows the depth",
    "knows these depths",
    LONGER,
)
EACH = 4
"""Budgets of an example in a step, where they are several."""


def main():
    """Train and measure what is not there yet; print and record the table."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/one-for-many"))
    parser.add_argument("--only", action="append", choices=(*ALONE, *ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--depths", type=int, nargs="+", default=[26, 22, 18, 15])
    parser.add_argument("--rows", type=int, default=100, help="unseen rows of each source")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    jobs, found = list(planned(args)), {}
    for job in jobs:
        print(left(jobs), file=sys.stderr)
        record = trained(args.recipe, job.folder, job.sets)
        asked = argparse.Namespace(**{**vars(args), "depths": list(job.depths)})
        measured = losses(asked, job.folder, job.sets, record)
        for column, blocks in enumerate(job.depths):
            found.setdefault((job.arm, blocks), []).append(at(measured, column))
    points = [compared(found, *key) for key in found]
    config = {**experiment.texts(args), "recipe": args.recipe.read_text()}
    config["arms"] = {job.arm: job.changes for job in jobs if job.arm != ONE}
    experiment.save(args.out, "one-for-many", {"points": points}, config=config)
    print(table(points))
    print(table(points, "behind_one_longer"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run to train, and the depths at which it is measured.

    Attributes:
        arm: Its name.
        folder: Of the run.
        changes: To the recipe, that make the arm.
        sets: All changes.
        depths: In blocks.
        work: Blocks that examples pass in all its steps, forward and back.
    """

    arm: str
    folder: Path
    changes: list[str]
    sets: list[str]
    depths: tuple[int, ...]
    work: float


def planned(args):
    """All runs, the first seed of every arm first: it shows early what the second is spent on."""
    recipe = read_recipe(Recipe, args.recipe, args.set)
    num_blocks = BuddyForCausalLM.outline(recipe.model.name).num_blocks
    for seed in args.seeds:
        for arm in args.only or (ONE, *ARMS, ONE_LONGER):
            for depths in [(d,) for d in args.depths] if arm in ALONE else [tuple(args.depths)]:
                own = changes(arm, depths, num_blocks, recipe)
                if arm in (LONGER, ONE_LONGER):
                    times = len({*args.depths, num_blocks})
                    own.append(f"optim.steps={recipe.optim.steps * times}")
                sets = [*args.set, *own, f"optim.seed={seed}"]
                name = f"one-{depths[0]}" if arm in ALONE else arm
                if arm == ONE_LONGER:
                    name += "-longer"
                yield Job(
                    arm=arm,
                    folder=args.runs / f"{name.replace(' ', '-')}-{seed}",
                    changes=own,
                    sets=sets,
                    depths=depths,
                    work=work(read_recipe(Recipe, args.recipe, sets), num_blocks),
                )


def changes(arm, depths, num_blocks, recipe):
    """What an arm changes in the recipe."""
    low, middle = num_blocks // 2, 3 * num_blocks // 4
    together = [f"budget.each={EACH}", f"optim.batch_size={recipe.optim.batch_size // EACH}"]
    lowered = [b for b in range(low, num_blocks + 1) for _ in range(3 if b <= middle else 1)]
    these = listed("budget.choices", dict.fromkeys([*depths, num_blocks]))
    knots = listed("lora.depths", sorted({*depths, low, num_blocks}))
    return {
        ONE: [listed("budget.choices", depths)],
        ONE_LONGER: [listed("budget.choices", depths)],
        "uniform": [],
        "low depths": [listed("budget.choices", lowered)],
        "these depths": [these],
        "same rows": together,
        "sandwich": [*together, "budget.sandwich=true"],
        "own teacher": [f"teacher.name={OWN_TEACHER}", "teacher.tokens=answers"],
        "knows the depth": [knots],
        "knows these depths": [knots, these],
        LONGER: [these],
    }[arm]


def listed(key, depths):
    """A setting that names budgets in blocks."""
    return f"{key}={json.dumps([f'{blocks} blocks' for blocks in depths])}"


def work(recipe, num_blocks):
    """Blocks that examples pass in all steps of a recipe; a pass without gradients is a third."""
    drawn = budget_range(recipe.budget, num_blocks)
    passes = recipe.budget.each * sum(drawn) / len(drawn)
    if recipe.budget.sandwich:
        others = (recipe.budget.each - 2) * sum(drawn) / len(drawn)
        passes = max(drawn) + min(drawn) + others
    if recipe.teacher.name is not None:
        passes += num_blocks / 3
    return recipe.optim.steps * recipe.optim.batch_size * passes


def left(jobs):
    """How many runs are left, and how long they take by those that are there."""
    records = {job.folder: job.folder / "record.json" for job in jobs}
    done = [job for job in jobs if records[job.folder].exists()]
    waiting = sum(job.work for job in jobs if job not in done)
    if not done:
        return f"{len(jobs)} runs to train, {waiting:,.0f} blocks of examples; no time known yet"
    seconds = sum(read_record(records[job.folder])["results"]["seconds"] for job in done)
    hours = waiting * seconds / sum(job.work for job in done) / 3600
    return f"{len(jobs) - len(done)} of {len(jobs)} runs left to train, about {hours:.1f} hours"


def at(measured, column):
    """What was measured at one depth."""
    return {
        "nats": [[row[column]] for row in measured["nats"]],
        "tokens": measured["tokens"],
        "step_ms": measured["step_ms"],
    }


def compared(found, arm, blocks):
    """An arm's loss at a depth, and how far it is behind the models that were tuned there."""
    runs = found[arm, blocks]
    point = {
        "arm": arm,
        "blocks": blocks,
        "nats": float(mean_losses(runs, 0).mean),
        "step_ms": sum(run["step_ms"] for run in runs) / len(runs),
    }
    for name, one in (("behind_one", ONE), ("behind_one_longer", ONE_LONGER)):
        if (one, blocks) in found and arm != one:
            point[name] = gain(found[one, blocks], runs, 0)
    return point


def table(points, behind="behind_one"):
    """Loss, and how far it is behind a model of that depth: a row an arm, a column a depth."""
    depths = sorted({point["blocks"] for point in points}, reverse=True)
    cells = {}
    for point in points:
        text = f"{point['nats']:.3f}"
        if behind in point:
            text += " {nats:+.3f} ± {error:.3f}".format(**point[behind])
        cells.setdefault(point["arm"], {})[point["blocks"]] = text
    head = ("arm", *(f"{depth} blocks" for depth in depths))
    rows = [(arm, *(row.get(depth, "") for depth in depths)) for arm, row in cells.items()]
    return experiment.markdown(head, rows)


if __name__ == "__main__":
    experiment.run(main)
