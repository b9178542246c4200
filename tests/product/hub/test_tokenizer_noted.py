"""A tokenizer whose class is noted is the one that transformers finds by itself."""

import json
import os

import pytest
from transformers import AutoTokenizer

from buddy.errors import CheckpointError
from buddy.hub import notes
from buddy.hub.tokenizer import read_tokenizer
from tests.product.serving.serving import chat_tokenizer
from tests.tiny import tiny_model


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "cache_home", lambda: tmp_path / "home")
    return tmp_path / "home" / "noted"


@pytest.fixture
def folder(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def unsearched(monkeypatch):
    """Fail where transformers looks for a tokenizer's class."""

    def searched(*arguments, **options):
        raise AssertionError("searched")

    return lambda: monkeypatch.setattr(AutoTokenizer, "from_pretrained", searched)


def named(folder, kind):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))


def facts(tokenizer):
    text = "w3 w5  w96 <s> w7"
    settings = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
    settings = {name: value for name, value in settings.items() if "/tmp" not in value}
    return (
        type(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.padding_side,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.name_or_path,
        tokenizer.model_max_length,
        settings,
        tokenizer([text, "w3"], padding=True)["input_ids"],
    )


@pytest.mark.parametrize("kind", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_it_is_read_alike(kind, folder, home, unsearched):
    tiny_model("llama").config.save_pretrained(folder)
    named(folder, kind)
    found = read_tokenizer(folder)
    unsearched()
    assert facts(read_tokenizer(folder)) == facts(found)


def test_other_files_are_looked_at_anew(folder, home):
    read_tokenizer(folder)
    named(folder, "LlamaForCausalLM")
    with pytest.raises(CheckpointError, match="is no tokenizer of the tokenizers library"):
        read_tokenizer(folder)


def test_so_are_files_of_the_same_size_and_time(folder, home):
    path = folder / "tokenizer_config.json"
    named(folder, "TokenizersBackend")
    before = path.stat()
    read_tokenizer(folder)
    path.write_text(path.read_text().replace("TokenizersBackend", "Gemma2ForCausalLM"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CheckpointError, match="Gemma2ForCausalLM"):
        read_tokenizer(folder)


@pytest.mark.parametrize("noted", ['{"class": "LlamaForCausalLM"}', '{"class": 3}', "[]", "{"])
def test_a_note_of_no_tokenizer_is_as_none(noted, folder, home, unsearched):
    read_tokenizer(folder)
    (note,) = home.iterdir()
    note.write_text(noted)
    read_tokenizer(folder)
    assert json.loads(note.read_text())["content"] == {"class": "TokenizersBackend"}
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    unsearched()
    with pytest.raises((AssertionError, CheckpointError), match="searched"):
        read_tokenizer(folder)
