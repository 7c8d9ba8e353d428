"What a step of training costs: all encoders, by the same steps."
import math
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.cli import main
from rvnnbook.data.listops import evaluate
from rvnnbook.lab import bench as module
from rvnnbook.lab.bench import BenchError, bench, bench_record, check_bench, draw_range, fresh, train_steps
from rvnnbook.lab.records import read_records
from rvnnbook.origin import code_hashes
from rvnnbook.core import length_mask
from rvnnbook.lab.subjects import known_entrants, library_form, make_entrant
from rvnnbook.literal import LITERAL
from rvnnbook.registry import list_encoders
from rvnnbook.show import costs as shown
from rvnnbook.show.costs import by_range, efficiency_lines, pareto_front, recorded_bench, split_metric

EXPERIMENTS = Path(__file__).parents[1] / "nbs" / "experiments"


def asked(**chosen):
    "Parameters of the benchmark, as the gate of its page gives them."
    return SimpleNamespace(**dict(profile="smoke", encoders="all", ranges="4-6", samples=2, dim=8, threads=1, device="cpu",
                                  limit=60.0, memory=0) | chosen)


SHORT = ["[MAX 2 9 ]", "[SM 1 [MIN 3 4 ] 5 ]"]


def test_expressions_are_of_the_range():
    drawn = draw_range(20, 25, 30)
    assert len(set(drawn)) == 30 and {20, 25} & {len(text.split()) for text in drawn}
    assert all(20 <= len(text.split()) <= 25 and 0 <= evaluate(text.split()) <= 9 for text in drawn)
    assert drawn != draw_range(19, 25, 30)


@pytest.mark.parametrize("name", known_entrants())
def test_everyone_can_take_part(name):
    found = train_steps(name, SHORT, dim=8)
    assert found["count"] == 2 and 0 < found["fastest_s"] <= found["seconds"] <= found["slowest_s"] < 60
    assert found["memory_mb"] >= 0 and all(map(math.isfinite, found.values())) and 0 < found["products_s"] < found["slowest_s"]


@pytest.mark.parametrize("name", sorted(LITERAL))
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("lengths", [[12, 7, 1, 2], [1, 1], [40, 35]])
def test_literal_forms_compute_the_same(name, train, lengths):
    lengths = [40, 40] if name == "crvnn" else lengths                           # its published form takes other rounds where ragged
    form, make = LITERAL[name]
    torch.manual_seed(0)
    encoder, found = make(8).double().train(train), []
    x, mask = torch.randn(len(lengths), max(lengths), 8, dtype=torch.float64), length_mask(torch.tensor(lengths))
    direction = torch.randn(len(lengths), 8, dtype=torch.float64)
    for written in (form, library_form):
        root, loss, _ = written(encoder, x, mask)
        encoder.zero_grad()
        ((root * direction).sum() + loss).backward()
        found.append({"root": root} | ({name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                                        for name, p in encoder.named_parameters()} if train else {}))
    assert found[0]["root"].abs().max() > .1 and (not train or sum(grad.abs().max() > 1e-3 for grad in found[0].values()) > 3)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_an_entrant_in_literal_form_is_an_encoder():
    written, x, mask = make_entrant("bt_grc_os, literal", 8), torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    assert written.dim == 8 and written(x, mask).root.shape == (2, 8)


def test_weights_move_and_are_those_of_the_seed():
    same, other = (make_entrant("bilstm", 8, seed) for seed in (0, 1))
    again = make_entrant("bilstm", 8)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), again.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(same.parameters(), other.parameters()))


def test_the_optimiser_takes_part(monkeypatch):
    taken = []
    def watched(parameters, **options):
        optimizer = real(parameters, **options)
        step = optimizer.step
        optimizer.step = lambda: taken.append(sum(float(p.grad.abs().sum()) for p in parameters if p.grad is not None)) or step()
        return optimizer
    real = module.make_optimizer
    monkeypatch.setattr(module, "make_optimizer", watched)
    train_steps("bilstm", SHORT, dim=8)
    assert len(taken) == 4 and all(size > 0 for size in taken)                 # before, two that count, and one whose products are recorded


def test_in_a_process_of_its_own():
    found = fresh(train_steps, dict(name="bilstm", expressions=SHORT, dim=8, limit=math.inf))
    assert found["count"] == 2 and found["seconds"] > 0
    assert fresh(train_steps, dict(name="bilstm", expressions=[SHORT[0]] * 2, dim=2048, memory=4)) == {"failed": {"out_of_memory": 1}}
    with pytest.raises(BenchError, match="bilstm: .*token 2 is 'x'"):
        fresh(train_steps, dict(name="bilstm", expressions=["[MAX 2 x ]"], dim=8))


