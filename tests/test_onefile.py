"""The book as PDF and EPUB: outline, page numbers, links, stills of players; three pages in `make test`, the book in `make test-long`."""
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from html import unescape

import pypdf
import pytest

from tests.browsing import ROOT
from tests.test_site import SITE, built  # noqa: F401

sys.path.insert(0, str(ROOT / "_ext"))
import landing  # noqa: E402
import onefile  # noqa: E402

THREE = [("", ["index"]), ("First part", ["nbs/play"]), ("Second part", ["nbs/recursive_networks", "nbs/crvnn"])]
WHOLE = onefile.parts(ROOT / "_toc.yml")
SIZES = [pytest.param(THREE, id="three pages"), pytest.param(WHOLE, marks=pytest.mark.long, id="whole book")]
X, OPF = "{http://www.w3.org/1999/xhtml}", "{http://www.idpf.org/2007/opf}"


def pages_of(chosen):
    return [name for _, names in chosen for name in names]


def squeezed(text):
    "Without spaces, which are lost where lines break."
    return "".join(text.split())


def title(name):
    "The first heading of a page of the site."
    return shown(re.search(r"<article.*?<h1>(.*?)</h1>", (SITE / f"{name}.html").read_text(), re.S)[1])


def numbered(page):
    "The number at the foot of a page of the PDF, and the text above it; the number is written first."
    number, _, text = page.extract_text().lstrip().partition("\n")
    return number, text


def shown(text):
    return squeezed(unescape(re.sub(r"<a class=.headerlink.*?</a>|<[^>]+>", "", text)))


def labels(name):
    "The labels of all frames of a page."
    return [unescape(label) for label in re.findall(r'class="frame-label"[^>]*>([^<]+)<', (SITE / f"{name}.html").read_text())]


@pytest.fixture(scope="module", params=SIZES)
def pdf(request, browser, built, tmp_path_factory):    # noqa: F811
    path = onefile.make_pdf(browser, SITE, request.param, tmp_path_factory.mktemp("pdf") / "book.pdf")
    return request.param, pypdf.PdfReader(path)


@pytest.fixture(scope="module", params=SIZES)
def epub(request, browser, built, tmp_path_factory):    # noqa: F811
    return request.param, onefile.make_epub(browser, SITE, request.param, tmp_path_factory.mktemp("epub") / "book.epub")


def test_outline_has_parts_with_chapters_with_sections(pdf):
    chosen, book = pdf
    entries, found, chapters = book.outline, {}, {}
    for entry, below in zip(entries, [*entries[1:], None]):
        if not isinstance(entry, list):
            found[entry.title] = below if isinstance(below, list) else []
    assert list(found)[2:] == [part for part, _ in chosen[1:]]
    for part, names in chosen[1:]:
        inside = found[part]
        heads = [entry for entry in inside if not isinstance(entry, list)]
        assert [squeezed(entry.title) for entry in heads] == [title(name) for name in names]
        chapters |= {name: book.get_destination_page_number(entry) for name, entry in zip(names, heads)}
        assert any(isinstance(entry, list) for entry in inside)
    assert list(chapters.values()) == sorted(set(chapters.values()))
    for name, number in chapters.items():
        assert squeezed(numbered(book.pages[number])[1]).startswith(title(name)), name


def test_every_page_of_the_pdf_has_its_number(pdf):
    _, book = pdf
    assert [numbered(page)[0] for page in book.pages] == [str(number) for number in range(1, len(book.pages) + 1)]


def test_the_pdf_is_small(pdf):
    chosen, book = pdf
    images = [image for page in book.pages for image in (page["/Resources"].get("/XObject") or {}).values() if image.get_object().get("/Subtype") == "/Image"]
    assert book.stream.getbuffer().nbytes <= (3_000_000 if chosen is THREE else 25_000_000)
    assert len(images) < len(book.pages) / 4, "shadows and round corners are printed as images"


