"""Can the prompt tell which blocks its answer needs? Measured, then predicted on held-out rows.

For each row a budget is drawn, the static plan of that budget is run, and so are some neighbours of
it: an executed block exchanged for a skipped block, near the boundary more often than far from it.
The change of the row's answer loss is what a router would have to know. Three predictors of it are
fitted on three quarters of the rows: the order alone (with an offset of each block for each
budget), the order and the row's source, the order and the pooled values of the first block. On the
rest it is asked how much of the variance they explain, and what those exchanges cost that they say
would help.
"""

import random
from pathlib import Path

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_examples
from buddy.depth.select import select_blocks
from buddy.lab import experiment
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans
from buddy.training.router.model import read_prior

NEAR = 0.6
"""Temperature of the draw of exchanges, in standard deviations of the prior."""


def main():
    """Measure, fit, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", help="instruction rows")
    parser.add_argument("--order", type=Path, required=True, help="record of buddy importance")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--exchanges", type=int, default=6)
    parser.add_argument("--fewest", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    swaps = measure(model, args)
    changes = swaps["change"]
    fits = {name: fit(swaps, name) for name in ("order", "source", "context")}
    results = {
        "rows": len(changes),
        "exchanges": changes.numel(),
        "mean_change": float(changes.mean()),
        "std_change": float(changes.std()),
        "share_helping": float((changes < 0).float().mean()),
        "held_out": fits,
    }
    experiment.save(args.out, "measured-swaps", results, config=args, model=model.facts())
    for name, value in results.items():
        print(name, value)


def measure(model, args):
    """The change of each row's loss under each exchange."""
    tokenizer = load_tokenizer(args.model)
    prior = torch.nn.functional.pad(read_prior(args.order, model.resources), (1, 1))
    examples = []
    for path in args.files:
        rows = read_examples(Source(path=path), tokenizer, max_tokens=args.max_tokens)
        examples += random.Random(0).sample(rows, min(len(rows), args.rows // len(args.files)))
    examples.sort(key=lambda example: example.num_tokens)
    found = [
        measure_batch(model, prior, examples[at : at + 12], args)
        for at in range(0, len(examples), 12)
    ]
    joined = {key: torch.cat([batch[key] for batch in found]) for key in found[0]}
    return {**joined, "prior": prior, "sources": [example.source for example in examples]}


def measure_batch(model, prior, examples, args):
    """Static plans and their neighbours, in one pass."""
    batch = collate(examples)
    scores = prior.expand(len(examples), -1)
    budgets = torch.randint(args.fewest, model.num_blocks - 1, (len(examples),))
    plan = select_blocks(scores, budgets).mask
    free = torch.ones(model.num_blocks, dtype=torch.bool)
    free[[0, -1]] = False
    out = drawn(-scores, plan & free, args.exchanges)
    into = drawn(scores, ~plan & free, args.exchanges)
    masks = plan[:, None].repeat(1, args.exchanges + 1, 1)
    row, place = torch.arange(len(examples))[:, None], torch.arange(1, args.exchanges + 1)
    masks[row, place, out] = False
    masks[row, place, into] = True
    seen = []

    def plans(observation):
        weight = observation.router_sees.float()[..., None]
        seen.append((observation.values.float() * weight).sum(1) / weight.sum(1))
        return masks

    with torch.no_grad(), fast_passes(model.backbone):
        losses = leaf_losses(model.backbone, run_plans(model.backbone, 1, batch, plans), batch)
    return {
        "context": seen[0],
        "budget": budgets,
        "out": out,
        "into": into,
        "change": losses[:, 1:] - losses[:, :1],
    }


def drawn(scores, allowed, count):
    """Blocks drawn with replacement, those of a high score more often."""
    logits = torch.where(allowed, scores / NEAR, -torch.inf)
    return torch.multinomial(logits.softmax(1), count, replacement=True)


def fit(swaps, name, steps=400):
    """Regress changes on differences of scores; what that says of rows it has not seen."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(swaps["budget"]), generator=generator)
    held_out, fitted = order[: len(order) // 4], order[len(order) // 4 :]
    blocks = len(swaps["prior"])
    scale = torch.nn.Parameter(torch.tensor(0.3))
    offset = torch.nn.Parameter(torch.zeros(blocks + 1, blocks))
    near = torch.arange(blocks + 1).float()
    smooth = torch.exp(-0.125 * (near[:, None] - near) ** 2)
    smooth = smooth / smooth.sum(1, keepdim=True)
    features = features_of(swaps, name, fitted)
    extra = torch.nn.Linear(features.shape[1], blocks)
    torch.nn.init.zeros_(extra.weight)
    groups = [
        {"params": [scale, offset], "weight_decay": 0.01},
        {"params": extra.parameters(), "weight_decay": 3.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    changes = swaps["change"].clamp(-1, 1)

    def predicted(rows):
        scores = scale * swaps["prior"] + (smooth @ offset)[swaps["budget"][rows]]
        scores = scores + extra(features[rows])
        return scores.gather(1, swaps["out"][rows]) - scores.gather(1, swaps["into"][rows])

    for _ in range(steps):
        rows = fitted[torch.randint(len(fitted), (256,), generator=generator)]
        loss = torch.nn.functional.huber_loss(predicted(rows), changes[rows], delta=0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        guess, truth = predicted(held_out), changes[held_out]
    spread = (truth - changes[fitted].mean()).square().mean()
    explained = 1 - (guess - truth).square().mean() / spread
    chosen = truth[guess < -0.02]
    return {
        "explained_variance": float(explained),
        "said_to_help": len(chosen) / truth.numel(),
        "change_where_said": float(chosen.mean()) if len(chosen) else None,
        "stderr": float(chosen.std() / len(chosen) ** 0.5) if len(chosen) > 1 else None,
    }


def features_of(swaps, name, fitted):
    """What a predictor is told of a row beside its budget."""
    if name == "order":
        return torch.zeros(len(swaps["budget"]), 1)
    if name == "source":
        names = sorted(set(swaps["sources"]))
        places = torch.tensor([names.index(source) for source in swaps["sources"]])
        return torch.nn.functional.one_hot(places, len(names)).float()
    context = swaps["context"]
    return (context - context[fitted].mean(0)) / context[fitted].std(0).clamp(min=1e-4)


if __name__ == "__main__":
    experiment.run(main)
