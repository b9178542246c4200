"""What would a ledger gain if it knew more of a token than its id? On measured losses.

Answers are measured at every level throughout, with the entropy and the two largest probabilities
of each distribution. Four tables of expected losses are fitted on the recipe's training rows and
spent by the ledger's rule on its validation rows: *nothing* (the mean loss at each level), *id*,
*free* (what the step before said at the level that it ran: known before the pass, at no cost but
the entropy's), and *both*. *Nothing* gains where the losses of the levels are no convex curve: the
rule mixes two levels that are better than the one between them.

No answer is run at mixed levels here, as `buddy train-ledger` does, and a price is taken that is
best on half of the training answers, whether or not chance may explain it.

    python benchmarks/ledger_features.py recipes/smollm2-135m-ledger.toml \
        --model smollm2-135m-buddy --out results/training/ledger-features.json
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import read_all
from buddy.lab import experiment
from buddy.routing.ledger import HASTE
from buddy.settings import read_recipe
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.ledger.recipe import LedgerRecipe
from buddy.training.router.choosing import plain_choice
from buddy.training.router.straight_through import straight_through_pass

PRICES = np.array([0.0, *np.geomspace(1e-3, 1.0, 25)])
RIDGE = 50.0
KNOWN = {"nothing": (), "id": ("id",), "free": ("free",), "both": ("id", "free")}
LOSS, ENTROPY, FIRST, SECOND = range(4)


@dataclass
class Measured:
    """An answer's tokens, and [tokens, levels, 4]: loss, entropy, two largest probabilities."""

    token_ids: tuple[int, ...]
    said: np.ndarray


