"""Every method tuned on the same rows for the same steps, and measured on the same unseen rows.

Trains and measures, one after another, each in a folder of its own that a later run goes on from:

    untuned         the base model, pruned by each static order
    buddy           one model, LoRA and router under random budgets
    joined          one model, LoRA under random budgets, blocks in one static order: ShortGPT's
                    first eight removals before the others of SLEB
    nested, searched, random
                    the same with SLEB's order, the best searched set of each depth, random masks
    sleb-N, shortgpt-N, ppl-N, taylor-plus-N
                    one model a depth: pruned to N blocks by a static method, and tuned there
    layerskip       one model for exits
    pudding         ten sets and a classifier, on the weights of `random`
    pudding_base, pudding_lora
                    the same on the base model, untuned; and adapters for all of its sets
    first, d-llm, mixture-of-depths, flexidepth, dash, adainfer (on the weights of `layerskip`)
                    no budget: at their own threshold, and at thresholds whose mean depth, over the
                    tokens of --calibrate, is that of each budget

Writes one record with the answer cross-entropy on unseen rows and, if asked, accuracy on tasks,
both with the difference from Buddy's row by row. PuDDing's rows are

    buddy data arc_easy arc_challenge hellaswag piqa winogrande --data-dir data --rows 96 --wrong \
        --without runs/mix-validation.jsonl --out runs/pudding-rows.jsonl

Two processes may share a folder of runs if `--only` gives them different methods; the same command
without it collects. What is there of another recipe or command is refused. A second seed is
`--set optim.seed=1` with another --runs.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_all
from buddy.errors import TrainingError
from buddy.hub.loading import named_dtype
from buddy.lab import experiment
from buddy.lab.commonsense import COMMONSENSE, metric_of
from buddy.lab.evaluation.against import Against, mean_difference
from buddy.lab.evaluation.answers.answer_points import Answered, by_answer, differences
from buddy.lab.evaluation.tasks.tasks import SampleScores
from buddy.lab.steps import (
    check_same_model,
    facts_of,
    measured_record,
    run_buddy,
    trained_record,
)
from buddy.methods.threshold import find_threshold, mean_depth
from buddy.policies.registry import methods as registered
from buddy.records import read_record
from buddy.settings import read_recipe
from buddy.training.methods import read_method
from buddy.training.router.recipe import Recipe

SHARED = {
    "buddy": ("Buddy", ["lora.keep_context=true"]),
    "joined": ("One order: ShortGPT, SLEB", ["router.policy=static:{orders}/shortgpt-sleb.json"]),
    "nested": ("One order: SLEB", ["router.policy=static:{orders}/sleb.json"]),
    "searched": ("Searched sets", ["router.policy=searched:{orders}/searched.json"]),
    "random": ("Random masks", ["router.policy=random"]),
}
"""One model for all depths: label, and changes to the recipe."""
STATIC = {
    "ppl": "Shortened LLaMA, PPL",
    "taylor-plus": "Shortened LLaMA, Taylor+",
    "shortgpt": "ShortGPT",
    "sleb": "SLEB",
}
"""One model a depth, and untuned: label."""
RIVALS = {
    method.name: method
    for method in sorted(registered(), key=lambda method: not method.keeps_budget)
}
"""Every method that is registered, by name; those that keep a budget first."""
STARTS_FROM = {"pudding": "random", "adainfer": "layerskip"}
"""Methods that are fitted to the weights of another run; their settings are their own. Those of all
others are their own, too, but for the learning rate, which goes with the model."""
PUDDING_LORA = "pudding_lora"
PUDDING_BASE = "pudding_base"
PUDDING_ROWS = 400
PUDDING = [
    f'data.train=[{{path="runs/pudding-rows.jsonl", stop={PUDDING_ROWS}}}]',
    f'data.validation=[{{path="runs/pudding-rows.jsonl", start={PUDDING_ROWS}}}]',
    "sets.items=8",
]
"""A search and a table of targets that take minutes."""
OWN = "own"
"""Label of a method's own threshold."""


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """A model to train, and how it is measured.

    Attributes:
        name: Of its folder.
        label: In tables and figures; of `untuned`, that of the first policy.
        recipe: None of the base model.
        changes: To the recipe.
        depths: That are measured.
        policies: LABEL=SPEC; its own policy if none.
        is_online: It keeps no budget.
    """

    name: str
    label: str
    recipe: Path | None
    changes: tuple[str, ...]
    depths: tuple[int, ...]
    policies: tuple[str, ...] = ()
    is_online: bool = False


