"""Links from a page to what it defines: at its end, the classes and functions that it exports, on the pages of the API."""
import html
import re
from pathlib import Path


def sources(package: Path) -> dict[str, str]:
    "Page -> the module that is made from its notebook."
    found = {}
    for file in package.rglob("*.py"):
        page = re.search(r"File to edit: (?:\.\./)*(\S+)\.ipynb", file.read_text(encoding="utf-8")[:300])
        if page:
            found[page[1]] = ".".join([package.name, *file.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
    return found


def links(module: str, objects: dict) -> list[tuple[str, str]]:
    "Name and address of the documented classes and functions of a module, classes first, from Sphinx's table of objects."
    found = [(name.rpartition(".")[2], entry) for name, entry in objects.items() if name.rpartition(".")[0] == module and entry.docname == f"api/{module}"]
    found.sort(key=lambda one: one[1].objtype not in ("class", "exception"))
    return [(name, f"{entry.docname}.html#{entry.node_id}") for name, entry in found]


def add_links(app, pagename, templatename, context, doctree):
    "html-page-context: the paragraph, at the end of the page's last section."
    if not hasattr(app, "page_modules"):
        import rvnnbook
        app.page_modules = sources(Path(rvnnbook.__file__).parent)
    module, body = app.page_modules.get(pagename), context.get("body") or ""
    found = links(module, app.env.get_domain("py").objects) if module else []
    end = body.rfind("</section>")
    if found and end > 0:
        up = "../" * pagename.count("/")
        shown = ", ".join(f'<a href="{up}{address}"><code>{html.escape(name)}</code></a>' for name, address in found)
        context["body"] = f'{body[:end]}<p class="defined">Defined on this page, in <code>{module}</code>: {shown}.</p>\n{body[end:]}'


def setup(app):
    app.connect("html-page-context", add_links)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
