"""The book in one file, made from the pages of the built site: `python _ext/onefile.py pdf|epub`.

Chromium opens every page without its scripts and hands over the article as XHTML: figures with frames show all frames,
and players their still. For the PDF it prints a few articles at once, and `joined` makes one document of the prints; the
EPUB has formulas in MathML. Code that a page folds is left out, and so are folds of the class `screen` and the pages of the API; links to them lead to the published site."""
import html
import os
import re
import shutil
import sys
import uuid
import zipfile
from datetime import datetime, timezone
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import joined  # noqa: E402
from landing import address, link_files, settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = "script, style, noscript, button, form, .headerlink, .doors, .downloads, .toctree-wrapper, details.hide, details.screen, path:not([d])"

# Returns the article of a page. Ids get the name of the page in front; links to pages of the book lead to such ids,
# all other links of the site to the published one.
EXTRACT = r"""([page, pages, published, leftOut]) => {
  const article = document.querySelector("article.bd-article"), root = location.href.slice(0, -`${page}.html`.length);
  const slug = name => name.replaceAll("/", "-"), own = id => `${slug(page)}.${id.replace(/[^\w.-]/g, "_")}`;
  const lists = ["for", "headers", "aria-labelledby", "aria-describedby", "aria-controls"];
  article.querySelectorAll(leftOut).forEach(e => e.remove());
  article.querySelectorAll("details").forEach(e => { e.open = true; });
  const seen = new Set();
  for (const e of article.querySelectorAll("*"))
    for (const {name, value} of [...e.attributes]) {
      if (name === "id" && seen.has(value)) e.removeAttribute("id");
      else if (name === "id") { seen.add(value); e.id = own(value); }
      else if (lists.includes(name)) e.setAttribute(name, value.split(/\s+/).map(own).join(" "));
      else if (name.endsWith("href") && value.startsWith("#") && e.localName !== "a") e.setAttribute(name, "#" + own(value.slice(1)));
      else if (value.includes("url(#")) e.setAttribute(name, value.replace(/url\(#([^)]*)\)/g, (all, id) => `url(#${own(id)})`));
    }
  for (const a of article.querySelectorAll("a[href]"))
    if (a.href.startsWith(root)) {
      const rest = a.href.slice(root.length), [file, anchor] = rest.split("#"), name = file.replace(/\.html$/, "");
      const id = anchor && "." + decodeURIComponent(anchor).replace(/[^\w.-]/g, "_");
      a.setAttribute("href", pages.includes(name) ? `#${slug(name)}${id || ""}` : published + rest);
    }
  article.querySelectorAll("img").forEach(image => image.setAttribute("src", image.src.slice(root.length)));
  article.id = slug(page);
  return {page, slug: article.id, title: article.querySelector("h1").textContent.trim(), text: new XMLSerializer().serializeToString(article),
          sheets: [...document.querySelectorAll("link[rel=stylesheet]")].map(sheet => sheet.getAttribute("href"))}; }"""

SHEET = """@page { size: A4; margin: 18mm; @bottom-center { content: counter(page); font-size: 8px; } }
html { font-size: 11pt; }
body { background: #fff; color: #000; }
*:not(#_) { box-shadow: none !important; border-radius: 0 !important; }    /* Chromium prints shadows and round corners as images */
.bd-content { display: block; }
.bd-article { padding: 0 !important; max-width: none; }
.part, .bd-article { break-before: page; }
.part { padding-top: 30%; text-align: center; }
.bd-article div.highlight pre, .bd-article div.cell_output pre { font-size: 0.68rem; }
.bd-article :is(p, ul, ol, dl) { max-width: none !important; }
h1, h2, h3, h4, h5, h6 { break-after: avoid; white-space: pre-wrap; }    /* the outline keeps the space where a line breaks */ .cell_input, tr { break-inside: avoid; }
.frames { display: grid; grid-template-columns: 1fr 1fr; gap: 0.5rem; }
.bd-article img, .drawing svg { max-width: 100%; height: auto; }
"""


class FileError(RuntimeError):
    "The file cannot be made; the message names the cause and the remedy."


def parts(toc: Path) -> list[tuple[str, list[str]]]:
    "Titles of the parts with their pages; the first has no title and holds the first page. Without the API."
    book = yaml.safe_load(toc.read_text())
    found = [("", [book["root"]])]
    for part in book["parts"]:
        names = [chapter["file"] for chapter in part["chapters"] if not chapter["file"].startswith("api/")]
        if names:
            found.append((part["caption"], names))
    return found


