"""Whatever the cache folder holds and the compiler does: a library that works, or why not.

The compilers here are shell scripts. Most of them copy a library that the real one made.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from buddy.engine.executors.native import compiler as compiler_module
from buddy.engine.executors.native import library as library_module
from buddy.engine.executors.native.instructions import best_set
from buddy.engine.executors.native.kernel_cache import keep, whole
from buddy.engine.executors.native.library import native_library
from buddy.errors import ModelError
from tests.hostile.damage import DAMAGE, works

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler, and Linux"
)

_OUTPUT = 'for word; do [ "$last" = -o ] && out=$word; last=$word; done\n'


@pytest.fixture(scope="module")
def good():
    """A library that the real compiler made."""
    return Path(native_library().calls._name)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BUDDY_NATIVE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Makes a compiler of a shell script, and returns the file that lists its runs."""

    def make(script, *arguments):
        path, runs = tmp_path / "cc", tmp_path / "runs"
        path.write_text(f'#!/bin/sh\necho "$@" >> {runs}\n{_OUTPUT}{script}\n')
        path.chmod(0o755)
        runs.write_text("")
        monkeypatch.setenv("CC", " ".join([str(path), *arguments]))
        return runs

    return make


_DAMAGED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from buddy.engine.executors.native import compiler, instructions, library
from buddy.engine.executors.native.kernel_cache import _checksum
from tests.hostile.damage import DAMAGE, works

assert "torch" not in sys.modules
good, runs, home = map(Path, sys.argv[2:])
key = compiler.identity(compiler.find_compiler(), instructions.best_set())
name = f"{key}-{_checksum(good)}.so"
for case, damage in {"none": lambda path: None, **DAMAGE}.items():
    os.environ["BUDDY_HOME"] = str(home / case)
    path = home / case / "native" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(good.read_bytes())
    damage(path)
    runs.write_text("")
    made = library.native_library()
    assert works(made) and made.why_not_kept is None, made
    assert list(path.parent.glob("*.so")) == [path] and path.read_bytes() == good.read_bytes()
    assert len(runs.read_text().splitlines()) == (made.compile_s is not None)
    print(case, "found" if made.compile_s is None else "made again", sep=": ", flush=True)
"""


def test_a_damaged_library_is_not_loaded_but_made_again(good, home, use):
    runs = use(f'cp {good} "$out"')
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _DAMAGED, root, good, runs, home],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = {"none", "unreadable"} if os.geteuid() == 0 else {"none"}  # root reads everything
    assert dict(line.split(": ") for line in done.stdout.splitlines()) == {
        case: "found" if case in found else "made again" for case in ("none", *DAMAGE)
    }


def test_a_whole_library_is_compiled_once_and_what_lies_beside_it_is_left_alone(good, home, use):
    runs = use(f'cp {good} "$out"')
    native = home / "native"
    native.mkdir(parents=True)
    (native / "another-0123.so").write_text("of another identity")
    assert native_library().compile_s is not None
    assert works(native_library())
    assert len(runs.read_text().splitlines()) == 1
    assert (native / "another-0123.so").read_text() == "of another identity"
    assert not list(native.glob("*.staging"))


def test_what_a_killed_process_left_is_cleared_away(good, home, use):
    use(f'cp {good} "$out"')
    words = compiler_module.find_compiler()
    key = compiler_module.identity(words, best_set())
    staging = home / "native" / f"{key}.staging"
    staging.mkdir(parents=True)
    (staging / "made.so").write_text("half of it")
    assert works(native_library())
    assert not staging.exists()


def test_two_processes_compile_once(good, home, use):
    runs = use(f'sleep 1; cp {good} "$out"')
    code = "from buddy.engine.executors.native.library import native_library; native_library()"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(runs.read_text().splitlines()) == 1
    assert len(list(home.glob("native/*.so"))) == 1


# A folder that cannot be used.
def _file_in_its_place(home):
    home.mkdir()
    (home / "native").write_text("a file")


def _folder_of_that_name(home):
    """The library's own place is taken by a folder, which no file replaces."""
    native_library()
    [path] = home.glob("native/*.so")
    path.unlink()
    path.mkdir()
    (path / "kept").write_text("")
    library_module._kept_or_compiled.cache_clear()


@pytest.mark.parametrize("spoil", [_file_in_its_place, _folder_of_that_name])
def test_where_the_cache_folder_cannot_be_used_a_library_is_made_for_one_process(
    good, home, use, spoil
):
    use(f'cp {good} "$out"')
    spoil(home)
    library = native_library()
    assert works(library)
    assert library.compile_s is not None
    assert str(home) in library.why_not_kept
    assert not Path(library.calls._name).exists()


