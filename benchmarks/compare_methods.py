"""Does routing pay? Every method tuned on the same rows for the same steps, and measured alike.

Trains and measures, one after another, each in a folder of its own that a later run goes on from:

    buddy           one model, LoRA and router under random budgets
    nested          one model, LoRA under random budgets, blocks in one static order (no router)
    joined          the same, with ShortGPT's first eight removals before the others of SLEB
    searched        the same, with the best searched set of each depth
    random          the same, with random masks
    sleb-N, ...     one model a depth: pruned to N blocks by a static method, and tuned there

Writes one record with the answer cross-entropy on unseen rows and, if asked, the eight tasks. Two
processes may share a folder of runs if `--only` gives them different methods; the same command
without it collects. What is there of another recipe or command is refused.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from reuse import is_measured, is_trained

from buddy.evaluation.against import Against
from buddy.evaluation.answers.answer_points import Answered, by_answer, differences
from buddy.records import RunRecord, read_record
from buddy.settings import read_recipe
from buddy.training.joint.recipe import Recipe

SHARED = {
    "buddy": ["lora.keep_context=true"],
    "nested": ["router.orders=[]", "router.policy=static:results/importance/sleb.json"],
    "joined": ["router.orders=[]", "router.policy=static:results/importance/shortgpt-sleb.json"],
    "searched": ["router.orders=[]", "router.policy=searched:results/importance/searched.json"],
    "random": ["router.orders=[]", "router.policy=random"],
}
PRUNED = {
    "sleb": "static:results/importance/sleb.json",
    "shortgpt": "static:results/importance/shortgpt.json",
}

LABELS = {
    "buddy": "(a) Buddy",
    "nested": "(c) SLEB",
    "joined": "(c) ShortGPT, SLEB",
    "searched": "(e) searched sets",
    "random": "(d) random masks",
    "sleb": "(b) SLEB",
    "shortgpt": "(b) ShortGPT",
}


def main():
    """Train what is not trained yet, measure what is not measured yet, collect."""
    args = read_arguments()
    points, gaps = [], []
    for name, changes, depths in conditions(args):
        if args.only and name not in args.only:
            continue
        folder = args.runs / name
        changes = [*changes, *args.set]
        if not is_trained(folder, read_recipe(Recipe, args.recipe, changes)):
            sets = [part for one in changes for part in ("--set", one)]
            buddy("train", args.recipe, "--out", folder, "--resume", *sets)
        for rows in args.rows:
            points += answers(rows, name, folder, depths)
            if name != "buddy" and "buddy" in (args.only or SHARED):
                gaps += above_buddy(rows[0], name, args.runs, depths)
        if args.tasks_dir:
            points += tasks(args, name, folder, depths)
    record = RunRecord(
        kind="comparison",
        model=None,
        config={"recipe": args.recipe.read_text(), "set": args.set, "rows": args.rows},
        results={"points": points, "above_buddy": gaps},
    )
    record.save(args.out)
    for title, *_ in args.rows:
        print(table(points, title, "answer_nll"))
    if args.tasks_dir:
        print(table(points, "average", "acc"))


def read_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--depths", default="26,22,18,15")
    parser.add_argument(
        "--rows",
        action="append",
        type=unseen_rows,
        required=True,
        metavar="NAME=FILE:START:STOP",
        help="unseen rows; may be repeated",
    )
    parser.add_argument("--tasks-dir", type=Path, help="measure the eight tasks from this folder")
    parser.add_argument("--limit", type=int, default=160, help="rows of each task")
    parser.add_argument("--only", action="append", help="this method alone; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def unseen_rows(text):
    """NAME=FILE:START:STOP in its parts."""
    title, equals, place = text.partition("=")
    path, *ends = place.rsplit(":", 2)
    if not (title and equals and path and len(ends) == 2 and all(map(str.isdigit, ends))):
        raise argparse.ArgumentTypeError(
            f"expected NAME=FILE:START:STOP, as in alpaca=rows.jsonl:0:160, got {text!r}"
        )
    return title, path, *map(int, ends)


def conditions(args):
    """Name, changes to the recipe, depths to measure."""
    depths = [int(depth) for depth in args.depths.split(",")]
    for name, changes in SHARED.items():
        yield name, changes, depths
    for method, policy in PRUNED.items():
        for depth in depths:
            changes = [
                "router.orders=[]",
                f"router.policy={policy}",
                f'budget.choices=["{depth} blocks"]',
                f'log.evaluate_budgets=["{depth} blocks"]',
            ]
            yield f"{method}-{depth}", changes, [depth]


def buddy(*arguments):
    """Run a command of ours, and stop where it stops."""
    subprocess.run([sys.executable, "-m", "buddy", *map(str, arguments)], check=True)


def measured(name, folder, kind, depths, *command):
    """The points of one evaluation of one model, under its method's label."""
    out = folder / f"{kind}.json"
    budgets = [part for depth in depths for part in ("-b", f"{depth} blocks")]
    arguments = ["eval", *command, "--model", folder / "checkpoint", "--out", out, *budgets]
    if not is_measured(out, arguments, folder / "checkpoint"):
        buddy(*arguments)
    named = {"label": label(name), "policy": method(name)}
    return [{**point, **named} for point in read_record(out)["results"]["points"]]


def method(name):
    """The models of one depth each are one method."""
    return name.rsplit("-", 1)[0]


def label(name):
    """What tables and figures call a method."""
    return LABELS[method(name)]


def answers(rows, name, folder, depths):
    """Answer cross-entropy on rows that none was trained on."""
    title, path, start, stop = rows
    found = measured(
        *(name, folder, f"answers-{title}", depths),
        *("answers", path, "--start", start, "--stop", stop, "--max-tokens", 192),
    )
    return [{**point, "task": title} for point in found if point["task"] == "all"]


def above_buddy(title, name, runs, depths):
    """By how much a method's answers are worse than Buddy's, and the standard error over rows."""
    ours = Against(runs / "buddy" / f"answers-{title}.samples.jsonl")
    theirs = Against(runs / name / f"answers-{title}.samples.jsonl")
    found = []
    for own, other in itertools.product(ours.conditions(), theirs.conditions()):
        if own.budget == other.budget and own.blocks in depths:
            marks = other.marks()
            pairs = zip(other.rows(marks, Answered), own.rows(marks, Answered), strict=True)
            difference, error = by_answer(differences(list(pairs)))
            point = {"task": title, "label": label(name), "blocks": own.blocks}
            found.append({**point, "rows": len(marks), "difference": difference, "stderr": error})
    return found


def tasks(args, name, folder, depths):
    """The eight commonsense tasks and their average."""
    return measured(
        *(name, folder, "tasks", depths),
        *("tasks", "--data-dir", args.tasks_dir, "--limit", args.limit),
    )


def table(points, task, metric):
    """One row a method, one column a depth."""
    cells = {}
    for point in points:
        if (point["task"], point["metric"]) == (task, metric):
            cells.setdefault(point["label"], {})[point["blocks"]] = point["value"]
    depths = sorted({depth for row in cells.values() for depth in row}, reverse=True)
    lines = [f"| {task}, {metric} | " + " | ".join(map(str, depths)) + " |"]
    lines.append("|---|" + "---:|" * len(depths))
    for method, row in cells.items():
        shown = (f"{row[depth]:.3f}" if depth in row else "-" for depth in depths)
        lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
