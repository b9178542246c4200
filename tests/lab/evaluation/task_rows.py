"""A row of each task in local files, and where it is written."""

import json

from buddy.lab.evaluation.local_tasks import LOCAL_TASKS

ARC = {"id": "1", "question": "Which falls?", "answerKey": "B"}
ARC["choices"] = {"text": ["fire", "a stone", "light"], "label": ["A", "B", "C"]}
ROWS = {
    "arc_easy": ARC,
    "boolq": {"question": "is it so", "passage": "It is so.", "label": 1},
    "gsm8k": {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5.\n#### 5"},
    "hellaswag": {
        "activity_label": "Cooking",
        "ctx_a": "A man stirs.",
        "ctx_b": "then he",
        "endings": ["sleeps.", "tastes [sub] it.", "flies.", "sings."],
        "label": "1",
    },
    "openbookqa": {
        "question_stem": "The sun is",
        "choices": {"text": ["cold", "wet", "hot", "small"], "label": ["A", "B", "C", "D"]},
        "answerKey": "C",
    },
    "piqa": {"goal": "Open a tin.", "sol1": "Use an opener.", "sol2": "Wait.", "label": 0},
    "social_iqa": {
        "context": "Ann fell.",
        "question": "How is she?",
        "answerA": "glad",
        "answerB": "hurt",
        "answerC": "bored",
        "label": "2",
    },
    "winogrande": {
        "sentence": "The cup beat the pan as the _ was light.",
        "option1": "pan",
        "option2": "cup",
        "answer": "2",
    },
    "mmlu": {"question": "w3?", "subject": "anatomy", "choices": list("abcd"), "answer": 1},
    "lambada_openai": {"text": "w3 w4"},
    "wikitext": {"page": "w3"},
}


def write(folder, name, rows, split="train"):
    """A split of a task, or of samsum."""
    place = folder / (LOCAL_TASKS[name].folder if name in LOCAL_TASKS else name)
    place.mkdir(exist_ok=True)
    (place / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
