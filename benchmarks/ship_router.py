"""Makes the folder in `hub/trained` of a router for frozen weights, from what `buddy route` wrote.

The model card is that in `--card`, with the record's table in the place of TABLE. With `--hub-id`
the router is for whatever weights go by that name, if they have the shapes and the tokenizer of
those that it was made on: a GGUF file's, in another number format.

    python benchmarks/ship_router.py runs/route --card CARD.md --out src/buddy/hub/trained/NAME
"""

import json
import shutil
from pathlib import Path

from route_table import by_depth

from buddy.checkpoint.card import CARD
from buddy.checkpoint.listed_files import MANIFEST
from buddy.checkpoint.manifest import write_manifest
from buddy.checkpoint.resolve import resolve
from buddy.hub.tokenizer import tokenizer_fingerprint
from buddy.lab import experiment
from buddy.records import read_record
from buddy.training.state import CHECKPOINT, RECORD


def main():
    """Copy what loads, describe it, list it."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("run", type=Path)
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--hub-id")
    args = parser.parse_args()
    card = args.card.read_text().replace("TABLE", by_depth(read_record(args.run / RECORD)))
    shutil.rmtree(args.out, ignore_errors=True)
    shutil.copytree(args.run / CHECKPOINT, args.out)
    (args.out / CARD).write_text(card)
    contents = json.loads((args.out / MANIFEST).read_text())
    if args.hub_id:
        tokenizer = resolve(args.run / CHECKPOINT).load_tokenizer()
        contents["base"] |= {
            "source": args.hub_id,
            "fingerprint": None,
            "tokenizer": tokenizer_fingerprint(tokenizer),
        }
    (args.out / MANIFEST).unlink()
    write_manifest(args.out, {k: v for k, v in contents.items() if k not in ("format", "files")})


if __name__ == "__main__":
    experiment.run(main)
