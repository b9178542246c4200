"""The rows of a file with answers that a model samples: what a student may learn from a teacher.

    python benchmarks/teacher_answers.py results/training/teacher runs/data/alpaca.jsonl \
        --stop 2000 --out runs/data/answered.jsonl

Rows keep their order and their prompts. Those whose prompt does not fit or whose sampled answer is
empty are left out, and so are answers that do not end within `--max-tokens`: their last word would
teach where to stop.
"""

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, encoder
from buddy.data.rows import read_rows
from buddy.lab import experiment


def read_arguments():
    """The command line."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--stop", type=int, help="first row that is not answered")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=160, help="of prompt and answer")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def answer(model, tokenizer, prompts, given, seed):
    """An answer to each prompt, in token ids without the end; None where it does not end."""
    longest = max(map(len, prompts))
    pad, ends = tokenizer.pad_token_id or tokenizer.eos_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(seed)
    out = model.generate(
        ids,
        attention_mask=mask,
        budget=1.0,
        do_sample=True,
        temperature=given.temperature,
        max_new_tokens=given.max_tokens - min(map(len, prompts)),
    )
    answers = []
    for prompt, made in zip(prompts, out[:, longest:].tolist(), strict=True):
        made = made[: given.max_tokens - len(prompt)]
        answers.append(made[: made.index(ends)] if ends in made else None)
    return answers


def main():
    """Answer, write."""
    given = read_arguments()
    console = Console(stderr=True)
    model = BuddyForCausalLM.from_pretrained(given.model, merge_adapter=True).eval()
    tokenizer = load_tokenizer(given.model)
    encode = encoder(Source(path=str(given.rows)).template, tokenizer)
    rows = [(row, encode(row, where)[0]) for where, row in read_rows(given.rows)[: given.stop]]
    batches = [rows[at : at + given.batch] for at in range(0, len(rows), given.batch)]
    answered = []
    with torch.inference_mode():
        for number, batch in enumerate(track(batches, console=console, transient=True)):
            fitting = [(row, ids) for row, ids in batch if 0 < len(ids) < given.max_tokens]
            if not fitting:
                continue
            prompts = [ids for _, ids in fitting]
            made = answer(model, tokenizer, prompts, given, given.seed + number)
            texts = [tokenizer.decode(tokens).strip() if tokens else "" for tokens in made]
            answered += [
                {**row, "output": text}
                for (row, _), text in zip(fitting, texts, strict=True)
                if text
            ]
    given.out.write_text("".join(f"{json.dumps(row)}\n" for row in answered))
    console.print(f"{given.out}: {len(answered):,} of {len(rows):,} rows are answered")


if __name__ == "__main__":
    experiment.run(main)
