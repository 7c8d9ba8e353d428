"""Launch buttons: links of a page to its notebook on Binder and on Colab, where `repository: url` in _config.yml is set.

Binder installs `binder/requirements.txt`. Colab opens the notebook alone, without the package and the records, so the page
shows the cell that has to run there first."""
import html

SERVICES = {"binderhub_url": "https://mybinder.org", "colab_url": "https://colab.research.google.com"}
CELL = """!git clone --quiet --depth 1 {url} /content/{name}
%cd /content/{name}/nbs
%pip install --quiet '..[notebooks]'"""


def install_cell(url: str) -> str:
    "The first cell of a notebook on Colab: clone the repository, go to its notebooks, install the package."
    url = url.rstrip("/").removesuffix(".git")
    return CELL.format(url=url, name=url.rsplit("/", 1)[-1])


def offer(app, config):
    "config-inited: the theme fails where it has services and no repository."
    options = config.html_theme_options
    if options.get("repository_url"):
        options["launch_buttons"] = {**options.get("launch_buttons", {}), **SERVICES}


def add_install_cell(app, pagename, templatename, context, doctree):
    "html-page-context: below the title of a notebook, folded."
    url = app.config.html_theme_options.get("repository_url")
    body = context.get("body") or ""
    if url and context.get("page_source_suffix") == ".ipynb" and "</h1>" in body:
        code = html.escape(install_cell(url), quote=False)
        context["body"] = body.replace("</h1>", '</h1>\n<details class="launch"><summary>First cell of this notebook on Colab</summary>'
                                       f"<pre>{code}</pre></details>", 1)


def setup(app):
    app.connect("config-inited", offer)
    app.connect("html-page-context", add_install_cell, priority=1001)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
