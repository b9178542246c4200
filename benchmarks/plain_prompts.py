"""What six plain prompts get at each budget, to be read: the prompts came before the model.

python benchmarks/plain_prompts.py smollm2-135m-buddy --out results/plain-prompts.json
"""

import torch
from rich.console import Console

from buddy import BuddyForCausalLM, DepthTrace, load_tokenizer
from buddy.data.chat import apply_chat
from buddy.lab import experiment

PROMPTS = (
    "Explain why the sky is blue.",
    "Name three fruits and say why they are healthy.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is the capital of France, and what is it known for?",
    "Give me two tips for sleeping better.",
)
BUDGETS = ("1.0", "0.8", "0.65", "0.5", "mean:0.8", "mean:0.65")
TOKENS = 80


def main():
    """Write, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--prefill-budget", default="1.0")
    given = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(given.model, merge_adapter=True).eval()
    tokenizer = load_tokenizer(given.model)
    console, answers = Console(), []
    for prompt in PROMPTS:
        console.rule(prompt)
        messages = [{"role": "user", "content": prompt}]
        ids = apply_chat(tokenizer, messages, return_tensors="pt", return_dict=True)["input_ids"]
        for budget in BUDGETS:
            trace = DepthTrace()
            with torch.no_grad():
                out = model.generate(
                    ids,
                    budget=budget,
                    prefill_budget=given.prefill_budget,
                    max_new_tokens=TOKENS,
                    do_sample=False,
                    trace=trace,
                )
            text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
            console.print(f"[bold]{budget}[/]  {trace.decode_blocks_per_token:.1f} blocks a token")
            console.print(text, markup=False, highlight=False)
            answers.append(
                {
                    "prompt": prompt,
                    "budget": budget,
                    "blocks_per_token": trace.decode_blocks_per_token,
                    "text": text,
                }
            )
    config = {
        "model": given.model,
        "prefill_budget": given.prefill_budget,
        "max_new_tokens": TOKENS,
        "decoding": "greedy",
    }
    experiment.save(
        given.out, "plain-prompts", {"answers": answers}, config=config, model=model.facts()
    )


if __name__ == "__main__":
    experiment.run(main)