def articles(browser, site: Path, names: list[str]) -> list[dict]:
    "The articles of pages: page, slug, title, text in XHTML, style sheets. A link to an id that was left out leads to its page."
    found, page = [], browser.new_page(java_script_enabled=False)
    for name in names:
        page.goto((site / f"{name}.html").resolve().as_uri(), wait_until="domcontentloaded")
        found.append(page.evaluate(EXTRACT, [name, names, address(settings(ROOT)), LEFT_OUT]))
    page.close()
    ids = {id for one in found for id in re.findall(r'\bid="([^"]+)"', one["text"])}
    for one in found:
        one["text"] = re.sub(r'href="#([^".]+)(\.[^"]*)?"', lambda m: m[0] if m[1] + (m[2] or "") in ids else f'href="#{m[1]}"', one["text"])
    return found


def contents(chosen: list[tuple[str, list[str]]], of: dict[str, dict], link: str) -> str:
    "The table of contents as nested lists."
    def items(names): return "".join(f'<li><a href="{link.format(of[name]["slug"])}">{html.escape(of[name]["title"])}</a></li>' for name in names)
    return "<ol>" + "".join(f"<li><span>{html.escape(title)}</span><ol>{items(names)}</ol></li>" if title else items(names) for title, names in chosen) + "</ol>"


ELSEWHERE = "https://elsewhere.invalid/#"     # a link to another print of the same book; no site has this name
AT_ONCE = 12                                 # pages of the site in one print: memory stays small


def spoken(text: str) -> str:
    "A text whose formulas are images for a screen reader, described by their TeX."
    text = re.sub(r"<mjx-assistive-mml.*?</mjx-assistive-mml>", "", text, flags=re.S)
    text = re.sub(r'(<mjx-math [^>]*?) aria-hidden="true"', r"\1", text)
    return re.sub(r'(<(?:span|div) class="math [^>]*?)data-tex="([^"]*)"', r'\1role="img" aria-label="\2"', text)


def prints(chosen: list[tuple[str, list[str]]], of: dict[str, dict]) -> list[tuple[str, list[str]]]:
    "What is printed at once: slugs and HTML of a few articles; the first print has the contents, the first of a part its title."
    first, *rest = chosen
    told = f'<div class="bd-article"><section><h1>Contents</h1>{contents(rest, of, "#{}")}<p>Code that the pages of the site fold is left out here.</p></section></div>'
    found = [([of[name]["slug"] for name in first[1]], "".join(of[name]["text"] for name in first[1]) + told)]
    for title, names in rest:
        for start in range(0, len(names), AT_ONCE):
            some = names[start:start + AT_ONCE]
            deeper = [re.sub(r"(</?h)([1-5])\b", lambda m: m[1] + str(int(m[2]) + 1), of[name]["text"]) for name in some]
            head = "" if start else f'<h1 class="part">{html.escape(title)}</h1>'
            found.append(([of[name]["slug"] for name in some], head + "".join(deeper)))
    return found


def make_pdf(browser, site: Path, chosen: list[tuple[str, list[str]]], target: Path) -> Path:
    "Print the pages, a few at once, and join the prints to one document with outline, page numbers, links and tags."
    found = articles(browser, site, [name for _, names in chosen for name in names])
    sheets = list(dict.fromkeys(re.sub(r"^(\.\./)+", "", sheet) for one in found for sheet in one["sheets"]))
    parts = prints(chosen, {one["page"]: {**one, "text": spoken(one["text"])} for one in found})
    where = {slug: number for number, (slugs, _) in enumerate(parts) for slug in slugs}
    links = [re.findall(r'href="#([^"]+)"', body) for _, body in parts]
    whole, book = site / "onefile.html", joined.Book()
    for number, (slugs, body) in enumerate(parts):
        body = re.sub(r'href="#(([^".]+)[^"]*)"', lambda m: m[0] if where.get(m[2], number) == number else f'href="{ELSEWHERE}{m[1]}"', body)
        asked = sorted({link for other, those in enumerate(links) if other != number for link in those if where.get(link.split(".")[0]) == number})
        whole.write_text(f'<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>{html.escape(found[0]["title"])}</title>'
                         + "".join(f'<link rel="stylesheet" href="{sheet}">' for sheet in sheets) + f"<style>{SHEET}html {{ counter-reset: page {book.count}; }}</style></head>"
                         f'<body><div class="bd-content">{body}</div><div hidden>{"".join(f"""<a href="#{link}"></a>""" for link in asked)}</div></body></html>')
        page = browser.new_page(reduced_motion="reduce")
        page.set_default_timeout(0)
        try:
            page.goto(whole.resolve().as_uri())
            book.append(page.pdf(outline=True, tagged=True, print_background=True, prefer_css_page_size=True), ELSEWHERE, below='class="part"' not in body and number > 0)
        finally:
            page.close()
            whole.unlink()
    book.write(target, found[0]["title"])
    return target


