"""The importer's door: what the wheel carries, what it needs, what importing costs."""
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rvnnbook

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(code, *options, **environment):
    "Run code in a fresh interpreter outside the clone; return what it printed."
    done = subprocess.run([sys.executable, *options, "-c", code], cwd="/", capture_output=True, text=True,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_settings_and_pyproject_agree():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    settings = settings["DEFAULT"]
    assert sorted(settings["requirements"].split()) == sorted(PROJECT["dependencies"])
    assert f">={settings['min_python']}" == PROJECT["requires-python"]
    assert settings["description"] == PROJECT["description"]
    name, target = settings["console_scripts"].split("=")
    assert PROJECT["scripts"] == {name: target}
    assert f'__version__ = "{settings["version"]}"' in (ROOT / "rvnnbook" / "__init__.py").read_text()
    assert settings["version"] in (ROOT / "CHANGELOG.md").read_text()
    assert settings["version"] in (ROOT / "CITATION.cff").read_text()


def test_constraints_pin_what_the_extras_ask_for():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower().replace("_", "-"), re.M))
    asked = [r for extra in PROJECT["optional-dependencies"].values() for r in extra] + PROJECT["dependencies"]
    for requirement in asked:
        name, exact = re.match(r"([\w.-]+)(?:==(\S+))?", requirement.lower().replace("_", "-")).groups()
        if name == "rvnnbook":                       # an extra that contains another one
            continue
        assert name in pins, f"{name} is not pinned"
        assert exact is None or pins[name] == exact


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory):
    "The wheel, built from a copy of the sources and unpacked; nothing of the clone is on the path."
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file() and not name.startswith(("nbs/", "tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy], check=True)
    wheel, = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_every_module_and_data_file(site_packages):
    def files(top):
        return {str(p.relative_to(top)) for p in (top / "rvnnbook").rglob("*") if p.suffix in (".py", ".npy", ".json", ".yml", ".safetensors", ".typed")}
    assert files(site_packages) == files(ROOT) and "rvnnbook/py.typed" in files(ROOT)      # type checkers read the annotations
    metadata = next(site_packages.glob("*.dist-info/METADATA")).read_text()
    needed = {r for r in re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.M)}
    assert {re.split("[<>=]", r)[0] for r in needed} == {"torch", "numpy", "safetensors"}


def test_the_readme_example_runs_on_runtime_needs_alone(site_packages, tmp_path):
    example = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    hidden = ("fastcore", "nbdev", "papermill", "matplotlib", "ipywidgets", "IPython", "accelerate", "tqdm", "yaml", "scipy")
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n" + example
                      + f"\nimport rvnnbook\nassert rvnnbook.__file__.startswith({str(site_packages)!r})")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(site_packages)})
    assert done.returncode == 0, done.stderr
    *answers, names, labels, accuracy = done.stdout.splitlines()
    assert len(answers) == 2 and all(re.fullmatch(r"predicted (\d) correct \1", answer) for answer in answers)
    assert (tmp_path / "tree.svg").read_text().startswith("<svg")
    names = names.strip("[]").replace("'", "").split(", ")
    assert {"rvnn", "tree_lstm", "lstm", "bilstm"} <= set(names) and names == sorted(names)
    assert re.fullmatch(r"tensor\(\[\d, \d, \d, \d\]\) tensor\(\[\d, \d, \d, \d\]\)", labels)
    assert float(accuracy.rpartition(" ")[2]) >= 0.9


def test_files_that_the_front_pages_name_exist():
    for page in ("README.md", "CONTRIBUTING.md", "index.md"):
        named = re.findall(r"\]\(([^)#: ]+)\)|`((?:nbs|rvnnbook|tests|_ext|_assets)/[a-z_/.-]+)`", (ROOT / page).read_text())
        missing = [path for pair in named for path in pair if path and not path.startswith("api/") and not (ROOT / path).exists()]
        assert len(named) > 5 and not missing, (page, missing)