def main():
    """Train what is not trained yet, measure what is not measured yet, collect."""
    args = read_arguments()
    points, gaps, task_gaps, changes = [], [], [], {}
    known = list(methods(args))
    if unknown := {*(args.only or ())} - {method.name for method in known}:
        raise SystemExit(
            f"--only names {', '.join(sorted(unknown))}: expected some of "
            f"{', '.join(method.name for method in known)}"
        )
    for method in known:
        if args.only and method.name not in args.only:
            continue
        changes[method.name] = method.changes
        model = trained(method, args)
        is_compared = method.name != "buddy" and "buddy" in (args.only or SHARED)
        for rows in args.rows:
            points += answers(rows, method, model, args)
            if is_compared:
                gaps += answers_above_buddy(rows[0], method, args.runs)
        if args.tasks_dir:
            points += tasks(args, method, model)
            if is_compared:
                task_gaps += accuracy_above_buddy(method, args.runs)
    tasks_asked = {"names": args.task, "limit": args.limit} if args.tasks_dir else None
    config = {name: getattr(args, name) for name in ("set", "dtype", "rows", "calibrate")}
    config |= {"recipe": args.recipe.read_text(), "changes": changes, "tasks": tasks_asked}
    results = {"points": points, "above_buddy": gaps, "accuracy_above_buddy": task_gaps}
    experiment.save(args.out, "comparison", results, config=config)
    for title, *_ in args.rows:
        print(table(points, title, "answer_nll"))
    if args.tasks_dir:
        for task in ("average", *(task for task in args.task if task not in COMMONSENSE)):
            print(table(points, task, metric_of(task)))


