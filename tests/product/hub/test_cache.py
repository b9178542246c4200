"""The cache has one place, and only names that stay in it."""

from pathlib import Path

import platformdirs
import pytest

from buddy.errors import CheckpointError, ModelError
from buddy.hub import store


def test_home_is_chosen_by_the_variable_or_the_system(monkeypatch, tmp_path):
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "chosen"))
    assert store.cache_home() == tmp_path / "chosen"
    assert store.model_dir("m") == tmp_path / "chosen" / "models" / "m"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("BUDDY_HOME")
        else:
            monkeypatch.setenv("BUDDY_HOME", unset)
        assert store.cache_home() == Path(platformdirs.user_cache_dir("buddy", appauthor=False))


def test_the_home_of_nobody_is_a_plain_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BUDDY_HOME", "~no such user/buddy")
    assert store.cache_home() == tmp_path / "~no such user" / "buddy"
    assert store.list_cached() == []
    with pytest.raises(CheckpointError, match=r"no GGUF file at .*~no such user/x\.gguf"):
        store.resolve_gguf("~no such user/x.gguf")


def test_an_empty_cache(home):
    assert store.list_cached() == []
    assert not store.is_cached("smollm2-135m")
    assert not home.exists()
    with pytest.raises(ModelError, match="no cached model is called 'smollm2-135m'; got none in"):
        store.remove("smollm2-135m")
    with pytest.raises(ModelError, match="smollm2-135m-buddy is a part of Buddy, and cannot be"):
        store.remove("smollm2-135m-buddy")


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", "a\\b", ".hidden", "a b", "C:x"])
def test_names_that_are_no_folder_of_the_cache(home, name):
    for ask in (store.model_dir, store.is_cached, store.remove):
        with pytest.raises(ModelError, match="no model can be called"):
            ask(name)