def test_the_command_knows_its_version():
    done = subprocess.run([sys.executable, "-m", "rvnnbook", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"rvnnbook {rvnnbook.__version__}\n"


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path):
    "The parent of a clone may be on the path: there the clone is a folder named rvnnbook without a module."
    (tmp_path / "rvnnbook").mkdir()
    done = subprocess.run([sys.executable, "-c", "import rvnnbook; print(rvnnbook.__version__)"], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == f"{rvnnbook.__version__}\n", done.stderr


def test_importing_brings_nothing_heavy():
    """The promise is at most 1.2 times the cost of importing torch. It holds with room to spare if torch is all that is
    imported, and is checked by what is loaded, not by a clock."""
    loaded = python("import sys, rvnnbook; print(*sorted({n.split('.')[0] for n in sys.modules}))").split()
    assert "rvnnbook" in loaded and not {"torch", "numpy", "scipy", "papermill", "matplotlib", "fastcore"} & set(loaded)
    before = set(python("import sys, torch; print(*sys.modules)").split())
    after = set(python("import sys, torch, rvnnbook; rvnnbook.create_encoder('rvnn', dim=4); print(*sys.modules)").split())
    assert {name for name in after - before if not name.startswith("rvnnbook")} <= {"difflib"}


def test_public_names_have_docstrings_and_docments():
    import ast
    bare = []
    for path in (ROOT / "rvnnbook").rglob("*.py"):
        if path.name in ("_modidx.py", "__main__.py"):
            continue
        lines = path.read_text().splitlines()
        tree = ast.parse("\n".join(lines))
        if tree.body and path.name != "__init__.py" and not ast.get_docstring(tree):
            bare.append(f"{path}: help() says nothing; add a line '> summary' below the notebook's title")
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                bare.append(f"{path.name}: {node.name} has no docstring")
            if "lab" in path.parts or path.name == "cli.py":     # a comment only where the name does not say it
                continue
            inner = [node] if isinstance(node, ast.FunctionDef) else [n for n in node.body if getattr(n, "name", "") == "__init__"]
            for function in inner:
                for argument in function.args.args + function.args.kwonlyargs:
                    if argument.arg != "self" and "#" not in lines[argument.end_lineno - 1]:
                        bare.append(f"{path.name}: {node.name}({argument.arg}) has no comment")
    assert not bare, "\n".join(bare)


def test_folders_say_what_they_hold():
    "Their `__init__.py` has one line, a docstring, and nothing else: it is not exported from a notebook."
    import ast
    rooms = [path for path in (ROOT / "rvnnbook").glob("*/__init__.py")]
    assert len(rooms) == 7
    for path in rooms:
        tree = ast.parse(path.read_text())
        assert len(tree.body) == 1 and ast.get_docstring(tree) and path.read_text().count("\n") == 1, path


def test_public_functions_and_methods_have_a_return_type():
    "In the rooms of the library: core, data, layers, reference, encoders, tasks and registry."
    import ast
    bare = []
    def visit(body, path, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, path, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.returns is None:
                bare.append(f"{path}: {prefix}{node.name}")
    rooms = [path for room in ("core", "data", "layers", "reference", "encoders", "own", "literal", "origin", "tasks", "registry", "optimization")
             for path in [ROOT / "rvnnbook" / f"{room}.py", *(ROOT / "rvnnbook" / room).glob("*.py")] if path.is_file()]
    assert len(rooms) > 60
    for path in rooms:
        visit(ast.parse(path.read_text()).body, path.relative_to(ROOT))
    assert bare == []


@pytest.mark.long
@pytest.mark.parametrize("page", ["trees_as_data", "cells", "recursive_networks", "neighbors", "attention", "topk"])
def test_a_downloaded_notebook_runs_alone(site_packages, tmp_path, page):
    "The file behind a page's download button, in an empty folder, with the wheel instead of the clone."
    import nbformat
    from nbclient import NotebookClient
    source = ROOT / "build" / "book" / "_build" / "html" / "_sources" / "nbs" / f"{page}.ipynb"
    if not source.exists():
        pytest.skip("the book is not built; remedy: make book")
    notebook = nbformat.read(source, 4)
    notebook.cells.append(nbformat.v4.new_code_cell("import rvnnbook; rvnnbook.__file__"))
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute(
        env={**os.environ, "PYTHONPATH": str(site_packages), "RVNNBOOK_DATA": str(tmp_path / "data")})
    assert str(site_packages) in notebook.cells[-1].outputs[0].data["text/plain"]


def test_pyright_accepts_the_types_of_the_rooms_that_users_import():
    """The rooms are named in pyproject.toml. Pyright is a development package of package.json, fetched with the site's scripts."""
    node = shutil.which("node") or str(Path(sys.executable).with_name("node"))
    done = subprocess.run([node, ROOT / "node_modules" / "pyright" / "index.js", "--project", ROOT, "--pythonpath", sys.executable],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]
