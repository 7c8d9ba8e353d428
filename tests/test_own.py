"Encoders from outside the book: loading by name, the promises, and their refusals."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rvnnbook.core import EncoderOutput
from rvnnbook.own import OwnEncoder, check_promises, load_own, source_hash
from rvnnbook.lab.records import append, identity
from rvnnbook.lab.run import recorded_runs
from rvnnbook.lab.settings import ParameterError, check_parameters
from rvnnbook.registry import create_encoder, encoder_options
from rvnnbook.show.leaderboard import read_leaderboard, write_leaderboard
from tests.records import make as make_record

ROOT = Path(__file__).resolve().parents[1]
SOURCE = '''
import torch
from torch import nn

class Sum(nn.Module):
    def __init__(self, dim, dropout=0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x, mask):
        return torch.where(mask[..., None], self.linear(self.dropout(x)).tanh(), 0).sum(1)

class EveryPosition(Sum):
    def forward(self, x, mask):
        return x

class NoDim(nn.Module):
    pass

function = len
'''


@pytest.fixture(autouse=True)
def outside(tmp_path, monkeypatch):
    (tmp_path / "outside_encoders.py").write_text(SOURCE)
    (tmp_path / "outside_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("outside_encoders", None)


def test_create_by_module_and_class():
    torch.manual_seed(0)
    encoder = create_encoder("outside_encoders:Sum", dim=8, dropout=.1)
    after = torch.rand(1)
    torch.manual_seed(0)
    load_own("outside_encoders:Sum")(8)
    assert torch.equal(after, torch.rand(1)), "the check draws nothing from the global generator"
    assert encoder.dim == 8 and encoder.training and encoder_options("outside_encoders:Sum") == ["dim", "dropout"]
    mask = torch.tensor([[True, True, False]])
    assert encoder(torch.randn(1, 3, 8), mask, trees=None, trace=True).root.shape == (1, 8)
    with pytest.raises(ValueError, match="mask must be bool"):
        encoder(torch.randn(1, 3, 8), mask.float())
    assert len(source_hash("outside_encoders:Sum")) == 12


@pytest.mark.parametrize("name, options, said", [
    ("no_such_module:Sum", {"dim": 4}, "there is no module 'no_such_module'. Remedy"),
    ("outside_encoders:Som", {"dim": 4}, "no subclass of torch.nn.Module named 'Som'. It has: EveryPosition, NoDim, Sum"),
    ("outside_encoders:function", {"dim": 4}, "no subclass of torch.nn.Module named 'function'"),
    ("outside_broken:Sum", {"dim": 4}, "importing outside_broken raised ZeroDivisionError"),
    ("outside_encoders:NoDim", {}, "takes no option 'dim'"),
    ("outside_encoders:Sum", {}, "pass dim"),
    ("outside_encoders:Sum", {"dim": 4, "dropuot": .1}, "unknown option 'dropuot'"),
    ("outside_encoders:Sum", {"dim": 4, "weights": "listops"}, "no weights 'listops'"),
    ("outside_encoders:EveryPosition", {"dim": 4}, "expected one vector a sentence, (4, 4)")])
def test_refused_by_name(name, options, said):
    with pytest.raises(ValueError) as error:
        create_encoder(name, **options)
    assert said in str(error.value) and "\n" not in str(error.value)


class Rule(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, x, mask):
        return self.rule(x, mask)


@pytest.mark.parametrize("rule, said", [
    (lambda x, mask: x[:, 0, :2], "expected one vector a sentence"),
    (lambda x, mask: None, "returned NoneType"),
    (lambda x, mask: x.mean(1), "padding"),
    (lambda x, mask: x.sum(1) * mask.sum(1, keepdim=True) / x.shape[1], "padding"),
    (lambda x, mask: (x - x.mean(0)).sum(1), "the same sentence alone"),
    (lambda x, mask: x.sum(1) + torch.rand(len(x), x.shape[2]), "two evaluations"),
    (lambda x, mask: x.sum(1) / 0, "not finite"),
    (lambda x, mask: x.sum(1).detach(), "gradient"),
    (lambda x, mask: x.sum(1) * 0, "gradient"),
    (lambda x, mask: x.view(3, -1), "raised RuntimeError"),
    (lambda x, mask: x[9, 9], "raised IndexError"), (lambda x, mask: x.no_such, "raised AttributeError: "), (lambda x, mask: {}["a"], "raised KeyError: 'a'")])
def test_broken_promises_are_refused(rule, said):
    with pytest.raises(ValueError) as error:
        check_promises(OwnEncoder(Rule(rule), 8, "mine:Mine"))
    assert said in str(error.value) and str(error.value).startswith("mine:Mine: ")


@pytest.mark.parametrize("seed", range(8))
def test_a_root_that_ends_in_a_norm_is_accepted(seed):
    "The sum of its channels has no gradient but for rounding."
    torch.manual_seed(seed)
    layer, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    def mean(x, mask):
        return norm((layer(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
    assert check_promises(OwnEncoder(Rule(mean), 4, "mine:Mine"))


def test_a_forward_that_raises_without_a_word_is_named():
    def rule(x, mask):
        raise NotImplementedError
    with pytest.raises(ValueError, match="mine:Mine: forward.x, mask. raised NotImplementedError"):
        check_promises(OwnEncoder(Rule(rule), 8, "mine:Mine"))


def test_a_forward_without_mask_is_refused():
    class NoMask(nn.Module):
        def forward(self, x):
            return x.sum(1)
    with pytest.raises(ValueError, match="raised TypeError"):
        check_promises(OwnEncoder(NoMask(), 8))


def test_an_encoder_output_and_trees_are_passed_on():
    class WithTrees(nn.Module):
        def forward(self, x, mask, trees=None):
            return EncoderOutput(x.sum(1), loss=0.5, trace={"trees": trees})
    encoder, trees = OwnEncoder(WithTrees(), 4), torch.tensor([[1, 0]])
    out = encoder(torch.ones(1, 2, 4), torch.ones(1, 2).bool(), trees=trees, generator=torch.Generator())
    assert out.loss == 0.5 and torch.equal(out.trace["trees"], trees)


@pytest.mark.parametrize("page, name", [("length_generalization", "model"), ("listops", "encoder"), ("logic", "encoder")])
def test_experiments_refuse_before_training(page, name):
    notebook = json.loads((ROOT / f"nbs/experiments/{page}.ipynb").read_text())
    run = check_parameters(notebook, {name: "outside_encoders:Sum"})
    assert vars(run)[name] == "outside_encoders:Sum"
    with pytest.raises(ValueError, match="one vector a sentence"):
        check_parameters(notebook, {name: "outside_encoders:EveryPosition"})
    with pytest.raises(ParameterError):
        check_parameters(notebook, {name: "no such encoder!"})
    assert set(vars(check_parameters(notebook, {}))) == set(vars(run)), "no parameter is added, so old runs keep their identity"


def test_the_experiment_runs_with_an_own_encoder(outside):
    path = os.pathsep.join([str(outside), str(ROOT)])
    words = [sys.executable, "-m", "rvnnbook", "run", str(ROOT / "nbs/experiments/length_generalization.ipynb"), "--no-notebook", "-p"]
    done = subprocess.run([*words, "model=outside_encoders:Sum"], cwd=outside, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and "'accuracy'" in done.stdout, done.stderr
    done = subprocess.run([*words, "model=outside_encoders:EveryPosition"], cwd=outside, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_own_encoders_are_loaded_where_gradients_are_off(outside, monkeypatch, off):
    monkeypatch.syspath_prepend(outside)
    with off():
        encoder = create_encoder("outside_encoders:Sum", dim=4)
        assert encoder(torch.ones(1, 2, 4), torch.ones(1, 2).bool()).root.shape == (1, 4)


def test_a_record_counts_as_long_as_the_source_is_the_same(outside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbs/results").mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text("")
    monkeypatch.syspath_prepend(outside)
    name = "outside_encoders:Sum"
    for seed, source in enumerate((source_hash(name), "0123456789ab")):
        append(make_record(experiment="toy", seed=seed, parameters={"encoder": name, "source": source}))
    found = recorded_runs("toy.ipynb", ["encoder", "seed"])
    assert found == {identity("toy", {"encoder": name}, 0)}


@pytest.mark.parametrize("change", [{"format": 2}, {"rows": [{"model": "A"}]}, {"rows": None}, {"rows": [3]}, {"rows": 5}])
def test_malformed_leaderboards_are_refused(outside, change):
    record = {"parameters": {"model": "A"}, "profile": "paper", "seed": 0, "id": "0", "metrics": {"s": {"accuracy": .5}}}
    file = outside / "board.json"
    write_leaderboard([record, record | {"seed": 1}], file)
    assert read_leaderboard(file)[0]["accuracy"] == .5 and read_leaderboard(file)[0]["seeds"] == 2
    with pytest.raises(ValueError, match="a seed was trained more than once"):
        write_leaderboard([record, record], outside / "other.json")
    with pytest.raises(ValueError, match="A, s: the runs differ in source"):
        write_leaderboard([record, record | {"seed": 1, "parameters": {"model": "A", "source": "0"}}], outside / "other.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="board.json"):
        read_leaderboard(file)