SET = re.compile(r'<mjx-container.*?<mjx-assistive-mml[^>]*>(<math.*?</math>)</mjx-assistive-mml></mjx-container>', re.S)


def mathml(text: str) -> str:
    "A text with its formulas in the MathML that stands beside the set form for screen readers."
    return re.sub(r' data-tex="[^"]*"', "", SET.sub(lambda m: re.sub(r' data-[\w-]+="[^"]*"', "", m[1]), text))


XHTML = ('<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" '
         'lang="en" xml:lang="en"><head><title>{}</title><link rel="stylesheet" href="book.css"/></head><body>{}</body></html>')
READER = """pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.75em; }
img, svg { max-width: 100%; height: auto; }
figure { margin: 1em 0; }
figcaption { font-size: 0.9em; }
table { border-collapse: collapse; }
th, td { padding: 0.1em 0.5em; text-align: left; }
.eqno { float: right; }
.frame { break-inside: avoid; }
.admonition { border-left: 3px solid #0072b2; padding-left: 1em; }
"""


def make_epub(browser, site: Path, chosen: list[tuple[str, list[str]]], target: Path) -> Path:
    "Write the pages as an EPUB 3: formulas in MathML, images beside them, the table of contents as navigation."
    about = settings(ROOT)
    found = articles(browser, site, [name for _, names in chosen for name in names])
    files, items, spine = {"book.css": READER}, ['<item id="css" href="book.css" media-type="text/css"/>'], []
    for one in found:
        text = mathml(one["text"])
        for image in sorted(set(re.findall(r'<img [^>]*src="([^"]+)"', text))):
            name = image.replace("/", "-").lstrip("_")
            text = text.replace(f'src="{image}"', f'src="{name}"')
            if name not in files:
                files[name] = (site / image).read_bytes()
                items.append(f'<item id="image{len(files)}" href="{name}" media-type="image/{"svg+xml" if name.endswith("svg") else name.rsplit(".")[-1]}"/>')
        kinds = " ".join(kind for kind in ("mathml", "svg") if f"<{kind.replace('ml', '')}" in text)
        files[f"{one['slug']}.xhtml"] = XHTML.format(html.escape(one["title"]), re.sub(r'href="#([^".]+)', r'href="\1.xhtml#\1', text))
        items.append(f'<item id="{one["slug"]}" href="{one["slug"]}.xhtml" media-type="application/xhtml+xml"' + (f' properties="{kinds}"' if kinds else "") + "/>")
        spine.append(f'<itemref idref="{one["slug"]}"/>')
    title = html.escape(found[0]["title"])
    listed = contents(chosen, {one["page"]: one for one in found}, "{}.xhtml")
    files["nav.xhtml"] = XHTML.format(title, f'<nav epub:type="toc"><h1>Contents</h1>{listed}</nav>')
    items.append('<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>')
    files["content.opf"] = (
        '<?xml version="1.0" encoding="utf-8"?>\n<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="en">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, address(about))}</dc:identifier>'
        f'<dc:title>{title}</dc:title><dc:creator>{html.escape(about["author"])}</dc:creator><dc:language>en</dc:language>'
        f'<meta property="dcterms:modified">{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}</meta></metadata>'
        f'<manifest>{"".join(items)}</manifest><spine>{"".join(spine)}</spine></package>')
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        book.writestr("META-INF/container.xml", '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
                      '<rootfile full-path="content.opf" media-type="application/oebps-package+xml"/></rootfiles></container>')
        for name, content in files.items():
            book.writestr(name, content)
    return target


def main(kind: str):
    "Make the file beside the first page of the site, and link it there."
    from playwright.sync_api import sync_playwright
    site = ROOT / "build" / "book" / "_build" / "html"
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        raise FileError("no Chromium found; install Chromium, or set CHROMIUM to its program file")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        target = MAKERS[kind](browser, site, parts(ROOT / "_toc.yml"), site / f"rvnnbook.{kind}")
        browser.close()
    link_files(site)
    print(f"{target.stat().st_size / 1e6:.1f} MB in {target}")


MAKERS = {"pdf": make_pdf, "epub": make_epub}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in MAKERS:
        sys.exit("usage: python _ext/onefile.py pdf|epub")
    try:
        main(sys.argv[1])
    except FileError as error:
        sys.exit(f"onefile: {error}")
