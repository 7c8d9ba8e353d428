"""Repairs of the markup for screen readers: names of the toggles in the sidebar, labels that hold what is seen, lines of signatures."""
import re


def name_toggles(soup):
    "The chevrons of the sidebar, which unfold the pages below the page of the link before them."
    for summary in soup.select("li > details > summary"):
        link = summary.parent.parent.find("a", recursive=False)
        if link is not None:
            summary["aria-label"] = f"Pages below {' '.join(link.get_text().split())}"
    return soup


def name_by_content(body: str) -> str:
    "Folded cells: the words that are seen are the name of the toggle. Entries of a bibliography are items of the list that they stand in."
    return body.replace('<summary aria-label="Toggle hidden content">', "<summary>").replace('role="doc-biblioentry"', 'role="listitem"')


def lines_of_signatures(body: str) -> str:
    "Sphinx puts the lines of a long signature into a list of definitions without terms; they are no list."
    def lines(found): return f'<div class="sig-lines">{found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")}</div>'
    return re.sub(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>(?=\n\n<span class=\"sig-paren\">)", lines, body)


def repair(app, pagename, templatename, context, doctree):
    "html-page-context, after the theme."
    if context.get("body"):
        context["body"] = lines_of_signatures(name_by_content(context["body"]))
    make = context.get("generate_toctree_html")
    if make:
        context["generate_toctree_html"] = lambda *words, **options: name_toggles(make(*words, **options))


def setup(app):
    app.connect("html-page-context", repair, priority=1000)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
