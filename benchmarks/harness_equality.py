"""Is full depth, through our lm-eval class, the same as lm-eval's own `hf` class?

Both score the same rows of the eight commonsense tasks in float32, where a difference would be a
mistake and not rounding. Buddy runs each context once for all its answers; `hf` runs each answer
with its context whole.
"""

import logging
import os
import time
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.lab import experiment
from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.lab.evaluation.tasks.loading import load_tasks


def loglikelihoods(lm, loaded, limit):
    """Every answer's log-likelihood, the metrics of each task, and the seconds taken."""
    started = time.perf_counter()
    found = evaluate(lm, loaded, limit=limit, bootstrap_iters=0)
    seconds = time.perf_counter() - started
    answers = {
        task: [response[0] for row in rows for response in row["filtered_resps"]]
        for task, rows in found["samples"].items()
    }
    metrics = {
        task: {
            name: value for name, value in figures.items() if name in ("acc,none", "acc_norm,none")
        }
        for task, figures in found["results"].items()
    }
    return answers, metrics, seconds


def main():
    """Run both and write the record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.float32, policy="full")
    tokenizer = load_tokenizer(args.model)
    loaded = load_tasks(list(COMMONSENSE), data_dir=args.data_dir, limit=args.limit)
    ours, our_metrics, our_s = loglikelihoods(
        BuddyLM(model, tokenizer=tokenizer), loaded, args.limit
    )
    theirs, their_metrics, their_s = loglikelihoods(
        HFLM(model.model, tokenizer=tokenizer, batch_size=16), loaded, args.limit
    )
    furthest = {
        task: max(abs(a - b) for a, b in zip(ours[task], theirs[task], strict=True))
        for task in ours
    }
    results = {
        "metrics_equal": our_metrics == their_metrics,
        "buddy": our_metrics,
        "hf": their_metrics,
        "largest_loglikelihood_difference": furthest,
        "answers": sum(map(len, ours.values())),
        "seconds": {"buddy": our_s, "hf": their_s},
    }
    config = {"model": args.model, "dtype": "torch.float32", "limit": args.limit}
    experiment.save(args.out, "harness-equality", results, config=config, model=model.facts())
    for task in ours:
        print(f"{task:14} {our_metrics[task]} {their_metrics[task]} {furthest[task]:.1e}")
    print(f"equal: {results['metrics_equal']}; seconds {our_s:.0f} and {their_s:.0f}")


if __name__ == "__main__":
    experiment.run(main)
