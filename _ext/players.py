"""Trained models in the page: committed weights as scripts, and the player's files on the pages that have one.

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


def add_player_files(app, pagename, templatename, context, doctree):
    "html-page-context: scripts and styles for a page with a player."
    names = wanted_weights(context.get("body") or "")
    if names and app.builder.format == "html":
        write_weights(Path(app.outdir) / "_static" / "weights", names)
        app.add_css_file("models.css")
        app.add_js_file("models.js", loading_method="defer")
        app.add_js_file("play.js", loading_method="defer")


def setup(app):
    app.connect("html-page-context", add_player_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
