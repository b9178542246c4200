import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy import files
from buddy.errors import CheckpointError, ResultError
from buddy.files import parse_json, read_json


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
