"""Icons without the theme's 1.5 MB script of all icons: a style sheet of the few that pages use, made from that script.

The outlines are those of Font Awesome Free, whose notice goes with them. `_ext/templates/static/webpack-macros.html`
keeps the theme from loading the script. The style sheet of the theme loses its icons, too, and its font of icons all but
the few characters that rules of the theme write."""
import re
from pathlib import Path
from urllib.parse import quote

ICONS = ["angle-left", "angle-right", "arrow-up", "bars", "chevron-down", "circle-half-stroke", "download", "expand", "file",
         "file-pdf", "list", "magnifying-glass", "moon", "rocket", "sun", "xmark", "arrow-right", "lightbulb"]


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


ICON_RULES = re.compile(r'(?:\.fa-[\w-]+:{1,2}before,?)+\{content:"[^"]*"\}')


def characters(sheets: str) -> set[int]:
    "The characters of private use, which are icons, that style sheets write, themselves or by number."
    return {ord(letter) for letter in sheets if "\ue000" <= letter <= "\uf8ff"} | {int(code, 16) for code in re.findall(r'"\\([ef][0-9a-f]{3})"', sheets)}


def slim(sheet: str, others: str, font: Path, target: Path) -> str:
    "The theme's style sheet without its rules for 1400 icons; its font shrinks to the characters that the rules and other sheets write."
    from fontTools import subset
    sheet = ICON_RULES.sub("", sheet)
    options = subset.Options(flavor="woff", with_zopfli=False)
    made = subset.load_font(str(font), options)
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=characters(sheet + others))
    cutter.subset(made)
    subset.save_font(made, str(target), options)
    return re.sub(r'url\((\S*?/)fa-solid-900\.woff2\) ?format\("woff2"\),url\(\S*?fa-solid-900\.ttf\) ?format\("truetype"\)', rf'url(\g<1>{target.name}) format("woff")', sheet)


def write_icons(app, error):
    "build-finished: write icons.css, remove the script that nothing loads, shrink the theme's sheet and font."
    if error or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    sheet = style_sheet(ICONS, theme_file("scripts/fontawesome.js").read_text(), theme_file("scripts/fontawesome.js.LICENSE.txt").read_text())
    (static / "icons.css").write_text(sheet)
    theme, fonts = static / "styles" / "pydata-sphinx-theme.css", static / "vendor" / "fontawesome" / "webfonts"
    others = "".join(file.read_text() for file in static.rglob("*.css") if file != theme)
    theme.write_text(slim(theme_file("styles/pydata-sphinx-theme.css").read_text(), others, fonts / "fa-solid-900.ttf", fonts / "icons.woff"))
    for name in ("fontawesome.js", "fontawesome.js.map"):
        (static / "scripts" / name).unlink(missing_ok=True)


def setup(app):
    app.add_css_file("icons.css", priority=900)
    app.connect("build-finished", write_icons)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
