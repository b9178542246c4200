"""A checkpoint of stage 1, as small as can be, and rows for it."""

import json

from buddy.data.examples import Example
from tests.tiny import random_ids, tiny_buddy
from tests.words import say, word_tokenizer


def save_stage_1(folder):
    tiny_buddy("qwen3").save_pretrained(folder, tokenizer=word_tokenizer())
    return folder


def rows(count, *, seed=0):
    """Prompts of 3 to 8 words, answers of 2 to 5."""
    made = []
    for number in range(count):
        prompt, answer = 3 + number % 6, 2 + number % 4
        ids = random_ids(1, prompt + answer, seed=1000 * seed + number)[0].tolist()
        made.append((ids[:prompt], ids[prompt:]))
    return made


def examples(count, *, seed=0):
    return [
        Example(tuple(prompt), tuple(answer), "made") for prompt, answer in rows(count, seed=seed)
    ]


def write_rows(path, count, *, seed=0):
    lines = (
        json.dumps({"prompt": say(*prompt), "completion": f" {say(*answer)}"})
        for prompt, answer in rows(count, seed=seed)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def write_recipe(folder, **settings):
    """A recipe for what stands in the folder; settings as `table__key=value`."""
    write_rows(folder / "train.jsonl", 12)
    write_rows(folder / "validation.jsonl", 10, seed=1)
    tables = {
        "optim": {"steps": 40, "learning_rate": 1e-2, "batch_size": 2},
        "log": {"every": 5, "save_every": 10, "evaluate_every": 20, "tensorboard": False},
    }
    for name, value in settings.items():
        table, _, key = name.partition("__")
        tables.setdefault(table, {})[key] = value
    text = f'model.name = "{folder / "stage1"}"\nmodel.dtype = "float32"\ndata.max_tokens = 40\n'
    for split in ("train", "validation"):
        text += f'[[data.{split}]]\npath = "{folder / split}.jsonl"\n'
    for table, values in tables.items():
        text += f"[{table}]\n"
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path = folder / "recipe.toml"
    path.write_text(text)
    return path
