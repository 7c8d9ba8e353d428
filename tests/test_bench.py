"The benchmark: what is measured is what is told, forms agree, failures are told too."
import json
import math
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rvnnbook.cli import main
from rvnnbook.layers import compiled_beam
from rvnnbook.lab import bench as module, subjects
from rvnnbook.encoders.efficient_beam import EfficientBeam
from rvnnbook.data.listops import Example
from rvnnbook.lab.bench import BenchError, apart, bench, bench_record, check_bench, fresh, gap, measure, summarize
from rvnnbook.lab.subjects import SUBJECTS, problem, record_products, replay_products, spread, take_step, usual_forms
from rvnnbook.literal import (GatedMemory, library_attention, literal_attention, literal_beam, literal_crvnn,
                              replayed, tables_kept)
from rvnnbook.registry import create_encoder
from rvnnbook.show.costs import (agreement, bench_lines, by_length, cases, findings, forms_of, growth, predict_lines, recorded_bench)
from rvnnbook.lab.records import RecordError, append, check_results, read_records, validate
from rvnnbook.origin import code_hashes
from tests.shares import KIND_OF, KINDS, step_shares

CRVNN, BEAM, ATTENTION = SUBJECTS["crvnn"], SUBJECTS["beam_tree"], SUBJECTS["attention"]
library_crvnn, library_beam = CRVNN.library, BEAM.library
FORMS = tuple(CRVNN.forms)
EXPERIMENTS = Path(__file__).parents[1] / "nbs" / "experiments"
TINY = dict(subject="crvnn", batch=1, dim=8)


def asked(**chosen):
    "Parameters of a benchmark, as the gate of a page gives them."
    return SimpleNamespace(**dict(profile="smoke", lengths="20", batches="1", dim=8, threads=1, repeats=1, device="cpu", limit=60.0,
                                  memory=0, ragged=False, forms="all") | chosen)


def now():
    return datetime.now(timezone.utc)


def split_name(length, batch, form, ragged=False):
    "What a line of the record is called."
    return f"n {'<=' if ragged else '='} {length}, batch {batch}, {form}"


@pytest.fixture
def clone(tmp_path):
    "As much of a clone as a record needs."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "_toc.yml").touch()
    return tmp_path


def test_the_command(clone):
    "Four forms in four processes; the table, the lines told on the way and the record say the same."
    words = ["run", EXPERIMENTS / "bench_crvnn.ipynb", "--no-notebook", "--profile", "cpu", "-p", "lengths=40", "-p", "dim=8", "-p", "repeats=1"]
    done = subprocess.run([sys.executable, "-m", "rvnnbook", *words], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record, = read_records("bench_crvnn", clone / "nbs" / "results")
    assert check_results(clone / "nbs" / "results") == []
    assert record["profile"] == "cpu" and record["threads"] == 1 and record["finished"]
    assert record["parameters"] == {"lengths": "40", "batches": "1", "dim": 8, "threads": 1, "repeats": 1, "device": "cpu", "limit": 600.0,
                                    "memory": 0, "ragged": False, "forms": "all"}
    assert {"rvnnbook.encoders.crvnn", "rvnnbook.layers.cells", "rvnnbook.lab.bench"} <= set(record["modules"])
    metrics = record["metrics"]
    assert list(metrics) == [f"n = 40, batch 1, {form}" for form in FORMS]
    assert done.stdout.splitlines()[:4] == [f"{split}: {line['seconds']:.3g} s" for split, line in metrics.items()]
    for form, line in zip(FORMS, done.stdout.splitlines()[7:]):
        told = line.partition(form)[2].split() if form != "library" else line.partition("library")[2].split()
        assert told[0] == f"{metrics[split_name(40, 1, form)]['seconds']:.3g}"
    assert all(metrics[split_name(40, 1, form)]["root_gap"] < 1e-4 for form in FORMS[1:3])
    for sentence in findings(metrics):
        assert sentence in done.stdout


def test_forms_take_turns_and_medians_are_those_of_what_was_measured():
    tasks, found = [], []
    def one(function, task, limit):
        tasks.append(task)
        found.append(measure(**task))
        return found[-1]
    forms = ("literal", "library", "products")
    metrics = bench("crvnn", asked(lengths="30 40", batches="1 2", repeats=3, forms="; ".join(forms), limit=5.0), one)
    cases = [(length, batch) for batch, length in product((1, 2), (30, 40))]
    assert [(t["length"], t["batch"], t["form"]) for t in tasks] == [(*case, form) for case in cases for _ in range(3) for form in forms]
    for case, form in product(cases, forms):
        mine = [f for t, f in zip(tasks, found) if (t["length"], t["batch"], t["form"]) == (*case, form)]
        line = metrics[split_name(*case, form)]
        seconds = [f["seconds"] for f in mine]
        assert (line["seconds"], line["fastest_s"], line["slowest_s"], line["count"]) == (median(seconds), min(seconds), max(seconds), 3)
        if form != "products":
            assert line["memory_mb"] == median(f["memory_mb"] for f in mine)
            assert line["rounds"] == sum(mine[0]["counts"]) / case[1]


@pytest.mark.parametrize("length, batch, dim", [(30, 1, 8), (40, 3, 16), (150, 2, 4)])
def test_all_forms_compute_the_same(length, batch, dim):
    found = {form: measure("crvnn", form, length, batch, dim, threads=torch.get_num_threads()) for form in FORMS[:3]}
    for form in FORMS[1:3]:
        assert found[form]["counts"] == found["literal"]["counts"] and len(found[form]["counts"]) == batch
        for name in ("root", "gradient"):
            wanted = torch.tensor(found["literal"][name])
            assert wanted.abs().max() > 1e-2
            torch.testing.assert_close(torch.tensor(found[form][name]), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    line = summarize({form: [found[form]] for form in FORMS[:2]}, "rounds")["library"]
    differences = [(torch.tensor(found["library"][n], dtype=torch.double) - torch.tensor(found["literal"][n], dtype=torch.double)).abs().max()
                   / torch.tensor(found["literal"][n], dtype=torch.double).abs().max() for n in ("root", "gradient")]
    assert [line["root_gap"], line["gradient_gap"]] == pytest.approx([float(d) for d in differences], rel=1e-12, abs=0)


def test_a_step_is_the_gradient_of_direction_and_penalty():
    encoder, x, mask, direction = problem(CRVNN.make, 30, 2, 8)
    encoder.penalty = 10.0
    out = encoder(x, mask)
    wanted = torch.autograd.grad((out.root * direction).sum() + out.loss, encoder.leaf.bias)[0]
    alone = torch.autograd.grad((encoder(x, mask).root * direction).sum(), encoder.leaf.bias)[0]
    for form in (literal_crvnn, library_crvnn):
        take_step(form, encoder, x, mask, direction)
        take_step(form, encoder, x, mask, direction)              # gradients do not add up
        torch.testing.assert_close(encoder.leaf.bias.grad, wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - alone).abs().max() > 0.01


class Count(TorchDispatchMode):
    "Operations of the plain matrix products."
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = [a for a in args if torch.is_tensor(a)][-2:]
            self.total += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def operations(step, *inputs):
    "Those of all recorded products."
    return sum(2 * math.prod(left[1]) * (right[1][1:] or [1])[-1] for left, right, _ in record_products(step, *inputs))


@pytest.mark.parametrize("make", [lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=False)),
                                  lambda: torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 2))])