def read_arguments():
    """The command line."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--depths", default="26,22,18,15")
    parser.add_argument(
        "--orders", default="results/importance", help="folder with the static orders' records"
    )
    parser.add_argument(
        "--rows",
        action="append",
        type=unseen_rows,
        required=True,
        metavar="NAME=FILE:START:STOP",
        help="unseen rows; may be repeated",
    )
    parser.add_argument(
        "--calibrate",
        type=unseen_rows,
        metavar="NAME=FILE:START:STOP",
        help="rows on which thresholds are searched; methods without a budget need it",
    )
    parser.add_argument("--tasks-dir", type=Path, help="measure tasks from this folder")
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        help="this task, gsm8k and mmlu among them; may be repeated (all eight)",
    )
    parser.add_argument("--limit", type=int, default=160, help="rows of each task")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an unseen row")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="measure in it; training has model.dtype in --set",
    )
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


def methods(args):
    """All of them, in the order in which they are trained."""
    depths = tuple(int(depth) for depth in args.depths.split(","))
    recipe = read_recipe(Recipe, args.recipe, args.set)
    rounds = BuddyForCausalLM.outline(recipe.model.name).num_blocks - min(depths)
    orders = {name: f"static:{args.orders}/{name}.json" for name in STATIC}
    policies = tuple(f"{STATIC[name]}={spec}" for name, spec in orders.items())
    yield ComparedMethod("untuned", "Untuned", None, (), depths, policies)
    for name, (label, changes) in SHARED.items():
        alone = [] if name == "buddy" else ["router.orders=[]"]
        changes = [*alone, *(change.format(orders=args.orders) for change in changes), *args.set]
        yield ComparedMethod(name, label, args.recipe, tuple(changes), depths)
    for order, spec in orders.items():
        for depth in depths:
            changes = [
                "router.orders=[]",
                f"router.policy={spec}",
                f'budget.choices=["{depth} blocks"]',
                f'log.evaluate_budgets=["{depth} blocks"]',
                *args.set,
            ]
            yield ComparedMethod(
                f"{order}-{depth}", STATIC[order], args.recipe, tuple(changes), (depth,)
            )
    for name, rival in RIVALS.items():
        changes = [f"optim.learning_rate={recipe.optim.learning_rate}", *args.set]
        if name in STARTS_FROM:
            dtypes = [change for change in args.set if change.startswith("model.dtype=")]
            changes = [f"model.name={args.runs / STARTS_FROM[name] / 'checkpoint'}", *dtypes]
        if name == "pudding":
            shown = ", ".join(f'"{depth} blocks"' for depth in depths)
            changes += [*PUDDING, f"sets.rounds={rounds}", f"targets.depths=[{shown}]"]
        own = args.recipe.with_name(f"{name}.toml")
        yield ComparedMethod(
            name, rival.label, own, tuple(changes), depths, is_online=not rival.keeps_budget
        )
        if name == "pudding":
            yield from tuned_pudding(args, recipe, own, changes[1:], depths)


def tuned_pudding(args, recipe, own, changes, depths):
    """PuDDing of the base model, and adapters that are trained under its sets.

    The classifier goes on reading what it was fitted to: no adapter is on that.
    """
    on_base = [f"model.name={recipe.model.name}", *changes]
    yield ComparedMethod(PUDDING_BASE, "PuDDing, untuned", own, tuple(on_base), depths)
    under_sets = [
        "router.orders=[]",
        "router.policy=pudding",
        f"model.name={args.runs / PUDDING_BASE / 'checkpoint'}",
        "lora.keep_context=true",
        *(change for change in args.set if not change.startswith("model.name=")),
    ]
    yield ComparedMethod(PUDDING_LORA, "PuDDing, LoRA", args.recipe, tuple(under_sets), depths)


def trained(method, args):
    """The checkpoint of a method, trained if it is not yet."""
    if method.recipe is None:
        return read_recipe(Recipe, args.recipe, args.set).model.name
    folder = args.runs / method.name
    _, settings = read_method(method.recipe, method.changes)
    if trained_record(folder, settings) is None:
        sets = [part for change in method.changes for part in ("--set", change)]
        run_buddy(["train", method.recipe, "--out", folder, "--resume", *sets])
    return folder / "checkpoint"


def thresholds(method, model, args):
    """The threshold of each depth that can be met, by label; searched once."""
    path = args.runs / method.name / "thresholds.json"
    config = {"depths": list(method.depths), "calibrate": list(args.calibrate or ())}
    if path.exists():
        found = read_record(path)
        if found["config"] != config:
            sys.exit(f"{path} was searched on other rows or depths: delete it to search again")
        return found["results"]["thresholds"]
    if args.calibrate is None:
        sys.exit(f"{method.name} keeps no budget: name rows for its thresholds by --calibrate")
    loaded = BuddyForCausalLM.from_pretrained(model, dtype=named_dtype(args.dtype))
    _, file, start, stop = args.calibrate
    source = Source(path=file, start=start, stop=stop)
    examples = read_all((source,), load_tokenizer(str(model)), max_tokens=args.max_tokens)

    def depth_under(threshold):
        loaded.set_policy(f"{method.name}:{threshold:.9g}")
        return mean_depth(loaded, loaded.policy, examples)

    # An exit stops above its threshold, a gate runs above it: one is the other turned round.
    ends = depth_under(0.0), depth_under(1.0)
    least, most = sorted(ends)

    def threshold_at(share):
        return share if ends == (least, most) else float(f"{1 - share:.9g}")

    def depth_at(share):
        return depth_under(threshold_at(share))

    found = {}
    for depth in method.depths:
        try:
            share, ran = find_threshold(depth_at, depth, least=least, most=most, tolerance=0.3)
        except TrainingError as error:
            print(f"{method.name}: {error}")
            continue
        found[str(depth)] = {"threshold": threshold_at(share), "mean_blocks": ran}
    experiment.save(path, "thresholds", {"thresholds": found}, config=config)
    return found


def measured(method, model, kind, args, *command):
    """The points of one evaluation of one model, under its method's label."""
    out = args.runs / method.name / f"{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    budgets = [f"{depth} blocks" for depth in method.depths]
    policies = list(method.policies)
    if method.is_online:
        budgets, policies = ["1.0"], [f"{OWN}={method.name}"]
        for depth, found in thresholds(method, model, args).items():
            policies.append(f"{depth}={method.name}:{found['threshold']:.9g}")
    arguments = ["eval", *command, "--model", model, "--out", out]
    arguments += [part for budget in budgets for part in ("-b", budget)]
    arguments += [part for policy in policies for part in ("--policy", policy)]
    if args.dtype:
        arguments += ["--dtype", args.dtype]
    record = measured_record(out, arguments)
    if record is None:
        run_buddy(arguments)
        record = read_record(out)
    else:
        check_same_model(out, record, facts_of(str(model), args.dtype))
    points = record["results"]["points"]
    if method.policies:
        return [{**point, "label": f"{point['label']}, untuned"} for point in points]
    if method.is_online:
        return [{**point, **wanted(point["label"]), "label": method.label} for point in points]
    return [{**point, "label": method.label, "policy": folder(method)} for point in points]


