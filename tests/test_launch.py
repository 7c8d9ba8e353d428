"""A book of two pages, built. Launch buttons: with a repository in _config.yml a page links Binder and Colab and shows Colab's first cell; without one it does neither."""
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import yaml

from tests.browsing import ROOT
from tests.test_site import BOOK, SITE, built  # noqa: F401

sys.path.insert(0, str(ROOT / "_ext"))
import launch  # noqa: E402

PAGE = "nbs/preface"
URL = "https://github.com/someone/somewhere"


@pytest.fixture(scope="module")
def page(built, tmp_path_factory):    # noqa: F811
    "The text of one notebook's page in a book of two, with a repository."
    folder = tmp_path_factory.mktemp("launch")
    book = folder / "book"
    shutil.copytree(BOOK, book, ignore=shutil.ignore_patterns("_build", "api", "*.ipynb", "weights"))
    shutil.copytree(ROOT / "_ext", book / "_ext", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(BOOK / f"{PAGE}.ipynb", book / f"{PAGE}.ipynb")
    shutil.copy(ROOT / "settings.ini", folder)
    (folder / "node_modules").symlink_to((ROOT / "node_modules").resolve())
    (book / "_toc.yml").write_text(f"format: jb-book\nroot: index\nchapters:\n  - file: {PAGE}\n")
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["repository"]["url"] == "" and config["repository"]["branch"] == "main"
    config["repository"]["url"] = URL
    (book / "_config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    done = subprocess.run([Path(sys.executable).with_name("jupyter-book"), "build", book], capture_output=True, text=True,
                          env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False)
    made = book / "_build" / "html"
    assert (made / f"{PAGE}.html").exists(), (done.stdout + done.stderr)[-3000:]
    return made, (made / f"{PAGE}.html").read_text()


def links(text):
    return [unescape(link) for link in re.findall(r'href="([^"]+)"', text)]


def test_a_repository_gives_links_to_binder_and_colab(page):
    _, text = page
    assert f"https://mybinder.org/v2/gh/someone/somewhere/main?urlpath=lab/tree/{PAGE}.ipynb" in links(text)
    assert f"https://colab.research.google.com/github/someone/somewhere/blob/main/{PAGE}.ipynb" in links(text)
    assert (ROOT / f"{PAGE}.ipynb").exists()


def test_a_page_shows_the_first_cell_of_colab(page):
    made, text = page
    cell = unescape(re.search(r'<details class="launch"><summary>[^<]*Colab</summary><pre>(.*?)</pre>', text, re.S)[1])
    assert cell == launch.install_cell(URL)
    assert cell.splitlines()[0].split()[-2:] == [URL, "/content/somewhere"] and "%cd /content/somewhere/nbs" in cell
    assert '<details class="launch">' not in (made / "index.html").read_text(), "the first page is no notebook"


def test_icons_and_logos_of_the_buttons_exist(page):
    made, text = page
    assert "fa-rocket" in text and ".fa-rocket::before" in (made / "_static" / "icons.css").read_text()
    logos = [made / "nbs" / logo for logo in re.findall(r'src="([^"]*logo_(?:binder|colab)[^"]*)"', text)]
    assert len(logos) == 2 and all(logo.resolve().exists() for logo in logos)


def test_the_title_of_the_book_is_in_citation_and_link_previews(page):
    made, text = page
    title = yaml.safe_load((ROOT / "_config.yml").read_text())["title"]
    assert f"title = {{{title}}}" in unescape(re.sub(r"<[^>]+>", "", (made / "index.html").read_text()))
    assert f'<meta property="og:site_name" content="{title}"/>' in text


def test_without_a_repository_there_are_no_buttons(built):    # noqa: F811
    text = (SITE / f"{PAGE}.html").read_text()
    assert not [link for link in links(text) if "mybinder" in link or "colab" in link]
    assert "launch-buttons" not in text and '<details class="launch">' not in text


@pytest.mark.parametrize("url", [URL, URL + "/", URL + ".git"])
def test_the_cell_of_an_address(url):
    assert launch.install_cell(url) == launch.install_cell(URL)


def test_the_extras_of_the_cell_and_of_binder_exist():
    project = (ROOT / "pyproject.toml").read_text()
    for text in (launch.CELL, (ROOT / "binder" / "requirements.txt").read_text()):
        for extra in re.search(r"\.\[([\w,]+)\]", text)[1].split(","):
            assert re.search(rf"^{extra} = \[", project, re.M), extra
