"""Mutants: an exported function returns zeros, or its first argument. Some test or some lesson must notice.

A sample of twelve by default; RVNNBOOK_MUTANTS=40 takes more, RVNNBOOK_MUTANTS=all takes every one,
and RVNNBOOK_MUTANTS=layers.cells.GRC.forward,core.check_batch those named. Everything happens in a copy of the tree."""
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["core.py", "own.py", "layers/*.py", "encoders/*.py", "data/*.py", "tasks/*.py"]
KINDS = ["zeros", "first"]
NOT_ASKED = {"test_mutants.py", "test_site.py", "test_show.py", "test_run.py", "test_book.py", "test_cli.py", "test_registry.py"}
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "node_modules", "runs", "__pycache__", ".hypothesis", ".pytest_cache",
                                    ".ruff_cache", ".ipynb_checkpoints", ".jupyter", "*.egg-info")
HELPER = '''
"Decorators that make a mutant of a function."
import functools, inspect
from pathlib import Path

def empty(value):
    if value is None or isinstance(value, (bool, int, float, str, bytes, list, dict, set, frozenset)):
        return None if value is None else type(value)()
    if isinstance(value, tuple):
        if hasattr(value, "_fields") or any(hasattr(part, "shape") for part in value):
            parts = [empty(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return ()
    if hasattr(value, "new_zeros") or hasattr(value, "dtype"):
        return value * 0 if value.dtype != bool and "bool" not in str(value.dtype) else value & False
    if isinstance(value, Path):
        return Path(".")
    if inspect.isgenerator(value):
        return iter(())
    return type("Nothing", (), {})()

def zeros(function):
    @functools.wraps(function)
    def mutant(*args, **kwargs):
        return empty(function(*args, **kwargs))
    return mutant

def first(function):
    names = list(inspect.signature(function).parameters)
    @functools.wraps(function)
    def mutant(*args, **kwargs):
        at = names[0] == "self"
        return args[at] if len(args) > at else kwargs.get(names[at])
    return mutant

def same(function):
    return function
'''
UNSHRUNK = '''
"pytest plugin: one failing example is enough, and no need to make it small."
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
settings.load_profile("mutants")
'''
LESSONS = '''
import json, os, sys
os.environ["MPLBACKEND"] = "Agg"
import rvnnbook
assert rvnnbook.__file__.startswith(sys.argv[2] + os.sep), rvnnbook.__file__
names = {"__name__": "__main__", "display": lambda *shown: None}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
'''


