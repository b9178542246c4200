"""Does lm-eval find through `buddy serve` what Buddy's own lm-eval class finds in process?

lm-eval's `local-completions` asks the server to echo each prompt with its log-probabilities; it
sends each answer with its context whole. Both score the same rows at full depth in float32, where a
difference would be a mistake and not rounding.
"""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TQDM_DISABLE"] = "1"

import torch
from harness_equality import loglikelihoods
from lm_eval.models.openai_completions import LocalCompletionsAPI
from served import served

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.lab import experiment
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.lab.evaluation.tasks.loading import load_tasks


def over_http(url, folder):
    """lm-eval's class for servers, as `lm_eval --model local-completions` makes it."""
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        batch_size=8,
    )


def main():
    """Score in process and over HTTP, and write the record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["arc_easy", "boolq"])
    parser.add_argument("--limit", type=int, default=200)
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    loaded = load_tasks(args.tasks, data_dir=args.data_dir, limit=args.limit)
    tokenizer = load_tokenizer(args.model)
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    facts = model.facts()
    inside, inside_metrics, inside_s = loglikelihoods(
        BuddyLM(model, tokenizer=tokenizer), loaded, args.limit
    )
    del model
    options = ("--dtype", "float32", "--default-budget", "1.0")
    with TemporaryDirectory() as folder, served(args.model, *options) as (url, _):
        tokenizer.save_pretrained(folder)
        outside, outside_metrics, outside_s = loglikelihoods(
            over_http(url, folder), loaded, args.limit
        )
    furthest = {
        task: max(abs(a - b) for a, b in zip(inside[task], outside[task], strict=True))
        for task in inside
    }
    results = {
        "metrics_equal": inside_metrics == outside_metrics,
        "in_process": inside_metrics,
        "over_http": outside_metrics,
        "largest_loglikelihood_difference": furthest,
        "answers": {task: len(answers) for task, answers in inside.items()},
        "seconds": {"in_process": inside_s, "over_http": outside_s},
    }
    config = {"model": args.model, "dtype": "torch.float32", "limit": args.limit}
    experiment.save(args.out, "harness-http", results, config=config, model=facts)
    for task in inside:
        print(f"{task:10} {inside_metrics[task]} {outside_metrics[task]} {furthest[task]:.1e}")
    print(f"equal: {results['metrics_equal']}; seconds {inside_s:.0f} and {outside_s:.0f}")


if __name__ == "__main__":
    experiment.run(main)
