"""A tiny trained model and a data folder, and how a table is made from them."""

import json
import sys

from buddy import BuddyForCausalLM
from buddy.cli import main
from buddy.lab.paper.registry import reproduce
from buddy.lab.paper.run import Request, Run
from tests.lab.evaluation.task_rows import ARC, ROWS, write
from tests.tiny import random_predictor, random_router, tiny_model
from tests.words import say, word_tokenizer

COUNT = 6


def save_model(folder):
    """A checkpoint with a router and a predictor, both random; its base has a chat template."""
    base = folder.with_name(f"{folder.name}-base")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tiny_model("qwen3").save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = BuddyForCausalLM.from_pretrained(base)
    model.router = random_router(model.model)
    model.predictor = random_predictor(model.router)
    model.set_policy("routed")
    model.save_pretrained(folder)
    return str(folder)


def save_data(folder):
    """Rows of everything that any table asks for."""
    folder.mkdir()
    rows = {**ROWS, "arc_challenge": ARC}
    for name, split in (
        ("openbookqa", "test"),
        ("piqa", "validation"),
        ("boolq", "validation"),
        ("social_iqa", "validation"),
        ("hellaswag", "validation"),
        ("arc_easy", "test"),
        ("arc_challenge", "test"),
        ("winogrande", "validation"),
    ):
        write(folder, name, [rows[name]] * 2, split)
    for split in ("test", "train"):
        maths = [{**ROWS["gsm8k"], "question": f"What is w{i} + 3?"} for i in range(3, 12)]
        write(folder, "gsm8k", maths, split)
    for split in ("test", "dev"):
        write(folder, "mmlu", [ROWS["mmlu"]] * 6, split)
    alpaca = [{"instruction": say(3 + i, 9, 40 + i), "output": say(5, 8 + i)} for i in range(40)]
    write(folder, "alpaca", alpaca)
    talks = [
        {"id": str(i), "dialogue": say(*range(3 + i, 9 + 2 * i)), "summary": say(3 + i, 9)}
        for i in range(COUNT)
    ]
    write(folder, "samsum", talks, "validation")
    for name in ("wikitext2", "ptb"):
        (folder / name).mkdir()
        text = " ".join(f"w{2 + i * i % 93}" for i in range(1600))
        (folder / name / "valid.txt").write_text(text)
    return folder


def make(table, model, data, out, **more):
    """The outcome of a table, and its record."""
    said = []
    request = Request(table=table, model=model, data_dir=data, out=out, **more)
    collected, paths = reproduce(Run(request, said.append))
    return collected, json.loads(paths[0].read_text()), said


def in_this_process(run, command):
    """Commands as they are typed, without the seconds that a new Python takes."""
    run.say(" ".join(["buddy", *command]))
    before = sys.argv
    sys.argv = ["buddy", *command]
    try:
        main._run(command)
    finally:
        sys.argv = before
