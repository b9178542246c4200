"""The rows that the shipped model learns from, beside those that `buddy data` writes.

    python benchmarks/training_mix.py --data-dir data --out runs/data

`alpaca.jsonl` has every distinct Alpaca row at hand, but for the prompts that are kept for
measuring: the first thousand of `cleaned_5k.jsonl` and the last of `train.jsonl`. Prompts are
compared by their text, case and spaces aside. `text.jsonl` has running text in stretches of 120
words, the first six of which are the prompt: WikiText-2's training split and passages of BoolQ's.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from buddy.lab import experiment

KEPT = (("cleaned_5k.jsonl", slice(0, 1000)), ("train.jsonl", slice(8063, None)))
LEARNED = (
    ("train.jsonl", slice(0, 8063)),
    ("train_extra.jsonl", slice(None)),
    ("cleaned_5k.jsonl", slice(1000, None)),
)
STRETCH, SHORTEST, PROMPT = 120, 40, 6
"""Words."""
PASSAGES = 4000


def read(path: Path) -> list[dict]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def asked(row: dict) -> str:
    """A prompt's text, to be compared."""
    return " ".join(f"{row['instruction']} {row.get('input', '')}".lower().split())


def alpaca(folder: Path) -> list[dict]:
    """Distinct rows whose prompt is not kept."""
    seen = {asked(row) for name, part in KEPT for row in read(folder / name)[part]}
    rows = []
    for name, part in LEARNED:
        for row in read(folder / name)[part]:
            if asked(row) not in seen and row["output"].strip():
                seen.add(asked(row))
                fields = {key: row.get(key, "") for key in ("instruction", "input", "output")}
                rows.append({**fields, "source": "alpaca"})
    random.Random(0).shuffle(rows)
    return rows


def text(folder: Path) -> list[dict]:
    """Stretches of running text, each once."""
    stretches = dict.fromkeys(_stretches(folder))
    rows = [
        {
            "prompt": " ".join(words[:PROMPT]),
            "completion": f" {' '.join(words[PROMPT:])}",
            "source": "text",
        }
        for words in stretches
    ]
    random.Random(1).shuffle(rows)
    return rows


def _stretches(folder: Path) -> Iterator[tuple[str, ...]]:
    pages = [row["page"] for row in read(folder / "wikitext2" / "train_part.jsonl")]
    passages = [part.strip() for page in pages for part in page.split("\n")]
    passages = [text for text in passages if len(text.split()) > 30]
    passages += [row["passage"] for row in read(folder / "boolq" / "train.jsonl")[:PASSAGES]]
    for passage in passages:
        words = passage.split()
        for start in range(0, len(words), STRETCH):
            stretch = words[start : start + STRETCH]
            if len(stretch) >= SHORTEST:
                yield tuple(stretch)


def main() -> None:
    """Write both files."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/data"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    made = {"alpaca": alpaca(given.data_dir / "alpaca"), "text": text(given.data_dir)}
    for name, rows in made.items():
        path = given.out / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    experiment.run(main)
