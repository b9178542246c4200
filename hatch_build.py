"""Puts into a wheel the commit that it is built from and, if asked, the compiled decode kernel.

`BUDDY_KERNELS=x86_64` or `aarch64` names the machine of the wheel. The kernel is compiled by CC,
which may be a cross compiler, for every instruction set of that machine. Without the variable the
wheel runs anywhere and compiles at first use.
"""

import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/buddy")
MACHINES = ("x86_64", "aarch64")
"""Of Linux: what wheels are made for."""
GLIBC = (2, 28)
"""The oldest C library that the wheels run with: that of torch's own wheels."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds `_commit.txt` beside `provenance.py`, which reads it, and the kernels of a machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build; an editable install runs the checkout, which git speaks for."""
        if version == "editable":
            return
        self._made = tempfile.TemporaryDirectory()
        files = build_data["force_include"]
        place = SOURCE if self.target_name == "sdist" else Path("buddy")
        for made in (*self._commit(), *self._kernels(build_data)):
            path = made.relative_to(self._made.name)
            files[str(made)] = (place / path).as_posix()

    def _commit(self) -> list[Path]:
        folder = Path(self.root) / SOURCE
        provenance = runpy.run_path(str(folder / "provenance.py"))
        name, commit = provenance["COMMIT_FILE"], provenance["own_commit"](folder)
        # What was unpacked from an sdist has the file already.
        if commit is None or (folder / name).exists():
            return []
        written = Path(self._made.name) / name
        written.write_text(f"{commit}\n", encoding="utf-8")
        return [written]

    def _kernels(self, build_data: dict[str, Any]) -> list[Path]:
        machine = os.environ.get("BUDDY_KERNELS")
        if machine is None or self.target_name != "wheel":
            return []
        sys.path.insert(0, str(Path(self.root) / SOURCE.parent))
        from buddy.engine.executors.native.compiler import compile_kernel, find_compiler
        from buddy.engine.executors.native.instructions import sets_of
        from buddy.engine.executors.native.kernel_cache import SHIPPED, keep

        sets = sets_of(machine) if machine in MACHINES else ()
        if not sets:
            raise SystemExit(f"BUDDY_KERNELS={machine}: no kernel is built for that machine")
        folder = Path(self._made.name) / SHIPPED.relative_to(Path(self.root, SOURCE).resolve())
        folder.mkdir(parents=True)
        made = []
        for instructions in sets:
            with tempfile.TemporaryDirectory() as staging:
                library = compile_kernel(find_compiler(), instructions, Path(staging))
                check_glibc(library)
                made.append(keep(library, folder, instructions.name))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        return made


def check_glibc(library: Path) -> None:
    """Refuse a library that asks for a newer C library than the wheel's name promises."""
    said = subprocess.run(
        ["readelf", "--wide", "--version-info", library], capture_output=True, text=True, check=True
    )
    newest = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", said.stdout))
    if newest > GLIBC:
        raise SystemExit(f"{library.name} needs glibc {newest}, later than {GLIBC}")
