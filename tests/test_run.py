"""One run of an experiment: parameters, exit status, limit, signals, lock, and files after a failure."""
import contextlib
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvnnbook.lab.run import StatusError, hold, holder, run_experiment, run_path
from rvnnbook.lab.settings import ParameterError, check_parameters, open_notebook, parse_value, strict
from rvnnbook.registry import describe_encoder
from rvnnbook.show.pages import execute, parameter_lines
from tests.faults import make_clone
from tests.helpers import JUPYTER, without
from tests.test_train import assert_same_run
from tests.training import go

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "_ext"))
from build import execute_chapter, strip_directives  # noqa: E402

EXPERIMENT = ROOT / "nbs" / "experiments" / "gold_trees.ipynb"
EXPERIMENTS = ["ablation", "beam_states", "bench_beam_tree", "bench_crvnn", "bench_efficiency", "bench_layers", "bench_predict", "bytes", "design_space", "gold_trees", "images", "inference", "length_generalization", "listops", "logic", "music", "nested", "parsing", "sentiment", "sequences", "tokens", "translation"]
COMMAND = Path(sys.executable).with_name("rvnnbook")


def run(*words, cwd, command=(COMMAND,), **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    return subprocess.run([*map(str, command), *map(str, words)], cwd=cwd, capture_output=True, text=True,
                          env={**clean, "OMP_NUM_THREADS": "1", **environment})


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def notebook(*sources, tags=()):
    cells = [{"cell_type": "code", "id": f"cell{i}", "metadata": {"tags": ["parameters"] if i in tags else []}, "source": source,
              "execution_count": None, "outputs": []} for i, source in enumerate(sources)]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


GATE = ("from rvnnbook.lab.settings import strict\n"
        "run = strict(globals(), {'smoke': {'n': 2}, 'cpu': {'n': 3}}, n=range(1, 10), rate=(0.1, 1.0), cell={'grc', 'lstm'})")
PARAMETERS = "profile = 'smoke'\nn = None\nrate = 0.5\ncell = 'grc'"


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps(notebook(PARAMETERS, GATE, "print('n is', run.n)\nassert run.n != 9, 'nine'", tags=(0,))))
    return path


