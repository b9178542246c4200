"""Which commit this source is of. Standard library alone, as building a wheel runs this file."""

import os
import subprocess
from pathlib import Path
from typing import Final

COMMIT_FILE: Final = "_commit.txt"
"""Beside this file in a wheel or an sdist: the commit that it was built from."""


def own_commit(folder: Path | None = None) -> str | None:
    """The commit of a source folder of Buddy, with `-dirty` where tracked files were changed.

    A wheel and an sdist carry it in `COMMIT_FILE`; of a checkout git is asked. A repository that
    merely lies around the folder, as around a virtual environment, says nothing about it.

    Args:
        folder: That holds this file; that of the package which runs, if not given.

    Returns:
        None where it is not known.
    """
    here = Path(__file__).parent if folder is None else folder
    written = here / COMMIT_FILE
    if written.is_file():
        return written.read_text(encoding="utf-8").strip() or None
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git(here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says in a folder; None where it refuses, or is not there."""
    # Git's own variables, as a hook sets them, would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