def test_every_product_of_a_small_net_is_recorded(make):
    net, x = make(), torch.randn(5, 3)
    products = record_products(lambda: net(x).sum().backward())
    found = sorted(tuple(tuple(shape) for _, shape, _ in product) for product in products)
    forward = [((5, 3), (3, 4), (5, 4)), ((5, 4), (4, 2), (5, 2))]
    assert found == sorted([*forward, ((2, 5), (5, 4), (2, 4)), ((5, 2), (2, 4), (5, 4)), ((4, 5), (5, 3), (4, 3))])
    first = next(product for product in products if product[1][1] == (3, 4))
    assert first[1][2] == (1, 3) and {kind for product in products for kind, *_ in product} == {torch.float32}    # a transposed weight
    assert all(one == two for one, two in zip(products, record_products(replay_products(products)), strict=True))
    assert net[0].weight.grad is not None and torch.backends.mkldnn.set_flags()[0] is True


def test_products_of_all_kinds_are_recorded_and_replayed():
    a, b, v, out = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(4), torch.empty(3, 5)
    def step():
        torch.mm(a[0], b[0], out=out)
        out.addmm_(a[1], b[1])
        torch.baddbmm(torch.zeros(2, 3, 5), a, b)
        torch.einsum("bij,bjk->bik", a, b.double().float())
        torch.addmv(v[:3], a[0], v)
        a[0] @ v
        a * 2
    products = record_products(step)
    assert [tuple(product[2][1]) for product in products] == [(3, 5), (3, 5), (2, 3, 5), (2, 3, 5), (3,), (3,)]
    replay_products(products)()
    assert record_products(lambda: None) == [] and replay_products([])() is None


def test_the_products_of_library_functions_are_recorded():
    "An LSTM and attention, which call fused operations otherwise."
    unit, x = torch.nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
    assert operations(unit, x) == 2 * 2 * 5 * 16 * (3 + 4)
    assert operations(torch.nn.functional.scaled_dot_product_attention, *torch.randn(3, 2, 5, 3)) == 2 * 2 * 2 * 5 * 5 * 3


def test_the_products_of_the_search_and_of_its_own_backward_pass_are_recorded():
    "The plain search composes five pairs a step, the compiled one each once; the backward pass has those of the replayed nodes."
    counts, cell = {}, 2 * (16 * 32 + 32 * 32)
    for compiled in (False, True):
        encoder, x, mask, direction = problem(lambda dim: EfficientBeam(dim, compiled=compiled), 20, 1, 8)
        counts[compiled] = [operations(take_step, library_beam, encoder, x, mask, direction, train) for train in (True, False)]
        nodes, = replayed(encoder.train(), x, mask)
        assert counts[compiled][0] > cell * (19 + 3 * nodes) and counts[compiled][1] > cell * 19
    assert counts[False][1] > cell * 5 * 19 > counts[True][1] and counts[False][0] > counts[True][0]
    found = create_encoder("ebt_grc", dim=8)
    assert operations(lambda: found(x, mask).root.sum().backward()) > cell * (19 + 3 * 19)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_scan_in_its_forms(ragged):
    "All compute the same; the floor is one product, forward and for its weight; a step a token is counted."
    sizes, found = (40, 3, 8), {}
    for form, options in SUBJECTS["scan"].forms.items():
        if form != "products":
            found[form] = measure("scan", form, *sizes, ragged=ragged)
            assert found[form]["counts"] == spread(40, 3, ragged)
            for name in ("root", "gradient"):
                assert gap(found[form][name], found["literal"][name]) < 1e-5
    encoder = problem(SUBJECTS["scan"].make, *sizes)[0]
    assert encoder.form == "unbound"
    assert set(measure("scan", "products", *sizes, ragged=ragged)) == {"seconds", "later_s", "gflops"}
    inputs = problem(SUBJECTS["scan"].make, *sizes, ragged=ragged)[1:]
    assert operations(take_step, SUBJECTS["scan"].library, encoder, *inputs) == 2 * 2 * 3 * 40 * 8 * 16          # with the padding
    with pytest.raises(ValueError, match="unknown form 'tree'; known: loop, blocks"):
        GatedMemory(8, form="tree")(*problem(SUBJECTS["scan"].make, *sizes)[1:3])


