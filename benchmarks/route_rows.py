"""Rows of six kinds for `buddy route`, from public data and from Python's own library.

Writes `train.jsonl` and `validation.jsonl`, whose rows name their kind as `source`: Alpaca, GSM8K,
SAMSum, running text (WikiText-2), Python code and HellaSwag. No row is in both. Beside them
`validation.jsonl` has two kinds of which there is no row to train on, in words of our own:
translation and lists of facts (`unseen_kinds.jsonl`). Rows of the data stay out of the project.

    python benchmarks/route_rows.py --data-dir DATA --out ROWS
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path


def read(path):
    """The rows of a JSON-lines file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def passages(text, draw, begin, end):
    """Pieces of a text of about these many letters: beginnings and how they go on."""
    words, pieces, at = text.split(" "), [], 0
    while at < len(words):
        first, second = draw.randint(*begin), draw.randint(*end)
        piece = words[at : at + first], words[at + first : at + first + second]
        at += first + second
        if len(piece[1]) == second:
            pieces.append((" ".join(piece[0]), " " + " ".join(piece[1])))
    return pieces


def code(draw):
    """Pieces of the modules of Python's library: some lines, and those that follow."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
        at = draw.randint(20, 60)
        while at + 24 < len(lines):
            first, second = draw.randint(5, 10), draw.randint(8, 14)
            yield "".join(lines[at : at + first]), "".join(lines[at + first : at + first + second])
            at += 80


def rows_of(data, draw):
    """Rows by kind, in a drawn order."""
    text = (data / "wikitext2/train_part.txt").read_text(encoding="utf-8")
    dialogues = "Summarize the dialogue."
    kinds = {
        "alpaca": [dict(row) for row in read(data / "alpaca/train.jsonl")],
        "gsm8k": [
            {"instruction": row["question"], "output": row["answer"]}
            for row in read(data / "gsm8k/train.jsonl")
        ],
        "samsum": [
            {"instruction": dialogues, "input": row["dialogue"], "output": row["summary"]}
            for row in read(data / "samsum/train.jsonl")
        ],
        "text": [
            {"prompt": begin, "completion": end}
            for begin, end in passages(text, draw, (15, 30), (60, 100))
            if "=" not in begin + end
        ],
        "code": [{"prompt": begin, "completion": end} for begin, end in code(draw)],
        "hellaswag": [
            {"prompt": row["ctx"], "completion": " " + row["endings"][int(row["label"])]}
            for row in read(data / "hellaswag/train.jsonl")
        ],
    }
    for kind, rows in kinds.items():
        draw.shuffle(rows)
        yield kind, [row for row in rows if all(_fits(kind, row))]


def _fits(kind, row):
    answer = row.get("output") or row.get("completion") or ""
    asked = row.get("prompt") or row["instruction"] + (row.get("input") or "")
    yield 20 <= len(answer.strip()) <= 600
    yield 20 <= len(asked) <= 700


def main():
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=240, help="training rows of each kind")
    parser.add_argument("--check", type=int, default=60, help="validation rows of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = {"train": [], "validation": []}
    for kind, rows in rows_of(args.data_dir, random.Random(args.seed)):
        named = [{**row, "source": kind} for row in rows]
        files["train"] += named[: args.rows]
        files["validation"] += named[args.rows : args.rows + args.check]
        print(kind, len(rows))
    files["validation"] += read(Path(__file__).with_name("unseen_kinds.jsonl"))
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
