"""A depth policy of your own: it scores blocks, and Buddy spends each budget on the scores.

    python examples/own_policy.py [--model MODEL]

`Comb` skips blocks as evenly as it can, whatever the prompt. Its loss on a short text stands beside
that of random blocks and that of the model's own policy. To give it a name for `--policy comb`,
register the class in the `pyproject.toml` of your package:

    [project.entry-points."buddy.policies"]
    comb = "my_package:Comb"
"""

import argparse

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, RowBudgets

TEXT = """Sunlight is a mixture of all colours. On its way through the air it meets gas molecules,
which scatter short wavelengths such as blue far more strongly than long ones such as red."""


class Comb(DepthPolicy):
    """Blocks at even distances: each budget leaves gaps that are as equal as can be."""

    name = "comb"

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """A row of scores for each sequence; the highest are kept, as many as its budget says."""
        scores = torch.zeros(len(state), self.num_blocks, device=state.device)
        for row, budget in enumerate(blocks.tolist()):
            # As many blocks as the budget has, from the first to the last.
            scores[row, torch.linspace(0, self.num_blocks - 1, budget).round().long()] = 1.0
        return scores

    def describe(self) -> str:
        """A few words for a summary line."""
        return "evenly spaced blocks"


def main() -> None:
    """Print the loss of three policies at three budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-buddy")
    name = parser.parse_args().model

    model = BuddyForCausalLM.from_pretrained(name, merge_adapter=True)
    ids = load_tokenizer(name)(TEXT, return_tensors="pt")["input_ids"]
    budgets = [0.9, 0.75, 0.6]
    policies = {model.policy.describe(): model.policy, "comb": Comb(model.num_blocks)}
    print(f"{'loss in nats a token, at':34}", *(f"{budget:>8.0%}" for budget in budgets))
    for label, policy in {**policies, "random": "random"}.items():
        model.set_policy(policy)
        with torch.no_grad():
            losses = [float(model(ids, labels=ids, budget=budget).loss) for budget in budgets]
        print(f"{label[:34]:34}", *(f"{loss:8.2f}" for loss in losses))


if __name__ == "__main__":
    main()
