"""The first page and what search engines and link previews read: results from records, tree, sitemap, 404, descriptions."""
import configparser
import html
import re
from pathlib import Path
from statistics import fmean

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

EXPRESSION = "[MAX 2 9 [MIN 4 7 ] 0 ]"
SHOWN = ("EBT-GRC", "RIR-EBT-GRC")
COLUMNS = [("official, listops_o_test", "official test"), ("generated, length_900_1000", "900 to 1000 tokens")]
DOORS = [("nbs/why_trees.html", "Read", "Start with the first chapter: why trees."),
         ("nbs/play.html", "Play", "Type an expression; a trained model computes it in the page."),
         ("nbs/findings.html", "Results", "What the runs of this book show, and how far they agree with the papers.")]


def settings(start: Path) -> dict:
    "The table of settings.ini of the clone that a folder belongs to."
    for folder in [start, *start.parents]:
        if (folder / "settings.ini").exists():
            parser = configparser.ConfigParser(interpolation=configparser.BasicInterpolation())
            parser.read(folder / "settings.ini")
            return dict(parser["DEFAULT"])
    raise FileNotFoundError(f"no settings.ini above {start}")


def address(about: dict) -> str:
    "Where the site is published, ending in a slash."
    return about["doc_host"].rstrip("/") + about["doc_baseurl"].rstrip("/") + "/"


def headline(records: Path) -> str:
    "A table of the shown models: mean accuracy over the seeds that have learned the task, and how their training ended."
    from rvnnbook.lab.records import latest, scan
    from rvnnbook.lab.verdicts import curve_of, how_ended, learned_runs, longest_runs
    runs = latest(scan(records)[0])
    rows, ends = [], []
    for model in SHOWN:
        seeds = longest_runs([run for run in runs if run["profile"] == "paper" and run["parameters"]["model"] == model and run["metrics"]])
        mine = learned_runs(seeds)
        if not mine:
            raise ValueError(f"{records.name} has no record of {model} in the paper profile that has learned the task")
        cells = "".join(f"<td>{100 * fmean(run['metrics'][split]['accuracy'] for run in mine):.1f} %</td>" for split, _ in COLUMNS)
        cut = sum(how_ended(run, curve_of(run)) == "limit" for run in mine)
        ends.append(f"{model}: " + (f"{cut} of {len(mine)} trainings cut short before early stopping" if cut else "trained until early stopping"))
        rows.append(f'<tr><th scope="row">{model}</th>{cells}<td>{len(mine)} of {len(seeds)}</td></tr>')
    heads = "".join(f'<th scope="col">{title}</th>' for title in ("model", *(title for _, title in COLUMNS), "seeds that have learned"))
    width = mine[0]["parameters"]["dim"]
    longest = mine[0]["parameters"]["longest"]
    return (f'<div class="landing-results"><table><caption>Accuracy on ListOps after training on at most {longest} tokens</caption>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
            f'<p>Width {width}; {"; ".join(ends)}. <a href="nbs/experiments/length_generalization.html">All models, lengths and settings</a></p>')


def soft_tree() -> str:
    "Two trees over one expression: the weight moves from the left-branching one to the right one."
    from rvnnbook.core import simple_tree
    from rvnnbook.data.listops import composition_steps, evaluate, tokenize
    from rvnnbook.show.trees import tree_layout
    tokens = tokenize(EXPRESSION)
    places, edges, (width, height) = tree_layout(composition_steps(tokens), tokens)
    other, wrong, (_, tall) = tree_layout(simple_tree("left", len(tokens)), tokens)
    top, leaf = places[0, len(tokens) - 1][1], places[0, 0][1]

    def fit(y):    # the left-branching tree is higher; both stand on the same leaves
        low, high = other[0, 0][1], other[0, len(tokens) - 1][1]
        return leaf + (y - low) * (top - leaf) / (high - low)

    parts = ['<g class="wrong">']
    for parent, child in wrong:
        (x, y), (u, v) = other[parent], other[child]
        parts.append(f'<path d="M{x:.1f} {fit(y):.1f}L{u:.1f} {fit(v):.1f}"/>')
    parts.append('</g><g class="right">')
    for parent, child in edges:
        (x, y), (u, v) = places[parent], places[child]
        parts.append(f'<path d="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}"/>')
    for (first, last), (x, y) in places.items():
        if first != last:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    parts.append("</g>")
    for i, token in enumerate(tokens):
        x, y = places[i, i]
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}">{html.escape(token)}</text>')
    said = (f"A tree over the expression {EXPRESSION} becomes certain: the weight of the left-branching tree fades, "
            f"the tree of the brackets remains. The value is {evaluate(tokens)}.")
    return (f'<svg class="soft-tree" viewBox="0 0 {width:.0f} {height + 20:.0f}" role="img" aria-label="{html.escape(said)}">'
            f'{"".join(parts)}</svg>')


def doors(pages: set[str]) -> str:
    "Links to the pages that exist."
    shown = [f'<a class="door" href="{link}"><strong>{name}</strong><span>{text}</span></a>'
             for link, name, text in DOORS if link.removesuffix(".html") in pages]
    return f'<nav class="doors" aria-label="Where to start">{"".join(shown)}</nav><p class="downloads"></p>'


