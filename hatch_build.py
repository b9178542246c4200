"""Writes the commit that a wheel or an sdist is built from into it."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/buddy")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds `_commit.txt` beside `provenance.py`, which reads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build; an editable install runs the checkout, which git speaks for."""
        folder = Path(self.root) / SOURCE
        provenance = runpy.run_path(str(folder / "provenance.py"))
        name, commit = provenance["COMMIT_FILE"], provenance["own_commit"](folder)
        # What was unpacked from an sdist has the file already.
        if version == "editable" or commit is None or (folder / name).exists():
            return
        self._made = tempfile.TemporaryDirectory()
        written = Path(self._made.name) / name
        written.write_text(f"{commit}\n", encoding="utf-8")
        place = SOURCE if self.target_name == "sdist" else Path("buddy")
        build_data["force_include"][str(written)] = f"{place.as_posix()}/{name}"
