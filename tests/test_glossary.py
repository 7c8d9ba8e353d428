"""The tables of terms and of symbols: definitions in one sentence, links that lead to the term, one meaning a symbol."""
import csv
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
LINK = re.compile(r"\[[^\]]+\]\(([^)]+\.ipynb)\)")


def rows(name):
    with (NBS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prose(page):
    "The markdown of a chapter on one line, without the targets of links and without comments."
    found = json.loads((NBS / page).read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "markdown")
    return " ".join(re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", text).split())


def occurs(term, text):
    "Whether a term or its plural stands in a text as whole words."
    singular = re.escape(term)
    plural = re.escape(term[:-2] + "es") if term.endswith("is") else rf"{singular}e?s"
    return re.search(rf"(?<![\w-])(?:{singular}|{plural})(?![\w])", text, re.I) is not None


def faults(definition):
    "What is wrong with a definition."
    found = []
    if not 6 <= len(definition.split()) <= 45:
        found.append("length")
    if not re.fullmatch(r"[A-Z][^.;?!]*\.", definition):
        found.append("not one sentence that ends in a full stop")
    return found


# Terms

GLOSSARY = rows("glossary")


def test_terms_are_unique_and_sorted():
    terms = [row["Term"].casefold() for row in GLOSSARY]
    assert len(terms) >= 60
    assert len(set(terms)) == len(terms) and terms == sorted(terms)
    assert all(row["Term"] == row["Term"].strip() for row in GLOSSARY)


@pytest.mark.parametrize("row", GLOSSARY, ids=lambda row: row["Term"])
def test_a_term_is_defined_in_one_sentence_and_occurs_in_its_chapter(row):
    assert faults(row["Definition"]) == []
    target = LINK.fullmatch(row["Chapter"])
    assert target, row["Chapter"]
    assert (NBS / target[1]).exists(), target[1]
    assert occurs(row["Term"], prose(target[1])), target[1]


def test_a_definition_does_not_begin_with_its_term():
    for row in GLOSSARY:
        assert not occurs(row["Term"], " ".join(row["Definition"].split()[:len(row["Term"].split()) + 1])), row["Term"]


def test_faulty_entries_are_found():
    assert faults("A node without children.") == ["length"]
    assert faults("Node of a tree. It has no children at all.") == ["not one sentence that ends in a full stop"]
    assert faults("Node of a tree that has no children") == ["not one sentence that ends in a full stop"]
    assert occurs("hypothesis", "two hypotheses") and occurs("leaf", "a Leaf,") and occurs("chunk", "chunks")
    assert not occurs("chunk", "chunking") and not occurs("scorer", "underscorer")


def test_terms_have_anchors_that_other_pages_can_refer_to(tmp_path):
    "The glossary is built alone, with the links to chapters taken out."
    for name in ("glossary.md", "glossary.csv"):
        text = (NBS / name).read_text()
        (tmp_path / name).write_text(re.sub(r"\]\((?!glossary)[^)]*\)", "](glossary.md)", text))
    (tmp_path / "index.md").write_text("# First\n\n{term}`Gumbel top-k`\n\n:::{toctree}\nglossary\n:::\n")
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / '_ext')!r})\nextensions = ['myst_parser', 'glossary_table']\n"
        "myst_enable_extensions = ['colon_fence']\n")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", tmp_path, tmp_path / "html"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "glossary.html").read_text()
    for row in GLOSSARY:
        assert f'id="term-{row["Term"].replace(" ", "-")}"' in page, row["Term"]
    assert 'href="glossary.html#term-Gumbel-top-k"' in (tmp_path / "html" / "index.html").read_text()


# Symbols

# Symbols with several meanings, with the chapters that introduce them. The table only shrinks: rename a symbol
# in its chapter and in nbs/notation.csv, then take its line out.
CLASHES = {
    "C": ["CRvNN", "Balanced trees"],
    "F_i": ["Self-IRU", "Token states in practice"],
    "H": ["Transformers", "Transformers"],
    "K": ["Beam Tree", "Ordered Memory"],
    "a_i": ["Sequence to sequence", "State spaces"],
    "b_i": ["Parallel scans", "State spaces"],
    "c": ["Cells", "Sequence to sequence"],
    "c_i": ["Recursive networks", "Balanced trees", "Parallel scans", "State spaces"],
    "l": ["Cells", "Texts as bytes"],
    "p": ["Images", "MEGA"],
    "p_i^i": ["Dynamic halting", "Ordered Memory"],
    "p_ii": ["Soft neighbor retrieval", "Sequence models"],
    "q_i": ["Gumbel top-k", "Transformers"],
    "z_i": ["Transformers", "Self-IRU", "State spaces"],
}


