"""The playground and the documentation: files of the package, which run no script but their own."""

from importlib.resources import files
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

_PAGES: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_pages(api: FastAPI) -> None:
    """Add the routes of the page, its files and `/docs`."""
    folder = files("buddy.serving.http") / "playground"
    contents = {name: (folder / name).read_bytes() for name in _PAGES}

    def page(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        # Starlette would add a charset of its own to text.
        return Response(contents[name], headers={**_PAGE_HEADERS, "Content-Type": _PAGES[name]})

    @api.get("/", include_in_schema=False)
    async def playground() -> Response:
        return page("index.html")

    @api.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return page("docs.html")

    @api.get("/playground/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page(name)
