"""The page in a browser: what it shows is what ran, with a mouse, by keys alone, and at 400 px."""

import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from buddy.serving.http.auth import Keys
from tests.product.serving.scripted import AUTO_BLOCKS, DEADLINE_BLOCKS, NUM_BLOCKS
from tests.product.serving.serving import served, until

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

# In each column, how many cells there are, and how many of them are lit.
COLUMNS = """pane => [...document.querySelectorAll(`[data-pane=${pane}] .column`)].map(
    column => [column.childElementCount, column.querySelectorAll("i.ran").length])"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running():
    with served(step_s=0.01) as running:
        yield running


@contextmanager
def opened(browser, url, width=1280, scheme="light", allowed=()):
    """The page, which must log no error but those allowed."""
    context = browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme=scheme, reduced_motion="reduce"
    )
    page, wrong = context.new_page(), []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    try:
        yield page
        assert [line for line in wrong if not any(text in line for text in allowed)] == []
    finally:
        context.close()


def ask(page, text="w10 w11", tokens=20):
    """Send a message, and wait for the whole answer."""
    page.get_by_label("Tokens", exact=True).fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Send").wait_for()


def test_each_column_has_exactly_the_budgets_cells_lit(browser, running):
    with opened(browser, running.url) as page:
        page.locator(".fraction .slider").fill("11")
        ask(page)
        assert page.evaluate(COLUMNS, "A") == [[NUM_BLOCKS, 11]] * 20
        assert page.locator(".depth-text").inner_text() == "20 tokens, 11.0 of 30 blocks each"
        figures = page.locator(".figures").inner_text()
        assert "220" in figures
        assert "37 %" in figures
        assert "11 blocks, fixed" in figures
        # Lit from the bottom up, as the runs of the engine say.
        first = page.evaluate("[...document.querySelector('.column').children].map(c=>c.className)")
        ran = np.random.default_rng(0).permutation(NUM_BLOCKS)[:11]
        lit = [NUM_BLOCKS - 1 - place for place, name in enumerate(first) if name == "ran"]
        assert sorted(lit) == sorted(ran)
        colours = page.evaluate(
            "['i.ran', 'i:not(.ran)'].map(s => getComputedStyle(document.querySelector(s))"
            ".backgroundColor)"
        )
        assert colours[0] != colours[1]


def test_two_panes_run_at_two_budgets_and_go_on_with_their_own_conversations(browser, running):
    with opened(browser, running.url) as page:
        page.get_by_label("Compare two budgets").check()
        page.locator("[data-pane=A] .fraction .slider").fill("24")
        page.locator("[data-pane=B] .fraction .slider").fill("9")
        ask(page, "w10", 5)
        ask(page, "w12", 6)
        assert page.evaluate(COLUMNS, "A") == [[NUM_BLOCKS, 24]] * 6
        assert page.evaluate(COLUMNS, "B") == [[NUM_BLOCKS, 9]] * 6
        # The second question came with the first one and its answer.
        assert len(running.engine.seen[-1].prompt) == 1 + 5 + 1 + 1
        for pane in "AB":
            log = page.get_by_role("log", name=f"Conversation {pane}")
            assert log.locator(".said.assistant").count() == 2
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".said").count() == 0


# In the page itself: on a busy machine an answer may end before a click from outside arrives.
STOP_AT_FIRST_COLUMN = """pane => document.querySelector(`[data-pane=${pane}] .column`)
    && (document.getElementById("stop").click(), true)"""


def test_two_budgets_are_answered_one_after_the_other(browser, running):
    """Side by side they would share the machine, and their speeds would hardly differ."""
    with opened(browser, running.url) as page:
        page.get_by_label("Compare two budgets").check()
        chosen = page.locator(".fraction .chosen").all_inner_texts()
        assert chosen == ["30 of 30 (100 %)", "15 of 30 (50 %)"]
        page.get_by_label("Tokens", exact=True).fill("100")
        page.get_by_label("Message").fill("w10")
        page.get_by_role("button", name="Send").click()
        page.locator("[data-pane=A] .column").nth(10).wait_for()
        assert running.engine.in_flight == 1
        assert "Waits for answer A" in page.locator("[data-pane=B] .depth-text").inner_text()
        page.wait_for_function(STOP_AT_FIRST_COLUMN, arg="B")
        assert len(page.evaluate(COLUMNS, "A")) == 100
        page.get_by_role("button", name="Send").wait_for()
        assert len(page.evaluate(COLUMNS, "B")) < 100
        page.get_by_label("Message").fill("w11")
        seen = len(running.engine.seen)
        page.get_by_role("button", name="Send").click()
        page.wait_for_function(STOP_AT_FIRST_COLUMN, arg="A")  # B is not asked
        page.get_by_role("button", name="Send").wait_for()
        assert len(running.engine.seen) == seen + 1
        assert "A column for each token" in page.locator("[data-pane=B] .depth-text").inner_text()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_sample_is_one_click_and_gone_once_something_is_said(browser, running, width):
    with opened(browser, running.url, width=width) as page:
        samples = page.get_by_role("group", name="Sample questions").get_by_role("button")
        samples.first.wait_for()
        assert samples.count() == 4
        page.get_by_label("Tokens", exact=True).fill("3")
        question = samples.first.inner_text()
        samples.first.click()
        page.locator(".column").nth(2).wait_for()
        assert page.locator(".said.user .text").inner_text() == question
        assert not samples.first.is_visible()
        page.get_by_role("button", name="Send").wait_for()
        page.get_by_role("button", name="New chat").click()
        assert samples.first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_auto_and_deadline_budgets(browser, running):
    with opened(browser, running.url) as page:
        page.get_by_label("Auto", exact=True).check()
        ask(page, tokens=4)
        assert page.evaluate(COLUMNS, "A") == [[NUM_BLOCKS, AUTO_BLOCKS]] * 4
        page.get_by_label("Deadline", exact=True).check()
        page.get_by_label("Milliseconds for each token").fill("12.5")
        ask(page, tokens=4)
        assert running.engine.seen[-1].budget.ms_per_token == 12.5
        assert page.evaluate(COLUMNS, "A") == [[NUM_BLOCKS, DEADLINE_BLOCKS]] * 4


def test_a_mean_is_asked_for_within_what_the_ledger_spends(browser, running):
    with opened(browser, running.url) as page:
        page.get_by_label("Mean", exact=True).check()
        slider = page.get_by_label("Blocks for a token on average")
        assert (slider.get_attribute("min"), slider.get_attribute("max")) == ("15", "30")
        slider.fill("21")
        ask(page, tokens=4)
        assert running.engine.seen[-1].budget.mean == 21
        assert "up to 21 blocks, mean" in page.locator(".figures").inner_text()


def test_kinds_of_budgets_that_the_model_cannot_have_say_why(browser):
    with served(has_predictor=False, means=None) as running, opened(browser, running.url) as page:
        for kind, why in (("Auto", "has no Budget Predictor"), ("Mean", "has no ledger")):
            choice = page.get_by_label(kind, exact=True)
            assert choice.is_disabled()
            assert why in choice.locator("..").get_attribute("title")


def test_stop_cancels_and_keeps_what_was_said(browser, running):
    with opened(browser, running.url) as page:
        before = len(running.engine.cancelled)
        page.get_by_label("Tokens", exact=True).fill("200")
        page.get_by_label("Message").fill("w10")
        page.get_by_role("button", name="Send").click()
        page.locator(".column").nth(3).wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        until(lambda: len(running.engine.cancelled) == before + 1)
        assert running.engine.in_flight == 0
        assert page.locator(".said.assistant .text").inner_text().startswith("w")
        assert page.locator(".said.error").count() == 0


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(browser, running):
    with opened(browser, running.url) as page:
        page.locator(".fraction .slider").wait_for()

        def reach(selector):
            for _ in range(20):
                page.keyboard.press("Tab")
                if page.evaluate("s => document.activeElement.matches(s)", selector):
                    outline = "getComputedStyle(document.activeElement).outlineStyle"
                    return page.evaluate(outline)
            raise AssertionError(f"{selector} is not reached")

        assert reach(".skip") == "solid"
        assert reach("#compare") == "solid"
        page.keyboard.press("Space")
        reach("[data-pane=A] input[type=radio]")
        assert reach("[data-pane=A] .fraction .slider") == "solid"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        reach("#prompt")
        page.keyboard.type("w10 w11")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tokens", exact=True).fill("200")
        page.locator("#prompt").focus()
        page.keyboard.press("Enter")
        page.locator("[data-pane=A] .column").nth(2).wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Send").wait_for()
        assert page.evaluate("document.activeElement.id") == "prompt"
        columns = page.evaluate(COLUMNS, "A")
        assert columns == [[NUM_BLOCKS, 4]] * len(columns)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_400_px_are_enough(browser, running, scheme, path):
    with opened(browser, running.url + path, width=400, scheme=scheme) as page:
        page.locator(".pane, section").first.wait_for()
        if path == "/":
            page.get_by_label("Compare two budgets").check()
            ask(page, "w10 " * 30, 60)
            for name in ("Send", "New chat"):
                box = page.get_by_role("button", name=name).bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 400
        assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_colours_follow_the_system_and_text_has_contrast(browser, running):
    grounds = []
    for scheme in ("light", "dark"):
        with opened(browser, running.url, scheme=scheme) as page:
            page.locator(".fraction .slider").wait_for()
            ground, text, muted = page.evaluate(
                "[getComputedStyle(document.querySelector('.pane')).backgroundColor,"
                " ...['.empty', '.chosen'].map(s => getComputedStyle(document.querySelector(s))"
                ".color)]"
            )
            grounds.append(ground)
            assert contrast(ground, text) >= 4.5
            assert contrast(ground, muted) >= 4.5
    assert grounds[0] != grounds[1]


def contrast(first, second):
    """The contrast that WCAG 2 defines."""

    def luminance(colour):
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_control_has_a_name(browser, running):
    with opened(browser, running.url) as page:
        page.locator(".fraction .slider").wait_for()
        nameless = page.evaluate(
            "[...document.querySelectorAll('input, textarea, button')].filter(field =>"
            " !(field.labels?.length && field.labels[0].textContent.trim())"
            " && !field.textContent.trim()).length"
        )
        assert nameless == 0
        assert page.locator("html").get_attribute("lang") == "en"


def test_nothing_is_fetched_from_elsewhere_and_no_script_is_inline(browser, running):
    with opened(browser, running.url) as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        response = page.reload()
        page.locator(".fraction .slider").wait_for()
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert asked
        assert all(url.startswith(running.url) for url in asked)
        assert page.locator("script:not([src]), [onclick], [style]:not(#prompt)").count() == 0


def test_text_of_the_model_is_never_markup(browser, running):
    with opened(browser, running.url) as page:
        ask(page, "<img src=x onerror=alert(1)>", 2)
        assert page.locator(".log img").count() == 0
        assert "<img" in page.locator(".said.user .text").inner_text()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser):
    key = "a-key-of-some-length"
    with (
        served(keys=Keys([key])) as running,
        opened(browser, running.url, allowed=["401"]) as page,
    ):
        field = page.get_by_label("This server needs a key")
        field.fill("wrong-key-of-some-length")
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("needs a key", exact=True).wait_for()
        field.fill(key)
        page.get_by_role("button", name="Use it").click()
        page.locator(".fraction .slider").wait_for()
        assert not field.is_visible()
        ask(page, tokens=3)
        assert len(page.evaluate(COLUMNS, "A")) == 3
        page.reload()
        page.locator(".fraction .slider").wait_for()
        assert page.evaluate("localStorage.length") == 0


def test_what_the_server_refuses_is_shown(browser):
    with (
        served(max_rows=0, max_queue=0) as running,
        opened(browser, running.url, allowed=["429"]) as page,
    ):
        ask(page, tokens=3)
        said = page.locator(".said.error .text").inner_text()
        assert said == "the queue is full (try again in 3 s)"


def test_the_reference_lists_every_route(browser, running):
    with opened(browser, f"{running.url}/docs") as page:
        page.locator("#reference[aria-busy=false]").wait_for()
        headings = page.locator("h2").all_inner_texts()
        assert any("/v1/chat/completions" in heading for heading in headings)
        assert page.locator("code", has_text="repetition_penalty").count() == 2