@pytest.mark.parametrize("ragged", [False, True])
def test_the_tree_of_gates_in_its_forms(ragged):
    "All compute the same; the floor has every linear map, forward and backward."
    sizes, found = (30, 3, 8), {}
    for form in SUBJECTS["self_iru"].forms:
        if form != "products":
            found[form] = measure("self_iru", form, *sizes, ragged=ragged)
            assert found[form]["counts"] == spread(30, 3, ragged)
            for name in ("root", "gradient"):
                assert gap(found[form][name], found["literal"][name]) < 1e-5
    assert list(SUBJECTS["self_iru"].forms) == ["literal", "literal, step by step", "library", "products"]
    encoder, *inputs = problem(SUBJECTS["self_iru"].make, *sizes, ragged=ragged)
    assert len(encoder.unit.bases) == 3 and encoder.form == "scans"
    floor = 2 * 3 * 30 * (2 * 8 * 8 + 3 * (9 * 8 * 8 + 6 * 8))                                 # the tokens need no gradient
    assert operations(take_step, SUBJECTS["self_iru"].library, encoder, *inputs) == floor


@pytest.mark.parametrize("form", ["library", "library, checkpointed"])
def test_the_forms_of_crvnn_agree_in_ragged_batches(form):
    literal, found = (measure("crvnn", name, 60, 4, 16, ragged=True) for name in ("literal", form))
    assert found["counts"] == literal["counts"] and max(apart(found, literal).values()) < 1e-4
    assert spread(60, 4, True)[-1] == 20


# ---- the beam

def test_the_beam_is_measured(clone, monkeypatch, capsys):
    "Eight forms, a ragged batch; all in this process, but for one at the end."
    monkeypatch.chdir(clone)
    tasks = []
    def one(function, task, limit):
        tasks.append(task)
        return measure(**task)
    bench("beam_tree", asked(profile="cpu", lengths="12", batches="3", ragged=True), one)
    out = capsys.readouterr().out
    record, = read_records("bench_beam_tree", clone / "nbs" / "results")
    assert record["parameters"]["ragged"] is True and record["parameters"]["forms"] == "all"
    assert "rvnnbook.encoders.efficient_beam" in record["modules"] and "rvnnbook.lab.bench" in record["modules"]
    metrics = record["metrics"]
    assert list(metrics) == [f"n <= 12, batch 3, {form}" for form in BEAM.forms]
    assert out.splitlines() == [f"{split}: {line['seconds']:.3g} s" for split, line in metrics.items()]
    assert "gradient_gap" in metrics["n <= 12, batch 3, library"] and "gradient_gap" not in metrics["n <= 12, batch 3, library, inference"]
    assert all(metrics[f"n <= 12, batch 3, library{how}"]["root_gap"] < 1e-4 for how in ("", ", compiled", ", inference", ", compiled inference"))
    found, again = (way(tasks[1]) for way in (partial(fresh, measure), lambda task: measure(**task)))
    assert tasks[1]["form"] == "library" and found["counts"] == again["counts"] and apart(found, again)["root_gap"] < 1e-4


# ---- encoders with literal forms for batches

@pytest.mark.parametrize("name", ["gumbel_tree", "bt_grc_os", "ordered_memory", "rir_ebt_grc", "bbt_grc"])
def test_an_encoder_is_measured_in_ragged_batches(name):
    found = {form: measure(name, form, 20, 3, 8, ragged=True) for form in SUBJECTS[name].forms}
    names = {"root", "gradient"} | ({"exact"} if SUBJECTS[name].chooses else set())
    assert set(found["products"]) == {"seconds", "later_s", "gflops"} and min(found["products"].values()) > 0
    assert set(found["literal"]) == set(found["library"]) == {"seconds", "later_s", "memory_mb", *names}
    for what in names:
        assert gap(found["library"][what], found["literal"][what]) < (1e-12 if what == "exact" else 1e-4)


def test_the_shares_of_a_step_are_those_of_known_operations():
    found = step_shares("bbt_grc", 40, 2, False)
    assert found["seconds"] > 0 and min(found[kind] for kind in KINDS) > 0 and 0 < found["rest"] < 1
    assert sum(found[kind] for kind in (*KINDS, "rest")) == pytest.approx(1)
    assert sum(len(names.split()) for names in KINDS.values()) == len(KIND_OF)


# ---- attention