def shape(symbol):
    "A symbol with every index called i, since the name of an index does not make another symbol: c_t and c_n are c_i."
    letter, marks = re.fullmatch(r"(.+?)((?:[_^](?:\{[^}]*\}|\\?\w))*)", symbol.strip().strip("$").replace(" ", "")).groups()
    indices = defaultdict(str)
    for side, names in re.findall(r"([_^])(\{[^}]*\}|\\?\w)", marks):
        indices[side] += re.sub("[a-z]", "i", names.strip("{}"))
    return letter + "".join(side + indices[side] for side in sorted(indices, reverse=True))


def clashes(table):
    "Symbols that several rows of a notation table use, with the chapter of each row."
    chapters = defaultdict(list)
    for row in table:
        for found in sorted({shape(symbol) for symbol in re.split(r",(?=\s*\$)", row["Symbol"]) if symbol.strip()}):
            chapters[found].append(re.match(r"\[([^\]]+)\]", row["First met"])[1])
    return {symbol: found for symbol, found in chapters.items() if len(found) > 1}


def test_a_symbol_has_one_meaning_except_for_known_clashes():
    found = clashes(rows("notation"))
    new = {symbol: chapters for symbol, chapters in found.items() if chapters != CLASHES.get(symbol)}
    assert not new, "several meanings: choose another symbol"
    assert not CLASHES.keys() - found.keys(), "resolved: take these out of CLASHES"


def test_links_of_the_notation_table_lead_to_chapters():
    for row in rows("notation"):
        target = LINK.fullmatch(row["First met"])
        assert target and (NBS / target[1]).exists(), row["First met"]


def test_a_second_meaning_is_found():
    table = [{"Symbol": symbol, "First met": f"[{chapter}](x.ipynb)"} for symbol, chapter in
             (("$c_t$", "A"), ("$b$, $c_{n}$", "B"), (r"$\bar c_t$", "C"), ("$c$", "D"), ("$W_1$, $W_2$", "E"), ("", "F"), ("", "G"),
              ("$p_t^i$", "H"), ("$p^j_i$", "I"), ("$F_f$, $F_o$", "J"))]
    assert clashes(table) == {"c_i": ["A", "B"], "p_i^i": ["H", "I"]}
    assert shape(r"$\ell^c_b$") == r"\ell_i^i" and shape("$p_{ij}$") == shape("$p_{tk}$") != shape("$p_i$")


# Greek letters in the formulas of parts I to III, with the word for the one meaning of each. Another meaning needs another letter.
GREEK = {"Phi": "normal", "delta": "remainder", "gamma": "halt penalty", "kappa": "window", "nu": "mixture",
         "sigma": "sigmoid|logistic|gate", "tau": "temperature", "varepsilon": "existence", "xi": "time"}
ALPHABET = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega".split()
LETTER = re.compile(r"\\((?:var)?(?:%s))(?![a-zA-Z])" % "|".join(ALPHABET), re.I)


def first_parts():
    "The chapters of parts I to III, in reading order."
    parts = re.split(r"(?m)^ *- caption: ", (ROOT / "_toc.yml").read_text())
    return [f"{page.removeprefix('nbs/')}.ipynb" for part in parts if re.match("I{1,3} ·", part)
            for page in re.findall(r"file: (\S+)", part)]


def unexplained(text):
    "Greek letters of a page's formulas that have no meaning in the table, or whose word the page lacks."
    formulas = " ".join(re.findall(r"\$\$.*?\$\$|\$[^$]*\$", text))
    return {letter for letter in LETTER.findall(formulas) if letter not in GREEK or not re.search(GREEK[letter], text, re.I)}


def test_a_greek_letter_has_one_meaning_in_the_first_parts():
    pages = {page: prose(page) for page in first_parts()}
    assert len(pages) >= 14
    assert {page: found for page, text in pages.items() if (found := unexplained(text))} == {}
    assert not GREEK.keys() - {letter for text in pages.values() for letter in LETTER.findall(text)}, "no longer used: take these out"


def test_a_greek_letter_with_another_meaning_is_found():
    assert unexplained(r"A window of $\tau = 2$ neighbors; $$\kappa + \varepsilon$$ bounds existence.") == {"tau"}
    assert unexplained(r"The weight $\alpha_i$ at the temperature $\tau$, with $\nu$.") == {"alpha", "nu"}
