"""Tables of the methods that were tuned alike, from their records: the loss a token, and an answer.

python benchmarks/methods_table.py
"""

from pathlib import Path

from buddy.lab import experiment
from buddy.records import read_record

RESULTS = Path(__file__).parent.parent / "results" / "training"
DEPTHS = (26, 22, 18, 15)
QWEN_DEPTHS = (21, 18, 15, 12)


def losses(depths, *names):
    """Nats a token of every method, and in brackets the mean over answers, in order of the first.

    Args:
        depths: Columns.
        names: Records; a later one has its methods in the place of an earlier one's.
    """
    points = {}
    for name in names:
        points |= unseen(name)
    labels = list(dict.fromkeys(label for label, _, _ in points))
    first = [label for label in labels if label == "Buddy"]
    rest = [label for label in labels if label != "Buddy" and not label.endswith("untuned")]
    untuned = [label for label in labels if label.endswith("untuned")]
    rows = [
        (label, *(cell(points, label, depth) for depth in depths))
        for label in (*first, *rest, *untuned)
    ]
    return experiment.markdown(("executed blocks", *depths), rows, texts=1)


def seeds(depths, first, *second):
    """Loss a token above Buddy's of the same seed: first and second seed."""
    one, two = unseen(first), {}
    for name in second:
        two |= unseen(name)
    rows = [("Buddy's own", *(f"{value(one, depth)} / {value(two, depth)}" for depth in depths))]
    for label in dict.fromkeys(label for label, _, _ in two if label != "Buddy"):
        pairs = [(above(one, label, depth), above(two, label, depth)) for depth in depths]
        rows.append((label, *(f"{a} / {b}" for a, b in pairs)))
    return experiment.markdown(("executed blocks", *depths), rows, texts=1)


def unseen(name):
    """Losses on the unseen rows, by label, blocks and metric; of two at one depth, the last."""
    points = read_record(RESULTS / name)["results"]["points"]
    return {
        (point["label"], point["blocks"], point["metric"]): point["value"]
        for point in points
        if point["task"] == "unseen"
    }


def cell(points, label, depth):
    """The loss a token, and in brackets that of an answer; nothing where it was not measured."""
    if (label, depth, "nll") not in points:
        return ""
    token, answer = (points[label, depth, metric] for metric in ("nll", "answer_nll"))
    return f"{token:.2f} ({answer:.2f})"


def value(points, depth):
    """Buddy's loss a token."""
    return f"{points['Buddy', depth, 'nll']:.2f}"


def above(points, label, depth):
    """How far the loss a token is above Buddy's; a dash where it was not measured."""
    if (label, depth, "nll") not in points:
        return "-"
    return f"{points[label, depth, 'nll'] - points['Buddy', depth, 'nll']:+.2f}"


def default_tables():
    """Both tables of the default model."""
    return (
        losses(DEPTHS, "methods.json", "first.json"),
        seeds(DEPTHS, "methods.json", "methods-1.json"),
    )


def qwen_tables():
    """Both tables of Qwen2.5-Coder-0.5B-Instruct."""
    second = ("methods-qwen05-1.json", "methods-qwen05-1-static.json")
    return (
        losses(QWEN_DEPTHS, "methods-qwen05.json"),
        seeds(QWEN_DEPTHS, "methods-qwen05.json", *second),
    )


if __name__ == "__main__":
    print("\n\n".join((*default_tables(), *qwen_tables())))
