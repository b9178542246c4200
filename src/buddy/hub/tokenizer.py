"""The tokenizer of a model's folder, loaded from a folder that Buddy wrote.

transformers finds a tokenizer's files by itself, and its config may name others, or a class that is
no tokenizer. So it is given copies of the files that a tokenizer can have, and what of the configs
is no file, no code and no object.
"""

import hashlib
import json
import shutil
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from buddy.errors import CheckpointError
from buddy.hub.config import CONFIG, read_config
from buddy.hub.notes import note_name, read_note, write_note
from buddy.hub.quiet import quiet_transformers
from buddy.hub.safe_paths import file_inside, find_inside, read_table
from buddy.hub.wrap_errors import explained

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILES: Final = (
    TOKENIZER_CONFIG,
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""The files that tokenizers of the supported families are read from."""
TEMPLATES: Final = "additional_chat_templates"
"""Folder of templates beside the one of `chat_template.jinja`."""
_NOT_PASSED: Final = frozenset(
    {
        *("auto_map", "name_or_path", "init_inputs", "gguf_file", "tokenizer_object"),
        *("vocab", "merges", "tokenizer_class", "trust_remote_code"),
        *("is_local", "local_files_only", "cache_dir", "token", "revision", "subfolder"),
    }
)
"""Keys of tokenizer_config.json that name code, files or places, or stand for objects."""


def sample_text() -> str:
    """The text that ships with Buddy: several kinds and languages, about 2,000 tokens."""
    return (files("buddy.hub") / "priors" / "quick.txt").read_text(encoding="utf-8")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """What tells tokenizers apart that are stored alike: the ids that they make of a text."""
    ids = tokenizer(sample_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def holds_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer of its own."""
    return (folder / TOKENIZER_CONFIG).exists()


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files of the folder that its tokenizer is read from, config.json too.

    Raises:
        CheckpointError: One may not be read.
    """
    templates = sorted(path.name for path in (folder / TEMPLATES).glob("*.jinja"))
    names = [CONFIG, *TOKENIZER_FILES, *(f"{TEMPLATES}/{name}" for name in templates)]
    return [name for name in names if find_inside(folder, name) is not None]


def read_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer in a folder, padding on the left.

    Which class of transformers it has is noted: to find out imports code for all its models.

    Raises:
        CheckpointError: There is none, or it is damaged or would run code.
    """
    noted = _noted_class(folder)
    advice = "save one there with the tokenizer's save_pretrained"
    with TemporaryDirectory(prefix="buddy-") as name:
        written = Path(name)
        _write(folder, written, is_known=noted is not None)
        read = _reader(folder) if noted is None else noted.from_pretrained
        with (
            quiet_transformers(),
            explained(f"the tokenizer in {folder} cannot be loaded", advice),
        ):
            tokenizer = read(written, trust_remote_code=False, padding_side="left")
            tokenizer.name_or_path = str(folder)
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            # A setting of a wrong type shows when it is used.
            tokenizer("a text", truncation=True, max_length=1)
            tried = tokenizer("a text", return_tensors="pt")
            tokenizer.decode(tried.input_ids[0], skip_special_tokens=True)
    if noted is None:
        write_note(_note_name(folder), {"class": type(tokenizer).__name__})
    return tokenizer


def _reader(folder: Path) -> Any:
    """What finds a tokenizer's class and reads it."""
    from transformers import AutoTokenizer, PreTrainedConfig

    config = read_config(folder) if (folder / CONFIG).exists() else PreTrainedConfig()
    return partial(AutoTokenizer.from_pretrained, config=config)


def _noted_class(folder: Path) -> Any:
    """The class that a tokenizer of these files had before; None where there was none."""
    named = read_note(_note_name(folder)).get("class")
    if not isinstance(named, str):
        return None
    import transformers

    kind = getattr(transformers, named, None)
    is_fast = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerFast)
    return kind if is_fast else None


def _note_name(folder: Path) -> str:
    """A name by which a tokenizer is noted: that of its files as they are, whatever is in them.

    A file may be replaced by one of its size and of an equal time of modification, as archives set
    it, but not at an equal time of change, nor in its own place on the disk.
    """
    states = ((name, file_inside(folder, name).stat()) for name in tokenizer_files(folder))
    files_now = [
        (name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
        for name, state in states
    ]
    return note_name("tokenizer", folder.resolve(), *files_now)


def _write(folder: Path, written: Path, *, is_known: bool) -> None:
    """Link what may be read of the folder, and write its configs anew; check an unknown class."""
    for name in tokenizer_files(folder):
        if name.endswith(".json") and not is_known:
            read_table(folder, name)  # refuses what transformers would fail at
        if name in (TOKENIZER_CONFIG, CONFIG):  # written anew below
            continue
        target, real = written / name, file_inside(folder, name).resolve()
        target.parent.mkdir(exist_ok=True)
        try:
            target.symlink_to(real)
        except OSError:  # not every system lets a user make links
            shutil.copyfile(real, target)
    config = dict(read_table(folder, CONFIG)) if (folder / CONFIG).exists() else {}
    values = read_table(folder, TOKENIZER_CONFIG) if holds_tokenizer(folder) else {}
    passed = {name: value for name, value in values.items() if _may_pass(name)}
    named = values.get("tokenizer_class") or config.get("tokenizer_class")
    if named is not None:
        if not is_known:
            _check_class(folder, named, has_code=bool(values.get("auto_map")))
        passed["tokenizer_class"] = named
    (written / TOKENIZER_CONFIG).write_text(json.dumps(passed), encoding="utf-8")
    # By these transformers tells tokenizers that it must correct.
    about = {key: config[key] for key in ("model_type", "transformers_version") if key in config}
    (written / CONFIG).write_text(json.dumps(about), encoding="utf-8")


def _may_pass(name: str) -> bool:
    return name not in _NOT_PASSED and not name.endswith(("_file", "_files"))


def _check_class(folder: Path, named: Any, *, has_code: bool) -> None:
    """Refuse a class that is no tokenizer of the tokenizers library.

    transformers would take any class of its own, a model too, and have it read the folder. For a
    name that it does not know it takes the plain tokenizer.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = folder / TOKENIZER_CONFIG
    if not isinstance(named, str):
        raise CheckpointError(f"{path}: tokenizer_class must be a name, got {str(named)[:80]}")
    with explained(f"{path}: tokenizer_class {named[:80]!r} cannot be had", "correct it"):
        kind = tokenizer_class_from_name(named)
    if kind is None and has_code:
        raise CheckpointError(
            f"{path}: the tokenizer {named[:80]!r} is code that comes with the model, and Buddy "
            "runs none: save it as tokenizer.json with PreTrainedTokenizerFast"
        )
    fast = isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerFast)
    if not (kind is None or fast or getattr(kind, "__name__", "") == "PythonBackend"):
        raise CheckpointError(
            f"{path}: tokenizer_class {named[:80]!r} is no tokenizer of the tokenizers library: "
            "expected such as PreTrainedTokenizerFast"
        )
