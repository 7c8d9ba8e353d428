"""Execute the chapters that changed and build the site: `python _ext/build.py [--chapter NOTEBOOK] [--jobs N]`, which is `make book`.

A chapter is executed again only when something that it used has changed: its notebook, a module of the package, a file
that it opened, the version of Python or of an installed package. A file that was not found counts as one without content.
Chapters run in parallel, each with a single thread, so that sums are added in the same order every time. The others go on
when one fails, and then no site is built. Before that, the package is compared with a fresh export of the notebooks.
`python _ext/build.py clean` removes outputs and editors' notes from the notebooks."""
import argparse
import filecmp
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


class BookError(RuntimeError):
    "The book cannot be built; the message names the cause and the remedy."


def pages(root: Path) -> list[str]:
    "The pages that the table of contents names, in reading order, without suffix."
    return re.findall(r"^\s*-?\s*(?:root|file):\s*(\S+)\s*$", (root / "_toc.yml").read_text(), re.M)


def chapters(root: Path) -> list[str]:
    "All notebooks, which are all executed: those of the pages first, then those that are not published."
    published = [page for page in pages(root) if (root / f"{page}.ipynb").exists()]
    every = [str(path.relative_to(root).with_suffix("")) for path in sources(root)]
    return published + [name for name in every if name not in published]


def content_hash(path: str | Path) -> str | None:
    "Digest of a file's bytes; None if there is no file."
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except (FileNotFoundError, IsADirectoryError):
        return None


def versions() -> str:
    "Digest of what is installed: Python and every distribution except this one."
    installed = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions() if d.metadata["Name"] != "rvnnbook")
    return hashlib.blake2b("\n".join([platform.python_version(), *installed]).encode(), digest_size=16).hexdigest()


def is_fresh(record: Path, installed: str) -> bool:
    "Whether nothing that an execution used, by its record, has changed since."
    try:
        before = json.loads(record.read_text())
        return before["versions"] == installed and all(content_hash(path) == digest for path, digest in before["used"].items())
    except (FileNotFoundError, ValueError, KeyError):
        return False


TAGS = {"hide": "remove-cell", "default_exp": "remove-cell",
        "hide_input": "remove-input", "hide_output": "remove-output"}

def strip_directives(notebook: dict) -> dict:      # JSON data; one without `#|` comes back equal
    """A notebook without the exporter's directives; those about the page become cell tags.

    A cell with `eval: false` is left empty."""
    cells = []
    for cell in notebook["cells"]:
        lines = "".join(cell["source"]).splitlines(keepends=True)
        given = [m[1] for m in map(re.compile(r"#\|\s*(\S+)").match, lines) if m]
        if given and cell["cell_type"] == "code":
            tags = cell["metadata"].get("tags", []) + [TAGS[d] for d in given if d in TAGS]
            kept = "".join(line for line in lines if not line.startswith("#|") and "eval:" not in given)
            metadata = {**cell["metadata"], "tags": list(dict.fromkeys(tags))}
            cell = {**cell, "source": kept, "metadata": metadata}
        cells.append(cell)
    return {**notebook, "cells": cells}


def record_dependencies(log: str, folders: list[str], skipped: list[str]):     # JSON file; below
    "Runs inside a kernel: record after every cell the files it read and its processor time."
    import builtins, json, os, sys, time  # noqa: E401
    from IPython import get_ipython
    read, cells, begun, importing = set(), [], [0.0, 0.0], [0, 0.0]
    plain_import = builtins.__import__
    def audit(event, arguments):
        name, flags = (arguments[0], arguments[2]) if event == "open" else (None, 0)
        if isinstance(name, (str, bytes)) and not (flags or 0) & 3:
            path = os.path.abspath(os.fsdecode(name))
            below = lambda tops: any(path.startswith(top + os.sep) for top in tops)
            if below(folders) and not below(skipped):
                read.add(path)
    def timed_import(*arguments, **options):
        importing[0], start = importing[0] + 1, time.process_time()
        try:
            return plain_import(*arguments, **options)
        finally:
            importing[0] -= 1
            importing[1] += 0 if importing[0] else time.process_time() - start
    def before(info):
        begun[:] = sum(os.times()[:4]), importing[1]
    def after(result):
        if not begun[0]: return    # the cell that placed this function
        spent, imports = sum(os.times()[:4]) - begun[0], importing[1] - begun[1]
        cells.append({"lesson": round(spent - imports, 3), "imports": round(imports, 3)})
        modules = {getattr(m, "__file__", None) for n, m in list(sys.modules.items())
                   if n.split(".")[0] == "rvnnbook"}
        files = sorted(f for f in (read | modules) - {None} if "__pycache__" not in f)
        with open(log + ".part", "w") as file:
            json.dump({"files": files, "cells": cells}, file)
        os.replace(log + ".part", log)
    sys.addaudithook(audit)
    builtins.__import__ = timed_import
    get_ipython().events.register("pre_run_cell", before)
    get_ipython().events.register("post_run_cell", after)


