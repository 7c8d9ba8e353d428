"""Write one page per module of the package, and an index by floor: `python _ext/api.py PACKAGE_DIR DEST`."""
import ast
import json
import re
import sys
from pathlib import Path

FLOORS = [  # heading, what it says, first words of the module names on it
    ("Shapes and data", "Conventions, languages, generators, batches.", ("core", "data")),
    ("Layers", "Pure functions and small modules that encoders share.", ("layers",)),
    ("Reference models", "The models of the chapters, for one sentence, as the papers' equations.", ("reference",)),
    ("Encoders", "The same architectures for batches: fast, masked, checked against the reference.", ("encoders", "own")),
    ("Literal forms", "Models for batches, step by step as published, with which tests and benchmarks compare the encoders.", ("literal",)),
    ("Models", "The table of encoders, heads that turn an encoder into a model for a task, and optimizers.", ("registry", "renamed", "tasks", "optimization")),
    ("Experiments and figures", "Training, records, sweeps, benchmarks; tree drawings, plots, interactive figures.", ("origin", "lab", "show")),
    ("Command line", "The `rvnnbook` command.", ("cli",)),
]

INTRODUCTION = """Each page lists what a module exports, with the shapes of everything that goes in and comes out.
A module uses modules of the sections above it, and those listed before it in its own section."""

MODULE_PAGE = """# {short}

{about}

```{{eval-rst}}
{classes}
.. automodule:: {name}
   :members:
   :exclude-members: {listed}
```
"""
CLASS = """.. autoclass:: {name}.{shown}
   :members:
"""

SHAPES = [("tokens", "(B, N) integers; mask (B, N)"), ("embedding", "(B, N, D)"), ("encoder", "root (B, D), states (B, N, D)"), ("head", "logits (B, classes)")]


def module_names(package_dir: Path) -> dict[str, Path]:
    "Dotted name -> file, for each module that defines something."
    names = {}
    for file in sorted(package_dir.rglob("*.py")):
        parts = file.relative_to(package_dir.parent).with_suffix("").parts
        if parts[-1] in ("_modidx", "__main__"):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
            if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(file.read_text()).body):
                continue
        names[".".join(parts)] = file
    return names


def module_doc(file: Path) -> str:
    "The first paragraph of a module's docstring."
    return (ast.get_docstring(ast.parse(file.read_text())) or "").strip().split("\n\n")[0]


def about_module(file: Path, package_dir: Path, dest: Path) -> str:
    "A sentence about a module and, where its chapter is in the table of contents, a link to it."
    text, doc = file.read_text(), module_doc(file)
    source = re.search(r"File to edit: (?:\.\./)*(\S+\.ipynb)", text)
    toc = dest.parent / "_toc.yml"
    page = source and source[1].removesuffix(".ipynb")
    if page and toc.exists() and re.search(rf"{re.escape(page)}(\.ipynb)?\s*$", toc.read_text(), flags=re.MULTILINE):
        link = f"Derived and tested in the chapter [](../{source[1]})."
    else:
        link = f"Made from `{source[1]}`." if source else ""
    return f"{doc}\n\n{link}".strip()


def public_classes(file: Path) -> list[str]:
    "The classes that a module exports: encoders first, then in the order of the source."
    tree = ast.parse(file.read_text())
    exported = next((ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"), [])
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in exported]
    encoders = {"Encoder"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") in encoders for base in node.bases):
            encoders.add(node.name)
    return [node.name for node in sorted(found, key=lambda node: node.name not in encoders)]


def shapes_figure() -> str:
    "A drawing of a model: what goes from part to part, with its shape."
    boxes = []
    for i, (name, shape) in enumerate(SHAPES):
        y = 10 + 64 * i
        boxes += [f'<rect x="10" y="{y}" width="110" height="34" rx="6" fill="none" stroke="#0072b2" stroke-width="2"/>',
                  f'<text x="65" y="{y + 22}" text-anchor="middle" fill="currentColor">{name}</text>', f'<text x="134" y="{y + 22}" fill="currentColor">{shape}</text>']
        boxes += [f'<path d="M65 {y + 36}v26m-5 -7l5 7l5 -7" fill="none" stroke="currentColor"/>'] if i < len(SHAPES) - 1 else []
    said = "; ".join(f"{name}: {shape}" for name, shape in SHAPES)
    return (f'<figure class="drawn" id="fig-api-shapes"><div class="drawing"><svg viewBox="0 0 350 250" width="350" role="img" aria-label="From tokens to scores. {said}." '
            f'font-size="14" font-family="system-ui, sans-serif">{"".join(boxes)}</svg></div>'
            "<figcaption>A classifier and its shapes: B sentences, N tokens, width D. Every encoder takes (B, N, D) and returns an EncoderOutput.</figcaption></figure>")


def write_api_pages(package_dir: Path, dest: Path) -> list[Path]:
    "Write dest/index.md and dest/<module>.md for every module; dest lies in the folder that holds _toc.yml."
    package_dir, dest = Path(package_dir), Path(dest)
    dest.mkdir(parents=True, exist_ok=True)
    names, written = module_names(package_dir), []
    for name, file in names.items():
        page = dest / f"{name}.md"
        classes = public_classes(file)
        page.write_text(MODULE_PAGE.format(name=name, short=name.removeprefix(f"{package_dir.name}."), about=about_module(file, package_dir, dest), listed=", ".join(classes),
                                           classes="\n".join(CLASS.format(name=name, shown=shown) for shown in classes)).replace("   :exclude-members: \n", ""))
        written.append(page)
    index = ["# The library, module by module", "", INTRODUCTION, "", shapes_figure(), ""]
    rooms = {name: name.split(".")[1] if "." in name else "" for name in names}
    listed = set()
    def entry(name):
        return f"- [`{name}`]({name}.md): {module_doc(names[name])}"
    for title, about, firsts in FLOORS:
        here = [name for first in firsts for name in names if rooms[name] == first]
        listed |= set(here)
        if here:
            index += [f"## {title}", "", about, "", *map(entry, here), ""]
    rest = [name for name in names if name not in listed]
    if rest:
        index += ["## Other modules", "", *map(entry, rest), ""]
    (dest / "index.md").write_text("\n".join(index))
    return [dest / "index.md", *written]


if __name__ == "__main__":
    print(json.dumps([str(page) for page in write_api_pages(Path(sys.argv[1]), Path(sys.argv[2]))], indent=1))
