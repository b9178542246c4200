"""What scripts share: a record that cannot be written is refused before anything is measured."""

import pytest

from buddy.lab import experiment


def test_a_record_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    parser = experiment.arguments("What it does.")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", str(tmp_path / "none" / "record.json")])
    assert f"there is no folder {tmp_path / 'none'}; make it first" in capsys.readouterr().err
    out = tmp_path / "record.json"
    assert parser.parse_args(["--out", str(out)]).out == out
