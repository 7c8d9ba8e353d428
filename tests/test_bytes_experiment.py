"""The experiment on bytes: what its page does not show of it, the pairs, the other models and the published forms."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rvnnbook.data.text import make_trees
from rvnnbook.lab.settings import ParameterError, check_parameters
from tests.helpers import JUPYTER, without

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "nbs" / "experiments" / "bytes.ipynb"
NOTEBOOK = json.loads(EXPERIMENT.read_text())


def test_the_gate_fills_in_what_the_paper_says_of_each_task():
    for task, dropouts in (("text", (.4, .2, .4)), ("retrieval", (.4, .1, .1))):                         # rir App. K
        run = check_parameters(NOTEBOOK, {"profile": "paper", "task": task})
        assert (run.dropout_in, run.dropout, run.dropout_out) == dropouts and (run.longest, run.dim, run.texts) == (4000, 128, 0)
    for profile in ("smoke", "cpu"):
        assert check_parameters(NOTEBOOK, {"profile": profile, "task": "retrieval"}).longest < 4000


@pytest.mark.parametrize("given, said", [
    ({"task": "listops"}, "task is 'listops': String should match"), ({"longest": 0}, "longest is 0: Input"),
    ({"model": ""}, "model is '': String should match"), ({"reviews": 6}, "unknown parameter 'reviews'")])
def test_the_gate_refuses(given, said):
    with pytest.raises(ParameterError) as error:
        check_parameters(NOTEBOOK, given)
    assert said in str(error.value)


def smoke(tmp_path, tmp_path_factory, *parameters, **environment):
    words = ["run", EXPERIMENT, "--no-notebook", *(word for parameter in parameters for word in ("-p", parameter))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    hidden = {**clean, "PYTHONPATH": without(tmp_path_factory.mktemp("path"), *JUPYTER), **environment}
    return subprocess.run([sys.executable, "-m", "rvnnbook", *map(str, words)], cwd=tmp_path, env=hidden, capture_output=True, text=True)


@pytest.mark.parametrize("task, model", [("text", "Transformer"), ("retrieval", "RIR-EBT-GRC minus S4D")])
def test_a_smoke_run_measures_a_test_that_it_calls_a_part_and_keeps_nothing(tmp_path, tmp_path_factory, task, model):
    done = smoke(tmp_path, tmp_path_factory, f"task={task}", f"model={model}")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    name = {"text": "IMDB", "retrieval": "AAN"}[task]
    assert re.findall(r"'([\w, ]+)': \{'accuracy': [01]\.", done.stdout) == [f"{name} test, bytes, in part"]
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path, tmp_path_factory):
    done = smoke(tmp_path, tmp_path_factory, "model=EBT-GRC")
    assert done.returncode != 0 and "unknown model 'EBT-GRC'; known: BBT-GRC, RIR-GRC" in done.stdout + done.stderr


@pytest.mark.parametrize("task, longest, title", [
    ("text", 4000, "test, bytes"), ("retrieval", 4000, "test, bytes"), ("retrieval", 40, "test, bytes, in part")])
def test_files_of_the_published_forms_are_read_and_called_whole_if_they_are(tmp_path, tmp_path_factory, task, longest, title):
    data = tmp_path_factory.mktemp("data")
    lines = [" ".join(tree.tokens) + " é" for tree in make_trees(24, seed=0)]
    if task == "text":
        (data / "imdb").mkdir()
        for count, part in ((20, "train"), (12, "test")):
            rows = [f"{('neg', 'pos')[i % 2]}\t{i}\t7\t{line}" for i, line in enumerate(lines[:count])]
            (data / "imdb" / f"{part}.tsv").write_text("\n".join(["label\tid\trating\ttext", *rows]) + "\n")
        expected = (18, 2, 12)
    else:
        (folder := data / "lra" / "lra_release" / "tsv_data").mkdir(parents=True)
        for count, part in ((20, "train"), (6, "eval"), (12, "test")):
            rows = [f"{i % 2}.0\t{i}\t{i + 1}\t{line}\t{other}" for i, (line, other) in enumerate(zip(lines[:count], lines[::-1]))]
            (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(rows) + "\n")
        expected = (20, 6, 12)
    done = smoke(tmp_path, tmp_path_factory, f"task={task}", f"longest={longest}", "steps=2", "check_every=1", RVNNBOOK_DATA=str(data))
    assert done.returncode == 0, done.stderr
    name = {"text": "IMDB", "retrieval": "AAN"}[task]
    assert re.search(rf"'training': {expected[0]}, 'validation': {expected[1]}, '{name} {title}': {expected[2]}, ", done.stdout), done.stdout
    most = int(re.search(r"'most bytes': (\d+)", done.stdout)[1])
    longest_line = max(len(line.encode()) for line in lines)
    assert 40 < most <= longest_line if longest == 4000 else most == 40


@pytest.mark.long
def test_made_pairs_are_learned_by_the_command_on_the_page(tmp_path, tmp_path_factory):
    command = next(line for cell in NOTEBOOK["cells"] for line in "".join(cell["source"]).splitlines() if "-p steps=400" in line)
    done = smoke(tmp_path, tmp_path_factory, *re.findall(r"-p (\S+)", command))
    assert float(re.search(r"'accuracy': ([\d.]+)", done.stdout)[1]) > .9, done.stderr
