"""The book as a whole: sources, executions, and a build that cannot be green over something broken."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "_ext"))
from build import chapters, check_drift, content_hash, drift, is_fresh, pages, published_page, run_time, versions  # noqa: E402

BIN = Path(sys.executable).parent
SOURCES = sorted((ROOT / "nbs").rglob("*.ipynb"))
SOURCES = [path for path in SOURCES if ".ipynb_checkpoints" not in path.parts]
CHAPTERS = chapters(ROOT)
PUBLISHED = [page for page in pages(ROOT) if page in CHAPTERS]
LESSON = re.compile(r"^\s*assert\b|\bassert_close\(|^\s*except \w+Error", re.M)


def cells(path, kind="code"):
    return ["".join(c["source"]) for c in json.loads(Path(path).read_text())["cells"] if c["cell_type"] == kind]


# Sources

def test_the_package_is_what_the_notebooks_export():
    assert drift(ROOT) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_source_notebook_is_clean_and_readable(path):
    notebook = json.loads(path.read_text())
    assert len({c["id"] for c in notebook["cells"]}) == len(notebook["cells"]), "cell ids are unique"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("#|")]
            assert len(lines) <= 40 and max(map(len, lines), default=0) <= 100, "".join(cell["source"])[:200]
    exports = [m[1] for source in cells(path) for m in re.finditer(r"^#\| default_exp (\S+)", source, re.M)]
    assert len(exports) <= 1
    shown = json.dumps(notebook)
    for word in ("TODO", "FIXME", "nbdev_export()", "show_doc"):
        assert word not in shown


def test_no_two_chapters_make_the_same_module():
    made = [m[1] for path in SOURCES for source in cells(path) for m in re.finditer(r"^#\| default_exp (\S+)", source, re.M)]
    assert len(made) == len(set(made))


def test_nine_exported_definitions_in_ten_have_a_lesson_within_three_cells():
    total, without = 0, []
    for path in SOURCES:
        code = cells(path)
        for i, source in enumerate(code):
            if source.startswith("#| export") and re.search(r"^(?:def|class) (?!_)", source, re.M):
                total += 1
                if not any(LESSON.search(later) for later in code[i + 1:i + 4]):
                    without.append(f"{path.stem}: {re.search('(?:def|class) (.*?)[(:]', source)[1]}")
    assert total > 50 and len(without) <= total / 10, without


def test_chapters_have_the_arc_of_the_book():
    for page in PUBLISHED:
        text = "\n".join(cells(ROOT / f"{page}.ipynb", "markdown"))
        assert text.startswith("# ") and text.count("\n# ") == 0, page
        if page not in ("nbs/preface", "nbs/traceability"):
            assert text.count(":::{exercise}") >= 1 and "<!-- run time -->" in text, page
            solutions = set(re.findall(r"solution-start\} (\S+)", text))
            assert solutions <= set(re.findall(r":label: (ex-\S+)", text)), page
            assert text.count("solution-start") == text.count("solution-end"), page
            told = [after for cell in cells(ROOT / f"{page}.ipynb", "markdown")
                    for after in re.findall(r"\{solution-end\}\n:::\s*(\S+)", cell) if not after.startswith((":::{", "#"))]
            assert not told, f"{page}: what an exercise comes to stands outside its folded solution, at {told}"


def test_lessons_are_not_asserted_away():
    "An assertion that is always true would be a lesson that cannot fail."
    for path in SOURCES:
        for source in cells(path):
            try:
                tree = ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M))
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                assert not (isinstance(node, ast.Assert) and isinstance(node.test, (ast.Constant, ast.Tuple))), (path.stem, source)


# Executions: those that readers see

@pytest.mark.parametrize("page", CHAPTERS)
def test_the_executed_chapter_is_complete_and_current(page):
    executed = ROOT / "build" / "executed" / f"{page}.ipynb"
    notebook = json.loads(executed.read_text())
    assert is_fresh(executed.with_suffix(".json"), versions())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["metadata"]["papermill"]["status"] == "completed"
            for output in cell["outputs"]:
                assert output["output_type"] != "error"
                assert not (output["output_type"] == "stream" and output["name"] == "stderr"), output["text"]


# What a build decides and what it publishes

def test_a_page_is_stale_once_a_missing_file_appears(tmp_path):
    (tmp_path / "a.txt").write_text("alpha")
    used = {str(tmp_path / name): content_hash(tmp_path / name) for name in ("a.txt", "missing.txt")}
    (tmp_path / "record.json").write_text(json.dumps({"versions": versions(), "used": used}))
    assert is_fresh(tmp_path / "record.json", versions()) and not is_fresh(tmp_path / "none.json", versions())
    (tmp_path / "missing.txt").write_text("here after all")
    assert not is_fresh(tmp_path / "record.json", versions())


def test_a_published_page_tells_its_run_time_and_has_neither_widgets_nor_docstring(tmp_path):
    cells = [{"lesson": 0.0, "imports": 2.0}, {"lesson": 0.25, "imports": 0.0}, {"lesson": 0.5, "imports": 0.0}]
    assert "0.8\u00a0s of processor time on one thread, beyond imports" in run_time({"cells": cells})
    view, html = "application/vnd.jupyter.widget-view+json", "text/html"
    shown = {"output_type": "display_data", "metadata": {}, "data": {view: {}, html: "<p>frames</p>"}}
    (tmp_path / "ran.ipynb").write_text(json.dumps({"metadata": {"widgets": {}, "papermill": {}}, "cells": [
        {"cell_type": "code", "metadata": {"papermill": {}}, "outputs": [shown]},
        {"cell_type": "markdown", "metadata": {}, "source": ["<!-- run time -->"]},
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "\n", "> Docstring.\n", "\n", "First.\n", "\n", "> Quote."]}]}))
    (tmp_path / "ran.json").write_text(json.dumps({"cells": cells}))
    page = json.loads(published_page(tmp_path / "ran.ipynb"))
    assert page["metadata"] == page["cells"][0]["metadata"] == {} and list(page["cells"][0]["outputs"][0]["data"]) == [html]
    assert [cell["source"] for cell in page["cells"][1:]] == [run_time({"cells": cells}), "# Title\n\nFirst.\n\n> Quote."]


# A build that meets something broken

def notebook(*sources):
    listed = [{"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": source,
               **({} if kind == "markdown" else {"execution_count": None, "outputs": []})} for i, (kind, source) in enumerate(sources)]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": listed}, indent=1, sort_keys=True) + "\n"


@pytest.fixture
def small_book(tmp_path):
    "A clone with a book of two chapters, and a third that is not published."
    root = tmp_path / "clone"
    (root / "nbs").mkdir(parents=True)
    for name in ("settings.ini", "pyproject.toml", "references.bib", "package.json", "package-lock.json", "_config.yml"):
        shutil.copy(ROOT / name, root)
    for name in ("_ext", "_assets"):
        shutil.copytree(ROOT / name, root / name)
    (root / "node_modules").symlink_to(ROOT / "node_modules")
    (root / "_toc.yml").write_text("format: jb-book\nroot: nbs/first\nchapters:\n- file: nbs/second\n- file: api/index\n")
    for name in ("first", "second", "third"):
        (root / "nbs" / f"{name}.ipynb").write_text(notebook(("markdown", f"# {name}"), ("code", "6 * 7")))
    subprocess.run([BIN / "nbdev_export"], cwd=root, check=True)
    subprocess.run([sys.executable, root / "_ext" / "build.py", "clean"], check=True)
    return root


def build(root, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    return subprocess.run([sys.executable, root / "_ext" / "build.py", *words], cwd=root, capture_output=True, text=True, env=env)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_broken_book_is_never_green(small_book):
    second, site = small_book / "nbs" / "second.ipynb", small_book / "build" / "book"
    edit(second, "6 * 7", "assert 6 * 7 == 41, 'not forty-one'")
    done = build(small_book)
    assert done.returncode == 1 and "second.ipynb: cell 2 raised AssertionError: not forty-one" in done.stderr
    assert not site.exists()
    done = build(small_book)                                        # it fails again, and only the broken chapter is run
    assert done.returncode == 1 and "[1/1] nbs/second" in done.stdout and not site.exists()

    edit(second, "assert 6 * 7 == 41, 'not forty-one'", "6 * 7")
    edit(second, "# second", "# second\\n\\n[nowhere](nowhere.md)")
    for _ in range(2):                                              # a warning stops the build each time, not only the first
        done = build(small_book)
        assert done.returncode == 1 and "nowhere" in done.stderr and "WARNING" in done.stderr

    edit(second, "\\n\\n[nowhere](nowhere.md)", "")
    done = build(small_book)
    assert done.returncode == 0, done.stderr
    page = done.stdout.strip().splitlines()[-1].removeprefix("open ")
    assert Path(page).exists() and "42" in (site / "_build" / "html" / "nbs" / "second.html").read_text()
    assert (small_book / "build" / "executed" / "nbs" / "third.ipynb").exists() and not (site / "nbs" / "third.ipynb").exists()

    done = build(small_book)                                        # nothing changed: nothing is run
    assert done.returncode == 0 and "[" not in done.stdout
    done = build(small_book, "--chapter", "nbs/second.ipynb")       # unless it is asked for by name
    assert done.returncode == 0 and "[1/1] nbs/second" in done.stdout, done.stderr
    assert Path(done.stdout.strip().splitlines()[-1].removeprefix("open ")) == site / "_build" / "html" / "nbs" / "second.html"

    done = build(small_book, "--chapter", "nbs/none.ipynb")
    assert done.returncode == 1 and "nbs/none.ipynb is no chapter" in done.stderr and done.stderr.count("\n") == 1

    edit(small_book / "nbs" / "third.ipynb", "6 * 7", "1 / 0")      # one that is not published, too, must run
    done = build(small_book)
    assert done.returncode == 1 and "third.ipynb: cell 2 raised ZeroDivisionError" in done.stderr
    edit(small_book / "nbs" / "third.ipynb", "1 / 0", "6 * 7")
    assert build(small_book).returncode == 0

    edit(small_book / "nbs" / "first.ipynb", "6 * 7", "6 * 8")
    done = build(small_book)
    assert done.returncode == 0 and re.findall(r"\] (nbs/\w+)", done.stdout) == ["nbs/first"]
    assert "48" in (site / "_build" / "html" / "nbs" / "first.html").read_text()


def test_drift_stops_the_build_and_names_the_remedy(small_book):
    module = small_book / "rvnnbook" / "stray.py"
    module.write_text("x = 1\n")
    done = build(small_book)
    assert done.returncode == 1 and done.stderr == "build: rvnnbook/stray.py differs from its notebook: run `make export`\n"
    module.unlink()
    first = small_book / "nbs" / "first.ipynb"
    edit(first, '"outputs": []', '"outputs": [{"name": "stdout", "output_type": "stream", "text": "hm"}]')
    edit(first, '"execution_count": null', '"execution_count": 3')
    done = build(small_book)
    assert done.returncode == 1 and "nbs/first.ipynb holds outputs" in done.stderr
    assert not (small_book / "build" / "executed").exists()
    with pytest.raises(Exception, match="holds outputs"):
        check_drift(small_book)
    cleaned = build(small_book, "clean")
    assert cleaned.stdout == "1 notebooks cleaned\n" and drift(small_book) == []


def test_saving_in_jupyterlab_leaves_the_source_as_it_was(tmp_path):
    "The server that `make lab` starts, its settings, a notebook opened, run and saved."
    code = """
