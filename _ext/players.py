"""Players in the page: their scripts and styles on the pages that have one, and committed weights as scripts.

A page opened from the disk may not fetch files, but it may load scripts: each file of weights becomes
`_static/weights/NAME.js`, which hands its bytes over in base64. It is loaded when a model is first used."""
import base64
import re
from importlib.resources import files
from pathlib import Path


def weight_script(name: str, data: bytes) -> str:
    "JavaScript that hands over a file of weights."
    return f'rvnnWeights({name!r}, "{base64.b64encode(data).decode()}");\n'.replace("'", '"')


def write_weights(dest: Path, names) -> list[Path]:
    "Write dest/NAME.js for each name; return the files."
    dest = Path(dest)
    dest.mkdir(parents=True, exist_ok=True)
    written = []
    for name in sorted(names):
        script = weight_script(name, (files("rvnnbook") / "weights" / f"{name}.safetensors").read_bytes())
        written.append(dest / f"{name}.js")
        if not written[-1].exists() or written[-1].read_text() != script:
            written[-1].write_text(script)
    return written


def wanted_weights(body: str) -> set[str]:
    "Names of the weights that a page's players use."
    return set(re.findall(r'<div class="model-player"[^>]* data-weights="([\w-]+)"', body))


def has_stepper(body: str) -> bool:
    "Whether a page holds a figure with frames."
    return 'class="drawn stepper"' in body


def add_player_files(app, pagename, templatename, context, doctree):
    "html-page-context: scripts and styles for a page with a stepper or a model."
    body = context.get("body") or ""
    names = wanted_weights(body)
    if app.builder.format != "html" or not (names or has_stepper(body)):
        return
    app.add_css_file("player.css")
    app.add_js_file("player.js", loading_method="defer")
    if names:
        write_weights(Path(app.outdir) / "_static" / "weights", names)
        app.add_css_file("models.css")
        app.add_js_file("models.js", loading_method="defer")
        app.add_js_file("play.js", loading_method="defer")


def setup(app):
    app.connect("html-page-context", add_player_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
