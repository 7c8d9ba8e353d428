"""The experiment between router and tree: its gate, a smoke run of every model, and the names under which a run is compared with the paper."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rvnnbook.lab.papers import paper_table
from rvnnbook.lab.settings import ParameterError, check_parameters
from rvnnbook.lab.train import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "nbs" / "experiments" / "design_space.ipynb"
NOTEBOOK = json.loads(EXPERIMENT.read_text())
RUN_CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if "run" in cell["metadata"].get("tags", [])]
MODELS, SPLIT_OF = (ast.literal_eval(re.search(name + r" = (\{.*?\})\n", "\n".join(RUN_CELLS), re.S)[1]) for name in ("MODELS", "SPLIT_OF"))
TASKS = ("listops", "logic")


# ---- the gate

def test_the_gate_takes_every_model_task_and_profile():
    for model in MODELS:
        for task in TASKS:
            for profile in ("smoke", "cpu", "paper"):
                run = check_parameters(NOTEBOOK, {"model": model, "task": task, "profile": profile})
                assert (run.model, run.task, run.profile) == (model, task, profile)
                assert not any(value is None for value in vars(run).values())
                TrainConfig(optimizer=run.optimizer, learning_rate=run.learning_rate, weight_decay=run.weight_decay, steps=run.steps, metric="accuracy")


@pytest.mark.parametrize("model, task, expected", [      # papers' README section 11; the layers: design_space section 7
    ("NDR", "listops", (512, 16, 20, "24 48", 512, "adamw", 2e-4, 0.09, 0.1, 100_000, 100)),
    ("NDR", "logic", (512, 16, 15, "15 30", 512, "adamw", 2e-4, 0.09, 0.1, 100_000, 6))])
def test_the_paper_profile_is_the_papers(model, task, expected):
    run = check_parameters(NOTEBOOK, {"model": model, "task": task, "profile": "paper"})
    assert (run.dim, run.heads, run.layers, run.test_layers, run.batch_size, run.optimizer, run.learning_rate, run.weight_decay,
            run.dropout, run.steps, run.longest) == expected
    assert run.draws == (10**6 if task == "listops" else 500_000) and run.stages == "none"
    tree = check_parameters(NOTEBOOK, {"model": "CRvNN", "task": task, "profile": "paper"})
    assert (tree.dim, tree.batch_size, tree.optimizer, tree.learning_rate, tree.weight_decay) == (128, 128, "radam_lookahead", 1e-3, 1e-2)
    plain = check_parameters(NOTEBOOK, {"model": "Transformer", "task": task, "profile": "paper"})
    assert (plain.dim, plain.heads, plain.layers) == (512, 8, 6)


def test_all_models_of_a_cpu_comparison_learn_from_the_same_examples():
    of_data = ("draws", "validation", "longest", "stages", "batch_size", "optimizer", "learning_rate", "steps", "dim", "seed")
    for task in TASKS:
        runs = [check_parameters(NOTEBOOK, {"model": model, "task": task, "profile": "cpu"}) for model in MODELS]
        assert len({tuple(getattr(run, name) for name in of_data) for run in runs}) == 1


@pytest.mark.parametrize("given, said", [
    ({"task": "music"}, "task is 'music': Input should be 'listops' or 'logic'"), ({"model": "ndr"}, "model is 'ndr'"),
    ({"test_layers": "24,48"}, "test_layers is '24,48'"), ({"test_layers": 2.5}, "test_layers is 2.5"),
    ({"stages": "2:10:32"}, "stages is '2:10:32'"), ({"layer": 3}, "unknown parameter 'layer'. Did you mean 'layers'?"),
    ({"model": 3}, "model is 3: String should match pattern")])
def test_the_gate_refuses(given, said):
    with pytest.raises(ParameterError) as error:
        check_parameters(NOTEBOOK, given)
    assert said in str(error.value)


# ---- runs

WITHOUT_JUPYTER = ("import sys\nfor name in ('papermill', 'nbclient', 'ipykernel', 'IPython', 'matplotlib', 'ipywidgets'): sys.modules[name] = None\n"
                   "from rvnnbook.cli import main\nsys.exit(main(sys.argv[1:]))")


def run_plainly(folder, *settings):
    words = ["run", str(EXPERIMENT), "--no-notebook", *(word for setting in settings for word in ("-p", setting))]
    return subprocess.run([sys.executable, "-c", WITHOUT_JUPYTER, *words], cwd=folder, capture_output=True, text=True)


def metrics_of(done):
    "The dictionary of metrics that a run printed."
    return next(value for value in map(ast.literal_eval, done.stdout.splitlines()[:-1]) if isinstance(value, dict)
                and all(isinstance(part, dict) for part in value.values()))


@pytest.mark.parametrize("model, task", [(model, TASKS[number % 2]) for number, model in enumerate(MODELS)] + [("NDR", "logic"), ("NDR-ACT", "listops")])
def test_a_smoke_run(tmp_path, model, task):
    done = run_plainly(tmp_path, f"model={model}", f"task={task}")
    assert done.returncode == 0 and done.stdout.endswith("True\ndone\n"), done.stderr
    titles = ["like training", "dg2_test" if task == "listops" else "7 operators"]
    counts = [", 3 layers", ", 6 layers"] if model in ("NDR", "Universal Transformer") else [""]
    metrics = metrics_of(done)
    assert list(metrics) == [f"generated, {title}{count}" for count in counts for title in titles]
    assert all(0 <= scores["accuracy"] <= 1 and scores["count"] == 10 for scores in metrics.values())
    layers = [scores["layers"] for scores in metrics.values() if "layers" in scores]
    if model == "NDR":
        assert layers == [3, 3, 6, 6]
    else:                                        # at least one, at most as many as the larger number says
        assert len(layers) == (2 if model in ("NDR-halt", "NDR-ACT") else 0) and all(1 <= n <= 6 for n in layers)
    if len(counts) == 2:                         # the layers really are others: the same weights, another NLL
        assert len({scores["nll"] for scores in metrics.values()}) == 4
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_unknown_model_is_refused_in_one_line(tmp_path):
    done = run_plainly(tmp_path, "model=MEGA")
    assert done.returncode != 0 and "unknown model 'MEGA'; known: Transformer" in done.stderr


# ---- what is compared

def test_every_column_of_the_papers_tables_is_asked_for():
    from rvnnbook.data.listops_splits import SPLITS
    assert list(SPLIT_OF) == paper_table("design_space.table2").columns and set(SPLIT_OF.values()) <= set(SPLITS)
    for column, split in SPLIT_OF.items():       # "len_200_300" is the split of such lengths, and so on
        numbers = [int(n) for n in re.findall(r"\d+", column)]
        rule = SPLITS[split]
        assert numbers in ([*rule.length], [*rule.depth], [rule.arguments[1]], [])
    assert paper_table("design_space.table3").columns == [f"ops_{k}" for k in range(7, 13)]
    assert any('f"ops_{k}": f"{source}, {k} operators" for k in range(7, 13)' in cell for cell in RUN_CELLS)