def test_attention_is_measured(clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    words = ["-p", "subject=attention", "-p", "lengths=20 60", "-p", "batches=2", "-p", "dim=32", "-p", "repeats=1"]
    assert main(["run", str(EXPERIMENTS / "bench_layers.ipynb"), "--no-notebook", "--profile", "cpu", *words]) == 0
    out, _ = capsys.readouterr()
    record, = read_records("bench_attention", clone / "nbs" / "results")
    assert record["parameters"]["lengths"] == "20 60" and "rvnnbook.layers.attention" in record["modules"]
    metrics = record["metrics"]
    assert list(metrics) == [f"n = {n}, batch 2, {form}" for n in (20, 60) for form in ATTENTION.forms]
    for n in (20, 60):
        library, literal = (metrics[f"n = {n}, batch 2, {form}"] for form in ("library", "literal"))
        assert library["tables"] == 2 < 4 < literal["tables"] and max(library["root_gap"], library["gradient_gap"]) < 1e-4
    lines = bench_lines(metrics)
    assert lines[0][10] == "tables" and [line[10] for line in lines[3::3]] == ["2.0", "2.0"] and lines[4][10] == "–"
    for sentence in findings(metrics):
        assert sentence in out


@pytest.mark.parametrize("length, batch, dim", [(2, 1, 8), (30, 3, 32), (70, 1, 48)])
def test_the_forms_of_attention_compute_the_same(length, batch, dim):
    found = {form: measure("attention", form, length, batch, dim, threads=torch.get_num_threads()) for form in ("literal", "library")}
    assert found["library"]["counts"] == [2] * batch
    for name in ("root", "gradient"):
        wanted = torch.tensor(found["literal"][name])
        assert wanted.abs().max() > 1e-2
        torch.testing.assert_close(torch.tensor(found["library"][name]), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("batch, dim", [(1, 8), (3, 32)])
def test_the_products_of_attention_are_those_of_the_forms(batch, dim):
    "Three for each linear map and each product of a head; the vectors need no gradient."
    inputs = problem(ATTENTION.make, 20, batch, dim)
    for form in (literal_attention, library_attention):
        assert operations(take_step, form, *inputs) == 6 * batch * (20 * dim * 4 * dim + 2 * 20 * 20 * dim) - 2 * batch * 20 * dim * dim


def test_what_is_kept_is_counted_once():
    logits = torch.randn(2, 3, 10, 10)
    assert tables_kept(torch.sigmoid, logits) == 1                                        # the result
    assert tables_kept(lambda s: s.sigmoid().sigmoid().sigmoid(), logits) == 3
    assert tables_kept(lambda s: s * s, logits) == 1                                      # one storage, saved twice
    assert tables_kept(lambda s: s.double().sigmoid(), logits) == 2                       # of eight bytes
    with torch.no_grad():
        assert tables_kept(torch.sigmoid, logits) == 1
    assert not logits.requires_grad


def test_an_interrupt_is_one_line(tmp_path):
    words = [sys.executable, "-m", "rvnnbook", "run", EXPERIMENTS / "bench_layers.ipynb", "--no-notebook",
             "-p", "lengths=16 512", "-p", "repeats=100000"]
    process = subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    told = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 75 and "16" in told and "SIGINT: stopped" in said[-1] and "Traceback" not in "".join(said), said


def gate(words, name="bench_layers"):
    return main(["run", str(EXPERIMENTS / f"{name}.ipynb"), *words])


def test_every_subject_has_a_page(capsys):
    for subject, name in (("crvnn", "bench_crvnn"), ("beam_tree", "bench_beam_tree"), *((other, "bench_layers") for other in list(SUBJECTS)[2:])):
        words = ["-p", f"subject={subject}"] if name == "bench_layers" else []
        assert gate([*words, "-p", "lengths=1"], name) == 2
        assert "lengths is 1" in capsys.readouterr().err
    assert gate(["-p", "subject=abacus"]) == 2 and "subject is 'abacus': Input should be 'attention', 'bbt_grc', 'bt_grc_os', 'gumbel_tree', 'ordered_memory', 'rir_ebt_grc', 'scan' or 'self_iru'" in capsys.readouterr().err
    assert gate(["-p", "encoders=lstm"]) == 2 and "unknown parameter 'encoders'" in capsys.readouterr().err


def test_a_form_is_what_its_name_says(monkeypatch):
    searches = []
    for name in ("arena_search", "compiled_search"):
        form = getattr(compiled_beam, name)
        monkeypatch.setattr(compiled_beam, name, lambda *args, form=form, name=name: searches.append(name) or form(*args))
    for form in BEAM.forms:
        searches.clear()
        if form.startswith("library"):
            measure("beam_tree", form, 40, 1, 4)
            first = "compiled_search" if "compiled" in form else "arena_search"
            assert searches[:2] == [first, first] and searches[-1] == first
    assert usual_forms("beam_tree") == tuple(BEAM.forms) and "library, compiled" not in usual_forms("beam_tree", "cuda")
    monkeypatch.setattr(subjects, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="unknown form 'library, compiled'"):
        bench("beam_tree", asked(lengths="5", forms="library, compiled"))
    assert [form for form in BEAM.forms if form not in usual_forms("beam_tree")] == ["library, compiled", "library, compiled inference"]


@given(st.integers(2, 300), st.integers(1, 40))
def test_ragged_lengths_fall_evenly(length, batch):
    lengths = spread(length, batch, ragged=True)
    assert len(lengths) == batch and lengths[0] == length and min(lengths) == lengths[-1] >= 1
    assert batch == 1 or abs(lengths[-1] - length / 3) <= 0.5 or lengths[-1] == 1
    steps = [one - other for one, other in zip(lengths, lengths[1:])]
    assert not steps or max(steps) - min(steps) <= 2 and min(steps) >= 0                # rounded at both ends
    mask = problem(EfficientBeam, length, batch, 2, ragged=True)[2]
    assert mask.sum(1).tolist() == lengths and spread(length, batch) == [length] * batch


@pytest.mark.parametrize("length, batch, ragged", [(2, 1, False), (25, 2, False), (30, 4, True)])
def test_the_forms_of_the_beam_compute_the_same(length, batch, ragged):
    found = {form: measure("beam_tree", form, length, batch, 8, threads=torch.get_num_threads(), ragged=ragged)
             for form in BEAM.forms if not form.startswith("products")}
    for literal, library, names in (
            ("literal", "library", ("root", "exact", "gradient")), ("literal, inference", "library, inference", ("root", "exact")),
            ("literal", "library, compiled", ("root", "exact", "gradient")),
            ("literal, inference", "library, compiled inference", ("root", "exact"))):
        one, other, how = found[literal], found[library], literal != "literal"
        assert set(one) == {"seconds", "later_s", "memory_mb", *names} and set(other) - set(one) == ({"counts"} if not how else set())
        for name in names:
            wanted = torch.tensor(one[name], dtype=torch.double)
            limit = 1e-12 if name == "exact" else 1e-4
            torch.testing.assert_close(torch.tensor(other[name], dtype=torch.double), wanted, rtol=limit, atol=limit * float(wanted.abs().max()))
            assert wanted.abs().max() > 1e-2
    assert length == 2 or apart(found["library, inference"], found["library"])["root_gap"] > 1e-3          # noise chooses other trees


def test_every_form_draws_the_same_noise_every_time():
    encoder, *inputs = problem(BEAM.make, 20, 2, 8)
    roots = [take_step(form, encoder, *inputs)[0] for form in (literal_beam, library_beam) * 2]
    for root in roots[1:]:
        torch.testing.assert_close(root, roots[0], rtol=1e-4, atol=1e-5)
    calm = take_step(library_beam, encoder, *inputs, train=False)[0]
    with torch.no_grad():
        assert not encoder.training and torch.equal(calm, encoder(*inputs[:2]).root) and (calm - roots[0]).abs().max() > 1e-2


def test_a_form_that_fails_is_not_measured_again():
    forms = []
    def one(function, task, limit):
        forms.append(task["form"])
        return {"failed": {"out_of_memory": 1}} if task["form"] == "library" else measure(**task)
    metrics = bench("beam_tree", asked(lengths="12", batches="2", repeats=2, forms="literal; library; products"), one)
    assert forms == ["literal", "library", "products", "literal", "products"]
    assert metrics["n = 12, batch 2, library"] == {"out_of_memory": 1} and metrics["n = 12, batch 2, products"]["count"] == 2
    assert findings(metrics)[-1:] == ["Without a result: n = 12, batch 2, library (out of memory)."]


def test_a_choice_tipped_by_rounding_is_no_mistake():
    one = {"root": [[1.0, 2.0]], "gradient": [3.0], "exact": [[1.0, 2.0]]}
    tipped, wrong = one | {"root": [[2.0, 1.0]], "gradient": [5.0]}, one | {"root": [[2.0, 1.0]], "exact": [[1.0, 2.5]]}
    assert apart(tipped, one) == {"root_gap": 0.0, "tipped": 1} and apart(one, one) == {"root_gap": 0.0, "gradient_gap": 0.0}
    assert apart(one | {"gradient": [6.0]}, one) == {"root_gap": 0.0, "gradient_gap": 1.0}
    said = [agreement({"n = 9, batch 1, library": apart(found, one)}) for found in (one, tipped, wrong, one | {"gradient": [6.0]})]
    assert [len(sentences) for sentences in said] == [1, 2, 1, 1] and [sentences[0][:6] == "BEWARE" for sentences in said] == [False, False, True, True]
    assert said[1][1].startswith("At n = 9, batch 1, library rounding tipped a choice")
    nan = one | {"root": [[math.nan, 1.0]], "exact": [[math.nan, 1.0]]}
    assert agreement({"n = 9, batch 1, library": apart(nan, one)})[0].startswith("BEWARE")


def test_inference_is_compared_with_inference():
    seconds = dict(zip((form for form in BEAM.forms if "compiled" not in form), (8.0, 2.0, 1.0, 4.0, 2.0, 0.5)))
    metrics = {split_name(9, 2, form, ragged=True): {"seconds": s, "nodes": 7.0} for form, s in seconds.items()}
    lines = bench_lines(metrics)
    assert lines[0][10] == "nodes" and [line[10] for line in lines[2:]] == ["7.0"] * 6 and [line[0] for line in lines[2:]] == ["n <= 9, batch 2"] + [""] * 5
    assert [line[7] for line in lines[2:]] == ["1", "0.25", "0.125", "1", "0.5", "0.125"] and [line[9] for line in lines[2:]] == ["8", "2", "1", "8", "4", "1"]
    assert findings(metrics) == []
    wider = metrics | {split_name(18, 2, form, ragged=True): {"seconds": 4 * s} for form, s in seconds.items()}
    assert all(growth(by_length(wider, form, "seconds", 2)) == 2 for form in seconds)
    assert forms_of(wider) == list(seconds) and cases(wider) == {"n <= 9, batch 2": (9, 2), "n <= 18, batch 2": (18, 2)}


def test_the_last_record_of_its_kind_is_shown(clone, monkeypatch):
    monkeypatch.chdir(clone)
    assert recorded_bench("beam_tree") == ({}, ["There is no record yet."])
    for number, ragged in enumerate((False, False, True)):
        metrics = {split_name(9, 1, "library", ragged): {"seconds": 1.0 + number}}
        append(bench_record("beam_tree", asked(profile="cpu", lengths="9", ragged=ragged), metrics, code_hashes(), now()))
    two = {split_name(9, 1, "library", True): {"seconds": 9.0}}
    append(bench_record("beam_tree", asked(profile="cpu", lengths="9", ragged=True, threads=2), two, code_hashes(), now()))
    assert recorded_bench("beam_tree", True, threads=2)[0] == two
    for ragged, seconds in ((False, 2.0), (True, 3.0)):
        metrics, (said,) = recorded_bench("beam_tree", ragged)
        assert metrics[split_name(9, 1, "library", ragged)]["seconds"] == seconds and said.startswith("Width 8; ")


def test_predictions_are_measured_in_turn_and_recorded(clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(module, "official_test", lambda: [Example(1, ("[MAX", "1", "]"))] * 40)
    taken = []
    def one(function, task, limit):
        assert set(task["expressions"]) == {"[MAX 1 ]"} and limit == 60.0
        taken.append((len(task["expressions"]), task["batch_tokens"], *[True] * task.get("literal", False)))
        return {"seconds": 1.0 + len(taken), "count": len(task["expressions"]), "memory_mb": 5.0, "accuracy": 1.0}
    run = SimpleNamespace(profile="cpu", encoder="crvnn", counts="10 40", literal=10, batch_tokens=64, threads=1, repeats=2, device="cpu", limit=60.0)
    metrics = bench("predict", run, one)
    assert taken == [(10, 0), (10, 64), (10, 0, True)] * 2 + [(40, 0), (40, 64)] * 2
    assert metrics["40 expressions, in batches"]["seconds"] == 10 and metrics["10 expressions, one by one"]["fastest_s"] == 2.0
    assert predict_lines(metrics)[-1] == ["40 expressions", "in batches", "10", "4", "5"]
    kept, (said,) = recorded_bench("predict")
    assert kept == metrics and not said.startswith("Width") and check_results(Path("nbs/results"), "bench_predict") == []
    failed = bench("predict", SimpleNamespace(**vars(run) | {"profile": "smoke"}), lambda function, task, limit: {"failed": {"over_limit_s": limit}})
    assert predict_lines(failed)[1] == ["10 expressions", "one by one", "–", "–", "–"]
    assert len(read_records("bench_predict")) == 1                                             # a smoke run leaves none


def test_the_records_that_are_kept_can_be_read():
    "The first was made before there was a second subject."
    records = read_records("bench_crvnn", Path(__file__).parents[1] / "nbs" / "results")
    assert records
    for record in records:
        metrics, wanted = record["metrics"], record["parameters"].get("forms", "all")
        lines, said = bench_lines(metrics), findings(metrics)
        forms = [form for form in FORMS if wanted == "all" or form in wanted.split("; ")]
        assert forms_of(metrics) == forms and len(lines) == 2 + len(metrics)
        if "literal" in forms:
            assert lines[0][10] == "rounds" and any(sentence.startswith("Roots and gradients agree") for sentence in said)
        if len(by_length(metrics, "library", "seconds", 1)) > 1:
            assert growth(by_length(metrics, "library", "seconds", 1)) > 0


GROWTH = """
import json, torch
from rvnnbook.origin import peak_memory
grown = []
for make, megabytes in ((torch.ones, 200), (torch.ones, 50), (torch.empty, 400)):      # memory that is not used has no pages
    level = peak_memory(anew=True)
    make(megabytes * 250_000)
    grown.append(peak_memory() - level)
print(json.dumps(grown))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forgets a peak")
def test_the_peak_is_of_memory_in_use_and_begins_anew():
    found = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)       # no garbage of other tests
    assert json.loads(found.stdout) == pytest.approx([200, 50, 0], abs=10)


# ---- in processes of their own

def test_a_process_counts_its_own_memory_and_not_its_parents():
    ballast = torch.ones(100_000_000)                                  # 400 MB
    found = fresh(measure, dict(subject="crvnn", form="literal", length=500, batch=1, dim=2))
    del ballast
    rounds, matrix = found["counts"][0], 500 * 500 * 4 / 1e6
    assert 4 * rounds * matrix < found["memory_mb"] < 40 * rounds * matrix       # that is 16 to 160 MB for 16 rounds
    assert found["seconds"] > 0


def test_the_checkpointed_form_keeps_less():
    kept = {form: fresh(measure, dict(subject="crvnn", form=form, length=300, batch=1, dim=32))["memory_mb"] for form in FORMS[1:3]}
    assert kept["library, checkpointed"] < 0.7 * kept["library"]


def test_what_fails_is_told(tmp_path, capsys):
    "Too little memory for a step, and enough for the products."
    run = asked(profile="cpu", lengths="1000", dim=2, repeats=2, memory=20, forms="literal; products")
    metrics = bench("crvnn", SimpleNamespace(**vars(run) | {"profile": "smoke"}))
    told = capsys.readouterr().out.splitlines()
    assert metrics["n = 1000, batch 1, literal"] == {"out_of_memory": 1} and metrics["n = 1000, batch 1, products"]["count"] == 2
    assert told[0] == "n = 1000, batch 1, literal: out of memory" and len(told) == 3                # and not tried again
    assert bench_lines(metrics)[2][:3] == ["n = 1000, batch 1", "literal", "out of memory"]
    assert findings(metrics) == ["Without a result: n = 1000, batch 1, literal (out of memory)."]
    record = bench_record("crvnn", run, metrics, code_hashes(), now() - timedelta(seconds=2.5))
    append(record, folder=tmp_path)
    assert read_records("bench_crvnn", tmp_path) == [record] and record["metrics"] == metrics and 2.5 <= record["wall_s"] < 9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited on Linux only")
def test_whoever_runs_out_of_memory_says_so_in_his_own_words():
    "Here it is oneDNN, which could not create a primitive."
    assert fresh(measure, dict(subject="beam_tree", form="literal", length=100, batch=8, dim=128, memory=300)) == {"failed": {"out_of_memory": 1}}


def test_what_takes_too_long_is_told():
    assert fresh(measure, dict(form="literal", length=1000, **TINY), limit=0.2) == {"failed": {"over_limit_s": 0.2}}


def test_what_is_wrong_otherwise_stops_everything():
    with pytest.raises(BenchError, match="crvnn, literal, n = 20: RuntimeError: .*abacus"):
        fresh(measure, dict(form="literal", length=20, device="abacus", **TINY))


# ---- words and numbers

@pytest.mark.parametrize("words, said", [
    ("lengths=1", "lengths is 1: "), ("lengths=20.5", "lengths is 20.5: "), ("batches=0", "batches is 0: "), ("dim=0", "dim is 0: "),
    ("threads=0", "threads is 0: "), ("repeats=-1", "repeats is -1: "), ("memory=-5", "memory is -5: "), ("memory=2.5", "memory is 2.5: "),
    ("limit=0", "limit is 0: "), ("limit=nan", "limit is 'nan': "), ("ragged=maybe", "ragged is 'maybe': "), ("device=tpu", "device is 'tpu': "),
    ("subject=attention ragged=True", "ragged must be False for attention"), ("length=20", "unknown parameter 'length'. Did you mean 'lengths'"),
    ("forms=libary", "unknown form 'libary'. Did you mean 'library'"), ("profile=cpu", "there is no clone of the book here")])
def test_a_refused_request_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert gate(["--no-notebook", *(part for word in words.split() for part in ("-p", word))]) == (1 if "clone" in said else 2)
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["runs"] * ("clone" in said)


def test_a_page_refuses_too(clone, monkeypatch, capsys):
    "With the page, the cell runs in a kernel."
    monkeypatch.chdir(clone)
    assert gate(["-p", "forms=libary"]) == 2
    assert "unknown form 'libary'. Did you mean 'library'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_no_measurement(capsys):
    assert gate(["--no-notebook", "-p", "device=cuda"]) == 2
    assert "device is cuda, but PyTorch finds no GPU" in capsys.readouterr().err


def made(**seconds_by_form):
    "Metrics as if 100 and 400 tokens had been measured."
    return {split_name(n, 1, form): {"seconds": s, "fastest_s": s, "slowest_s": s, "count": 1, "memory_mb": 10 * s}
            for form, pair in seconds_by_form.items() for n, s in zip((100, 400), pair)}


def test_sentences_follow_the_numbers():
    slower = made(literal=(1.0, 2.0), library=(1.0, 8.0), products=(0.5, 0.5))
    faster = made(literal=(1.0, 8.0), library=(1.0, 2.0), products=(0.5, 0.5))
    assert bench_lines(slower)[6][1:10] == ["library", "8", "8", "8", "–", "80", "4", "4", "16"]        # n = 400; the last three are ratios
    assert bench_lines(faster)[6][1:10] == ["library", "2", "2", "2", "–", "20", "0.25", "0.25", "4"]
    assert [growth(by_length(slower, form, "seconds", 1)) for form in ("literal", "library", "products")] == [0.5, 1.5, 0]
    assert [growth(by_length(faster, form, "seconds", 1)) for form in ("literal", "library", "products")] == [1.5, 0.5, 0]
    assert agreement({"n = 9, batch 1, library": {"root_gap": 1e-7, "gradient_gap": 2e-3}})[0].startswith("BEWARE: the forms differ by 2e-03")
    assert "agree with the literal form's to 3e-04" in agreement({"n = 9, batch 1, library": {"root_gap": 3e-4, "gradient_gap": 1e-7}})[0]


def lines(**pairs_by_form):
    "Metrics of chosen lengths: form -> (length, seconds or what failed), ..."
    return {split_name(n, 1, form.replace("_", ", ")): s if isinstance(s, dict) else {"seconds": s}
            for form, pairs in pairs_by_form.items() for n, s in pairs}


def test_growth_is_between_the_greatest_lengths_of_a_form():
    "The literal form fails where the library goes on."
    metrics = lines(literal=[(500, 1.0), (1000, 4.0), (2000, {"out_of_memory": 1})], library=[(500, 1.0), (1000, 2.0), (2000, 16.0)],
                    library_checkpointed=[(500, 2.0), (1000, {"over_limit_s": 60.0}), (2000, {"over_limit_s": 60.0})],
                    products=[(1000, 1.0), (2000, 2.0)])
    powers = {form: growth(by_length(metrics, form, "seconds", 1)) for form in forms_of(metrics)}
    assert powers == {"literal": 2.0, "library": 3.0, "library, checkpointed": None, "products": 1.0}
    assert findings(metrics) == [
        "Without a result: n = 2000, batch 1, literal (out of memory); n = 1000, batch 1, library, checkpointed (over 60 s); "
        "n = 2000, batch 1, library, checkpointed (over 60 s)."]


@pytest.mark.parametrize("gaps", [(math.nan, 1e-7), (1e-7, math.nan), (1e-7, 2e-3), (math.inf, 1e-7)])
def test_a_gap_that_is_large_or_no_number_is_told(gaps):
    names = "root_gap", "gradient_gap"
    good = {"n = 9, batch 1, library": dict.fromkeys(names, 1e-6)}
    bad = {"n = 99, batch 1, library": dict(zip(names, gaps))}
    for metrics in (good | bad, bad | good):
        said, = agreement(metrics)
        assert said.startswith("BEWARE") and f"{max(gaps, key=lambda g: 9 if math.isnan(g) else g):.0e} of" in said
        assert "n = 99, batch 1, library" in said and "n = 9," not in said
    said, = agreement(good)
    assert not said.startswith("BEWARE") and said.endswith("to 1e-06 of their largest entry, compared at n = 9, batch 1, library.")


def test_no_limit_of_memory_where_there_is_no_way_to_set_one(tmp_path, monkeypatch):
    assert check_bench("crvnn", asked(memory=50)) == list(FORMS)
    with pytest.raises(ValueError, match="unknown form 'library, inference'"):
        check_bench("crvnn", asked(forms="library; library, inference"))
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.strip("/"))            # as on a system without /proc
    with pytest.raises(ValueError, match="on Linux only"):
        check_bench("crvnn", asked(memory=50))
    assert check_bench("crvnn", asked(forms="products; library")) == ["library", "products"]        # the rounds come first


def test_an_unknown_form_is_not_measured_as_another():
    with pytest.raises(KeyError, match="libary"):
        measure(form="libary", length=20, **TINY)


@pytest.mark.parametrize("error", [BenchError("broken"), KeyboardInterrupt()])
def test_what_was_measured_is_told_before_something_breaks(error, clone, monkeypatch, capsys):
    def breaks(function, task, limit):
        if task["form"] == "products":
            raise error
        return measure(**task)
    monkeypatch.chdir(clone)
    with pytest.raises(type(error)):
        bench("crvnn", asked(profile="cpu"), breaks)
    told = capsys.readouterr().out.splitlines()
    assert [line.rpartition(":")[0] for line in told] == [split_name(20, 1, form) for form in FORMS[:3]]
    assert read_records("bench_crvnn", clone / "nbs" / "results") == []


def test_a_gap_that_is_no_number_is_not_recorded(clone, monkeypatch):
    def wrong(function, task, limit):
        found = measure(**task)
        return found | {"root": [[math.nan] * 8]} if task["form"] == "library" else found
    monkeypatch.chdir(clone)
    with pytest.raises(ValueError):
        bench("crvnn", asked(profile="cpu", forms="; ".join(FORMS[:2])), wrong)
    assert read_records("bench_crvnn", clone / "nbs" / "results") == []


def test_the_table_divides_what_stands_in_it():
    lines = bench_lines(made(literal=(1.0, 8.0), library=(1.0, 2.0), products=(0.5, 0.25)))
    assert [len(line) for line in lines] == [12] * 8 and [line[0] for line in lines[2:]] == ["n = 100, batch 1", "", "", "n = 400, batch 1", "", ""]
    assert lines[6] == ["", "library", "2", "2", "2", "–", "20", "0.25", "0.25", "8", "–", "–"]
    counted = bench_lines({name: line | {"rounds": 2.5} for name, line in made(library=(1.0, 2.0)).items()})
    assert [line[10] for line in counted] == ["rounds", "mean", "2.5", "2.5"], "a column where something was counted"
    assert bench_lines(made(literal=(150.0, 1234.0)))[3][:7] == ["n = 400, batch 1", "literal", "1234", "1234", "1234", "–", "12340"]
    alone = bench_lines({name: line for name, line in made(library=(1.0, 2.0)).items()})
    assert alone[3][7:10] == ["–"] * 3                                   # no ratio to what was not measured


@given(st.floats(-1, 4), st.floats(1e-3, 1e3), st.lists(st.integers(2, 5000), min_size=2, max_size=5, unique=True))
def test_growth_of_a_power(power, scale, lengths):
    assert growth({n: scale * n ** power for n in lengths}) == pytest.approx(power, abs=1e-6)


def test_a_record_that_was_changed_is_refused():
    record = bench_record("crvnn", asked(profile="cpu", lengths="100 400"), made(literal=(1.0, 2.0)), code_hashes(), now())
    assert validate(json.loads(json.dumps(record))) == record and record["parameters"]["lengths"] == "100 400"
    with pytest.raises(RecordError, match="changed after it was written"):
        validate(json.loads(json.dumps(record).replace('"seconds": 2.0', '"seconds": 1.5')))
    leg, = record["legs"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", leg["started"]) and leg["to_step"] == 0 and leg["threads"] == 1