def wanted(label):
    """The depth that a threshold was searched for stands in the place of the budget."""
    return {"is_own": True} if label == OWN else {"blocks": int(label)}


def folder(method):
    """The models of one depth each are one method."""
    return method.name.rsplit("-", 1)[0] if len(method.depths) == 1 else method.name


def answers(rows, method, model, args):
    """Answer cross-entropy on rows that none was trained on."""
    title, path, start, stop = rows
    command = ("answers", path, "--start", start, "--stop", stop, "--max-tokens", args.max_tokens)
    found = measured(method, model, f"answers-{title}", args, *command)
    return [{**point, "task": source_of(title, point["task"])} for point in found]


def source_of(title, task):
    """All unseen rows go by their title, those of one source by both."""
    return title if task == "all" else f"{title}: {task}"


def beside_buddy(kind, sample, method, runs):
    """Each depth of a method, and its samples in pairs with Buddy's of the same rows."""
    ours = Against(runs / "buddy" / f"{kind}.samples.jsonl").conditions()
    theirs = Against(runs / method.name / f"{kind}.samples.jsonl").conditions()
    for other in theirs:
        name = str(other.about["minus"])
        if name == OWN:
            continue
        blocks = int(name) if method.is_online else other.blocks
        label = f"{name}, untuned" if method.policies else method.label
        for own in ours:
            if own.blocks != blocks or blocks not in method.depths:
                continue
            marks = other.marks()
            pairs = list(zip(other.rows(marks, sample), own.rows(marks, sample), strict=True))
            yield {"label": label, "blocks": blocks, "rows": len(marks)}, pairs


def answers_above_buddy(title, method, runs):
    """How much worse a method's answers are than Buddy's, and the standard error over rows."""
    found = []
    for about, pairs in beside_buddy(f"answers-{title}", Answered, method, runs):
        difference, error = by_answer(differences(pairs))
        found.append({"task": title, **about, "difference": difference, "stderr": error})
    return found


def accuracy_above_buddy(method, runs):
    """How much more often a method is right by task, and on average over those of commonsense."""
    found = []
    for about, pairs in beside_buddy("tasks", SampleScores, method, runs):
        scores = {}
        for other, own in pairs:
            metric = metric_of(own.task)
            if metric in own.scores:  # GSM8K has a sample for each way to read an answer
                scores.setdefault(own.task, []).append((other.scores[metric], own.scores[metric]))
        gaps = {task: mean_difference(both) for task, both in scores.items()}
        found += [
            {**about, "task": task, "rows": len(scores[task]), "difference": gap, "stderr": error}
            for task, (gap, error) in gaps.items()
        ]
        if shared := [gaps[task] for task in COMMONSENSE if task in gaps]:
            shared_gaps, errors = zip(*shared, strict=True)
            error = math.hypot(*errors) / len(errors)
            mean = fmean(shared_gaps)
            found.append({"task": "average", **about, "difference": mean, "stderr": error})
    return found


def tasks(args, method, model):
    """The commonsense tasks and their average."""
    command = ("tasks", "--data-dir", args.tasks_dir, "--limit", args.limit)
    chosen = [part for task in args.task for part in ("--task", task)]
    return measured(method, model, "tasks", args, *command, *chosen)


def table(points, task, metric):
    """One row a method, one column a depth."""
    cells = {}
    for point in points:
        if (point["task"], point["metric"]) == (task, metric) and not point.get("is_own"):
            cells.setdefault(point["label"], {})[point["blocks"]] = point["value"]
    depths = sorted({depth for row in cells.values() for depth in row}, reverse=True)
    rows = [
        (method, *(f"{row[depth]:.3f}" if depth in row else "-" for depth in depths))
        for method, row in cells.items()
    ]
    return experiment.markdown((f"{task}, {metric}", *depths), rows)


if __name__ == "__main__":
    experiment.run(main)
