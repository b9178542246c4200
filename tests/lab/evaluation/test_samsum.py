"""SAMSum: where dialogues come from, and how a model is asked for a summary."""

import json

import pytest

from buddy.data.examples import encoder
from buddy.errors import DataError
from buddy.lab.evaluation.rouge.samsum import (
    INSTRUCTION,
    Dialogue,
    prompt_ids,
    read_answer,
    read_dialogues,
)
from tests.words import word_tokenizer


@pytest.fixture
def tokenizer():
    return word_tokenizer()


def test_prompts_take_the_models_own_form(tokenizer):
    plain = tokenizer.decode(prompt_ids(tokenizer, "w7 w8"))
    assert plain.split()[-3] == "w8"
    assert read_answer(tokenizer, [7, 8]) == "w7 w8"
    asked = []

    class Chat:
        chat_template = "there is one"

        def apply_chat_template(self, messages, **options):
            asked.append((messages, options))
            return "<user>"

        def __call__(self, text, **options):
            assert (text, options["add_special_tokens"]) == ("<user>", False)
            return {"input_ids": [5]}

        def decode(self, token_ids, **options):
            return " First.\nSecond. \n"

    assert prompt_ids(Chat(), "Ann: hi") == [5]
    ((messages, options),) = asked
    assert messages[0]["content"] == f"{INSTRUCTION}\n\nAnn: hi"
    assert options["add_generation_prompt"]
    assert read_answer(Chat(), [1]) == "First.\nSecond."
    Chat.chat_template = None
    assert read_answer(Chat(), [1]) == "First."


def test_training_rows_ask_as_evaluation_does_where_a_model_may_think_aloud(tokenizer):
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }} w9{% if enable_thinking is false %} w10 w11{% endif %}"
    )
    row = {"instruction": f"{INSTRUCTION}\n\nw7 w8", "output": "w5"}
    prompt, answer = encoder("chat", tokenizer)(row, "line 1")
    assert prompt == prompt_ids(tokenizer, "w7 w8")
    assert (prompt[-5:], answer[0]) == ([7, 8, 9, 10, 11], 5)


def test_dialogues_come_from_a_folder(tmp_path):
    (tmp_path / "samsum").mkdir()
    rows = [{"id": str(i), "dialogue": f"A: {i}", "summary": f"s{i}"} for i in range(9)]
    file = tmp_path / "samsum" / "validation.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    every = read_dialogues(tmp_path)
    assert every[2] == Dialogue("2", "A: 2", "s2")
    assert len(every) == len(read_dialogues(tmp_path, limit=20)) == 9
    drawn = read_dialogues(tmp_path, limit=4, seed=3)
    assert drawn == read_dialogues(tmp_path, limit=4, seed=3)
    assert len(set(drawn)) == 4
    assert drawn != read_dialogues(tmp_path, limit=4, seed=4)
    with pytest.raises(DataError, match=r"test\.jsonl cannot be read"):
        read_dialogues(tmp_path, "test")


def test_dialogues_come_from_the_hub(monkeypatch):
    import datasets

    rows = [{"id": "1", "dialogue": "A: b", "summary": "c"}, {"id": "2", "dialogue": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    assert read_dialogues(None) == [Dialogue("1", "A: b", "c")]

    def offline(name, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="no network; give a local folder"):
        read_dialogues(None)