def link_files(site: Path):
    "List the book in one file on the first page, in the formats that lie beside it."
    index = site / "index.html"
    shown = " · ".join(f'<a href="rvnnbook.{kind}">{kind.upper()}</a> ({(site / f"rvnnbook.{kind}").stat().st_size / 1e6:.0f} MB)'
                       for kind in ("pdf", "epub") if (site / f"rvnnbook.{kind}").exists())
    said = f"The book in one file: {shown}" if shown else ""
    index.write_text(re.sub(r'(<p class="downloads">).*?(</p>)', rf"\g<1>{said}\g<2>", index.read_text()))


CAPTION = "The weight moves from the left-branching tree (dashed) to the tree of the brackets."

class SoftTree(SphinxDirective):
    def run(self): return [nodes.raw("", f'<figure class="soft">{soft_tree()}<figcaption>{CAPTION}</figcaption></figure>', format="html")]


class Doors(SphinxDirective):
    def run(self): return [nodes.raw("", doors(set(self.env.found_docs)), format="html")]


class Headline(SphinxDirective):
    def run(self):
        records = Path(self.env.srcdir) / "nbs" / "results" / "length_generalization.jsonl"
        self.env.note_dependency(str(records))
        return [nodes.raw("", headline(records), format="html")]


class Citation(SphinxDirective):
    def run(self):
        about = settings(Path(self.env.srcdir))
        text = (f"@software{{rvnnbook,\n  title = {{{self.config.project}}},\n  author = {{{{{about['author']}}}}},\n"
                f"  version = {{{about['version']}}},\n  url = {{{address(about)}}}\n}}")
        return [nodes.literal_block(text, text, language="bibtex")]


def configure(app, config):
    "The canonical address of every page follows from settings.ini, the name in citation, card and links from the book's title."
    config.project = config.html_title
    config.html_baseurl = address(settings(Path(app.confdir)))


def describe(app, pagename, templatename, context, doctree):
    "Description and link preview of a page: its first paragraph and the book's picture."
    about = settings(Path(app.confdir))
    text = about["description"]
    if doctree is not None and pagename != "index":
        first = next((node.astext() for node in doctree.findall(nodes.paragraph) if len(node.astext()) > 40), text)
        text = re.sub(r"\s+", " ", first)
    text = text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " …"
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title") or about["title"]))
    link = address(about) + pagename + ".html" if pagename != "index" else address(about)
    context["pageurl"] = link
    tags = {"og:title": title, "og:description": text, "og:type": "book" if pagename == "index" else "article",
            "og:url": link, "og:image": address(about) + "_static/card.png", "og:site_name": app.config.project}
    context["metatags"] = (context.get("metatags") or "") + f'<meta name="description" content="{html.escape(text)}"/>' + "".join(
        f'<meta property="{name}" content="{html.escape(value)}"/>' for name, value in tags.items())


def name_neighbors(app, pagename, templatename, context, doctree):
    "Give the links to the previous and next page the titles of the table of contents."
    trees = app.env.tocs[app.config.root_doc].findall(addnodes.toctree)
    names = {page: title for tree in trees for title, page in tree["entries"] if title}
    _, *pages = app.builder.relations.get(pagename, (None, None, None))
    for side, page in zip(("prev", "next"), pages):
        if page in names and context.get(side):
            context[side] = {**context[side], "title": names[page]}


def draw_card(file: Path, title: str):
    "The picture of a link preview, 1200 by 630."
    from matplotlib.figure import Figure

    from rvnnbook.data.listops import composition_steps, tokenize
    from rvnnbook.show.trees import tree_layout
    tokens = tokenize(EXPRESSION)
    places, edges, _ = tree_layout(composition_steps(tokens), tokens)
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    figure.text(.05, .8, title, fontsize=44, weight="bold")
    figure.text(.05, .72, "Trees, recurrence and attention in running code", fontsize=22)
    ax = figure.add_axes((.05, .06, .9, .6))
    for parent, child in edges:
        ax.plot(*zip(places[parent], places[child]), color="#0072b2", lw=3)
    for (first, last), (x, y) in places.items():
        if first == last:
            ax.text(x, y + 8, tokens[first], ha="center", va="top", fontsize=22)
        else:
            ax.plot(x, y, "o", color="#d55e00", markersize=13)
    ax.invert_yaxis()
    ax.axis("off")
    figure.savefig(file, metadata={"Software": None})


def finish(app, error):
    "Sitemap, robots.txt, 404 page and picture; no page of these is a chapter."
    if error or app.builder.format != "html":
        return
    about, out = settings(Path(app.confdir)), Path(app.outdir)
    base = address(about)
    links = [base if page == "index" else f"{base}{page}.html" for page in sorted(app.env.found_docs)]
    listed = "".join(f"<url><loc>{html.escape(link)}</loc></url>" for link in links)
    (out / "sitemap.xml").write_text('<?xml version="1.0" encoding="UTF-8"?>\n'
                                     f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{listed}</urlset>\n')
    (out / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {base}sitemap.xml\n")
    (out / "404.html").write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="robots" content="noindex"><title>Page not found</title><link rel="icon" href="data:,">'
        "<style>:root{color-scheme:light dark}body{font:1.1rem system-ui,sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem}</style></head>"
        f'<body><main><h1>Page not found</h1><p>There is no page at this address. <a href="{base}">First page of the book</a>, '
        f'<a href="{base}search.html">search</a>.</p></main></body></html>\n')
    draw_card(out / "_static" / "card.png", app.config.project)
    link_files(out)


def setup(app):
    for name, directive in {"softtree": SoftTree, "doors": Doors, "headline": Headline, "citation": Citation}.items():
        app.add_directive(name, directive)
    app.connect("config-inited", configure)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", name_neighbors)
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
