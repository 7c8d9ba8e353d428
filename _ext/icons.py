"""Icons without the theme's 1.5 MB script of all icons: a style sheet of the few that pages use, made from that script.

The outlines are those of Font Awesome Free, whose notice goes with them. `_ext/templates/static/webpack-macros.html`
keeps the theme from loading the script."""
import re
from pathlib import Path
from urllib.parse import quote

ICONS = ["angle-left", "angle-right", "arrow-up", "bars", "chevron-down", "circle-half-stroke", "download", "expand", "file",
         "file-pdf", "list", "magnifying-glass", "moon", "sun", "xmark", "arrow-right", "lightbulb"]


def theme_file(name: str) -> Path:
    "A file among the static files of the theme below ours."
    import pydata_sphinx_theme
    return Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static" / name


def outline(script: str, name: str) -> tuple[int, int, str]:
    "Width, height and SVG path of a solid icon: the last of its name, as outlined and brand icons come before."
    found = re.findall(rf'(?<![\w-])"?{re.escape(name)}"?:\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+","([^"]+)"\]', script)
    if not found:
        raise KeyError(f"the theme has no icon {name}")
    width, height, path = found[-1]
    return int(width), int(height), path


def style_sheet(names, script: str, notice: str) -> str:
    "A rule for each icon: a box in the colour of the text, cut out by the outline."
    rules = [notice.strip(), 'html body [class*="fa-"]::before { content: ""; display: inline-block; height: 1em; background: currentColor; vertical-align: -0.125em; }']
    for name in names:
        width, height, path = outline(script, name)
        svg = quote(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><path d="{path}"/></svg>', safe="/:=' ,.-")
        rules.append(f'html body .fa-{name}::before {{ width: {width / height:.3g}em; mask: url("data:image/svg+xml,{svg}") center / contain no-repeat; }}')
    return "\n".join(rules) + "\n"


def write_icons(app, error):
    "build-finished: write icons.css, remove the script that nothing loads."
    if error or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    sheet = style_sheet(ICONS, theme_file("scripts/fontawesome.js").read_text(), theme_file("scripts/fontawesome.js.LICENSE.txt").read_text())
    (static / "icons.css").write_text(sheet)
    for name in ("fontawesome.js", "fontawesome.js.map"):
        (static / "scripts" / name).unlink(missing_ok=True)


def setup(app):
    app.add_css_file("icons.css", priority=900)
    app.connect("build-finished", write_icons)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