def test_who_had_no_memory_is_spared():
    tasks = []
    def one(function, task, limit):
        assert limit is None and task["limit"] == 60, "a process may take its time: `train_steps` has the limit"
        tasks.append((task["name"], len(task["expressions"][0].split())))
        return {"failed": {"out_of_memory": 1}} if task["name"] == "crvnn" else {"seconds": 1.0, "memory_mb": 0.0, "count": 1}
    metrics = bench("efficiency", asked(encoders="crvnn; lstm", ranges="4-4 7-7", samples=1), one)
    assert tasks == [("crvnn", 4), ("lstm", 4), ("lstm", 7)]
    assert metrics["7 to 7 tokens, crvnn"] == {"out_of_memory": 1} and len(metrics) == 4
    assert efficiency_lines(metrics)[2:] == [["", "lstm", "1", "0", "1", "0"], ["", "crvnn", "–", "–", "–", "–"]]
    shares = {split: line | ({"products_s": .25} if "7 to" in split and "seconds" in line else {}) for split, line in metrics.items()}
    assert efficiency_lines(shares)[1:] == [["", "", *["s a step", "÷ products", "MB"] * 2], ["", "lstm", "1", "–", "0", "1", "4", "0"],
                                            ["", "crvnn", *["–"] * 6]]


def test_settings(capsys):
    assert check_bench("efficiency", asked()) == known_entrants() and set(list_encoders()) < set(known_entrants())
    with pytest.raises(ValueError, match="unknown encoder 'crvn'"):
        check_bench("efficiency", asked(encoders="crvn"))
    for wrong, words in (("samples=0", "samples is 0"), ("ranges=9-5", "ranges: 9-5 must be two lengths, 3 or more and in order"),
                         ("ranges=2-5", "3 or more"), ("device=tpu", "device is 'tpu'"), ("length=5", "unknown parameter 'length'"),
                         ("encoders=[]", "encoders is []")):
        assert main(["run", str(EXPERIMENTS / "bench_efficiency.ipynb"), "-p", wrong]) == 2
        assert words in capsys.readouterr().err


def test_kept_also_when_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "results_folder", lambda profile: tmp_path)
    def broken(function, task, limit):
        if task["name"] == "lstm":
            raise KeyboardInterrupt
        return train_steps(**task)
    with pytest.raises(KeyboardInterrupt):
        bench("efficiency", asked(profile="cpu", encoders="bilstm; lstm"), broken)
    record, = read_records("bench_efficiency", folder=tmp_path)
    assert list(record["metrics"]) == ["4 to 6 tokens, bilstm"] and record["metrics"]["4 to 6 tokens, bilstm"]["count"] == 2
    assert not record["finished"]              # so that a sweep measures the others
    assert record["parameters"]["encoders"] == "bilstm; lstm" and record["parameters"]["ranges"] == "4-6"


def test_later_records_replace_lines(monkeypatch):
    def record(name, seconds):
        metrics = {f"4 to 6 tokens, {name}": {"seconds": seconds, "memory_mb": 1.0, "count": 1}}
        return bench_record("efficiency", asked(profile="cpu", encoders=name), metrics, code_hashes(), datetime.now(timezone.utc))
    kept = [record("lstm", 1.0), record("bilstm", 2.0), record("lstm", 3.0)]
    monkeypatch.setattr(shown, "read_records", lambda name: kept)
    metrics, about = recorded_bench("efficiency")
    assert by_range(metrics, "lstm", "seconds") == {(4, 6): 3.0} and by_range(metrics, "bilstm", "seconds") == {(4, 6): 2.0}
    assert len(about) == 1 and "Width 8" in about[0]


def test_names_of_lines():
    assert split_metric("200 to 250 tokens, ebt_grc, literal") == ("200 to 250 tokens", (200, 250), "ebt_grc, literal")
    assert split_metric("n <= 12, batch 3, library, inference") == ("n <= 12, batch 3", (12, 3), "library, inference")


costs = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


@settings(deadline=None)
@given(costs)
def test_front(points):
    front = pareto_front(points)
    worse = {name for name, (cost, gain) in points.items() for other, more in points.values()
             if (other < cost and more >= gain) or (other <= cost and more > gain)}
    assert set(front) == set(points) - worse
    assert [points[name][0] for name in front] == sorted(points[name][0] for name in front)
