"""The search: what it indexes, and how it ranks and shows pages in a real browser, opened from the disk."""
import csv
import json
import re
import shutil
import sys

import pytest
from docutils import nodes

from tests.browsing import ROOT

sys.path.insert(0, str(ROOT / "_ext"))
import finder  # noqa: E402

PAGES = {  # page -> kind, title, names, sections
    "nbs/halting": ("Chapter", "Dynamic halting", ["halting"], [["", "Dynamic halting", "A model stops when <b> nothing & nobody is left."],
                                                                ["limits", "Limits of layers", "The number of layers has a limit."]]),
    "nbs/crvnn": ("Chapter", "Continuous recursion", ["CRvNN", "modulated sigmoid"], [["", "Continuous recursion", "Halting is one part: halting halting halting."]]),
    "api/halting": ("Library", "halting", [], [["", "halting", ""], ["create_encoder", "create_encoder", "Make an encoder that is halting."]]),
    "nbs/implementations/registry": ("Implementation", "Registry", ["create_encoder"], [["", "Registry", "A table of encoders, each with an alias."]]),
}


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    "The search page with an index of four pages, opened from the disk; nothing may go wrong in it."
    made, wrong = tmp_path_factory.mktemp("search"), []
    (made / "_static").mkdir()
    for name in ("search.js", "search.css"):
        shutil.copy(ROOT / "_assets" / name, made / "_static")
    pages = [{"url": f"{page}.html", "kind": kind, "title": title, "names": names, "sections": sections} for page, (kind, title, names, sections) in PAGES.items()]
    (made / "_static" / "search-index.js").write_text(finder.index_script(pages, [["stopping", "halting"]]))
    form = re.search(r"<article.*</article>", (ROOT / "_ext" / "templates" / "search.html").read_text(), re.S)[0]
    form = re.sub(r"\{\{ pathto\('([^']*)'\) \}\}", r"\1.html", form)
    (made / "search.html").write_text('<!doctype html><html lang="en"><head><meta charset="utf-8"><title>t</title><link rel="icon" href="data:,"><link rel="stylesheet" href="_static/search.css">'
                                      '<script defer src="_static/search-index.js"></script><script defer src="_static/search.js"></script></head>'
                                      f"<body><main>{form}</main></body></html>")
    page = browser.new_context().new_page()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((made / "search.html").as_uri() + "?q=halting")
    yield page
    page.context.close()
    assert wrong == []


def found(page, words):
    "Titles in order, for words typed into the field and sent."
    page.get_by_label("Words").fill(words)
    page.keyboard.press("Enter")
    return page.eval_on_selector_all(".search-results > li > a", "links => links.map(a => a.textContent)")


def test_the_query_of_the_address_is_answered(opened):
    assert opened.get_by_label("Words").input_value() == "halting"
    assert opened.locator(".search-results > li").count() == 3
    assert opened.locator("[role=status]").inner_text() == "3 pages"


def test_a_chapter_named_by_the_query_stands_before_the_function_of_that_name(opened):
    assert found(opened, "halting") == ["Dynamic halting", "halting", "Continuous recursion"]
    assert found(opened, "create_encoder")[:2] == ["Registry", "halting"]


def test_names_synonyms_and_endings(opened):
    assert found(opened, "crvnn") == ["Continuous recursion"]
    assert found(opened, "Modulated sigmoids")[0] == "Continuous recursion"
    assert found(opened, "stopping")[0] == "Dynamic halting"
    assert found(opened, "encoder")[0] == "Registry"


def test_a_word_that_is_being_typed_finds_what_begins_with_it(opened):
    opened.get_by_label("Words").fill("ali")
    assert opened.locator(".search-results > li > a").all_inner_texts() == ["Registry"]


def test_the_filter_shows_one_kind_and_counts_all(opened):
    found(opened, "halting")
    assert opened.locator(".search-kinds label").all_inner_texts()[:2] == ["All (3)", "Chapter (2)"]
    opened.get_by_label("Library (1)").check()
    assert opened.locator(".search-results > li > a").all_inner_texts() == ["halting"]
    opened.get_by_label("All (3)").check()


def test_hits_are_marked_and_links_lead_to_sections(opened):
    found(opened, "limits layers")
    first = opened.locator(".search-results > li").first
    assert first.locator("ul a").get_attribute("href") == "nbs/halting.html?highlight=limits%20layers#limits"
    assert first.locator("mark").all_inner_texts() == ["layers", "limit"]
    found(opened, "nobody")
    assert "<b> nothing & nobody" in opened.locator(".search-results p").first.inner_text()


def test_nothing_found_is_said(opened):
    assert found(opened, "zzzz <i>") == []
    assert opened.locator("[role=status]").inner_text() == "Nothing found for “zzzz <i>”."


def test_an_index_cannot_end_its_script():
    script = finder.index_script([{"title": "</script><script>"}], [])
    assert "</script" not in script and json.loads(script.removeprefix("window.rvnnIndex=").rstrip(";\n"))["pages"][0]["title"] == "</script><script>"


def test_sections_hold_prose_and_captions_but_no_code_and_no_formulas():
    text = nodes.paragraph("", "", nodes.Text("We use "), nodes.literal("", "fit"), nodes.math("", r"\alpha"), nodes.Text("."))
    code, shown = nodes.literal_block("", "import os"), nodes.raw("", "<figure><svg>x</svg><figcaption>A <b>tree</b>.</figcaption></figure>", format="html")
    inner = nodes.section("", nodes.title("", "Inner"), nodes.paragraph("", "deep"), ids=["inner"])
    document = nodes.section("", nodes.title("", "Page"), text, code, shown, inner, ids=["page"])
    top = nodes.container("", document)
    assert finder.sections_of(top) == [["", "Page", "We use fit. A tree."], ["inner", "Inner", "deep"]]


def test_the_tables_of_the_search_name_pages_that_exist():
    with (ROOT / "_ext" / "search_names.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["page"] for row in rows}) == len(rows)
    assert not [row["page"] for row in rows if not list(ROOT.glob(row["page"] + ".*"))]
    assert all(len(group) > 1 and all(group) for group in finder.synonyms(ROOT / "_ext" / "synonyms.txt"))
    names = finder.names_of_pages(ROOT / "nbs" / "glossary.csv", ROOT / "_ext" / "search_names.csv")
    assert "beam search" in names["nbs/beam_tree"] and "CRvNN" in names["nbs/crvnn"]