def test_one_smoke_rerun(tmp_path):
    done = run("run", EXPERIMENT, "-p", "seed=1", "-p", "draws=2000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    target = tmp_path / done.stdout.splitlines()[-1].removeprefix("done: ")
    assert target.parent == tmp_path / "build" / "runs"
    cells = json.loads(target.read_text())["cells"]
    shown = "".join("".join(o.get("data", {}).get("text/plain", "")) for c in cells for o in c.get("outputs", []))
    assert "'seed': 1" in shown and "'draws': 2000" in shown
    beside = [name for name in files(ROOT / "nbs" / "experiments") if ".ipynb_checkpoints" not in name]
    assert beside == [f"{name}.ipynb" for name in EXPERIMENTS], "an experiment writes nothing beside itself"


@pytest.mark.parametrize("words, said", [
    (["nothing.ipynb"], "there is no notebook nothing.ipynb"),
    (["nothing.ipynb", "--parameters"], "there is no notebook nothing.ipynb"),
    (["{small}", "-p", "m=3"], "unknown parameter 'm'"),
    (["{small}", "-p", "rat=0.5"], "Did you mean 'rate'?"),
    (["{small}", "-p", "n=three"], "n is 'three': Input should be a valid integer"),
    (["{small}", "-p", "n=2.0"], "n is 2.0: Input should be a valid integer"),
    (["{small}", "-p", "n=True"], "n is True: Input should be a valid integer"),
    (["{small}", "-p", "n=10"], "n is 10: Input should be less than 10"),
    (["{small}", "-p", "rate=nan"], "rate is 'nan': Input should be a valid number"),
    (["{small}", "-p", "rate=1.5"], "rate is 1.5: Input should be less than or equal to 1"),
    (["{small}", "-p", "cell=gru"], "cell is 'gru': Input should be 'grc' or 'lstm'"),
    (["{small}", "-p", "cell=gru", "-p", "n=0", "-p", "rat=1"], "n is 0: Input should be greater than or equal to 1; cell is 'gru': Input should be"
     " 'grc' or 'lstm'; unknown parameter 'rat'. Did you mean 'rate'? Known: profile, n, rate, cell"),
    (["{small}", "-p", "_n=2"], "unknown parameter '_n'"),
    (["{small}", "-p", "open=2"], "unknown parameter 'open'"),
    (["{small}", "-p", "_checked=1", "-p", "nn=2"], "unknown parameter '_checked'"),
    (["{small}", "-p", "n=2", "-p", "n=3"], "n is given twice"),
    (["{small}", "--profile", "cpu", "-p", "profile=smoke"], "profile is given twice"),
    (["{small}", "-p", "n={{[]}}"], "n is '{[]}': Input should be a valid integer"),
    (["{small}", "-p", "n"], "-p takes NAME=VALUE"),
    (["{small}", "-p", "=3"], "-p takes NAME=VALUE"),
    (["{small}", "--profile", "gpu"], "profile is 'gpu': Input should be 'cpu' or 'smoke'"),
    (["{small}", "-p", "profile=None"], "profile is None: Input should be"),
    (["{plain}"], "has no parameters cell"),
    (["{broken}"], "is not a notebook"), ([".", "--parameters"], ". is not a notebook"),
])
def test_a_refused_request_is_one_line_and_leaves_nothing(small, tmp_path, words, said):
    (tmp_path / "plain.ipynb").write_text(json.dumps(notebook("x = 1")))
    (tmp_path / "broken.ipynb").write_text("{")
    before = files(tmp_path)
    words = [w.format(small="small.ipynb", plain="plain.ipynb", broken="broken.ipynb") for w in words]
    done = run("run", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_parameter_is_listed_with_its_values_and_its_meaning(name):
    notebook = open_notebook(ROOT / "nbs" / "experiments" / f"{name}.ipynb")
    lines, run = parameter_lines(notebook), vars(check_parameters(notebook, {"profile": "cpu"}))
    heads, meanings = {line.partition(" ")[0]: line for line in lines[::2]}, lines[1::2]
    assert heads.keys() == run.keys() and len(lines) == 2 * len(run)
    assert all(meaning.startswith("    ") and len(meaning) > 7 and "#" not in meaning for meaning in meanings)
    for name in run:
        assert f"cpu {run[name]!r}" in heads[name] or heads[name] == f"{name} = {run[name]!r}"
    name, rule = ("seed", "(from 0, below 2147483648)") if "seed" in run else ("threads", "(from 1, below 257)")
    assert meanings[[*heads].index(name)].endswith(rule)


def test_parameters_are_listed_and_a_bare_name_is_understood():
    done = run("run", "nbs/experiments/gold_trees.ipynb", "--parameters", cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("profile = smoke 'smoke', cpu 'cpu'") and "\nseed = 0\n    " in done.stdout
    done = run("run", "nbs/implementations/crvnn.ipynb", "--parameters", cwd=ROOT)
    assert done.returncode == 2 and "has no parameters cell" in done.stderr and done.stderr.count("\n") == 1
    for asked in ("gold_trees", "nbs/experiments/gold_treess.ipynb"):
        done = run("run", asked, cwd=ROOT)
        assert done.returncode == 2 and done.stderr.endswith("Did you mean nbs/experiments/gold_trees.ipynb?\n")


def test_a_reader_of_the_first_line_only_is_no_error():
    done = run("-c", f"set -o pipefail; {COMMAND} results | head -n 1", cwd=ROOT, command=("bash",))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split() == ["experiment", "records", "finished", "stale"]


def test_python_dash_m_and_a_run_folder_of_ones_own(small, tmp_path):
    done = run("run", "small.ipynb", "--profile", "cpu", "-p", "rate=1", cwd=tmp_path, command=(sys.executable, "-m", "rvnnbook"),
               RVNNBOOK_RUNS=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    target, = (tmp_path / "elsewhere").glob("small-cpu-*.ipynb")
    assert "n is 3" in target.read_text()


def test_the_tagged_cells_are_a_script(small, tmp_path, tmp_path_factory):
    book = json.loads(small.read_text())
    more = notebook("import matplotlib", "stars = '*' * run.n\nstars", "half = run.n / 2", "half")["cells"]
    for cell in more[1:]:
        cell["metadata"]["tags"] = ["run"]
    small.write_text(json.dumps({**book, "cells": book["cells"] + more}))
    path = without(tmp_path_factory.mktemp("path"), *JUPYTER)
    def plainly(*words):
        return run("run", small, "--no-notebook", *words, cwd=tmp_path, PYTHONPATH=path)
    done = plainly("-p", "n=5")
    assert (done.returncode, done.stdout) == (0, "*****\n2.5\ndone\n"), done.stderr
    assert files(tmp_path) == ["small.ipynb"]
    refused = plainly("-p", "n=10")
    assert refused.returncode == 2 and "n is 10: " in refused.stderr and not refused.stdout
    small.write_text(json.dumps(book))
    refused = plainly()
    assert refused.returncode == 2 and "no cells tagged `run`" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_listops_experiment_needs_no_jupyter(tmp_path, tmp_path_factory):
    done = run("run", ROOT / "nbs/experiments/listops.ipynb", "--no-notebook", "-p", "encoder=lstm", "-p", "stages=none",
               cwd=tmp_path, PYTHONPATH=without(tmp_path_factory.mktemp("path"), *JUPYTER))
    assert done.returncode == 0 and "'accuracy': 0." in done.stdout and done.stdout.endswith("done\n"), done.stderr
    assert files(tmp_path) == []                               # a smoke run keeps nothing


def test_a_notebook_that_raises_fails_in_one_line_and_keeps_the_earlier_result(small, tmp_path):
    assert run("run", "small.ipynb", "-p", "n=8", cwd=tmp_path).returncode == 0
    earlier = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    done = run("run", "small.ipynb", "-p", "n=9", cwd=tmp_path)
    said = re.fullmatch(r"rvnnbook: small.ipynb: cell \d raised AssertionError: nine \(see (.*)\)\n", done.stderr)
    assert done.returncode == 1 and said, done.stderr
    assert "nine" in (tmp_path / said[1]).read_text()
    for name, content in earlier.items():
        assert (tmp_path / name).read_bytes() == content
    assert [name for name in files(tmp_path) if name not in earlier] == [said[1]]
    assert run("run", "small.ipynb", "-p", "n=8", cwd=tmp_path).returncode == 0


def test_a_text_that_records_prove_wrong_fails_the_book_but_not_the_run(small, tmp_path):
    book = json.loads(small.read_text())
    def with_cells(*pairs):
        more = notebook(*(source for source, _ in pairs))["cells"]
        for number, (cell, (_, trains)) in enumerate(zip(more, pairs)):
            cell.update(id=f"more{number}", metadata={"tags": ["run"] * trains})
        small.write_text(json.dumps({**book, "cells": book["cells"] + more}))
    with_cells(("score = run.n", True), ("assert score > 5, 'the text says so'", False), ("print('shown', score)", False))
    done = run("run", "small.ipynb", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("checks on its page failed: cell 5 raised AssertionError.") == 1, done.stderr
    target = tmp_path / done.stdout.splitlines()[-1].removeprefix("done: ")
    assert "the text says so" in target.read_text() and "shown 2" in target.read_text()
    assert not [name for name in files(tmp_path) if "failed" in name]
    done = run("run", "small.ipynb", "-p", "n=6", cwd=tmp_path)
    assert done.returncode == 0 and "page failed" not in done.stdout
    with pytest.raises(RuntimeError, match="cell 5 raised AssertionError: the text says so"):     # as the book runs it
        execute(small, tmp_path / "out" / "small.ipynb")
    with_cells(("score = run.n", True), ("assert score > 5, 'not yet'", False), ("print('shown', score)", True))
    done = run("run", "small.ipynb", cwd=tmp_path)
    assert done.returncode == 1 and "AssertionError: not yet" in done.stderr


def test_plain_papermill_meets_the_same_gate(small, tmp_path):
    papermill = Path(sys.executable).with_name("papermill")
    def attempt(*words):
        return subprocess.run([papermill, small, tmp_path / "out.ipynb", "--no-progress-bar", *words], capture_output=True, text=True)
    assert attempt("-p", "n", "4").returncode == 0
    for words, said in ((("-p", "m", "4"), "unknown parameter 'm'"), (("-p", "n", "400"), "less than 10"), (("-p", "n", "x"), "valid integer")):
        done = attempt(*words)
        assert done.returncode != 0 and said in done.stderr


def test_other_commands_refuse_in_one_line(tmp_path):
    (tmp_path / "bad.tsv").write_text("3\t[MAX 1 2 ]\n")
    for words, status, said in ((("data", "add", "listops", "none.tsv"), 2, "none.tsv"),
                                (("data", "add", "listops", "bad.tsv"), 2, "bad.tsv:1")):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert files(tmp_path) == ["bad.tsv"]
    assert run("nonsense", cwd=tmp_path).returncode == 2
    names = run("encoders", cwd=tmp_path).stdout.split()
    assert {"rvnn", "tree_lstm", "lstm", "bilstm"} <= set(names) and names == sorted(set(names))
    described = run("encoders", "tree_lstm", cwd=tmp_path)
    assert described.returncode == 0 and described.stdout == describe_encoder("tree_lstm") + "\n" and "    dim: int," in described.stdout
    refused = run("encoders", "tree_lstn", cwd=tmp_path)
    assert refused.returncode == 2 and "Did you mean 'tree_lstm'?" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_official_test_is_installed_from_a_file(tmp_path):
    official = Path(__file__).parents[2] / "shared" / "data" / "listops" / "test_d20s.tsv.xz"
    if not official.exists():
        pytest.skip("the official ListOps test is not beside this checkout (shared/data/listops/test_d20s.tsv.xz)")
    done = run("data", "add", "listops", official, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    installed = tmp_path / "data" / "listops" / "test_d20s.tsv.xz"
    assert lzma.open(installed).read() == lzma.open(official).read()


def test_commands_about_encoders_and_data_need_no_extra(tmp_path, tmp_path_factory):
    path = without(tmp_path_factory.mktemp("path"), "pydantic")
    for words in (["encoders"], ["data", "list"]):
        done = run(*words, cwd=tmp_path, PYTHONPATH=path)
        assert done.returncode == 0 and not done.stderr, done.stderr
    done = run("run", "small.ipynb", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode != 0 and done.stderr.count("\n") == 1


def test_missing_book_tools_are_named(tmp_path, small, tmp_path_factory):
    done = run("run", "small.ipynb", cwd=tmp_path, PYTHONPATH=without(tmp_path_factory.mktemp("path"), "papermill"))
    assert done.returncode == 1 and "pip install 'rvnnbook[notebooks]'" in done.stderr and done.stderr.count("\n") == 1


def test_dependencies_include_modules_files_and_missing_files(tmp_path):
    (tmp_path / "seen.txt").write_text("x")
    path = tmp_path / "watch.ipynb"
    path.write_text(json.dumps(notebook(
        "import rvnnbook.core\nopen('seen.txt').read()\nopen('written.txt', 'w').close()",
        "try:\n    open('missing.txt')\nexcept FileNotFoundError:\n    pass", "import sympy\nsum(range(10**7))")))
    record = execute_chapter(path, tmp_path / "out" / "watch.ipynb", tmp_path)
    names = {Path(file).name for file in record["files"]}
    assert {"seen.txt", "missing.txt", "core.py", "__init__.py"} <= names and "written.txt" not in names
    assert len(record["cells"]) == 3
    assert record["cells"][2]["imports"] > 0 and record["cells"][2]["lesson"] > 0.05


def test_dependencies_include_weights(tmp_path):
    path = tmp_path / "weights.ipynb"
    path.write_text(json.dumps(notebook("from rvnnbook.registry import read_weights", "assert read_weights('crvnn', 'listops')")))
    record = execute_chapter(path, tmp_path / "out" / "weights.ipynb", ROOT)
    assert str(ROOT / "rvnnbook/weights/crvnn-listops.safetensors") in record["files"]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_kernel_that_does_not_start_gets_one_more_chance(small, tmp_path, monkeypatch, deaths):
    import papermill
    started, real = [], papermill.execute_notebook
    def unlucky(*words, **options):
        started.append(words)
        if len(started) <= deaths:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return real(*words, **options)
    monkeypatch.setattr(papermill, "execute_notebook", unlucky)
    target = tmp_path / "out" / "small.ipynb"
    if deaths == 1:
        execute(small, target)
        assert target.exists() and len(started) == 2
    else:
        with pytest.raises(RuntimeError, match="before replying"):
            execute(small, target)
        assert len(started) == 2 and files(tmp_path / "out") == []


def test_a_dying_kernel_is_an_error_not_a_result(tmp_path):
    path = tmp_path / "dies.ipynb"
    path.write_text(json.dumps(notebook("import os", "os._exit(1)", "1")))
    with pytest.raises(Exception, match="[Kk]ernel died"):
        execute(path, tmp_path / "out" / "dies.ipynb")
    assert files(tmp_path / "out") == []


@given(st.integers(), st.integers(-50, 50), st.integers(1, 60))
def test_whole_numbers_pass_exactly_when_in_range(value, low, length):
    try:
        assert strict({"profile": "smoke", "x": value}, {"smoke": {}}, x=range(low, low + length)).x == value
        passed = True
    except ParameterError:
        passed = False
    assert passed == (low <= value < low + length)


@given(st.text(), st.one_of(st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_values_are_read_as_python_reads_them(text, value):
    assert parse_value(repr(value)) == value
    assert parse_value(f'word {text}') == f'word {text}'        # no literal: the text itself


@given(st.dictionaries(st.sampled_from(["n", "rate", "cell", "profile", "nn", "Rate", "x1"]), st.one_of(
    st.none(), st.integers(-2, 12), st.floats(), st.sampled_from(["grc", "lstm", "smoke", "cpu", ""]))))
def test_the_gate_lets_through_only_what_it_declares(given_values):
    content = notebook(PARAMETERS, GATE, tags=(0,))
    try:
        passed = check_parameters(content, given_values)
    except ParameterError as error:
        assert "\n" not in str(error)
        return
    assert set(given_values) <= {"n", "rate", "cell", "profile"}
    assert passed.n in range(1, 10) and 0.1 <= passed.rate <= 1 and passed.cell in ("grc", "lstm") and passed.profile in ("smoke", "cpu")
    assert run_path("x.ipynb", passed) == run_path("x.ipynb", check_parameters(content, vars(passed)))


def test_a_wrong_profile_is_the_only_fault_of_parameters_without_a_value():
    names = {"profile": "cpuu", "dim": None, "seed": -1}
    with pytest.raises(ParameterError) as error:
        strict(names, {"smoke": {"dim": 8}, "cpu": {"dim": 64}}, dim=range(1, 99), seed=range(9))
    assert "profile is 'cpuu'" in str(error.value) and "seed is -1" in str(error.value) and "dim" not in str(error.value)


def test_the_gate_may_be_run_again_by_hand():
    names = {"profile": "smoke", "n": 3}
    strict(names, {"smoke": {}}, n=range(5))
    names.update(torch="imported since", run="too")
    assert strict(names, {"smoke": {}}, n=range(5)).n == 3


def test_directives_leave_no_trace():
    cell = {"cell_type": "code", "metadata": {}, "source": "#| export\n#| hide_input\nx = '#| not this'\n"}
    text = {"cell_type": "markdown", "metadata": {}, "source": "#| export"}
    out = strip_directives({"cells": [cell, text], "metadata": {}})["cells"]
    assert out[0]["source"] == "x = '#| not this'\n" and out[0]["metadata"]["tags"] == ["remove-input"]
    assert out[1] == text and cell["metadata"] == {}


ENDS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
JOB_GATE = ("from rvnnbook.lab.settings import strict\n"
            "run = strict(globals(), {'smoke': {}, 'cpu': {}}, what=r'\\w+', steps=range(1, 10**6), minutes=(0, 60))")
ACT = """import os, signal, time
print('doing', run.what, flush=True)
if run.what == 'raise':
    raise ArithmeticError('on purpose')
if run.what == 'exit':
    os._exit(7)
if run.what == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
if run.what == 'many':
    for number in range(20000): print(number)
    print('no newline', end='')
if run.what == 'missing':
    error = OSError('no such page')
    error.status = 404
    raise error
if run.what == 'busy':
    error = OSError('later')
    error.status = 75
    raise error
if run.what == 'deaf':
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        pass
if run.what in ('sleep', 'deaf'):
    print('asleep', flush=True)
    time.sleep(600)"""
TRAIN = """if run.what == 'train':
    import os, time
    from tests.training import go
    from rvnnbook.lab.run import run_folder
    from rvnnbook.optimization import classification_loss
    def loss(model, batch):
        print('step', flush=True)
        time.sleep(float(os.environ.get('SLOW', 0)))
        return classification_loss(model, batch)
    _, outcome = go(run_folder('job', run, ('minutes',)), loss=loss, steps=run.steps, save_every=1e9,
                    time_budget=60 * run.minutes or 1e9)"""
RECORD = "if run.what: print('recorded')"


@pytest.fixture
def job(tmp_path):
    "A notebook whose parameter decides how it ends, in a folder of its own."
    book = notebook("profile = 'smoke'\nwhat = 'finish'\nsteps = 25\nminutes = 0.0", JOB_GATE, ACT, TRAIN, RECORD, tags=(0,))
    for cell in book["cells"][2:]:
        cell["metadata"]["tags"] = ["run"]
    (tmp_path / "job.ipynb").write_text(json.dumps(book))
    yield tmp_path
    deadline = time.monotonic() + 60
    while left := mine(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(.1)


def mine(folder):
    "Processes that were started with this folder in their environment, by their number."
    found = {}
    for number in psutil.pids():
        try:
            if f"HOME={folder}\0".encode() in Path(f"/proc/{number}/environ").read_bytes() and psutil.Process(number).status() != "zombie":
                found[number] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
        except (OSError, psutil.Error):
            pass
    return found


def begin(folder, *words, ignored=(), stdout=subprocess.PIPE, **environment):
    "Start `rvnnbook run`, with signals as a terminal leaves them but for those that are ignored."
    def dispositions():
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    return subprocess.Popen([COMMAND, "run", "job.ipynb", *map(str, words)], cwd=folder, stdout=stdout, stderr=subprocess.PIPE,
                            text=True, preexec_fn=dispositions,
                            env={**clean, "OMP_NUM_THREADS": "1", "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment})


def wait_for(process, word):
    "Read the output of a run up to a word; a run that does not print it is killed."
    timer = threading.Timer(240, process.kill)
    timer.start()
    for line in process.stdout:
        if line.strip() == word:
            break
    else:
        raise AssertionError(f"did not print {word}: {process.stderr.read()}")
    timer.cancel()


def finish(process):
    "What is left of a run's words, and its exit status."
    said, complained = process.communicate(timeout=240)
    return process.returncode, said, complained


def taken(folder):
    "Wait until a run has taken its lock."
    deadline = time.monotonic() + 240
    while not any((folder / "runs").glob("*.lock")):
        assert time.monotonic() < deadline
        time.sleep(.05)


@pytest.mark.parametrize("what, status, said", [
    ("finish", 0, ""), ("raise", 1, "cell 3 raised ArithmeticError: on purpose"), ("busy", 75, "later"),
    ("missing", 1, "cell 3 raised OSError: no such page")])
def test_the_exit_status_says_how_a_plain_run_ended(what, status, said, job):
    got = finish(begin(job, "--no-notebook", "-p", f"what={what}"))
    assert got == (status, got[1], f"rvnnbook: {said}\n" if said else "")
    assert got[1].startswith(f"doing {what}\n") and ("recorded\ndone\n" in got[1]) == (status == 0)
    assert ("Traceback" in got[1]) == (status == 1)
    assert files(job) == ["job.ipynb"]                         # smoke: no lock


@pytest.mark.parametrize("what, status", [("exit", 7), ("kill", -signal.SIGKILL)])
def test_a_process_that_dies_has_the_status_of_the_system_and_leaves_no_lock(what, status, job):
    assert finish(begin(job, "--no-notebook", "--profile", "cpu", "-p", f"what={what}"))[0] == status
    lock, = (job / "runs").glob("*.lock")
    assert holder(lock) is None


def test_a_refused_run_leaves_nothing(job):
    status, said, complained = finish(begin(job, "--no-notebook", "-p", "what=%"))
    assert status == 2 and "what is '%': String should match pattern" in complained and not said and files(job) == ["job.ipynb"]
    for words in (["--limit", "0"], ["--limit", "nan"], ["--limit", "soon"]):
        assert finish(begin(job, *words))[0] == 2
    assert files(job) == ["job.ipynb"]


def test_a_run_is_a_script_and_then_a_page(job):
    status, said, complained = finish(begin(job, "--profile", "cpu"))
    assert status == 0, (complained, said)
    page = json.loads((job / said.splitlines()[-1].removeprefix("done: ")).read_text())
    assert "recorded\n" in ["".join(output["text"]) for cell in page["cells"] for output in cell["outputs"] if output["output_type"] == "stream"]
    assert said.splitlines().count("doing finish") == said.splitlines().count("recorded") == 2


def test_a_kernel_that_is_killed_is_noticed(job):
    began = time.monotonic()
    status, said, complained = finish(begin(job, "-p", "what=kill"))
    assert status == 1 and complained == "rvnnbook: Kernel died\n" and time.monotonic() - began < 120
    status, said, complained = finish(begin(job, "-p", "what=raise"))
    assert status == 1 and "job.ipynb: cell 3 raised ArithmeticError: on purpose (see " in complained and "doing raise" in said
    assert complained.count("\n") == 1


def test_a_limit_stops_a_run(job):
    status, _, complained = finish(begin(job, "--no-notebook", "-p", "what=sleep", "--limit", "4"))
    assert (status, complained) == (75, "rvnnbook: limit of 4 s: stopped; run the same command again to start over\n")


def test_no_cell_begins_after_an_interrupt_that_a_cell_ignored_and_a_second_signal_ends_the_run(job):
    process = begin(job, "--no-notebook", "--profile", "cpu", "-p", "what=deaf")
    wait_for(process, "doing deaf")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    wait_for(process, "asleep")
    time.sleep(1)
    assert process.poll() is None and len(mine(job)) == 1
    process.send_signal(signal.SIGINT)
    status, said, _ = finish(process)
    assert status == 75 and "recorded" not in said


def test_no_further_cell_begins_after_a_signal(tmp_path, capsys):
    cells = ["profile = 'smoke'", "from rvnnbook.lab.settings import strict\nrun = strict(globals(), {'smoke': {}})",
             "import os, signal\ntry:\n    signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt:\n    pass", "print('next')"]
    book = notebook(*cells, tags=(0,))
    for cell in book["cells"][2:]:
        cell["metadata"]["tags"] = ["run"]
    (tmp_path / "small.ipynb").write_text(json.dumps(book))
    with contextlib.chdir(tmp_path), pytest.raises(StatusError, match="SIGTERM: stopped") as error:
        run_experiment("small.ipynb", {})
    assert error.value.status == 75 and "next" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.long
def test_a_training_that_is_stopped_again_and_again_ends_as_if_it_had_not(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train", "-p", "steps=300"]
    for number in ENDS:
        process = begin(job, *words, SLOW=".2")
        wait_for(process, "step")
        process.send_signal(number)
        status, said, complained = finish(process)
        assert status == 75 and "recorded" not in said, (said, complained)
        assert complained == f"rvnnbook: {number.name}: stopped; run the same command again to resume\n"
    for limit in (8, 16):                                # seconds, before and in the training
        status, said, complained = finish(begin(job, *words, "--limit", limit, SLOW="1"))
        assert status == 75 and "recorded" not in said and f"limit of {limit} s: stopped" in complained
    status, said, _ = finish(begin(job, *words))
    assert status == 0 and said.endswith("recorded\ndone\n")
    go(job / "whole", steps=300)
    folder, = (path for path in (job / "runs").iterdir() if path.is_dir())
    assert_same_run(job / "whole", folder)


def test_a_training_whose_minutes_are_up_is_to_go_on(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train", "-p", "steps=4", "-p"]
    assert finish(begin(job, *words, "minutes=0.0001"))[0] == 75
    assert finish(begin(job, *words, "minutes=0.0"))[0] == 0


def test_a_notebook_is_stopped_in_its_training_and_goes_on(job):
    words = ["--profile", "cpu", "-p", "what=train"]
    process = begin(job, *words, SLOW=".5")
    wait_for(process, "step")
    process.send_signal(signal.SIGTERM)
    status, said, complained = finish(process)
    assert (status, complained) == (75, "rvnnbook: SIGTERM: stopped; run the same command again to resume\n") and "recorded" not in said
    assert not list((job / "runs").glob("*.ipynb"))
    assert finish(begin(job, *words))[0] == 0
    go(job / "whole")
    folder, = (path for path in (job / "runs").iterdir() if path.is_dir())
    assert_same_run(job / "whole", folder)


def test_a_notebook_is_stopped_anywhere_else(job):
    process = begin(job, "-p", "what=sleep")
    wait_for(process, "asleep")
    process.send_signal(signal.SIGINT)
    status, said, complained = finish(process)
    assert (status, complained) == (75, "rvnnbook: SIGINT: stopped; run the same command again to start over\n")
    assert not list((job / "build/runs").glob("*.ipynb"))


def test_a_signal_in_the_first_moment_stops_a_run(job):
    process = begin(job, "--no-notebook", "--profile", "cpu")
    taken(job)
    process.send_signal(signal.SIGTERM)
    status, said, _ = finish(process)
    assert status in (0, 75) and ("recorded" in said) == (status == 0)           # 0: it was quicker than the signal


def test_a_kernel_ends_when_its_run_is_killed(job):
    process = begin(job, "-p", "what=sleep")
    wait_for(process, "asleep")
    assert len(mine(job)) == 2
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL         # the fixture waits until nobody is left


def test_a_look_at_a_lock_does_not_end_a_run(tmp_path):
    "`rvnnbook sweep --status` takes a free lock for a moment."
    path, looking = tmp_path / "x.lock", True
    def look():
        while looking:
            holder(path)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(200):
            hold(path).lock.release()
    finally:
        looking = False
        thread.join()


def test_one_run_at_a_time(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train"]
    first = begin(job, *words, SLOW="600")
    wait_for(first, "step")
    status, said, complained = finish(begin(job, *words))
    assert status == 75 and f"this run is locked by process {first.pid} (" in complained and not said
    status, said, complained = finish(begin(job, *words, "-p", "minutes=1"))     # another command, the same training
    assert status == 75 and f"this run is locked by process {first.pid} (" in complained
    first.kill()
    finish(first)
    while mine(job):
        time.sleep(.1)
    assert finish(begin(job, *words))[0] == 0


def test_an_ignored_hangup_does_not_end_a_run(job):
    with open(job / "nohup.out", "w") as output:
        process = begin(job, "--no-notebook", "--profile", "cpu", stdout=output, ignored=(signal.SIGHUP,))
    taken(job)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 0 and (job / "nohup.out").read_text() == "doing finish\nrecorded\ndone\n"


def test_a_run_that_cannot_print_has_failed(job):
    reading, writing = os.pipe()
    os.close(reading)
    process = begin(job, "--no-notebook", "--profile", "cpu", stdout=writing)
    os.close(writing)
    assert finish(process)[0] == 1


def test_a_terminal_without_umlauts_does_not_end_a_run(job):
    process = begin(job, "--no-notebook", "-p", "what=größe", PYTHONIOENCODING="ascii")
    assert finish(process) == (0, "doing gr\\xf6\\xdfe\nrecorded\ndone\n", "")


def test_a_run_has_unlimited_output(job):
    status, said, _ = finish(begin(job, "--no-notebook", "-p", "what=many"))
    assert status == 0 and said.splitlines() == ["doing many", *map(str, range(20000)), "no newlinerecorded", "done"]


def test_two_launched_processes_make_one_run_with_the_losses_of_one_process(tmp_path):
    launch = [Path(sys.executable).with_name("accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "rvnnbook"]
    curves = []
    for name, command in (("one", (COMMAND,)), ("two", launch)):
        clone = make_clone(tmp_path / name, 1)
        path = clone / "nbs/experiments/tiny.ipynb"
        path.write_text(path.read_text().replace("dropout=0.1", "dropout=0.0").replace("VOCABULARY), 10)", "VOCABULARY), 10).double()"))
        request = ["run", "nbs/experiments/tiny.ipynb", "--no-notebook", "--profile", "cpu", "-p", "seed=1"]
        done = run(*request, cwd=clone, command=command, ACCELERATE_USE_CPU="true", PYTHONPATH=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        record, = [json.loads(line) for line in (clone / "nbs/results/tiny.jsonl").read_text().splitlines()]
        trace, = (clone / "nbs/results/traces").glob("*.json")
        curves.append(json.loads(trace.read_text())["curve"])
        assert [leg["processes"] for leg in record["legs"]] == [len(curves)]
        folder, = (path for path in (clone / "runs").iterdir() if path.is_dir())
        assert [path.name for path in folder.iterdir()].count("lock") == 1 and len(list(folder.glob("stage-1/step-*"))) == 1
        assert done.stdout.endswith("done\n") and done.stdout.count("'held out'") == 1         # one process prints
        again = run(*request, "--unless-recorded", cwd=clone, command=command, ACCELERATE_USE_CPU="true", PYTHONPATH=ROOT)
        assert again.returncode == 0 and "this run has a record" in again.stdout
    one, two = curves
    assert len(one["loss"]) == 2 and one["loss"] == pytest.approx(two["loss"], rel=1e-6) and one["nll"] == pytest.approx(two["nll"], rel=1e-6)


@pytest.mark.parametrize("name", ["listops", "logic", "design_space"])
@pytest.mark.parametrize("short", [{"steps": 20}, {"stages": "8:20:32:1e-3"}])
def test_a_training_that_ends_before_its_first_check_is_refused_first(name, short):
    notebook = open_notebook(ROOT / f"nbs/experiments/{name}.ipynb")
    with pytest.raises(ParameterError, match="a training of 20 steps ends before its first check, at step (250|500)$"):
        check_parameters(notebook, {"profile": "cpu", **short})


@pytest.mark.parametrize("missing", ["papermill", "ipykernel"])
def test_what_a_page_needs_is_missed_before_the_training(missing, tmp_path):
    code = "import sys; sys.modules[sys.argv[1]] = None; from rvnnbook.cli import main; sys.exit(main(['run', 'nbs/experiments/listops.ipynb']))"
    done = subprocess.run([sys.executable, "-c", code, missing], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "RVNNBOOK_RUNS": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "") and not list(tmp_path.iterdir())
    assert done.stderr == f"rvnnbook: this needs {missing}, which is not installed. Remedy: pip install 'rvnnbook[notebooks]', or the option --no-notebook\n"
