import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy import files
from buddy.errors import CheckpointError, ResultError
from buddy.files import new_folder, parse_json, read_json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"{", "is no JSON"),
        (b"[" * 100_000, "nests too deeply"),
        (b"[NaN]", "NaN is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b"9" * 5000, "is no JSON"),
        (b'["\\ud800"]', "half a surrogate pair"),
    ],
)
def test_what_is_no_json_is_one_line(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_json(path, CheckpointError)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_a_missing_and_a_huge_file_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ResultError, match="cannot be read"):
        read_json(tmp_path, ResultError)
    with pytest.raises(ResultError, match="No such file"):
        read_json(tmp_path / "none", ResultError)
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 3)
    (tmp_path / "long").write_text("[1, 2]")
    with pytest.raises(ResultError, match="6 bytes"):
        read_json(tmp_path / "long", ResultError)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(_JSON)
def test_json_is_read_as_it_was_written(value):
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only), "here", ResultError) == value


@given(st.binary())
def test_of_any_bytes_only_our_error_comes_out(content):
    with suppress(ResultError):
        parse_json(content, "here", ResultError)


@pytest.mark.parametrize(("stopped_after", "left"), [(1, "old"), (2, "new")])
def test_ctrl_c_between_two_renames_loses_no_folder(tmp_path, monkeypatch, stopped_after, left):
    folder, replace, renamed = tmp_path / "model", files.os.replace, []
    folder.mkdir()
    (folder / "old").touch()

    def interrupted(source, target):
        replace(source, target)
        renamed.append(target)
        if len(renamed) == stopped_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as staging:
        (staging / "new").touch()
    assert [one.name for one in folder.iterdir()] == [left]


def test_a_new_folder_takes_the_place_that_a_link_leads_to(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "old").touch()
    (tmp_path / "near").mkdir()
    link = tmp_path / "near" / "link"
    link.symlink_to(tmp_path / "far")
    with new_folder(link) as staging:
        (staging / "new").touch()
    assert link.is_symlink()
    assert [path.name for path in link.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["link", "new"]


@pytest.mark.parametrize("name", [".", "inner/.."])
def test_a_new_folder_may_be_the_one_that_one_is_in(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with new_folder(Path(name)) as staging:
        (staging / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "new"]
