"""Keys: who has none sees only what anybody may, and no key is written anywhere."""

import json
import logging

import httpx
import pytest

from buddy.errors import ServingError
from buddy.serving.http.app import check_origins
from buddy.serving.http.auth import Keys
from tests.product.serving.serving import served

KEY, OTHER = "k" * 20, "another-key-of-29-characters!"


def test_a_file_has_a_key_a_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{KEY}\n\n  {OTHER}  \n")
    keys = Keys.read(path)
    assert keys.takes(KEY.encode())
    assert keys.takes(OTHER.encode())
    for wrong in (b"", KEY[:-1].encode(), KEY.encode() + b"k", b"# of the team", b"\xff" * 20):
        assert not keys.takes(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no key"),
        ("# nothing\n", "there is no key"),
        ("short\n", "key 1 cannot be used"),
        (f"{KEY}\nwith spaces in it, and long enough\n", "key 2 cannot be used"),
        (f"{KEY}é\n", "key 1 cannot be used"),
    ],
)
def test_a_file_without_good_keys_is_refused_and_the_key_is_not_shown(tmp_path, text, said):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ServingError, match=said) as refused:
        Keys.read(path)
    assert "short" not in str(refused.value).replace("too short", "")
    assert KEY not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ServingError, match="cannot be read"):
        Keys.read(tmp_path / "none")


@pytest.fixture(scope="module")
def running():
    with served(keys=Keys([KEY, OTHER])) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
        [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")],
    ],
    ids=range(8),
)
def test_without_a_key_nothing_is_answered(running, headers):
    before = len(running.engine.seen)
    for method, path in [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1//models"),
        ("GET", "/playground"),
        ("GET", "/nothing"),
    ]:
        response = httpx.request(method, running.url + path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert len(running.engine.seen) == before


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_with_a_key_all_is_answered_and_under_any_name(running, key):
    headers = {"Authorization": f"bearer {key}", "Host": "models.example"}
    assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{running.url}/metrics", headers=headers).status_code == 200
    body = {"prompt": "w9", "max_tokens": 2}
    made = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers)
    assert made.status_code == 200


def test_the_page_and_whether_it_is_alive_need_no_key(running):
    for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/playground/style.css"):
        assert httpx.get(running.url + path).status_code == 200, path


def test_logs_are_json_and_have_neither_prompts_nor_keys(running, caplog):
    with caplog.at_level(logging.DEBUG):
        secret = {"messages": [{"role": "user", "content": "w42 w43"}], "max_tokens": 2}
        path = f"{running.url}/v1/chat/completions?key={KEY}"
        made = httpx.post(path, json=secret, headers={"Authorization": f"Bearer {KEY}"})
        httpx.post(path, json=secret, headers={"Authorization": f"Bearer {KEY}x"})
        httpx.get(f"{running.url}/health")
    ours = [record for record in caplog.records if record.name.startswith(("buddy", "uvicorn"))]
    lines = [
        json.loads(record.getMessage()) for record in ours if record.name == "buddy.serving.access"
    ]
    # The line of an earlier test's page may come late.
    lines = [line for line in lines if line["path"] == "/v1/chat/completions"]
    assert [line["status"] for line in lines] == [200, 401]
    assert lines[0]["id"] == made.headers["x-request-id"]
    assert lines[0]["bytes"] == len(made.content)
    text = "\n".join(record.getMessage() for record in ours)
    assert KEY not in text
    assert "w42" not in text
    assert made.json()["choices"][0]["message"]["content"].split()[0] not in text


def test_pages_of_an_allowed_origin_may_ask_and_others_may_not():
    with served(keys=Keys(["k" * 16]), origins=("https://chat.example",)) as running:
        path = f"{running.url}/v1/chat/completions"
        asks = {"Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        ours = httpx.options(path, headers={"Origin": "https://chat.example", **asks})
        assert ours.status_code == 200
        assert ours.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in ours.headers["access-control-allow-headers"]
        other = httpx.options(path, headers={"Origin": "https://other.example", **asks})
        assert other.status_code == 400
        refused = httpx.post(path, json={}, headers={"Origin": "https://chat.example"})
        assert refused.status_code == 401  # a key is needed still, and the page may read so
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    with served() as running:
        made = httpx.get(f"{running.url}/v1/models", headers={"Origin": "https://chat.example"})
        assert "access-control-allow-origin" not in made.headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://*.example", ""]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ServingError, match="expected \\* or an origin"):
        check_origins([origin])
