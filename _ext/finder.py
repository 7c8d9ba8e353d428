"""The book's search: a script with the text of every section, loaded by the search page alone.

A page opened from the disk may load scripts but not fetch files, so the index is a script. search.js ranks: names
of a page (glossary.csv and search_names.csv) before titles, headings and text; chapters before functions."""
import csv
import json
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.environment.collectors import EnvironmentCollector

KINDS = {  # first folders of a page -> what it is; search.js weighs by it
    "nbs/experiments/": "Results", "nbs/implementations/": "Implementation", "nbs/workshop/": "Workshop", "api/": "Library",
    "nbs/claims": "Results", "nbs/versus": "Results", "nbs/notation": "Reference", "nbs/glossary": "Reference",
    "nbs/differences": "Reference", "nbs/traceability": "Reference", "nbs/bibliography": "Reference",
}
SILENT = (nodes.raw, nodes.literal_block, nodes.comment, nodes.math, nodes.math_block, nodes.substitution_definition,
          nodes.system_message, nodes.target, addnodes.toctree, addnodes.index)


def kind_of(page: str) -> str:
    "What a page is, for the search's filter."
    return next((kind for first, kind in KINDS.items() if page.startswith(first)), "Chapter")


def words_of(node) -> str:
    "The prose of a node: no code, no formulas, no output of cells but the captions of figures."
    if isinstance(node, nodes.raw):
        return " ".join(re.sub(r"<[^>]+>", "", said) for said in re.findall(r"<figcaption>(.*?)</figcaption>", node.astext(), re.S))
    if isinstance(node, nodes.Text):
        return node.astext()
    if isinstance(node, SILENT) or node.get("refdomain") == "cite":
        return ""
    inline = isinstance(node, nodes.TextElement)
    return ("" if inline else " ").join(filter(None, map(words_of, node.children)))


def signature_name(sig) -> tuple[str, str]:
    "Short name and anchor of a described object."
    return sig.get("fullname") or sig.astext(), (sig.get("ids") or [""])[0]


def sections_of(doctree) -> list[list[str]]:
    "[anchor, heading, text] of every section and every described object, in order; the first is the page itself."
    found = []

    def walk(node, here):
        for child in node.children:
            if isinstance(child, nodes.section):
                there = ["" if not found else (child.get("ids") or [""])[0], "", ""]
                found.append(there)
                walk(child, there)
            elif isinstance(child, nodes.title):
                here[1] = words_of(child)
            elif isinstance(child, addnodes.desc):
                name, anchor = signature_name(child[0])
                there = [anchor, name, ""]
                found.append(there)
                walk(child[-1], there)
            elif child.children and any(child.findall(lambda part: isinstance(part, (nodes.section, addnodes.desc)))):
                walk(child, here)
            else:
                here[2] += " " + words_of(child)

    walk(doctree, ["", "", ""])
    return [[anchor, heading, " ".join(text.split())] for anchor, heading, text in found]


class Sections(EnvironmentCollector):
    "Keeps the sections of every page in the environment, so that an unchanged page is not read again."
    def process_doc(self, app, doctree):
        self.of(app.env)[app.env.docname] = sections_of(doctree)

    def clear_doc(self, app, env, docname):
        self.of(env).pop(docname, None)

    def merge_other(self, app, env, docnames, other):
        self.of(env).update({name: self.of(other)[name] for name in docnames if name in self.of(other)})

    @staticmethod
    def of(env):
        if not hasattr(env, "book_sections"):
            env.book_sections = {}
        return env.book_sections


def names_of_pages(glossary: Path, table: Path) -> dict[str, list[str]]:
    "Page -> terms that it explains, from the glossary, and names that lead to it, from the table."
    names = {}
    if glossary.exists():
        with glossary.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                page = re.search(r"\(([\w/]+)\.ipynb\)", row["Chapter"])
                if page:
                    names.setdefault(f"nbs/{page[1]}", []).append(row["Term"])
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names.setdefault(row["page"], []).extend(name.strip() for name in row["names"].split(";"))
    return names


def synonyms(file: Path) -> list[list[str]]:
    "Groups of phrases that mean the same, one group a line."
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [[phrase.strip() for phrase in line.split(";")] for line in lines]


def index_script(pages: list[dict], groups: list[list[str]]) -> str:
    "JavaScript that holds the index; nothing in it can end a script element."
    text = json.dumps({"pages": pages, "synonyms": groups}, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f"window.rvnnIndex={text};\n"


def write_index(app, error):
    "build-finished: the search's script."
    if error or app.builder.format != "html":
        return
    here, sections = Path(__file__).parent, Sections.of(app.env)
    names = names_of_pages(Path(app.srcdir) / "nbs" / "glossary.csv", here / "search_names.csv")
    pages = []
    for page in sorted(app.env.found_docs):
        parts = sections.get(page)
        if parts:
            pages.append({"url": f"{page}.html", "title": parts[0][1], "kind": kind_of(page), "names": names.get(page, []), "sections": parts})
    script = index_script(pages, synonyms(here / "synonyms.txt"))
    (Path(app.outdir) / "_static" / "search-index.js").write_text(script, encoding="utf-8")


def use_own_templates(app, config):
    config.templates_path.append(str(Path(__file__).parent / "templates"))
    config.html_additional_pages["search"] = "search.html"


def without_sphinx_index(app):
    "Sphinx's own index is neither made nor loaded."
    if hasattr(app.builder, "search"):
        app.builder.search = False


def setup(app):
    app.add_env_collector(Sections)
    app.connect("config-inited", use_own_templates)
    app.connect("builder-inited", without_sphinx_index)
    app.connect("build-finished", write_index)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