import json, sys
from pathlib import Path
from time import process_time
from jupyter_server.services.contents.filemanager import FileContentsManager
from traitlets.config import Config
config = Config()
settings = Path(sys.argv[1], "_ext", "lab_config.py")
exec(settings.read_text(), {"get_config": lambda: config, "__file__": str(settings)})
manager = FileContentsManager(root_dir=sys.argv[2], config=config)
for path in sorted(Path(sys.argv[2]).rglob("*.ipynb")):
    name = str(path.relative_to(sys.argv[2]))
    model = manager.get(name)
    model["content"]["metadata"]["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    model["content"]["metadata"]["language_info"] = {"name": "python", "version": "3.12.1"}
    for cell in model["content"]["cells"]:
        cell["metadata"]["collapsed"] = True
        if cell["cell_type"] == "code":
            cell["execution_count"] = 5
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "printed"}]
            cell["metadata"]["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    manager.save(model, name)
"""
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    subprocess.run([sys.executable, "-c", code, ROOT, tmp_path / "nbs"], check=True, capture_output=True)
    for path in SOURCES:
        assert (tmp_path / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path


def test_pre_commit_hooks_pass():
    done = subprocess.run([BIN / "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    subprocess.run([BIN / "pre-commit", "validate-config", ROOT / ".pre-commit-config.yaml"], check=True)
    for entry in re.findall(r"entry: (\S+)", config):
        assert (ROOT / entry).exists(), entry