def execute_chapter(source: Path, target: Path, root: Path) -> dict:       # root: folder of its dependencies
    "Execute a notebook: the files that it used below a few folders, the times of its cells, and of all of it in seconds."
    from rvnnbook.show.pages import execute
    start, log = time.perf_counter(), target.with_name(f".{target.name}.json")
    outside = "build runs .venv .git .jupyter node_modules".split()
    data = os.path.abspath(os.environ.get("RVNNBOOK_DATA", "data"))
    words = str(log.resolve()), [str(root.resolve()), data], [str(root.resolve() / name) for name in outside]
    try:
        execute(source, target, content=strip_directives(json.loads(source.read_text())),
                extra_arguments=["--IPKernelApp.exec_lines="      # before the first cell
                                 f"{inspect.getsource(record_dependencies)}\nrecord_dependencies(*{words!r})\ndel record_dependencies"])
        return {**json.loads(log.read_text()), "seconds": round(time.perf_counter() - start, 1)}
    finally:
        log.unlink(missing_ok=True)


def run_chapter(root: Path, page: str, preload: bool = False) -> dict:
    "Execute one chapter into build/executed and record what it used; `preload`: in a kernel that has imported large modules."
    import preloaded
    source, target = root / f"{page}.ipynb", root / "build" / "executed" / f"{page}.ipynb"
    os.environ.setdefault("RVNNBOOK_DATA", str(root / "data"))
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0", MPLBACKEND="module://matplotlib_inline.backend_inline",
                      TRITON_INTERPRET="1")        # read when a module imports Triton, as torch._dynamo does
    preloaded.use(preload and "peak_memory(anew=True)" not in source.read_text())      # a forked process maps libraries as it uses them
    record = execute_chapter(source, target, root)
    used = {file: content_hash(file) for file in [str(source), *record.pop("files")]}
    record.update(used=used, versions=versions())
    target.with_suffix(".json").write_text(json.dumps(record, indent=1))
    return record


def run_chapters(root: Path, always: tuple[str, ...] = (), jobs: int | None = None) -> dict[str, str]:
    "Execute every chapter that is not fresh, and those of `always`, several at once; the errors of pages that failed."
    from rvnnbook.lab.run import StatusError
    installed, failed = versions(), {}
    record = {page: root / "build" / "executed" / f"{page}.json" for page in chapters(root)}
    stale = [page for page in record if page in always or not is_fresh(record[page], installed)]
    jobs = jobs or os.cpu_count()
    many = len(stale) > 2 * jobs       # importing once pays
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run_chapter, root, page, many): page for page in stale}
        for number, future in enumerate(as_completed(waiting), 1):
            page = waiting[future]
            try:
                message = f"{future.result()['seconds']:.0f} s"
            except Exception as error:         # it raised, its kernel died, its process was killed
                message = str(error) or type(error).__name__
                message = failed[page] = message if isinstance(error, StatusError) else f"{page}: {message}"
                record[page].unlink(missing_ok=True)
            print(f"[{number}/{len(stale)}] {page}: {message}", flush=True)
    return failed


def clean_notebook(notebook: dict):
    "Remove outputs, counts and an editor's metadata from a notebook, in place."
    from nbdev.clean import clean_nb
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    clean_nb(notebook, allowed_cell_metadata_keys=["tags", "mystnb"])