def main():
    """Measure, fit, spend, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path, help="of `buddy train-ledger`")
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    recipe = read_recipe(LedgerRecipe, args.recipe, [f"model.name={args.model}"])
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    fitted, held_out = (
        measure(model, args.model, sources, recipe)
        for sources in (recipe.data.train, recipe.data.validation)
    )
    levels, means = np.array(recipe.ledger.levels), np.array(recipe.means, float)
    tokens = sum(len(answer.token_ids) - 1 for answer in held_out)
    constant = np.array(
        [np.interp(means, levels, answer.said[1:, :, LOSS].sum(0)) for answer in held_out]
    )
    found = {}
    for name, known in KNOWN.items():
        half = Expected(fitted[::2], levels, known, recipe.ledger)
        prices = best_prices(half, fitted[1::2], means)
        lost, ran = spend(Expected(fitted, levels, known, recipe.ledger), held_out, means, prices)
        gain = lost - constant
        error = gain.std(0, ddof=1) * len(gain) ** 0.5 / tokens
        found[name] = {
            "difference": (gain.sum(0) / tokens).tolist(),
            "stderr": error.tolist(),
            "blocks": ran.tolist(),
            "prices": prices.tolist(),
        }
        print(name, np.round(found[name]["difference"], 3), np.round(error, 3))
    results = {
        "answers": len(held_out),
        "tokens": tokens,
        "means": means.tolist(),
        "constant": (constant.sum(0) / tokens).tolist(),
        "by_features": found,
    }
    config = {**asdict(recipe), "ridge": RIDGE}
    experiment.save(args.out, "ledger-features", results, config=config, model=model.facts())


@torch.no_grad()
def measure(model, name, sources, recipe):
    """Every answer at every level, its prompt at full depth."""
    rows = read_all(sources, load_tokenizer(name), max_tokens=recipe.data.max_tokens, note=print)
    rows = sorted((row for row in rows if len(row.answer) > 1), key=lambda row: row.num_tokens)
    choice, found = plain_choice(model.scoring_policy), []
    for start in range(0, len(rows), recipe.ledger.batch_size):
        part = rows[start : start + recipe.ledger.batch_size]
        batch, by_level = collate(part, model.device), []
        for level in recipe.ledger.levels:
            depths = torch.full_like(batch.token_ids, level)
            depths[batch.is_prompt] = model.num_blocks
            with fast_passes(model.backbone):
                out = straight_through_pass(
                    model.backbone, model.scoring_policy, batch, depths, choice
                )
            by_level.append(say(model.backbone, out.hidden[batch.rows, batch.columns], batch))
        answers = np.stack(by_level, 1)
        for row, example in enumerate(part):
            found.append(Measured(tuple(example.answer), answers[(batch.rows == row).numpy()]))
    return found


def say(backbone, hidden, batch):
    """[answer tokens, 4] of one pass."""
    parts = []
    for rows, targets in zip(hidden.split(128), batch.targets.split(128), strict=True):
        log_probs = torch.log_softmax(backbone.logits(rows).float(), 1)
        probs = log_probs.exp()
        loss = -log_probs.gather(1, targets[:, None])
        entropy = -(probs * log_probs).sum(1, keepdim=True)
        parts.append(torch.cat((loss, entropy, probs.topk(2, 1).values), 1).numpy())
    return np.concatenate(parts)


class Expected:
    """What each level is expected to lose, from the token and from what the step before said."""

    def __init__(self, answers, levels, known, settings):
        self.levels = levels
        fed = np.concatenate([answer.token_ids[:-1] for answer in answers])
        losses = np.concatenate([answer.said[1:, :, LOSS] for answer in answers]).astype(float)
        self.mean, self.offsets, self.weights = losses.mean(0), {}, None
        if "id" in known:
            ids, place, counts = np.unique(fed, return_inverse=True, return_counts=True)
            sums = np.zeros((len(ids), len(levels)))
            np.add.at(sums, place, losses - self.mean)
            offsets = sums / (counts + settings.shrinkage)[:, None]
            is_kept = counts >= settings.least
            self.offsets = dict(zip(ids[is_kept].tolist(), offsets[is_kept], strict=True))
        if "free" in known:
            # Whatever level the token before ran: each is a row of the regression.
            before = np.concatenate([answer.said[:-1] for answer in answers])
            inputs = self._inputs(before, np.broadcast_to(levels, before.shape[:2]))
            inputs = inputs.reshape(-1, inputs.shape[-1])
            rest = losses - np.stack([self.of_token(token) for token in fed.tolist()])
            wanted = np.repeat(rest, len(levels), 0)
            square = inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1])
            self.weights = np.linalg.solve(square, inputs.T @ wanted)

    def of_token(self, token):
        """[levels]."""
        return self.mean + self.offsets.get(token, 0.0)

    def __call__(self, token, before, ran):
        """[ways, levels] for a token, after a step that said `before` at the levels `ran`."""
        expected = np.broadcast_to(self.of_token(token), (len(ran), len(self.levels)))
        return (
            expected
            if self.weights is None
            else expected + self._inputs(before, ran) @ self.weights
        )

    def _inputs(self, said, ran):
        entropy, first, second = (said[..., place] for place in (ENTROPY, FIRST, SECOND))
        plain = (np.ones_like(entropy), entropy, first)
        share = ran / self.levels[-1]
        more = (
            entropy**2,
            first**2,
            entropy * first,
            second,
            np.log(first),
            first > 0.9,
            first > 0.99,
        )
        return np.stack((*plain, *more, *(feature * share for feature in plain)), -1)


def spend(expected, answers, means, prices):
    """What the ledger's rule gives, by way side by side: [answers, ways] nats, and mean blocks."""
    levels, lost, ran = expected.levels, np.zeros((len(answers), len(means))), np.zeros(len(means))
    for place, answer in enumerate(answers):
        saved, chosen = np.zeros(len(means)), np.full(len(means), len(levels) - 1)
        for token, before, after in zip(
            answer.token_ids, answer.said, answer.said[1:], strict=False
        ):
            block = prices * np.exp(-HASTE * saved / means)
            cost = expected(token, before[chosen], levels[chosen]) + block[:, None] * levels
            cost[levels > np.floor(saved + means + 1e-9)[:, None]] = np.inf
            chosen = cost.argmin(1)
            saved += means - levels[chosen]
            ran += levels[chosen]
            lost[place] += after[chosen, LOSS]
    return lost, ran / sum(len(answer.token_ids) - 1 for answer in answers)


def best_prices(expected, answers, means):
    """The price of each mean under which these answers lose least."""
    lost, _ = spend(expected, answers, np.repeat(means, len(PRICES)), np.tile(PRICES, len(means)))
    return PRICES[lost.sum(0).reshape(len(means), len(PRICES)).argmin(1)]


if __name__ == "__main__":
    experiment.run(main)
