"""Which blocks of the default model turn the residual least? Writes its shipped prior.

python benchmarks/default_prior.py --text wikitext2/valid.txt
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import transformers

from buddy import BuddyForCausalLM, __version__, load_tokenizer
from buddy.importance.cosine import BlockInfluence
from buddy.models.presets import DEFAULT_MODEL

OUT = Path(__file__).parent.parent / "src/buddy/models/priors/smollm2-135m.json"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a window")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(DEFAULT_MODEL, policy="full")
    ids = load_tokenizer(DEFAULT_MODEL)(
        args.text.read_text(), return_tensors="pt", add_special_tokens=False
    ).input_ids[0, : args.windows * args.tokens]
    windows = ids[: len(ids) // args.tokens * args.tokens].view(-1, args.tokens)
    influence = BlockInfluence(model.backbone)
    for batch in windows.split(4):
        influence.update(batch)
    importance = influence.scores()
    record = {
        "model": DEFAULT_MODEL,
        "indicator": "block-influence",
        "calibration": {
            "text": f"{args.text.parent.name}/{args.text.name}",
            "windows": len(windows),
            "tokens": args.tokens,
        },
        "command": f"python benchmarks/default_prior.py --text {args.text.parent.name}/"
        f"{args.text.name} --windows {args.windows} --tokens {args.tokens}",
        "versions": {
            "buddy": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "importance": [round(value, 6) for value in importance.tolist()],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    order = importance[1:-1].argsort() + 1
    print("least important first:", *order.tolist(), file=sys.stderr)


if __name__ == "__main__":
    main()