def test_the_pdf_is_tagged(pdf):
    chosen, book = pdf
    tags = book.root_object["/StructTreeRoot"]
    nums = tags["/ParentTree"]["/Nums"]
    owners = {nums[at]: nums[at + 1] for at in range(0, len(nums), 2)}
    assert list(owners) == sorted(owners) and len(tags["/K"]["/K"]) >= len(chosen)
    kinds, depths = Counter(), {}

    def depth(element):
        "How far an element lies below the root; its parent has to list it."
        if element.get("/S") == "/Document":
            return 0
        place = element.indirect_reference.idnum
        if place not in depths:
            kinds[element["/S"]] += 1
            assert place in {getattr(kid, "idnum", None) for kid in list(element["/P"]["/K"])}
            assert element["/S"] != "/Figure" or element.get("/Alt") or all(isinstance(kid.get_object(), dict) for kid in element["/K"]), "a drawing is described, or its parts are"
            depths[place] = 1 + depth(element["/P"])
        return depths[place]

    for page in book.pages:
        elements = owners[page["/StructParents"]].get_object()
        assert len(elements) and all(depth(one.get_object()) > 0 for one in elements)
    assert kinds["/H1"] >= len(chosen) and kinds["/H2"] >= len(pages_of(chosen)) - 1 and kinds["/Figure"] > 50 and kinds["/P"] > 100


def test_links_of_the_pdf_have_targets(pdf):
    chosen, book = pdf
    inner, outer, places = [], set(), book.named_destinations
    for page in book.pages:
        for link in (note.get_object() for note in page.get("/Annots") or []):
            if "/Dest" in link:
                inner.append(link["/Dest"])
            else:
                outer.add(link["/A"]["/URI"])
    assert not [place for place in inner if place not in places]
    assert {"/" + name.replace("/", "-") for name in pages_of(chosen)[1:]} <= set(inner), "the contents link every page"
    assert not [address for address in outer if not address.startswith(("https://", "http://"))]
    assert any(address.startswith(landing.address(landing.settings(ROOT))) for address in outer), "pages that were left out"


def test_players_are_stills_and_formulas_are_set(pdf):
    chosen, book = pdf
    text = squeezed("".join(page.extract_text() for page in book.pages))
    frames = [label for name in pages_of(chosen) for label in labels(name)]
    assert len(frames) > 3 and not [label for label in frames if squeezed(label) not in text]
    assert "ThetreethatCRvNNhascomposedsofar" in text and "ComputeRandomexpression" not in text
    if chosen is THREE:    # other pages have such code
        assert "\\(" not in text and "\\mathrm" not in text


def test_epub_is_complete(epub):
    chosen, path = epub
    with zipfile.ZipFile(path) as book:
        first = book.infolist()[0]
        assert (first.filename, first.compress_type, book.read("mimetype")) == ("mimetype", zipfile.ZIP_STORED, b"application/epub+zip")
        package = ET.fromstring(book.read("content.opf"))
        listed = {item.get("href") for item in package.iter(f"{OPF}item")}
        assert listed == set(book.namelist()) - {"mimetype", "META-INF/container.xml", "content.opf"}
        assert [item.get("idref") for item in package.iter(f"{OPF}itemref")] == [name.replace("/", "-") for name in pages_of(chosen)]
        texts = {name: ET.fromstring(book.read(name)) for name in listed if name.endswith(".xhtml")}
    ids = {name: {e.get("id") for e in tree.iter() if e.get("id")} for name, tree in texts.items()}
    formulas = 0
    for name, tree in texts.items():
        for link in (e.get("href") for e in tree.iter(f"{X}a")):
            if link and "://" not in link:
                file, _, place = link.partition("#")
                assert file in ids and (not place or place in ids[file]), f"{link} in {name}"
        assert not list(tree.iter(f"{X}script")) and not list(tree.iter(f"{X}button"))
        math = [e for e in tree.iter() if "math" in (e.get("class") or "").split() and e.tag in (f"{X}span", f"{X}div")]
        formulas += len(math)
        assert all(any(child.tag.endswith("}math") for child in e.iter()) for e in math), name
    assert formulas > 10
    words = "".join(texts["nbs-crvnn.xhtml"].itertext())
    assert labels("nbs/crvnn") and all(label in words for label in labels("nbs/crvnn"))


@pytest.mark.long
def test_epubcheck_finds_nothing(epub):
    program = shutil.which("epubcheck")
    if program is None:
        pytest.skip("epubcheck is not installed")
    command = ["java", "-jar", program] if zipfile.is_zipfile(program) else [program]
    done = subprocess.run([*command, epub[1]], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_first_page_links_the_files_that_exist(tmp_path):
    (tmp_path / "index.html").write_text('<h1>t</h1><p class="downloads"></p>')
    landing.link_files(tmp_path)
    assert "href" not in (tmp_path / "index.html").read_text()
    (tmp_path / "rvnnbook.pdf").write_bytes(b"x" * 3_200_000)
    for _ in range(2):
        landing.link_files(tmp_path)
    assert (tmp_path / "index.html").read_text() == '<h1>t</h1><p class="downloads">The book in one file: <a href="rvnnbook.pdf">PDF</a> (3 MB)</p>'