def test_where_the_cache_folder_is_full_a_library_is_made_for_one_process(good, home, use):
    full = 'echo "ld: error: No space left on device" >&2; exit 1'
    use(f'case "$out" in {home}/*) {full};; esac; cp {good} "$out"')
    library = native_library()
    assert works(library)
    assert "No space left on device" in library.why_not_kept
    assert not list(home.glob("native/*.so"))
    assert not list(home.glob("native/*.staging"))


def test_warnings_of_a_compiler_and_words_after_its_name_are_no_obstacle(good, home, use):
    runs = use(f'echo "warning: an error is near" >&2; cp {good} "$out"', "-DONE", "'-D T'")
    assert works(native_library())
    assert runs.read_text().startswith("-DONE -D T -O3")


# What a wheel brings.
@pytest.fixture
def shipped(good, tmp_path, monkeypatch):
    """A package with the library of this processor's best set; where it is."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    copy = Path(shutil.copy(good, tmp_path / "copy.so"))
    monkeypatch.setattr(library_module, "SHIPPED", folder)
    return keep(copy, folder, best_set().name)


@pytest.mark.parametrize("words", ["no-such-compiler", "false"])
def test_a_wheels_library_needs_no_compiler_and_no_cache_folder(home, shipped, words, monkeypatch):
    monkeypatch.setenv("CC", words)
    library = native_library()
    assert works(library)
    assert Path(library.calls._name) == shipped
    assert (library.instructions, library.compile_s) == (best_set().name, None)
    assert not home.exists()


@pytest.mark.parametrize("damage", [DAMAGE["one bit"], DAMAGE["empty"], DAMAGE["gone"]])
def test_a_wheels_library_that_is_damaged_is_replaced_or_named(
    good, home, shipped, damage, monkeypatch, use
):
    damage(shipped)
    assert not list(whole(shipped.parent, best_set().name))
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        with pytest.raises(ModelError, match="own kernel cannot be loaded here, and no C compiler"):
            native_library()
    use(f'cp {good} "$out"')
    assert Path(native_library().calls._name).parent == home / "native"


_OTHER_MACHINE = r"""head -c 18 {good} > "$out"; printf '\377\377' >> "$out"
tail -c +21 {good} >> "$out" """

REFUSED = {
    "exit 1": "could not compile the kernel: exit status 1, and it said nothing",
    'echo "x.c:1: warning: odd"; echo "x.c:2: error: unknown flag"; echo "1 error"; exit 1': (
        "could not compile the kernel: x.c:2: error: unknown flag"
    ),
    'echo "it is broken" >&2; exit 3': "could not compile the kernel: it is broken",
    "kill -9 $$": "could not compile the kernel: signal 9",
    "exit 0": "reported success and wrote no library",
    'mkdir "$out"': "reported success and wrote no library",
    ': > "$out"': "made a library that this machine cannot load",
    'echo junk > "$out"': "made a library that this machine cannot load",
    'head -c 5000 {good} > "$out"': "made a library that this machine cannot load",
    # What loading it kills the process with.
    'cp {good} "$out"; truncate -s 30000 "$out"': "made a library that this machine cannot load",
    _OTHER_MACHINE: "made a library that this machine cannot load",
    'cp {libc} "$out"': "undefined symbol: buddy_step",
}


@pytest.mark.parametrize(("script", "says"), REFUSED.items())
def test_a_compiler_that_makes_nothing_usable_is_refused_in_one_line(good, home, use, script, says):
    maps = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in maps if "/libc." in line)
    runs = use(script.replace("{good}", str(good)).replace("{libc}", libc))
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            native_library()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(home.glob("native/*.so"))
    # In the cache folder and in a temporary one, and not for every model again.
    assert len(runs.read_text().splitlines()) == 2


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(home, use, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler_module, "COMPILE_LIMIT_S", 1)
    child = tmp_path / "child"
    runs = use(f"sleep 600 & echo $! > {child}; wait")
    with pytest.raises(ModelError, match=r"cc did not end in 1 s"):
        native_library()
    assert len(runs.read_text().splitlines()) == 1
    process = Path(f"/proc/{child.read_text().strip()}/stat")
    while process.exists() and process.read_text().split()[2] != "Z":  # killed is not yet gone
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"CC": "", "PATH": ""}, "no C compiler was found: install gcc or clang"),
        ({"CC": "no-such-compiler -O3"}, "CC names 'no-such-compiler', which is no program"),
        ({"CC": "'cc"}, "CC cannot be read as a command: No closing quotation"),
        ({"BUDDY_NATIVE": "0"}, "BUDDY_NATIVE=0 is set"),
    ],
)
def test_where_there_is_no_compiler_it_says_so(home, monkeypatch, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=says):
        native_library()


@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_a_usual_compiler_is_found_by_any_of_its_names(tmp_path, monkeypatch, name):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    assert compiler_module.find_compiler() == (str(path),)
