"""One batch in which every prompt has a budget of its own.

    python examples/mixed_budgets.py [--model MODEL]

A single `generate` runs four rows, each exactly as deep as its budget allows. The trace counts the
blocks where they ran.
"""

import argparse

from buddy import BuddyForCausalLM, DepthTrace, load_tokenizer

PROMPTS = ["The capital of France is", "Water boils at", "The sun rises in the", "Cats like"]


def main() -> None:
    """Generate once, and print a line for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-buddy")
    name = parser.parse_args().model

    model = BuddyForCausalLM.from_pretrained(name, merge_adapter=True)
    tokenizer = load_tokenizer(name)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    # A share, a percentage or a count of blocks.
    budgets = [1.0, "80%", 0.6, f"{model.num_blocks // 2 + 1} blocks"]
    trace = DepthTrace()
    out = model.generate(**inputs, budget=budgets, max_new_tokens=12, do_sample=False, trace=trace)

    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
    last_step = trace.steps[-1]
    print(f"{'budget':>10}  blocks run  text")
    for row, (budget, prompt, answer) in enumerate(zip(budgets, PROMPTS, answers, strict=True)):
        text = f"{prompt}{answer}".replace("\n", " ")[:54]
        ran = f"{last_step.executed[row]} of {model.num_blocks}"
        print(f"{budget!s:>10}  {ran:>10}  {text}")


if __name__ == "__main__":
    main()
