"""Steppers on a page, opened from the disk in a real browser: keys, buttons, labels; without scripts, in print, with reduced motion."""
import shutil

import pytest

from rvnnbook.show.steppers import stepper
from rvnnbook.show.trees import tree_drawing
from tests.browsing import ROOT, seen, turn_through

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>t</title><link rel="icon" href="data:,"><link rel="stylesheet" href="book.css"><link rel="stylesheet" href="player.css">
<script defer src="player.js"></script></head><body><main><article class="bd-article"><h1>h</h1>{figures}</article></main></body></html>"""
SIX = [2, 1, 3, 2, 1, 0]
LABELS = ["before round 1", *(f"after round {i} of 3" for i in (1, 2, 3))]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    "A page with two steppers, one of two frames."
    made = tmp_path_factory.mktemp("page")
    for name in ("player.js", "player.css", "book.css"):
        shutil.copy(ROOT / "_assets" / name, made)
    frames = [tree_drawing(SIX, "abcdef", upto=i) for i in range(4)]
    first = stepper(frames, labels=LABELS, name="fig-a", alt="A tree.", caption="A tree of six leaves: rounds.")
    second = stepper(frames[2:], name="fig-b", alt="A tree.", caption="Its last rounds.")
    (made / "page.html").write_text(PAGE.format(figures=first.html + second.html))
    return (made / "page.html").as_uri()


@pytest.fixture
def opened(browser, address):
    "A function that opens the page with options of a browser context."
    contexts, wrong = [], []

    def open_page(**options):
        contexts.append(browser.new_context(**{"viewport": {"width": 390, "height": 844}, **options}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def visible(page):
    return page.eval_on_selector_all("#fig-a .frame", "frames => frames.map(f => f.checkVisibility({visibilityProperty: true}))")


def test_keys_buttons_dragging_and_play(opened):
    page = opened()
    turn_through(page, "fig-a")
    turn_through(page, "fig-b")
    assert page.locator("#fig-a [role=group].player-steps").get_attribute("aria-label") == "Frames: A tree of six leaves"


def test_the_page_does_not_jump_when_frames_change(opened):
    page = opened()
    heights = []
    for _ in LABELS:
        heights.append(page.locator("#fig-a").bounding_box()["height"])
        page.locator("#fig-a").get_by_role("button", name="Forward").click(force=True)
    assert len(set(heights)) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hidden_frames_are_not_reached_by_tab(opened):
    page = opened()
    page.locator("#fig-a input").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('#fig-a .frame.now .drawing')")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('figure').id") == "fig-b"


def test_without_scripts_the_last_frame_shows(opened):
    page = opened(java_script_enabled=False)
    frames = page.locator("#fig-a .frame")
    assert [frames.nth(i).is_visible() for i in range(4)] == [False, False, False, True]
    assert page.locator("#fig-a .frame-label").last.inner_text() == LABELS[-1]


def test_a_stepper_in_a_folded_solution_stays_hidden(opened):
    page = opened()
    page.evaluate("document.querySelector('article').style.visibility = 'hidden'")
    assert visible(page) == [False] * 4 and not page.locator("#fig-a .player-steps").is_visible()


@pytest.mark.parametrize("scripts", [True, False])
def test_in_print_every_frame_shows_with_its_label(opened, scripts):
    page = opened(java_script_enabled=scripts)
    page.emulate_media(media="print")
    labels = page.locator("#fig-a .frame-label")
    assert [labels.nth(i).is_visible() for i in range(4)] == [True] * 4
    if scripts:
        assert visible(page) == [True] * 4 and not page.locator("#fig-a .player-steps").is_visible()


def test_reduced_motion_has_no_play_button(opened):
    page = opened(reduced_motion="reduce")
    assert page.get_by_role("button", name="Play").count() == 0
    page.locator("#fig-a").get_by_role("button", name="Forward").click()
    assert seen(page, "fig-a") == LABELS[1]
