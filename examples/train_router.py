"""A router for a model whose weights stay as they are, from two kinds of prompts.

    python examples/train_router.py [--model MODEL] [--out FOLDER]

What `buddy route` does, from Python and on far too few rows: it searches which blocks each kind can
spare, fits a router that ranks blocks so, and measures it on rows that nothing was searched on.
`buddy route MODEL` does the same with hundreds of rows, down to 60 % of the blocks.
"""

import argparse
import json
import tempfile
from pathlib import Path

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.training.recipe import DataSettings, ModelSettings
from buddy.training.route.recipe import FitSettings, RouteRecipe, SearchSettings
from buddy.training.route.run import train_route

CAPITALS = """France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Norway Oslo,
Russia Moscow, Greece Athens, Cuba Havana, Peru Lima, Kenya Nairobi, Poland Warsaw"""


def rows() -> list[dict[str, str]]:
    """Twelve rows of each kind; `source` names it."""
    pairs = [pair.split() for pair in CAPITALS.split(",")]
    found = [(f"The capital of {land} is", f" {city}.", "capitals") for land, city in pairs]
    found += [(f"{n} plus {n + 2} is", f" {2 * n + 2}.", "sums") for n in range(1, 13)]
    return [dict(zip(("prompt", "completion", "source"), row, strict=True)) for row in found]


def main() -> None:
    """Search, fit and save; then run the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="one that has no router")
    parser.add_argument("--out", type=Path, help="by default a folder that is thrown away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder, "route")
        file = Path(folder, "rows.jsonl")
        file.write_text("\n".join(map(json.dumps, rows())))
        recipe = RouteRecipe(
            model=ModelSettings(name=options.model, dtype="float32"),
            data=DataSettings(train=(Source(path=str(file)),), max_tokens=40),
            search=SearchSettings(
                rows=4, confirm_rows=4, check_rows=4, candidates=3, least=0.9, depths=(0.9,)
            ),
            fit=FitSettings(steps=200),
        )
        checkpoint = train_route(recipe, out)
        results = json.loads((out / "record.json").read_text())["results"]
        for table in results["tables"]["groups"]:
            print(f"loss in nats a token, with {table['blocks']} blocks but for the first column")
            print(f"{'':10}{'all blocks':>12}{'by the prior':>14}{'by the router':>15}")
            for kind, row in table["by_source"].items():
                print(f"{kind:10}{row['full']:12.2f}{row['prior']:14.2f}{row['routed']:15.2f}")
        model = BuddyForCausalLM.from_pretrained(checkpoint)
        print(f"policy of the checkpoint: {model.policy.describe()}")


if __name__ == "__main__":
    main()
