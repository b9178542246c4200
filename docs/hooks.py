"""What the site has besides the pages of this folder: the commands, and the files that pages link.

A link that leads out of `docs/` works on the site too: the file lies under `repository/` there, a
Markdown file as a page of its own. A folder's name stands in the place of a link to it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from buddy.cli.registry import all_commands, make_app

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COMMANDS = "reference/cli"
LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SHOWN = {".json", ".png"}
"""Kinds of file that a browser shows; it would save others, so they are given as text."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the page of each command into the navigation, beside the page of all."""
    pages = next(_lists_with(config.nav, f"{COMMANDS}/index.md"))
    pages.extend({name: f"{COMMANDS}/{name}.md"} for name in _commands())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of each command, and whatever pages link outside of this folder."""
    for name, text in _commands().items():
        files.append(File.generated(config, f"{COMMANDS}/{name}.md", content=text))
    seen: set[Path] = set()
    pages = [Path(page.abs_src_path or "") for page in files.documentation_pages()]
    pages = [page for page in pages if page.is_file()]
    while pages:
        page = pages.pop()
        for target in _targets(page):
            if not target.is_file() or DOCS in target.parents or target in seen:
                continue
            seen.add(target)
            place = _place(target)
            if target.suffix == ".md":
                text = _relinked(target.read_text(), target, place)
                files.append(File.generated(config, place, content=text))
                pages.append(target)
            else:
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where the site has what they lead to."""
    source = page.file.abs_src_path
    return markdown if source is None else _relinked(markdown, Path(source), page.file.src_uri)


def _lists_with(nav: Any, entry: str) -> Iterator[list[Any]]:
    """Each list of the navigation that has an entry."""
    if isinstance(nav, dict):
        for value in nav.values():
            yield from _lists_with(value, entry)
    elif isinstance(nav, list):
        if entry in nav:
            yield nav
        for item in nav:
            yield from _lists_with(item, entry)


def _targets(page: Path) -> list[Path]:
    return [_target(page, link) for _, link, _ in LINK.findall(page.read_text())]


def _target(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / link))


def _place(target: Path) -> str:
    """Where the site has a file of the repository."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    place = f"repository/{target.relative_to(ROOT).as_posix()}"
    return place if target.suffix in {".md", *SHOWN} else f"{place}.txt"


def _relinked(markdown: str, page: Path, place: str) -> str:
    def moved(match: re.Match[str]) -> str:
        label, link, anchor = match.groups(default="")
        target = _target(page, link)
        if target.is_dir():
            return f"{label[1:-1]} (`{target.relative_to(ROOT)}`)"
        if not target.is_file():
            return match[0]
        return f"{label}({os.path.relpath(_place(target), os.path.dirname(place))}{anchor})"

    return LINK.sub(moved, markdown)


def _commands() -> dict[str, str]:
    """The page of each command, by its name, in the order of help."""
    app = get_command(make_app())
    context = app.make_context("buddy", [], resilient_parsing=True)
    names = [command.name for command in sorted(all_commands(), key=lambda item: item.order)]
    return {name: _page(app.get_command(context, name), name, context) for name in names}


def _page(command: Any, name: str, parent: Any, level: int = 1) -> str:
    context = type(parent)(command, info_name=name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = f"{'#' * level} {context.command_path}\n\n{_prose(command.help or '')}\n\n"
    text += f"```text\n{usage}\n```\n\n"
    records = [value.get_help_record(context) for value in command.params]
    text += "".join(_described(*record) for record in records if record)
    for sub, part in getattr(command, "commands", {}).items():
        if not part.hidden:
            text += _page(part, sub, context, level + 1)
    return text


def _prose(text: str) -> str:
    """The help of a command; paragraphs that click leaves as they are become blocks of code."""
    parts = [part.strip("\n") for part in text.split("\n\n")]
    return "\n\n".join(
        f"```sh\n{part[1:].strip(chr(10))}\n```" if part.startswith("\b") else _escaped(part)
        for part in parts
    )


def _described(option: str, meaning: str) -> str:
    """An option and what it does, as a definition; a default stands beside its name."""
    found = re.fullmatch(r"(.*?)\s*(?:\[(default: )?([^][]*)\])?", meaning, re.DOTALL)
    said, word, value = found.groups(default="") if found else (meaning, "", "")
    beside = f" {word}`{value}`" if word else f" *{value}*" if value else ""
    return f"`{option}`{beside}\n:   {_escaped(' '.join(said.split()))}\n\n"


def _escaped(text: str) -> str:
    """A text without Markdown but its code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
