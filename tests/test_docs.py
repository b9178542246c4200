"""The pages' Python blocks run, a page's in one namespace, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)([^)#]+)[^)]*\)")


def blocks(page):
    return list(BLOCK.finditer(page.read_text()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_python_blocks_run(page):
    namespace = {"__name__": page.stem}
    ran, reasons = 0, []
    for block in blocks(page):
        if block["reason"]:
            reasons.append(block["reason"])
            continue
        line = page.read_text()[: block.start("code")].count("\n")
        # Blank lines in front, so that a failure names the page's own line.
        exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)
        ran += 1
    if not ran:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []
