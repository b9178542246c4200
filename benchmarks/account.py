"""How fast should a ledger's account spend what it holds? Blocks that run, and what answers lose.

An answer ends before its account is empty, so it runs less than the mean that was asked for. The
faster the price falls as the account fills (`HASTE` in `budget/ledger.py`), the less is left, and
the less is saved for tokens that gain more by it. Each answer is fed at the depths that it would be
decoded at, its prompt at full depth, and compared with the same mean for each token.

    python benchmarks/account.py --rows validation.jsonl --out results/training/account.json
"""

from fractions import Fraction

import torch
from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.budget import ledger as accounts
from buddy.lab import experiment
from buddy.training.answer_losses import Losses
from buddy.training.fast import fast_passes
from buddy.training.ledger.measure import measure_depths


def losses(model, rows, spend):
    """Nats of each answer, and how many blocks its tokens ran."""
    with fast_passes(model.backbone):
        lost, ran = measure_depths(model, rows, spend, model.num_blocks, batch_size=8)
    tokens = torch.tensor([len(blocks) for blocks in ran], dtype=torch.float64)
    nats = torch.tensor(lost, dtype=torch.float64)[:, None]
    return Losses(nats, tokens), sum(map(sum, ran)) / float(tokens.sum())


@torch.no_grad()
def main():
    """Measure, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--rows", action="append", required=True)
    parser.add_argument("--kinds", default="alpaca,gsm8k,samsum")
    parser.add_argument("--each", type=int, default=48, help="rows of each kind, at most")
    parser.add_argument("--means", default="20,22")
    parser.add_argument("--hastes", default="0.5,2,4,8")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = BuddyForCausalLM.from_pretrained(args.model, merge_adapter=True, dtype=torch.float32)
    by_kind = experiment.by_source(args.rows, tokenizer, 256)
    rows = [row for kind in args.kinds.split(",") for row in by_kind[kind][: args.each]]
    rows = [row for row in rows if len(row.answer) > 1]
    points = []
    for mean in map(int, args.means.split(",")):
        flat, _ = losses(model, rows, lambda ids, mean=mean: [mean] * len(ids))
        spend = model.ledger.budget(Fraction(mean)).levels
        for haste in track(args.hastes.split(","), transient=True):
            accounts.HASTE = float(haste)
            lost, blocks = losses(model, rows, spend)
            apart, error = lost.behind(flat.nats[:, 0])
            point = {"mean": mean, "haste": float(haste), "blocks": blocks}
            point |= {"difference": float(apart), "stderr": float(error)}
            points.append(point)
            print(f"{mean} {haste:>4} {blocks:.2f} blocks {float(apart):+.4f} ± {float(error):.4f}")
    experiment.save(
        args.out, "ledger-account", {"answers": len(rows), "points": points}, config=args
    )


if __name__ == "__main__":
    experiment.run(main)
