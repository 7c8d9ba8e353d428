"""The book's Sphinx extension: what the pages need to work without a network, and docments as parameter tables."""
import dataclasses
import inspect
import re

from docutils import nodes


def drop_thebe(app, pagename, templatename, context, doctree):
    "The theme's live-code scripts load from elsewhere; the book has no use for them."
    def keep(file):
        return "thebe" not in f"{getattr(file, 'filename', file)} {getattr(file, 'attributes', {}).get('body', '')}".lower()
    for key in ("script_files", "css_files"):
        context[key] = [file for file in context.get(key, []) if keep(file)]


def escape(text: str) -> str:
    "Markdown as we write it in docstrings (backticks, bare * and _) as reStructuredText."
    parts = re.sub("`+", "`", text).split("`")
    if len(parts) % 2 == 0:
        parts = ["`".join(parts)]
    def plain(part):
        return re.sub(r"([\\*_|`]|:(?=:))", r"\\\1", part)
    return "".join(rf"\ ``{part.strip()}``\ " if i % 2 and part.strip() else plain(part) for i, part in enumerate(parts))


def sentence(text: str) -> str:
    "Escaped, and safe at the start of a paragraph, where a dash, a number or a letter with a dot would begin a list."
    escaped = escape(text)
    return rf"\ {escaped}" if escaped.strip() else ""


def fields(obj) -> list[str]:
    "The parameter comments of a function, or of a class's __init__, as a field list."
    from fastcore.docments import docments
    if inspect.isclass(obj) and "__init__" not in vars(obj) and not dataclasses.is_dataclass(obj):
        return []
    try:
        found = docments(obj, full=True)
    except (TypeError, ValueError, OSError):    # no source or no signature, as for built-in bases
        return []
    texts = {name: " ".join((about.get("docment") or "").split()) for name, about in found.items()}
    lines = [f":param {name}: {sentence(text)}" for name, text in texts.items() if text and name != "return"]
    if texts.get("return") and not inspect.isclass(obj):
        lines.append(f":returns: {sentence(texts['return'])}")
    return lines


def render_docments(app, what, name, obj, options, lines):
    "autodoc-process-docstring: escape the docstring, add the parameters."
    lines[:] = [escape(line) for line in lines]
    if what in ("class", "exception", "function", "method"):
        lines += ["", *fields(obj), ""]


def choose_members(app, what, name, obj, skip, options):
    "Show every forward of ours, which has docments but often no docstring; hide a named tuple's field stubs."
    if name == "forward" and getattr(obj, "__module__", "").startswith("rvnnbook"):
        return False
    if (inspect.getdoc(obj) or "").startswith("Alias for field number"):
        return True
    return None


def own_nodes(app, doctree):
    """doctree-read: nodes of eval-rst blocks belong to a document of their own, whose settings hold the whole environment.
    Stored with each API page, it made them 34 MB each in a build that reads few pages anew."""
    for node in doctree.findall():
        node.document = doctree


def keep_together(app, doctree):
    "doctree-read: no line ends within a number, before its percent sign, or between Eq. and its number."
    for text in list(doctree.findall(nodes.Text)):
        joined = re.sub(r"(\d|\bEqs?\.) (?=%|\d{3}\b|(?<=\. )\d)", "\\1\N{NO-BREAK SPACE}", text)
        if joined != text and not isinstance(text.parent, nodes.literal | nodes.FixedTextElement | nodes.raw):
            text.parent.replace(text, nodes.Text(joined))


def setup(app):
    app.setup_extension("glossary_table")
    app.connect("html-page-context", drop_thebe, priority=999)
    app.connect("autodoc-process-docstring", render_docments, priority=100)
    app.connect("autodoc-skip-member", choose_members)
    app.connect("doctree-read", own_nodes)
    app.connect("doctree-read", keep_together)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
