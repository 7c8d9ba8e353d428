"""Repairs of the theme's markup for screen readers: names of the toggles in the sidebar, labels that hold what is seen."""


def name_toggles(soup):
    "The chevrons of the sidebar, which unfold the pages below the page of the link before them."
    for summary in soup.select("li > details > summary"):
        link = summary.parent.parent.find("a", recursive=False)
        if link is not None:
            summary["aria-label"] = f"Pages below {' '.join(link.get_text().split())}"
    return soup


def name_by_content(body: str) -> str:
    "Folded cells: the words that are seen are the name of the toggle."
    return body.replace('<summary aria-label="Toggle hidden content">', "<summary>")


def repair(app, pagename, templatename, context, doctree):
    "html-page-context, after the theme."
    if context.get("body"):
        context["body"] = name_by_content(context["body"])
    make = context.get("generate_toctree_html")
    if make:
        context["generate_toctree_html"] = lambda *words, **options: name_toggles(make(*words, **options))


def setup(app):
    app.connect("html-page-context", repair, priority=1000)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