def functions(source):
    "Exported and private functions and methods of a source, with their definition: {qualified name: node}."
    tree, found = ast.parse(source), {}
    exported = next((ast.literal_eval(node.value) for node in tree.body
                     if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"), None)
    for node in tree.body:
        name = getattr(node, "name", "")
        if exported is not None and name not in exported and not name.startswith("_"):
            continue
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                    found[f"{node.name}.{method.name}"] = method
    return found


def mutated(source, name, kind):
    "The source with a decorator directly above one definition; None if it has none of that name."
    node = functions(source).get(name)
    if node is None:
        return None
    lines = source.splitlines(keepends=True)
    lines.insert(node.lineno - 1, " " * node.col_offset + f'@__import__("mutation").{kind}\n')
    return "".join(lines)


def gives(node):
    "Whether a definition returns or yields anything: a mutant of what it gives would be the function itself."
    return any(isinstance(part, (ast.Yield, ast.YieldFrom)) or isinstance(part, ast.Return) and part.value is not None
               for part in ast.walk(node))


def mutants(root=ROOT):
    "All mutants: (module path, qualified name, kind)."
    found = []
    for path in sorted({path for pattern in ROOMS for path in (root / "rvnnbook").glob(pattern)}):
        for name, node in functions(path.read_text()).items():
            if not gives(node):
                continue
            takes = len(node.args.args) - ("." in name) + len(node.args.kwonlyargs) > 0
            found += [(str(path.relative_to(root)), name, kind) for kind in KINDS if kind != "first" or takes]
    return found


def title(mutant):
    module, name, kind = mutant
    return f"{module.removeprefix('rvnnbook/').removesuffix('.py').replace('/', '.')}.{name} -> {kind}"


def chosen():
    wanted, every = os.environ.get("RVNNBOOK_MUTANTS", "12"), mutants()
    if wanted == "all":
        return every
    if wanted.isdigit():
        return Random("mutants").sample(every, min(int(wanted), len(every)))
    return [mutant for mutant in every if title(mutant).split(" ")[0] in wanted.split(",")]


def files_about(module, root):
    "Test files that name the module, its own first."
    dotted, found = module.removesuffix(".py").replace("/", "."), []
    helper = (root / "tests" / "golden.py").read_text()
    for path in sorted((root / "tests").glob("test_*.py")):
        text = path.read_text()
        text += helper if "import golden" in text else ""
        if path.name not in NOT_ASKED and (dotted in text or "encoders" in dotted and path.name == "test_encoders.py"):
            found.append(path)
    own = f"test_{dotted.split('.')[-1]}.py"
    return [str(path.relative_to(root)) for path in sorted(found, key=lambda path: (path.name != own, path.stat().st_size))]


def chapter_of(module, root):
    "The notebook that the module is exported from."
    dotted = module.removeprefix("rvnnbook/").removesuffix(".py").replace("/", ".")
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        if any(f"#| default_exp {dotted}\n" in "".join(cell["source"]) + "\n" for cell in json.loads(path.read_text())["cells"]):
            return path
    raise LookupError(f"no chapter for {module}")


class Workshop:
    "A copy of the tree in which one function at a time is spoilt."
    def __init__(self, folder):
        self.root = folder / "copy"
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED)
        (self.root / "mutation.py").write_text(HELPER)
        (self.root / "unshrunk.py").write_text(UNSHRUNK)
        (folder / "lessons.py").write_text(LESSONS)
        self.failing = {}
        self.environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        where = self.run("-c", "import rvnnbook; print(rvnnbook.__file__)").stdout.strip()
        assert where == str(self.root / "rvnnbook" / "__init__.py"), f"the copy is not what is imported, but {where}"

    def run(self, *words, folder="."):
        return subprocess.run([sys.executable, *words], cwd=self.root / folder, env=self.environment, capture_output=True, text=True,
                              timeout=900)

    def killed(self, module, name, kind):
        "Who notices the mutant: the name of a test, or of a chapter; None if nobody does."
        chapter, source = chapter_of(module, self.root), (self.root / module).read_text()
        notebook = chapter.read_text()
        cells = json.loads(notebook)
        tests, changed = files_about(module, self.root), 0
        assert tests, f"no test file names {module}"
        left_out = self.failing_anyway(tests)
        for cell in cells["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code" and text.startswith("#| export") and (new := mutated(text, name, kind)):
                cell["source"], changed = new, changed + 1
        assert changed == 1, f"{chapter.name} defines {name} {changed} times"
        try:
            (self.root / module).write_text(mutated(source, name, kind))
            chapter.write_text(json.dumps(cells))
            done = self.pytest("-x", *left_out, *tests)
            if done.returncode in (1, 2):
                return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), done.stdout[-300:])
            assert done.returncode == 0, done.stdout + done.stderr
            done = self.run(str(self.root.parent / "lessons.py"), str(chapter), str(self.root), folder=chapter.parent.relative_to(self.root))
            return f"{chapter.name}: {done.stderr.strip().splitlines()[-1][:100]}" if done.returncode else None
        finally:
            (self.root / module).write_text(source)
            chapter.write_text(notebook)

    def pytest(self, *words):
        return self.run("-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "unshrunk", *words)

    def failing_anyway(self, tests):
        "Options that leave out tests that fail without any mutant: they notice nothing."
        for test in tests:
            if test not in self.failing:
                lines = self.pytest(test).stdout.splitlines()
                self.failing[test] = [line.split(" ")[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
        return [f"--deselect={name}" for test in tests for name in self.failing[test]]


# ---- the instruments themselves

def test_mutants_are_made_of_every_room():
    names = {title(mutant) for mutant in mutants()}
    assert {"core.check_batch -> zeros", "core.check_batch -> first", "layers.cells.GRC.forward -> first", "data.listops.draw_expression -> zeros",
            "encoders.rvnn.RvNN.cell -> zeros", "tasks.classify.Classifier.forward -> zeros", "layers.tree_search._merge_rows -> zeros"} <= names
    assert not any("core.check_choice" in name for name in names)                      # it refuses, or gives nothing
    assert "encoders.rvnn.RvNN.cell -> first" not in names and not any("__init__" in name for name in names)


def test_helper(tmp_path):
    names = {}
    exec(HELPER, names)
    import numpy as np
    import torch
    values = [True, 3, 2.5, "word", [1], {1: 2}, (1, 2), Path("a"), frozenset([1])]
    assert [names["zeros"](lambda v: v)(value) for value in values] == [False, 0, 0.0, "", [], {}, (), Path("."), frozenset()]
    assert names["zeros"](lambda: torch.tensor([2, 3]))().tolist() == [0, 0]
    assert names["zeros"](lambda: torch.tensor([True]))().tolist() == [False]
    assert names["zeros"](lambda: np.array([2.0]))().tolist() == [0]
    assert [part.tolist() for part in names["zeros"](lambda: (torch.ones(1), torch.ones(2)))()] == [[0], [0, 0]]
    assert list(names["zeros"](lambda: (i for i in range(3)))()) == []
    assert names["first"](lambda a, b: a + b)(1, 2) == 1 and names["first"](lambda *, b=5: b)(b=4) == 4
    text = "class A:\n    @property\n    def b(self):\n        return 7\n"
    assert mutated(text, "A.b", "zeros") == text.replace("    def", '    @__import__("mutation").zeros\n    def')
    assert mutated(text, "c", "zeros") is None


@pytest.mark.long
def test_mutants_are_noticed(tmp_path, capsys):
    workshop, survivors = Workshop(tmp_path), []
    sample = chosen()
    assert sample, "no such mutant"
    module, name, _ = sample[0]
    assert workshop.killed(module, name, "same") is None, "the copy fails without a mutant"
    for mutant in sample:
        found = workshop.killed(*mutant)
        with capsys.disabled():
            print(f"{title(mutant)}: {found or 'SURVIVES'}", flush=True)
        if found is None:
            survivors.append(title(mutant))
    assert not survivors, f"{len(survivors)} of {len(sample)} mutants survive: " + "; ".join(survivors)
