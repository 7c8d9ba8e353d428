"""What the tests that need a browser share: a page server, what to do where there is no browser, going through a stepper."""
import contextlib
import functools
import http.server
import os
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


def missing(what, remedy):
    "Skip, or fail where a browser is required."
    message = f"{what}; remedy: {remedy}"
    pytest.fail(message) if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip(message)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@contextlib.contextmanager
def serving(folder, handler=Quiet):
    "The folder on a free port of the loopback interface."
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def seen(page, name):
    "The label of the frame of a stepper that is visible now; the spoken labels have to agree."
    shown, *spoken = page.evaluate("""name => {
        const figure = document.getElementById(name), visible = f => f.checkVisibility({visibilityProperty: true}) && f.getBoundingClientRect().height > 0;
        return [[...figure.querySelectorAll(".frame")].filter(visible).map(f => f.querySelector(".frame-label").textContent),
                figure.querySelector("output[aria-live=polite]").textContent, figure.querySelector("input[type=range]").getAttribute("aria-valuetext")]; }""", name)
    assert [*shown, *shown] == spoken
    return shown[0]


def turn_through(page, name):
    "Go through a stepper by keys, by dragging, by its buttons and by Play."
    figure = page.locator(f"#{name}")
    labels = page.eval_on_selector_all(f"#{name} .frame-label", "labels => labels.map(e => e.textContent)")
    slider = figure.get_by_role("slider", name="frame")
    back, play, on = (figure.get_by_role("button", name=said, exact=True) for said in ("Back", "Play", "Forward"))
    assert len(labels) >= 2 and seen(page, name) == labels[0] and back.is_disabled()
    slider.scroll_into_view_if_needed()
    slider.focus()
    for key, at in (("ArrowRight", 1), ("Home", 0), ("End", -1), ("ArrowLeft", -2)):
        page.keyboard.press(key)
        assert seen(page, name) == labels[at], key
    page.keyboard.press("Home")
    place = slider.bounding_box()
    page.mouse.move(place["x"] + 4, place["y"] + place["height"] / 2)
    page.mouse.down()
    page.mouse.move(place["x"] + place["width"] + 5, place["y"] + place["height"] / 2, steps=10)
    page.mouse.up()
    assert seen(page, name) == labels[-1] and on.is_disabled(), "dragged to the end"
    back.click()
    assert seen(page, name) == labels[-2]
    on.click()
    assert seen(page, name) == labels[-1]
    page.evaluate("""name => {
        const output = document.querySelector(`#${name} output`);
        window.heard = [];
        new MutationObserver(() => heard.push(output.textContent)).observe(output, {childList: true}); }""", name)
    play.click()
    page.wait_for_function("window.heard.length > 1")
    assert page.evaluate("window.heard.slice(0, 2)") == labels[:2], "Play goes on by one, from the first frame"
    page.evaluate("name => document.querySelector(`#${name} button[aria-label=Pause]`)?.click()", name)    # two frames end by themselves
    assert play.count() == 1


def accessibility(page, theme):
    "What axe-core finds serious or critical on a page in the light or the dark, as sentences."
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate((ROOT / "node_modules" / "axe-core" / "axe.min.js").read_text())
    found = page.evaluate("""theme => {
        document.documentElement.style.setProperty("transition", "none");
        document.documentElement.dataset.theme = document.documentElement.dataset.mode = theme;
        const rules = Object.fromEntries(["label-content-name-mismatch", "skip-link"].map(rule => [rule, {enabled: true}]));
        return axe.run(document, {resultTypes: ["violations"], rules}); }""", theme)["violations"]
    return [f"{theme}: {rule['id']}, {len(rule['nodes'])} times, as in {rule['nodes'][0]['html'][:120]} at {rule['nodes'][0]['target']}"
            for rule in found if rule["impact"] in ("serious", "critical") or rule["id"] == "heading-order"]
