"""Formulas are set when the site is built: by MathJax in Node, with MathML for screen readers and without a script in the page."""
import re
import sys

import pytest
from sphinx.errors import ExtensionError

from tests.browsing import ROOT
from tests.test_site import PAGES, SITE, built  # noqa: F401

sys.path.insert(0, str(ROOT / "_ext"))
import formulas  # noqa: E402

PAGE = r'''<p><span class="math notranslate nohighlight">\(a &lt; b\)</span>, or so (<span class="math notranslate nohighlight">\(a &lt; b\)</span>)</p>
<div class="math notranslate nohighlight" id="eq-x">
<span class="eqno">(1)<a class="headerlink" href="#eq-x">#</a></span>\[\begin{split}x &amp;= 1\\y &amp;= 2\end{split}\]</div><code>\(c\)</code>'''


def test_formulas_are_set_once_and_keep_number_and_tex():
    asked = formulas.formulas_of(PAGE)
    assert asked == {("a < b", False), (r"\begin{split}x &= 1\\y &= 2\end{split}", True)}
    made, sheet = formulas.typeset(sorted(asked))
    page = formulas.set_formulas(PAGE, made)
    assert page.count("<mjx-container") == page.count("<math ") == 3 and r"<code>\(c\)</code>" in page and '<span class="eqno">(1)' in page
    assert '<span class="joined"><span class="math ' in page and "</mjx-container></span>,</span> or so <span" in page
    assert 'or so <span class="joined">(<span class="math ' in page and "</mjx-container></span>)</span></p>" in page
    assert formulas.formulas_of(page) == asked and formulas.set_formulas(page, made) == page
    assert "@font-face" in sheet and all(f"mjx-c{ord(letter):X}" in sheet.upper().replace("MJX-C", "mjx-c") for letter in "12<")


def test_numbers_stay_on_one_line():
    from docutils import nodes
    import book
    paragraph = nodes.paragraph("", "", nodes.Text("By Eq. 5, 95 % of 10 000 pairs with 3 or 4 tokens. 5 are left."), nodes.literal("", "5 %"))
    book.keep_together(None, paragraph)
    assert paragraph.astext().replace("\N{NO-BREAK SPACE}", "_") == "By Eq._5, 95_% of 10_000 pairs with 3 or 4 tokens. 5 are left.5 %"


@pytest.mark.parametrize("wrong", [r"\nothing x", r"\frac{a", r"a_b_c"])
def test_a_wrong_formula_stops_the_build_and_is_named(wrong):
    with pytest.raises(ExtensionError) as error:
        formulas.typeset([("x", False), (wrong, True)])
    assert wrong in str(error.value)


def test_all_formulas_of_the_site_are_set(built):    # noqa: F811
    total, sheet = 0, (SITE / "_static" / "formulas.css").read_text()
    for name in [*PAGES, "genindex", "search"]:
        page = (SITE / f"{name}.html").read_text()
        found = len(re.findall(r'<(?:span|div) class="math ', page))
        assert page.count("<mjx-container") == page.count("<mjx-assistive-mml") == found, name
        assert not re.search(r"<script[^>]*mathjax|window\.MathJax|data-mjx-error", page, re.I), name
        missing = set(re.findall(r'<mjx-c class="(mjx-c[0-9A-F]+)', page)) - set(re.findall(r"\.(mjx-c[0-9A-F]+)", sheet))
        assert not missing, name
        total += found
    assert total > 900
    fonts = set(re.findall(r'url\("?([^")]+\.woff)', sheet))
    assert fonts and all((SITE / "_static" / font).exists() for font in fonts)
