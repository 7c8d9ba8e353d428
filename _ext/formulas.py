"""Formulas are set when the site is built: MathJax, run by Node, turns TeX into HTML with hidden MathML for screen readers.

Pages then load no script for formulas, only a style sheet and fonts. A formula keeps its TeX in `data-tex`, so that
every build makes the style sheet for the characters of all pages, also of those that it did not write."""
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sphinx.errors import ExtensionError

FORMULA = re.compile(r'(?P<before>[(\[“]?)(?P<open><(?P<tag>span|div) class="math [^>]*)>\s*(?P<number>(?:<span class="eqno">.*?</span>)?)\s*'
                     r'\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]\s*</(?P=tag)>(?P<after>[.,;:!?)\]]*)', re.S)
KEPT = re.compile(r'<(span|div) class="math [^>]*data-tex="([^"]*)"')
TYPESET = r"""
require("mathjax").init({
  loader: {load: ["input/tex", "output/chtml", "a11y/assistive-mml"]},
  tex: {packages: {"[-]": ["noundefined", "require", "autoload"]}, formatError: (jax, error) => { throw error; }},
  chtml: {fontURL: "vendor/mathjax/output/chtml/fonts/woff-v2"},
}).then(MathJax => {
  const adaptor = MathJax.startup.adaptor, made = [];
  for (const [tex, display] of JSON.parse(require("fs").readFileSync(0, "utf8")))
    try { made.push(adaptor.outerHTML(MathJax.tex2chtml(tex, {display}))); } catch (error) { made.push({error: error.message}); }
  console.log(JSON.stringify({made, sheet: adaptor.textContent(MathJax.chtmlStylesheet())})); });
"""


def typeset(formulas: list[tuple[str, bool]]) -> tuple[dict[tuple[str, bool], str], str]:
    "(TeX, whether displayed) -> HTML for each formula, and the style sheet for them."
    node = shutil.which("node") or str(Path(sys.executable).with_name("node"))
    done = subprocess.run([node, "-e", TYPESET], cwd=Path(__file__).parent, input=json.dumps(formulas), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError("MathJax failed; it needs node and the packages that `make book` installs\n" + done.stderr[-2000:])
    found = json.loads(done.stdout)
    wrong = [f"{tex}: {made['error']}" for (tex, _), made in zip(formulas, found["made"]) if isinstance(made, dict)]
    if wrong:
        raise ExtensionError("formulas that MathJax cannot set:\n" + "\n".join(wrong))
    return dict(zip(formulas, found["made"])), found["sheet"]


def formulas_of(page: str) -> set[tuple[str, bool]]:
    "TeX of a page's formulas, and whether each is displayed."
    return {(html.unescape(m["tex"]), m["kind"] == "[") for m in FORMULA.finditer(page)} | {(html.unescape(tex), tag == "div") for tag, tex in KEPT.findall(page)}


def set_formulas(page: str, made: dict[tuple[str, bool], str]) -> str:
    "A page with its formulas set; no line ends between a formula and the marks beside it."
    def set_one(m):
        tex, marks = html.unescape(m["tex"]), m["before"] or m["after"]
        formula = f'{m["open"]} data-tex="{html.escape(tex)}">{m["number"]}{made[tex, m["kind"] == "["]}</{m["tag"]}>'
        return f'<span class="joined">{m["before"]}{formula}{m["after"]}</span>' if marks else formula
    return FORMULA.sub(set_one, page)


def set_site(out: Path):
    "Set the formulas of all pages, and write the style sheet."
    pages = {file: file.read_text(encoding="utf-8") for file in out.rglob("*.html") if "_static" not in file.parts}
    made, sheet = typeset(sorted(set().union(*map(formulas_of, pages.values()))))
    for file, page in pages.items():
        if (done := set_formulas(page, made)) != page:
            file.write_text(done, encoding="utf-8")
    (out / "_static" / "formulas.css").write_text(sheet, encoding="utf-8")


def finish(app, error):
    "build-finished"
    if not error and app.builder.format == "html":
        set_site(Path(app.outdir))


def setup(app):
    from myst_parser.sphinx_ext.mathjax import html_visit_displaymath
    from sphinx.ext.mathjax import html_visit_math
    app.add_html_math_renderer("formulas", (html_visit_math, None), (html_visit_displaymath, None))    # what `finish` looks for
    app.add_css_file("formulas.css")
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