def clean_source(path: Path) -> bytes:
    "A source notebook in the form that sources have."
    notebook = json.loads(path.read_text())
    clean_notebook(notebook)
    return (json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def sources(root: Path) -> list[Path]:
    "All source notebooks, chapters or not."
    return [path for path in sorted((root / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts]


def drift(root: Path) -> list[str]:
    "Where the package or the notebooks differ from what exporting and cleaning would give, a line for each file."
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in ("nbs", "rvnnbook"):
            others = "[!_]*.py", "_[!_]*.py", "__pycache__", ".ipynb_checkpoints"      # than __init__.py, whose docstring is written by hand
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns(*others))
        for name in ("settings.ini", "pyproject.toml"):
            shutil.copy(root / name, copy)
        subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=copy, check=True, capture_output=True)
        names = {str(path.relative_to(top / "rvnnbook")) for top in (root, copy) for path in (top / "rvnnbook").rglob("*.py")}
        _, differ, missing = filecmp.cmpfiles(root / "rvnnbook", copy / "rvnnbook", names, shallow=False)
    found = [f"rvnnbook/{name} differs from its notebook: run `make export`" for name in sorted(differ + missing)]
    return found + [f"{path.relative_to(root)} holds outputs or editor notes: run `make export`"
                    for path in sources(root) if path.read_bytes() != clean_source(path)]


def check_drift(root: Path):
    "Refuse to go on when the package and the notebooks disagree. An unchanged tree is not compared twice."
    compared = [*sources(root), *sorted((root / "rvnnbook").rglob("*.py")), root / "settings.ini"]
    state = hashlib.blake2b("".join(f"{path}{content_hash(path)}" for path in compared).encode()).hexdigest()
    seen = root / "build" / "no-drift"
    if seen.exists() and seen.read_text() == state:
        return
    if found := drift(root):
        raise BookError("\n".join(found))
    seen.parent.mkdir(exist_ok=True)
    seen.write_text(state)


def write_if_changed(path: Path, content: bytes) -> bool:
    "Write a file unless it has this content already; whether it was written."
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return True


def run_time(record: dict) -> str:
    "The measured run time of an executed chapter, as a sentence."
    lessons = sum(cell["lesson"] for cell in record["cells"])
    return f"*Run time of this page when it was built: {lessons:.1f}\u00a0s of processor time on one thread, beyond imports.*"


def published_page(executed: Path) -> bytes:
    """An executed chapter with its run time written in, without widgets and the executor's notes.

    The line `> ...` below the title is the docstring of the module, and no part of the page.
    """
    notebook = json.loads(executed.read_text())
    sentence = run_time(json.loads(executed.with_suffix(".json").read_text()))
    for key in ("papermill", "widgets"):
        notebook["metadata"].pop(key, None)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
        for key in ("papermill", "execution"):
            cell["metadata"].pop(key, None)
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"]).replace("<!-- run time -->", sentence)
            cell["source"] = re.sub(r"\A(# .*\n)\n> .*\n", r"\1", text)
    return json.dumps(notebook, sort_keys=True).encode()


def stage(root: Path) -> Path:
    "Put together what Jupyter Book reads, in build/book. Only changed files are written, so that only changed pages are built again."
    from api import write_api_pages
    from vendor import vendor
    site, wanted = root / "build" / "book", {}
    for name in ("_config.yml", "_toc.yml", "references.bib", "index.md"):
        if (root / name).exists():
            wanted[name] = (root / name).read_bytes()
    for path in [path for folder in ("_ext", "_assets", "nbs") for path in (root / folder).rglob("*")]:
        if path.is_file() and path.suffix not in (".ipynb", ".pyc") and ".ipynb_checkpoints" not in path.parts:
            wanted[str(path.relative_to(root))] = path.read_bytes()
    for page in pages(root):
        if (root / f"{page}.ipynb").exists():
            wanted[f"{page}.ipynb"] = published_page(root / "build" / "executed" / f"{page}.ipynb")
    for name, content in wanted.items():
        write_if_changed(site / name, content)
    for path in [path for folder in ("nbs", "_assets", "_ext") for path in (site / folder).rglob("*") if path.is_file()]:
        if str(path.relative_to(site)) not in wanted and "vendor" not in path.parts:
            path.unlink()
    kept = {page.name for page in write_api_pages(root / "rvnnbook", site / "api")}
    for page in (site / "api").glob("*.md"):
        if page.name not in kept:
            page.unlink()
    vendor(site / "_assets")
    return site


def build_site(site: Path) -> Path:
    "Run Jupyter Book, warnings being errors, and check that every page is there; the first page."
    command = [Path(sys.executable).with_name("jupyter-book"), "build", site, "-W", "--keep-going"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    html = site / "_build" / "html"
    missing = [page for page in pages(site) if not (html / f"{page}.html").exists()]
    if done.returncode or missing:
        shutil.rmtree(site / "_build" / ".doctrees", ignore_errors=True)      # else faulty pages are not read again, and pass
        lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr).splitlines()
        messages = [line for line in lines if re.search(r"WARNING|ERROR|[Ee]xception", line)] or lines[-15:]
        messages += [f"there is no page for {page}" for page in missing][:5]
        raise BookError("the site was not built:\n" + "\n".join(messages))
    return html / "index.html"


def make_book(root: Path, always: tuple[str, ...] = (), jobs: int | None = None) -> Path:
    "Check, execute, stage, build; the first page of the site."
    check_drift(root)
    if failed := run_chapters(root, always, jobs):
        raise BookError(f"{len(failed)} of {len(chapters(root))} chapters failed, so no site was built:\n" + "\n".join(failed.values()))
    return build_site(stage(root))


def main() -> str:
    "The last line of output."
    parser = argparse.ArgumentParser(description="Execute the chapters that changed and build the site.")
    parser.add_argument("action", nargs="?", choices=["book", "clean"], default="book", help="clean: take outputs out of the notebooks")
    parser.add_argument("--chapter", metavar="NOTEBOOK", help="run this chapter even if nothing changed")
    parser.add_argument("--jobs", type=int, metavar="N", help="chapters to run at once (default: one a core)")
    options, root = parser.parse_args(), Path(__file__).resolve().parents[1]
    if options.action == "clean":
        changed = [path for path in sources(root) if write_if_changed(path, clean_source(path))]
        return f"{len(changed)} notebooks cleaned"
    chapter = options.chapter and os.path.relpath(options.chapter, root).removesuffix(".ipynb")
    if chapter and chapter not in chapters(root):
        raise BookError(f"{options.chapter} is no chapter; there are: {', '.join(chapters(root))}")
    index = make_book(root, (chapter,) if chapter else (), options.jobs)
    return f"open {index.parent / (chapter + '.html') if chapter in pages(root) else index}"


if __name__ == "__main__":
    try:
        print(main(), flush=True)
    except BookError as error:
        sys.exit(f"build: {error}")
