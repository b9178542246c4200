r"""Packs wheels and files for a machine without a network, in folders of limited size.

    python benchmarks/offline_pack.py --out pack --python 3.12 --without torch,numpy \
        --also pytest,beartype --files model.gguf --most-mb 40

makes `pack/1`, `pack/2` and so on, which may travel one by one. There, once they lie together:

    pip install --no-index --no-deps --target site pack/*/*.whl
    python pack/1/join.py pack

Versions are those that are installed here. `join.py` puts files together again and checks them.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from buddy.lab import experiment

PLATFORMS: Final = tuple(
    f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17, 5)
)
"""What pip may take: it matches each name exactly."""
JOIN: Final = '''"""Joins the pieces of files that lie in the folders of a pack, and checks them."""
import hashlib, pathlib, sys
for digest in sorted(pathlib.Path(sys.argv[1]).glob("*/*.sha256")):
    name = digest.name.removesuffix(".sha256")
    pieces = sorted(pathlib.Path(sys.argv[1]).glob(f"*/{name}.piece*"))
    data = b"".join(piece.read_bytes() for piece in pieces)
    if hashlib.sha256(data).hexdigest() != digest.read_text():
        sys.exit(f"{name}: a piece is missing or damaged")
    pathlib.Path(sys.argv[1], name).write_bytes(data)
    print(pathlib.Path(sys.argv[1], name))
'''


def needed(extras, also, without):
    """Distributions that Buddy needs with these extras, and others, with their versions here."""
    found: dict[str, str] = {}
    left = [Requirement(f"buddy-llm[{','.join(sorted(extras))}]"), *map(Requirement, sorted(also))]
    while left:
        asked = left.pop()
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        try:
            made = distribution(name)
        except PackageNotFoundError:
            continue
        for line in made.requires or ():
            need = Requirement(line)
            wanted = ({"extra": extra} for extra in ("", *asked.extras))
            if need.marker is None or any(map(need.marker.evaluate, wanted)):
                key = re.sub(r"[-_.]+", "-", need.name).lower()
                if key not in found and key not in without and not key.startswith("nvidia-"):
                    found[key] = ""
                    left.append(need)
        if name != "buddy-llm":
            found[name] = made.version
    return {name: version for name, version in sorted(found.items()) if version}


def fetch(packages, python, folder):
    """Fetch a wheel of each package for another Python."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for name, version in packages.items():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        done = subprocess.run(
            [*command, *platforms, f"{name}=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(
                f"no wheel of {name} {version} for Python {python}: {done.stderr.strip()[-300:]}"
            )


def pieces(path, most, folder):
    """Cut a file into pieces, and note its digest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        number = 0
        while data := file.read(most):
            digest.update(data)
            yield _written(folder / f"{path.name}.piece{number:03d}", data)
            number += 1
    yield _written(folder / f"{path.name}.sha256", digest.hexdigest().encode())


def _written(path, data):
    path.write_bytes(data)
    return path


def spread(files, out, most):
    """Put files into numbered folders, none larger than `most`; how many there are."""
    number, size = 1, 0
    for file in sorted(files, key=lambda file: file.stat().st_size, reverse=True):
        if size and size + file.stat().st_size > most:
            number, size = number + 1, 0
        size += file.stat().st_size
        place = out / str(number)
        place.mkdir(parents=True, exist_ok=True)
        shutil.move(file, place / file.name)
    (out / "1" / "join.py").write_text(JOIN)
    return number


def main():
    """Fetch, cut, spread."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--extras", default="serve", help="of buddy-llm; commas between")
    parser.add_argument("--also", default="pytest,beartype,hypothesis", help="other packages")
    parser.add_argument("--without", default="torch,triton", help="packages that are there")
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="cut into pieces")
    parser.add_argument("--most-mb", type=int, default=40, help="of a folder")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} is there already: name another --out")
    fetched = args.out / "all"
    fetched.mkdir(parents=True)
    most = args.most_mb * 10**6
    extras, also, without = (
        set(filter(None, text.split(","))) for text in (args.extras, args.also, args.without)
    )
    fetch(needed(extras, also, without), args.python, fetched)
    for path in args.files:
        list(pieces(path, most, fetched))
    number = spread(list(fetched.iterdir()), args.out, most)
    fetched.rmdir()
    print(f"{number} folders in {args.out}, each of at most {args.most_mb} MB")


if __name__ == "__main__":
    experiment.run(main)
