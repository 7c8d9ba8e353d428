"Records of runs: what goes in comes out, what is damaged is refused, what changed is noticed."
import ast
import copy
import csv
import hashlib
import json
import math
import operator
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook import origin
from rvnnbook.lab import records as runs
from rvnnbook.lab.records import (
    POINTS, Leg, Record, RecordError, append, as_frame, changed_modules, check_results, current_parameters, end_to_end, identity, latest, load, make_trace,
    merge_records, new_record, query_records, read_records, read_trace, results_folder, scan, select, sittings, standing_id, trace_path, validate)
from rvnnbook.origin import LIBRARIES, code_hash, code_hashes, digest, libraries, loaded_modules
from rvnnbook.lab.revalidate import revalidate
from rvnnbook.show.tables import results_table, write_parquet
from tests.records import LEG as A_LEG
from tests.records import make, signed

ROOT = Path(__file__).resolve().parents[1]
TRACE = {"curve": {"step": [1, 5, 9], "loss": [2.5, 1.0, None], "accuracy": [0.1, 0.5, 0.75]}, "trees": ["((1 2) 3)"]}


def python(code, *words, cwd=ROOT, **options):
    env = {**os.environ, "PYTHONPATH": str(options.pop("path", ROOT)), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=cwd, capture_output=True, text=True, env=env, **options)


# ---- what goes in comes out

finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text("abc XYZ.,<=>:+-é雪\"'{}[]\n", min_size=1, max_size=12).filter(str.strip)
scores = st.fixed_dictionaries({"accuracy": st.floats(0, 1)}, optional={"count": st.integers(1, 10**6), "nll": finite, "tree_accuracy": st.sampled_from([0, 1, 0.5])})


@st.composite
def records(draw):
    stops = sorted(draw(st.lists(st.integers(0, 10**6), max_size=4)))
    legs = [{**A_LEG, "seconds": draw(st.floats(0, 1e9)), "from_step": low, "to_step": high} for low, high in zip([0, *stops], stops)]
    return make(profile=draw(st.sampled_from(["cpu", "paper"])), seed=draw(st.integers(0, 2**63)), legs=legs,
                parameters=draw(st.dictionaries(st.sampled_from(["dim", "rate", "cell", "x"]), st.one_of(st.none(), st.booleans(), st.integers(), finite, words))),
                metrics=draw(st.dictionaries(words, scores, min_size=1, max_size=3)), rule=draw(words), finished=draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(st.lists(records(), max_size=4, unique_by=lambda record: record["id"]), st.booleans())
def test_what_is_appended_is_read(tmp_path_factory, several, traced):
    folder = tmp_path_factory.mktemp("results")
    several = [signed({**record, "trace": digest(TRACE, 12)}) if traced else record for record in several]
    for record in several:
        append(record, TRACE if traced else None, folder)
    assert json.dumps(read_records("toy", folder)) == json.dumps(several)
    assert all(read_trace(record, folder) == TRACE for record in several if traced)
    assert check_results(folder) == [] and read_records("other", folder) == []


@given(st.integers(1, 700), st.integers(0, 50))
def test_a_trace_keeps_the_ends_and_at_most_two_hundred_points(count, jump):
    rows = [{"step": 3 + step * (jump + 1), "loss": 1 / (step + 1)} for step in range(count)]
    curve = make_trace(rows)["curve"]
    kept = curve["step"]
    assert len(kept) == len(curve["loss"]) == min(count, POINTS) and kept[0] == rows[0]["step"] and kept[-1] == rows[-1]["step"]
    loss = {row["step"]: row["loss"] for row in rows}
    assert all(abs(value - loss[step]) <= 1e-5 * loss[step] for step, value in zip(kept, curve["loss"]))
    gaps = {(b - a) // (jump + 1) for a, b in zip(kept, kept[1:])}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1, "evenly chosen"


def test_numbers_that_are_not_finite():
    "A check may give nan; a test must give a number."
    assert make_trace([{"step": 1, "nll": math.nan}, {"step": 2, "nll": -math.inf}, {"step": 3, "nll": .5}])["curve"]["nll"] == [None, None, .5]
    with pytest.raises(RecordError, match="finite numbers only, but test: accuracy is nan; far: nll is inf$"):
        new_record("toy", {}, profile="cpu", seed=0, modules={}, rule="all", metrics={
            "test": {"accuracy": math.nan, "count": 3}, "far": {"nll": math.inf}})


def test_a_training_without_a_validation_is_not_recorded():
    with pytest.raises(ValueError, match="nothing was validated yet"):
        make_trace([])


def test_a_record_of_a_real_training_in_two_sittings(tmp_path):
    "What lab.train hands over is what a record takes."
    code = """
import sys
from pathlib import Path
import torch
from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import VOCABULARY, collate_listops, unique_draws
from rvnnbook.lab.records import append, make_trace, new_record
from rvnnbook.origin import code_hashes
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.classify import Classifier
began = code_hashes()
folder = Path(sys.argv[1])
examples = list(unique_draws(60, seed=0))
def run(**options):
    torch.manual_seed(0)
    model = Classifier(create_encoder("rvnn", dim=8), vocabulary=len(VOCABULARY), classes=10)
    return train(model, BucketLoader(examples, 20, collate_listops, seed=0), lambda model: {"accuracy": 0.5}, folder=folder / "run",
                 metric="accuracy", optimizer="adamw", steps=6, **options)
run(time_budget=0)
outcome = run()
trace = make_trace(outcome.history)
record = new_record("toy", {"dim": 8, "profile": "cpu", "seed": 0}, profile="cpu", seed=0, modules=began, legs=outcome.legs, trace=trace,
                    metrics={"validation": {"accuracy": 0.5}}, rule="last step", finished=outcome.finished)
append(record, trace, folder / "results")
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    record, = read_records("toy", tmp_path / "results")
    assert [(leg["from_step"], leg["to_step"]) for leg in record["legs"]] == [(0, 1), (1, 6)]
    assert record["parameters"] == {"dim": 8} and record["wall_s"] == sum(leg["seconds"] for leg in record["legs"]) > 0
    assert read_trace(record, tmp_path / "results")["curve"]["step"][-1] == 6 and record["peak_memory_mb"] > 50
    assert {"rvnnbook.encoders.rvnn", "rvnnbook.lab.train", "rvnnbook.data.listops", "rvnnbook.registry"} <= set(record["modules"])
    assert not {"rvnnbook.lab.records", "rvnnbook.cli"} & set(record["modules"])
    told = json.dumps(record)
    for private in (socket.gethostname(), str(ROOT), str(Path.home()), str(tmp_path)):
        assert private not in told
    assert changed_modules(record) == []


def test_code_that_changed_between_two_legs_makes_the_record_stale(tmp_path):
    "The package is edited after the first leg; the record has the hashes of the code that trained first."
    shutil.copytree(ROOT / "rvnnbook", tmp_path / "rvnnbook", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    code = """
import json, sys
import torch
from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import VOCABULARY, collate_listops, unique_draws
from rvnnbook.lab.records import changed_modules, make_trace, new_record
from rvnnbook.lab.train import train
from rvnnbook.origin import code_hashes
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.classify import Classifier
began = code_hashes()
torch.manual_seed(0)
model = Classifier(create_encoder("rvnn", dim=8), vocabulary=len(VOCABULARY), classes=10)
outcome = train(model, BucketLoader(list(unique_draws(60, seed=0)), 20, collate_listops, seed=0), lambda model: {"accuracy": 0.5},
                folder="run", metric="accuracy", optimizer="adamw", steps=6, **json.loads(sys.argv[1]))
record = new_record("toy", {"dim": 8}, profile="cpu", seed=0, modules=began, legs=outcome.legs, trace=make_trace(outcome.history or [{"step": 1}]),
                    metrics={"validation": {"accuracy": 0.5}}, rule="last step", finished=outcome.finished)
print(json.dumps([record, code_hashes(), changed_modules(record)]))
"""
    def sit(**options):
        done = python(code, json.dumps(options), cwd=tmp_path, path=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    first, before, stale = sit(time_budget=0)
    assert stale == [] and not first["finished"]
    with open(tmp_path / "rvnnbook" / "layers" / "cells.py", "a") as module:
        module.write("EDITED = True\n")
    for _ in range(2):                 # the second time it trains no further
        record, after, stale = sit()
        assert record["finished"] and [leg["to_step"] for leg in record["legs"]] == [1, 6]
        assert {name for name in after if after[name] != before[name]} == {"rvnnbook.layers.cells"} == {*stale}
        assert record["modules"] == before and all("modules" not in leg for leg in record["legs"])


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=3), max_size=4))
def test_stages_are_counted_through(stages):
    "Steps made in each leg of each stage, against one training that made them all."
    def outcome(*sizes):
        stops = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
        return SimpleNamespace(legs=[{**A_LEG, "seconds": float(b - a), "from_step": a, "to_step": b} for a, b in zip(stops, stops[1:])],
                               history=[{"step": stop, "seconds": float(stop)} for stop in stops[1:]])
    whole = outcome(*(size for sizes in stages for size in sizes))
    legs, history = end_to_end(outcome(*sizes) for sizes in stages)
    assert legs == whole.legs and history == whole.history
    validate(make(legs=legs))


# ---- what is damaged is refused

def places(value, path=()):
    "Every place in nested data."
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


def altered(record, path, change):
    "A copy, with change(container, key) done at one place, signed anew so that the id does not give it away."
    record = copy.deepcopy(record)
    container = record
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    try:
        return signed(record) if path != ("id",) else record
    except (TypeError, ValueError):                              # JSON cannot say it
        return record


def put(value):
    return lambda container, key: container.__setitem__(key, value)


RECORD = make(trace="0123456789ab")

@pytest.mark.parametrize("path", list(places(RECORD)), ids=lambda path: ".".join(map(str, path)))
def test_every_field_damaged_in_turn_is_refused(path):
    validate(RECORD)
    for value in (float("nan"), float("inf"), object, {}, [], "", "see /home/me/x", b"x", -1e400):
        if value == {} and path in (("parameters",), ("modules",)) or value == [] and path == ("legs",):
            continue                                             # may be empty
        with pytest.raises(RecordError) as error:
            validate(altered(RECORD, path, put(value)))
        assert "\n" not in str(error.value) and str(path[0]) in str(error.value)


@pytest.mark.parametrize("path", [(name,) for name, field in Record.model_fields.items() if field.is_required()] + [("legs", 0, name) for name in Leg.model_fields], ids=str)
def test_a_missing_field_is_refused(path):
    with pytest.raises(RecordError, match=re.escape(f"{'.'.join(map(str, path))}: Field required")):
        validate(altered(RECORD, path, lambda container, key: container.pop(key)))


@pytest.mark.parametrize("path, value, said", [
    (("seed",), -1, "seed: Input should be greater than or equal to 0"),
    (("seed",), True, "seed: Input should be a valid integer"),
    (("seed",), 1.0, "seed: Input should be a valid integer"),
    (("experiment",), "../x", "experiment: String should match pattern"),
    (("experiment",), "Toy", "String should match pattern '^[a-z][a-z0-9_]*$'"),
    (("profile",), "gpu", "profile: Input should be 'smoke', 'cpu' or 'paper'"),
    (("commit",), "ab" * 19, "commit: String"),
    (("commit",), "AB" * 20, "String should match pattern '^[0-9a-f]{40}$'"),
    (("dirty",), 1, "dirty: Input should be a valid boolean"),
    (("threads",), 0, "threads: Input should be greater than 0"),
    (("wall_s",), -0.1, "wall_s: Input should be greater than or equal to 0"),
    (("finished",), 1, "finished: Input should be a valid boolean"),
    (("recorded",), "2026-01-31", "recorded: Value error, it must be a time in UTC"),
    (("recorded",), "2026-01-31T12:00:00", "a time in UTC"),
    (("recorded",), "2026-01-31T12:00:00+02:00", "a time in UTC"),
    (("recorded",), "2026-13-31T12:00:00+00:00", "recorded: Value error, month must be"),
    (("version",), "new", "version: String"),
    (("trace",), "xyz", "trace: String should match pattern '^[0-9a-f]{12}$'"),
    (("note",), "hello", "note: Extra inputs are not permitted"),
    (("parameters", "dim"), [1, 2], "parameters.dim.int: Input should be a valid integer"),
    (("parameters", "data"), "/data/x", "nonempty text without an absolute path"),
    (("parameters", "data"), "~/x", "parameters.data."),
    (("parameters", "data"), "C:\\x", "parameters.data."),
    (("device",), "node (/dev/nvidia0)", "device: Value error"),
    (("modules", "rvnnbook.core"), "absent", "modules.rvnnbook.core: String should match"),
    (("modules", "torch.nn"), "0123456789ab", "modules.torch.nn.[key]: String should match"),
    (("libraries", "torch"), None, "libraries.torch: Input"),
    (("libraries", "numpy"), 2, "libraries.numpy: Input"),
    (("metrics", "official <= 100", "accuracy"), 1.0001, "accuracy is 1.0001; it must be a share from 0 to 1"),
    (("metrics", "official <= 100", "accuracy"), 98, "metrics.official <= 100: Value error, accuracy is 98"),
    (("metrics", "official <= 100", "tree_accuracy"), -0.1, "tree_accuracy is -0.1; it must be a share from 0 to 1"),
    (("metrics", "official <= 100", "count"), 0, "count is 0; it must be a whole number from 1"),
    (("metrics", "official <= 100", "count"), 10.5, "count is 10.5; it must be a whole number from 1"),
    (("metrics", "official <= 100", "nll"), "low", "metrics.official <= 100.nll: Input should be a valid number"),
    (("metrics", "/data/test"), {"accuracy": 0.5}, "nonempty text without an absolute path"),
    (("metrics",), {}, "metrics: Dictionary should have at least 1 item"),
    (("legs", 0, "from_step"), 5, "leg 0 goes from step 5 to 100; what came before it stopped at 0"),
    (("legs", 1, "from_step"), 90, "leg 1 goes from step 90 to 250; what came before it stopped at 100"),
    (("legs", 1, "to_step"), 99, "leg 1 goes from step 100 to 99"),
    (("legs", 1, "host"), "x", "legs.1.host: Extra"),
    (("legs", 0), None, "legs.0: Input")], ids=str)
def test_a_value_out_of_place_is_named(path, value, said):
    with pytest.raises(RecordError) as error:
        validate(altered(RECORD, path, put(value)))
    assert said in str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_number_changed_by_hand_is_noticed(data):
    "Any character of a line exchanged for another: the line is refused, or says the same."
    line = json.dumps(RECORD, sort_keys=True)
    at = data.draw(st.integers(0, len(line) - 1))
    new = data.draw(st.characters(codec="ascii", exclude_characters="\n"))
    try:
        found = validate(json.loads(line[:at] + new + line[at + 1:]))
    except ValueError:                                           # RecordError and JSONDecodeError are
        return
    assert found == RECORD


@pytest.mark.parametrize("change, said", [
    (lambda curve: curve.pop("step"), "'step' must be whole numbers"),
    (lambda curve: curve["step"].append(10), "'loss' has 3 numbers for 4 steps"),
    (lambda curve: curve["step"].__setitem__(1, 1), "increasing"),
    (lambda curve: curve["step"].__setitem__(1, 5.0), "whole numbers"),
    (lambda curve: curve["loss"].__setitem__(1, float("nan")), "curve.loss.1.float: Input should be a finite number"),
    (lambda curve: curve["loss"].__setitem__(1, "low"), "curve.loss.1.float: Input should be a valid number"),
    (lambda curve: curve.update({name: list(range(201)) for name in curve}), "at most 200")])
def test_a_damaged_trace_is_refused(change, said, tmp_path):
    trace = copy.deepcopy(TRACE)
    change(trace["curve"])
    with pytest.raises(RecordError) as error:
        append(make(trace=digest(TRACE, 12)), trace, tmp_path)
    assert said in str(error.value) and not any(tmp_path.iterdir())


def test_all_libraries_that_can_change_a_result_are_named():
    assert {"python", *LIBRARIES} == {*libraries()}


def test_a_trace_belongs_to_its_record(tmp_path):
    record = make(trace=digest(TRACE, 12))
    for wrong in (None, {**TRACE, "trees": []}):
        with pytest.raises(RecordError, match="another trace"):
            append(record, wrong, tmp_path)
    with pytest.raises(RecordError, match="another trace"):
        append(make(), TRACE, tmp_path)
    append(record, TRACE, tmp_path)
    path = trace_path(record, tmp_path)
    for content, said in ((json.dumps({**TRACE, "trees": []}), "its hash differs from the recorded one"), ("{", "damaged")):
        path.write_text(content)
        assert any(said in line for line in check_results(tmp_path))
    for number in ("NaN", "-Infinity", "1e400"):
        path.write_text(json.dumps(TRACE).replace("2.5", number, 1))
        assert check_results(tmp_path)[0].startswith(f"toy.jsonl:1: traces/{path.name} is damaged (")
    path.unlink()
    assert check_results(tmp_path) == [f"toy.jsonl:1: traces/{path.name} is missing"]
    path.with_name("stray.json").write_text("{}")
    assert "traces/stray.json belongs to no valid record" in check_results(tmp_path)


def test_damaged_lines_are_named_and_others_still_read(tmp_path):
    path = tmp_path / "toy.jsonl"
    good = [make(seed=seed) for seed in range(3)]
    lines = [json.dumps(record) for record in good]
    for text, said in ((lines[0][:80], "toy.jsonl:2: not a whole JSON line"), ("", "toy.jsonl:2: not a whole JSON line"), ("<<<<<<< ours", "toy.jsonl:2"),
                       (lines[2].replace(good[2]["id"], good[0]["id"]), f"toy.jsonl:2: id is {good[0]['id']}, but the content gives {good[2]['id']}"), ("[1]", "toy.jsonl:2: : Input should be a valid dictionary"),
                       (lines[2].replace("0.75", "NaN"), "accuracy: Input should be a finite number"), (lines[2].replace("0.75", "-Infinity"), "accuracy: Input should be a finite number"),
                       (lines[2].replace("0.75", "1e999"), "accuracy: Input should be a finite number"), (lines[2].replace("0.75", "9" * 400), "accuracy: Input should be a valid number"), (lines[2].replace("0.75", "0.76"), "changed after it was written"),
                       (json.dumps(make(experiment="other")), "toy.jsonl:2: experiment is 'other'"), ("[" * 10**5, "toy.jsonl:2: not a whole JSON line"),
                       ("\xff", "toy.jsonl:2")):
        path.write_bytes("\n".join([lines[0], text, lines[1], ""]).encode("latin1"))
        found, faults = scan(path)
        assert found == good[:2] and len(faults) == 1 and said in faults[0], faults
        with pytest.raises(RecordError, match=re.escape(faults[0])):
            read_records("toy", tmp_path)


def test_a_half_written_line_is_named_and_does_not_spread(tmp_path):
    one, two = make(seed=1), make(seed=2)
    path = append(one, folder=tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"commit": "ab')
    with pytest.raises(RecordError, match="toy.jsonl:2: the line has no end: it was cut off. Remedy: delete it"):
        read_records("toy", tmp_path)
    append(two, folder=tmp_path)
    found, faults = scan(path)
    assert found == [one, two] and len(faults) == 1 and faults[0].startswith("toy.jsonl:2: not a whole JSON line")


def test_a_record_is_added_once_and_counts_once(tmp_path):
    path = append(make(), folder=tmp_path)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="already"):
        append(make(), folder=tmp_path)
    assert path.read_bytes() == before
    path.write_bytes(2 * before)                                 # as a merge may leave it
    assert read_records("toy", tmp_path) == [make()] and check_results(tmp_path) == []


def test_a_run_that_had_nothing_left_to_do_is_no_second_run(tmp_path):
    path = append(make(trace=digest(TRACE, 12)), TRACE, tmp_path)
    before, later = files_of(tmp_path), "2026-03-01T12:00:00Z"
    assert append(make(recorded=later, peak_memory_mb=1.5, trace=digest(TRACE, 12)), TRACE, tmp_path) == path
    committed = make(commit="0123abcd" * 5, dirty=True, trace=digest(TRACE, 12))     # the first record has been committed meanwhile
    assert committed["commit"] != make()["commit"] and append(committed, TRACE, tmp_path) == path
    assert files_of(tmp_path) == before
    first, = read_records("toy", tmp_path)
    assert standing_id(committed, tmp_path) == standing_id(first, tmp_path) == first["id"] != committed["id"]
    measured_anew = make(recorded=later, metrics={"test": {"accuracy": 0.25}})
    other_code = make(recorded=later, modules={"rvnnbook.core": "0123456789ab"})
    untrained = [make(legs=[], recorded=when) for when in ("2026-03-01T12:00:00Z", "2026-03-01T12:00:01Z")]
    for record in (measured_anew, other_code, *untrained):       # a benchmark without sittings is a measurement every time
        append(record, folder=tmp_path)
    assert len(read_records("toy", tmp_path)) == 5


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_smoke_runs_are_no_results(tmp_path):
    (tmp_path / "nbs" / "results").mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text("")
    committed = tmp_path / "nbs" / "results"
    assert results_folder("cpu", tmp_path / "nbs" / "results") == committed and results_folder("smoke", tmp_path) == tmp_path / "build" / "results"
    smoke = make(profile="smoke")
    with pytest.raises(RecordError, match="smoke"):
        append(smoke, folder=committed)
    assert not any(committed.iterdir())
    append(smoke, folder=results_folder("smoke", tmp_path))
    assert read_records("toy", tmp_path / "build" / "results") == [smoke] and not any(committed.iterdir())
    with pytest.raises(RecordError, match="no clone"):
        results_folder(start="/")


# ---- several writers, and none left in the middle

def test_concurrent_appends_keep_every_line_whole(tmp_path):
    code = ("import sys; from pathlib import Path; from rvnnbook.lab.records import append; from tests.records import make\n"
            "for number in range(40): append(make(seed=int(sys.argv[2]) * 1000 + number, rule='x' * 20_000), folder=Path(sys.argv[1]))")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(writer)], cwd=ROOT, env=env) for writer in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(record["seed"] for record in read_records("toy", tmp_path)) == sorted(1000 * w + n for w in range(4) for n in range(40))


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = ("import sys, itertools; from pathlib import Path; from rvnnbook.lab.records import append; from tests.records import make\n"
            "for number in itertools.count(): append(make(seed=number, rule='x' * 50_000), folder=Path(sys.argv[1]))")
    path = tmp_path / "toy.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not path.exists() or path.stat().st_size < 10 * 50_000:
        time.sleep(0.002)
        assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    seeds = [record["seed"] for record in read_records("toy", tmp_path)]
    assert len(seeds) >= 10 and seeds == list(range(len(seeds)))


def test_a_full_disk_adds_nothing(tmp_path):
    path = append(make(seed=1), folder=tmp_path)
    before = path.read_bytes()
    code = ("import resource, sys; from pathlib import Path; from rvnnbook.lab.records import append, make_trace\n"
            "from rvnnbook.origin import digest; from tests.records import make\n"
            "trace = make_trace([{'step': 1, 'loss': 1.0}])\n"
            "size = Path(sys.argv[1], 'toy.jsonl').stat().st_size\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))\n"
            "append(make(seed=2, trace=digest(trace, 12)), trace, folder=Path(sys.argv[1]))")
    done = python(code, tmp_path)
    assert done.returncode == 1 and "OSError: toy.jsonl: no room for the record; nothing was added" in done.stderr
    assert path.read_bytes() == before and not list((tmp_path / "traces").glob("*"))


# ---- names that were in use before

OLD = make(trace=digest(OLD_TRACE := {"curve": {"step": [1], "surprise": [0.5]}, "trees": ["surprise"]}, 12), rule="best validation surprise",
           metrics={"test": {"surprise": 0.5, "surprise_by_piece": 0.25, "accuracy": 1}})


def test_old_names_are_read_as_the_new_ones_and_the_text_stays(tmp_path):
    path = append(OLD, OLD_TRACE, tmp_path / "away")
    files = files_of(tmp_path / "away")
    record, = read_records("toy", tmp_path / "away")
    assert record["metrics"] == {"test": {"nll": 0.5, "nll_by_piece": 0.25, "accuracy": 1}} and record["rule"] == "best validation nll"
    assert {**record, "metrics": OLD["metrics"], "rule": OLD["rule"]} == OLD
    assert read_trace(record, tmp_path / "away") == {"curve": {"step": [1], "nll": [0.5]}, "trees": ["surprise"]}
    assert load("toy", "`test: nll` == 0.5", tmp_path / "away")["id"].tolist() == [OLD["id"]]
    merge_records([tmp_path / "away"], tmp_path / "home")
    assert files_of(tmp_path / "home") == files == files_of(tmp_path / "away") and check_results(tmp_path / "home") == []
    again = make(trace=OLD["trace"], rule="best validation nll", metrics=record["metrics"], recorded="2026-03-01T12:00:00Z")
    assert append(again, OLD_TRACE, tmp_path / "away") == path and files_of(tmp_path / "away") == files, "the same sittings under the new names"


# ---- identity and staleness

def test_identity():
    parameters = {"dim": 8, "rate": 0.1}
    same = {identity("toy", parameters, 0), identity("toy", {"rate": 0.1, "dim": 8}, 0), identity("toy", {**parameters, "seed": 3, "profile": "cpu"}, 0)}
    assert len(same) == 1 and re.fullmatch("[0-9a-f]{16}", *same)
    others = [identity("boy", parameters, 0), identity("toy", parameters, 1), identity("toy", {"dim": 8, "rate": 0.2}, 0),
              identity("toy", {"dim": 8}, 0), identity("toy", {"dim": True, "rate": 0.1}, 0), identity("toy", {"dim": "8", "rate": 0.1}, 0)]
    assert len({*others, *same}) == 7


SAMPLE = '''
"A module."
import os.path as p
from . import x

@decorated(1)
class A(B, metaclass=C):
    "Words."
    a: int = 3
    def f(self, x, /, y=1.5, *z, k=None, **w) -> dict[str, int]:
        """More words."""
        async def g(): await x
        return {**w, 'a': [i for i in z if i], **{}} | {f"{x!r:>9} {z=}": lambda: (yield)}
def h():
    try:
        with open("x") as f, g() as (a, b): a[1:, ...] = b if a else -2j
    except (OSError, ValueError) as e: raise e from None
    else: print(b"x" + rb"\\y", end="")
    match x:
        case {"a": [1, *rest], **others} if rest: global q; q = (w := 1_000)
        case A(x=None) | str(): pass
    while True: break
'''


def test_the_hash_of_a_source_is_the_same_for_every_python():
    "The constant was computed with 3.11, 3.12 and 3.13; a Python that gives another would make every run look stale."
    assert code_hash(SAMPLE) == "5f8af51ea627"


MODULES = sorted(path for path in (ROOT / "rvnnbook").rglob("*.py") if path.stat().st_size)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "rvnnbook")))
def test_layout_and_words_do_not_count_but_every_number_does(path):
    source = path.read_text()
    plain = ast.parse(source)
    assert code_hash(ast.unparse(plain)) == code_hash(source), "comments and layout"
    for node in ast.walk(plain):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body[0].value.value = "Other words."
    assert code_hash(ast.unparse(plain)) == code_hash(source), "docstrings"
    numbers = [node for node in ast.walk(plain) if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    for node in numbers[:: max(1, len(numbers) // 3)]:
        node.value += 1
        assert code_hash(ast.unparse(plain)) != code_hash(source), ast.unparse(node)
        node.value -= 1


def test_a_run_is_stale_when_its_code_changed_and_not_when_its_comments_did(tmp_path):
    shutil.copytree(ROOT / "rvnnbook", tmp_path / "rvnnbook", ignore=shutil.ignore_patterns("__pycache__"))
    modules = json.dumps(code_hashes(["rvnnbook.layers.cells", "rvnnbook.core", "rvnnbook.encoders.rvnn", "rvnnbook.registry"]))
    def changed():
        done = python("import json, sys, rvnnbook; assert rvnnbook.__file__.startswith(sys.argv[2])\n"
                      "from rvnnbook.lab.records import changed_modules; print(json.dumps(changed_modules({'modules': json.loads(sys.argv[1])})))",
                      modules, tmp_path, cwd=tmp_path, path=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    def edit(name, old, new):
        path = tmp_path / "rvnnbook" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    assert changed() == []
    edit("layers/cells.py", "import torch", "import torch   # the library\n\n# a remark\n")
    told = ast.get_docstring(next(node for node in ast.parse((ROOT / "rvnnbook" / "core.py").read_text()).body if isinstance(node, ast.FunctionDef)))
    edit("core.py", told, f"{told} Indeed.")                     # a docstring
    edit("lab/papers.py", "import", "x = 1\nimport")             # not one of the run's modules
    edit("registry.py", "ENCODERS = {", 'ENCODERS = {"later": ("rvnnbook.encoders.later", "Later", {}),')
    assert changed() == []
    edit("registry.py", '{"cell": "grc"}', '{"cell": "lstm"}')
    assert changed() == ["rvnnbook.registry"]
    edit("layers/cells.py", "import torch", "import torch\nnew = 1\n")
    (tmp_path / "rvnnbook" / "encoders" / "rvnn.py").unlink()
    assert changed() == ["rvnnbook.encoders.rvnn", "rvnnbook.layers.cells", "rvnnbook.registry"]


def test_code_that_changes_while_a_run_is_going_does_not_enter_its_record(tmp_path):
    shutil.copytree(ROOT / "rvnnbook", tmp_path / "rvnnbook", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import json, rvnnbook.core
from pathlib import Path
from rvnnbook.lab.records import changed_modules, new_record
from rvnnbook.origin import code_hashes
began = code_hashes()
import rvnnbook.layers.cells                       # loaded after the beginning: still noted
for name in ("core", "lab/records"):
    path = Path(rvnnbook.core.__file__).parent / f"{name}.py"
    path.write_text(path.read_text() + "\\nnew = 1\\n")
record = new_record("toy", {}, profile="cpu", seed=0, modules=began, metrics={"test": {"accuracy": 1}}, rule="none", wall_s=1)
print(json.dumps([changed_modules(record), sorted(record["modules"])]))
"""
    done = python(code, cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    changed, modules = json.loads(done.stdout)
    assert changed == ["rvnnbook.core"] and "rvnnbook.layers.cells" in modules


def test_what_is_loaded_is_hashed():
    code = ("import json, rvnnbook.cli, rvnnbook.show.plots, rvnnbook.lab.records, rvnnbook.layers.cells\n"
            "from rvnnbook.origin import loaded_modules; print(json.dumps(loaded_modules()))")
    loaded = json.loads(python(code).stdout)
    assert "rvnnbook.layers.cells" in loaded and not [name for name in loaded if re.search(r"cli|show|lab\\.records|layers$", name)]
    assert set(loaded_modules()) == set(code_hashes())


# ---- revalidation

EXPERIMENT = [("parameters", "profile = 'cpu'\nseed = None\ndim = None\nsteps = None"),
              (None, """from rvnnbook.lab.settings import strict
run = strict(globals(), {"cpu": dict(seed=0, dim=8, steps=12), "smoke": dict(seed=0, dim=8, steps=2)}, seed=range(9), dim=range(4, 64), steps=range(1, 100))"""),
              ("run", """import torch
from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import VOCABULARY, collate_listops, unique_draws
from rvnnbook.lab.records import append, make_trace, new_record
from rvnnbook.origin import code_hashes
from rvnnbook.lab.run import run_folder
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.optimization import evaluate_classifier
from rvnnbook.tasks.classify import Classifier
began, examples = code_hashes(), list(unique_draws(60, seed=0))
torch.manual_seed(run.seed)
model = Classifier(create_encoder("rvnn", dim=run.dim), vocabulary=len(VOCABULARY), classes=10)
judge = lambda model: evaluate_classifier(model, BucketLoader(examples[:20], 20, collate_listops))
outcome = train(model, BucketLoader(examples[20:], 8, collate_listops, seed=run.seed), judge, folder=run_folder("toy", run), check_every=4,
                optimizer="adamw", steps=run.steps)"""),
              ("run", """trace = make_trace(outcome.history)
record = new_record("toy", vars(run) | {"source": "drawn"}, profile=run.profile, seed=run.seed, modules=began, legs=outcome.legs, trace=trace,
                    metrics={"test": {**judge(model), "count": 20}}, rule="best validation nll", finished=outcome.finished)
append(record, trace)""")]


def test_a_stale_record_is_current_again_when_its_first_steps_are_repeated(tmp_path):
    "A real run, code that changes without changing results, and code that changes them."
    for name in ("nbs/results", "nbs/experiments", "away/nbs/results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text("")
    shutil.copytree(ROOT / "rvnnbook", tmp_path / "rvnnbook", ignore=shutil.ignore_patterns("__pycache__"))
    cells = [{"cell_type": "code", "metadata": {"tags": [tag] if tag else []}, "source": source} for tag, source in EXPERIMENT]
    (tmp_path / "nbs" / "experiments" / "toy.ipynb").write_text(json.dumps({"cells": cells}))
    def call(*words):
        done = python("import sys; from rvnnbook.cli import main; sys.exit(main(sys.argv[1:]))", *words, cwd=tmp_path, path=tmp_path)
        return done.returncode, done.stdout.strip().splitlines(), done.stderr
    def edit(name, old, new):
        path = tmp_path / "rvnnbook" / name
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    assert call("run", "nbs/experiments/toy.ipynb", "--no-notebook", "-p", "steps=12")[0] == 0
    path = tmp_path / "nbs" / "results" / "toy.jsonl"
    line, = path.read_bytes().splitlines()
    assert call("results", "revalidate")[1] == ["0 of 0 stale records hold for the code of today"]
    assert call("results", "revalidate", "boy") == (2, [], "rvnnbook: no records of 'boy'\n")
    edit("tasks/classify.py", "import torch\n", "import torch\nunused = 1\n")
    assert call("results", "toy")[1][-1].endswith(" True")               # stale
    code, told, error = call("results", "revalidate", "toy", "--where", "dim == 8")
    record, _ = read_records("toy", path.parent)
    assert code == 0 and told == [f"toy {record['id']} holds: training to step 4", "1 of 1 stale records hold for the code of today"], error
    assert call("results", "toy")[1][-1].endswith(" False") and call("results", "toy", "--check")[1] == ["valid records: 2"]
    before, added = path.read_bytes().splitlines()
    found, same = json.loads(added), record.keys() - {"id", "modules", "commit", "dirty", "recorded"}
    assert before == line and found["revalidated"] == "training to step 4" and found["modules"].keys() >= record["modules"].keys()
    assert all(found[name] == record[name] for name in same) and latest(read_records("toy", path.parent)) == [found]
    assert len(list((path.parent / "traces").iterdir())) == 2
    shutil.copytree(path.parent, tmp_path / "away" / "nbs" / "results", dirs_exist_ok=True)
    path.write_bytes(line + b"\n")                                # another clone, which has the record alone
    assert call("results", "toy")[1][-1].endswith(" True")
    assert call("results", "merge", "away")[1] == ["records added: 1"] and path.read_bytes().splitlines() == [line, added]
    assert call("results", "toy")[1][-1].endswith(" False")
    edit("lab/train.py", "    run.optimizer.step()\n", "    run.optimizer.step()\n    run.optimizer.param_groups[0]['lr'] *= .9\n")
    assert call("results", "toy")[1][-1].endswith(" True"), "what changed since the revalidation"
    code, told, _ = call("results", "revalidate")
    assert code == 0 and re.fullmatch(rf"toy {found['id']} not confirmed: (loss|nll|accuracy) is .*; recorded is .*", told[0]) and told[1].startswith("0 of 1")
    assert path.read_bytes().splitlines() == [line, added]


def test_a_record_without_a_training_is_not_revalidated(tmp_path):
    with pytest.raises(RecordError, match="no training to repeat"):
        revalidate(make(), folder=tmp_path)


def test_a_revalidated_record_is_a_later_one_of_the_same_run(tmp_path):
    append(make(), folder=tmp_path)
    later = make(modules=code_hashes(["rvnnbook.core"]), revalidated="training to step 4", recorded="2026-02-01T12:00:00+00:00")
    append(later, folder=tmp_path)
    assert changed_modules(make()) == ["rvnnbook.core"] and changed_modules(later) == [] and latest(read_records("toy", tmp_path)) == [later]
    assert load("toy", "revalidated.notna() and not stale", tmp_path)["id"].tolist() == [later["id"]]
    assert [line.split()[-1] for line in results_table([make(), later]).splitlines()[2:]] == ["True", "False"]
    with pytest.raises(RecordError, match="nonempty text without an absolute path"):
        validate(make(revalidated="/x/y"))


# ---- choosing and showing

def test_select_and_latest():
    runs = [make(seed=seed, metrics={"test": {"accuracy": value, "nll": 1 - value}}) for seed, value in enumerate((0.5, 0.75, 0.25))]
    later = make(seed=1, recorded="2026-02-01T12:00:00Z", metrics={"test": {"accuracy": 0.125}})
    wide = make(seed=1, parameters={"dim": 16}, metrics={"other": {"accuracy": 1}})
    assert latest([*runs, wide, later]) == [runs[0], runs[2], wide, later]
    assert select([*runs, wide], dim=16) == [wide] and select([*runs, wide], seed=1, dim=8) == [runs[1]] and select(runs, nothing=1) == []
    titles = [results_table(several).splitlines()[1].split() for several in ([*runs, wide], runs)]
    assert [[name for name in ("encoder", "dim", "rate", "balanced", "limit") if name in found] for found in titles] == [["encoder", "dim", "rate", "balanced"], ["encoder"]]


def test_the_mean_over_seeds():
    first = [make(seed=seed, metrics={"test": {"accuracy": value}}) for seed, value in enumerate((0.5, 0.625, 0.75))]
    again = make(seed=2, recorded="2026-02-01T12:00:00Z", metrics={"test": {"accuracy": 0.875}})
    wide = make(seed=1, parameters={"dim": 16}, finished=False, metrics={"other": {"accuracy": 1}})
    lines = results_table([*first[::-1], wide, again], mean=True).splitlines()
    assert len(lines) == 4 and "other: accuracy" in lines[1] and " 0 1 2 " in lines[2] + lines[3]
    told = [line.split()[-2:] for line in lines[2:] if "0.6667 ± 0.19" in line]      # of 0.5, 0.625 and 0.875
    assert told == [["True", "True"]]
    assert [line.split()[-2:] for line in lines[2:] if "±" not in line] == [["False", "True"]]


def test_the_table_of_records():
    current = code_hashes(["rvnnbook.core"])
    fresh, stale = make(modules=current), make(seed=1, finished=False)
    lines = results_table([fresh, stale, make(experiment="another", metrics={"test": {"nll": 0.5}})]).splitlines()
    assert lines[0] == "another" and "test: nll" in lines[1] and lines[3] == "" and lines[4] == "toy"
    assert lines[5].split() == ("profile encoder seed official <= 100: accuracy official <= 100: nll "
                                "generated 200 to 300: accuracy finished stale").split()
    assert lines[6].split() == ["cpu", "crvnn", "0", "0.75", "0.5", "0.5", "True", "False"]
    assert lines[7].split()[-2:] == ["False", "True"]
    assert results_table([]) == results_table([], mean=True) == "no records"
    assert sittings([fresh, make(legs=[], device="a GPU")]) == ("abababa, unknown, cdcdcdc+", "a processor, a GPU")


def test_a_wide_table_is_divided_for_a_terminal():
    runs = [make(seed=seed, metrics={f"test {number}": {"accuracy": (seed + number) / 64} for number in range(8)}) for seed in range(3)]
    whole = [line.split() for line in results_table(runs).splitlines()[2:]]
    lines = results_table(runs, width=70).splitlines()
    assert lines[0] == "toy" and max(map(len, lines)) <= 70 and "\\" in lines[1]
    told = {f"[{line}]": sum((each.split()[1:] for each in lines if each.startswith(f"[{line}]")), []) for line in (1, 2, 3)}
    assert list(told.values()) == whole, "a numbered line in each part, with all cells"
    assert results_table(runs, width=1000).splitlines()[2].split() == ["[1]", *whole[0]]


def test_the_table_of_records_in_a_terminal():
    screen, terminal = os.openpty()
    shown = subprocess.Popen([sys.executable, "-m", "rvnnbook", "results", "listops"], stdout=terminal, env={**os.environ, "COLUMNS": "90"})
    os.close(terminal)
    with open(screen, "rb", buffering=0) as output:
        printed = b""
        with suppress(OSError):        # the end of a terminal
            while part := output.read(4096):
                printed += part
    assert shown.wait() == 0
    lines = printed.decode().splitlines()
    assert max(map(len, lines)) <= 90 and sum(line.startswith("[1]") for line in lines) > 1
    assert sum(line.startswith(f"[{len(latest(read_records('listops')))}]") for line in lines) > 1, "a line for each run"


# ---- two branches

def git(folder, *words):
    done = subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words],
                          cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_branches_that_add_records_merge_into_a_valid_file(tmp_path):
    folder = tmp_path / "nbs" / "results"
    git(tmp_path, "init", "-b", "main")
    for name in (".gitattributes", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    def add(branch, seeds, trace=None):
        for seed in seeds:
            append(make(seed=seed, trace=trace and digest(trace, 12)), trace, folder)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", branch)
    add("main", [0])
    git(tmp_path, "switch", "-c", "left")
    add("left", [1, 2], TRACE)
    git(tmp_path, "switch", "-c", "right", "main")
    add("right", [3])
    git(tmp_path, "cherry-pick", "left")                         # the same records by another way
    add("right", [4])
    git(tmp_path, "switch", "left")
    add("left", [5])
    git(tmp_path, "merge", "right", "-m", "merge")
    assert sorted(record["seed"] for record in read_records("toy", folder)) == list(range(6)) and check_results(folder) == []


# ---- several machines

def lines_of(folder):
    return sorted(line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines())


def machine(folder, several):
    "A folder as another machine sends it: records with and without traces."
    folder.mkdir(parents=True, exist_ok=True)
    for record in several:
        append(record, TRACE if record["trace"] else None, folder)
    return folder


POOL = [make(seed=seed, experiment=experiment, trace=digest(TRACE, 12) if seed % 2 else None)
        for experiment in ("toy", "boy") for seed in range(4)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from(range(len(POOL))), unique=True, min_size=1), min_size=1, max_size=4), st.data())
def test_a_merge_is_the_union_whatever_the_order(tmp_path_factory, shares, data):
    "Any shares of the records, merged in any order and as often as one likes: each record once, with its trace."
    top = tmp_path_factory.mktemp("machines")
    sent = [machine(top / str(number), [POOL[i] for i in share]) for number, share in enumerate(shares)]
    order = data.draw(st.lists(st.sampled_from(sent), max_size=4)) + data.draw(st.permutations(sent))
    home, added = top / "home", []
    while order:
        count = data.draw(st.integers(1, len(order)))
        added += merge_records(order[:count], home)[0]
        order = order[count:]
    expected = {i for share in shares for i in share}
    assert lines_of(home) == sorted({line for folder in sent for line in lines_of(folder)})
    assert sorted(record["id"] for record in added) == sorted(POOL[i]["id"] for i in expected)
    assert check_results(home) == []
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert merge_records(sent, home) == ([], [])
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_what_cannot_be_believed_is_not_merged(tmp_path):
    traced, plain = make(seed=1, trace=digest(TRACE, 12)), make(seed=2)
    away = machine(tmp_path / "away", [traced, plain, make(seed=3, trace=digest(TRACE, 12)), make(seed=4, profile="smoke")])
    trace_path(traced, away).write_text(json.dumps({**TRACE, "trees": []}))
    trace_path(make(seed=3, trace=digest(TRACE, 12)), away).unlink()
    with open(away / "toy.jsonl", "a") as file:
        file.write(json.dumps(make(seed=5)).replace('"accuracy": 0.75', '"accuracy": 0.85') + "\n")
        file.write(json.dumps(make(seed=6))[:-40])
    added, refused = merge_records([away], tmp_path / "home")
    assert added == [plain] == read_records("toy", tmp_path / "home") and check_results(tmp_path / "home") == []
    said = "\n".join(refused)
    assert len(refused) == 5 and all(text in said for text in (
        "its hash differs from the recorded one", "is missing", "a smoke run is no result", "changed after it was written", "cut off"))
    with pytest.raises(RecordError, match="there are no records in"):
        merge_records([machine(tmp_path / "more", [make(seed=9)]), tmp_path / "nothing"], tmp_path / "home")
    assert read_records("toy", tmp_path / "home") == [plain], "nothing is added if one folder is refused"


def test_a_merge_mends_a_lost_trace_and_keeps_other_numbers(tmp_path):
    traced = make(seed=1, trace=digest(TRACE, 12))
    home = machine(tmp_path / "home", [traced])
    machine(tmp_path / "away" / "nbs" / "results", [traced, make(seed=2)])
    trace_path(traced, home).write_text("{}")
    assert merge_records([tmp_path / "away"], home) == ([make(seed=2)], [])               # a clone
    assert read_trace(traced, home) == TRACE
    other = make(seed=2, metrics={"test": {"accuracy": 0.5}})
    assert merge_records([machine(tmp_path / "third", [other])], home) == ([other], []) and len(read_records("toy", home)) == 3


def test_concurrent_merges_add_each_record_once(tmp_path):
    sent = [machine(tmp_path / f"away-{number}", [make(seed=seed, rule="x" * 5000, trace=digest(TRACE, 12)) for seed in range(number * 10, number * 10 + 20)])
            for number in range(4)]
    code = ("import sys; from pathlib import Path; from rvnnbook.lab.records import append, merge_records; from tests.records import make\n"
            "home, number, *sent = sys.argv[1:]\n"
            "added, _ = merge_records(map(Path, sent), Path(home)); append(make(seed=1000 + int(number)), folder=Path(home)); print(len(added))")
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "home", str(number), *sent[number:], *sent[:number]], cwd=ROOT,
                                stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) for number in range(4)]
    added = [int(writer.communicate()[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4 and sum(added) == 50
    lines = lines_of(tmp_path / "home")
    assert len(lines) == len(set(lines)) == 54 and check_results(tmp_path / "home") == []


# ---- many records

def clone(folder):
    "A folder that is taken for a clone of the book, and its results."
    (folder / "_toc.yml").write_text("")
    (folder / "nbs" / "results").mkdir(parents=True)
    return folder / "nbs" / "results"


def test_a_line_is_validated_once_and_a_module_hashed_once(tmp_path, monkeypatch):
    "The work done for a listing of many records, counted and not timed."
    folder = clone(tmp_path)
    modules = [code_hashes(["rvnnbook.core"]), code_hashes(["rvnnbook.core", "rvnnbook.layers.cells", "rvnnbook.registry", "rvnnbook.encoders.rvnn"])]
    records = [make(seed=seed, modules=modules[seed % 2]) for seed in range(500)]
    (folder / "toy.jsonl").write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    calls, validated = {"validate": 0}, runs.validate
    def counted(record):
        calls["validate"] += 1
        return validated(record)
    monkeypatch.setattr(runs, "validate", counted)
    origin._file_hash.cache_clear()
    table = results_table(read_records("toy", folder))
    assert calls == {"validate": 500} and origin._file_hash.cache_info().misses == 4 and len(table.splitlines()) == 502
    append(make(seed=500, modules=modules[0]), folder=folder)
    calls.update(validate=0)
    assert read_records("toy", folder) == [*records, make(seed=500, modules=modules[0])] and calls["validate"] == 1
    calls.update(validate=0)
    assert read_records("toy", folder)[:500] == records and check_results(folder) == [] and calls["validate"] == 0


@pytest.mark.parametrize("place", [0, 100, 299])
def test_a_line_changed_after_it_was_read_is_refused(tmp_path, place):
    folder = clone(tmp_path)
    path = folder / "toy.jsonl"
    path.write_bytes(b"".join(json.dumps(make(seed=seed)).encode() + b"\n" for seed in range(300)))
    assert len(read_records("toy", folder)) == 300 == len(read_records("toy", folder))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:place], lines[place].replace('"accuracy": 0.75', '"accuracy": 0.85'), *lines[place + 1:]]))
    for _ in range(2):
        with pytest.raises(RecordError, match=f"toy.jsonl:{place + 1}: id is"):
            read_records("toy", folder)
    path.write_text("".join(lines))
    assert len(read_records("toy", folder)) == 300
    path.write_text("".join(lines[:10]))                         # shorter than what was read
    assert len(read_records("toy", folder)) == 10


# ---- queries and exports

@given(st.lists(st.tuples(st.sampled_from([None, 8, 16.5, 64]), st.sampled_from([None, "wide", "narrow"]), st.integers(0, 3)), max_size=6),
       st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.sampled_from([8, 16.5, 64]), st.sampled_from(["wide", "narrow", "x"]))
@settings(deadline=None)
def test_queries_agree_with_python(values, sign, number, word):
    several = [make(seed=seed, parameters={"dim": dim, "cell": cell}) for dim, cell, seed in values] + [make(seed=4, parameters={"dim": 0, "cell": "x", "rate": 1})]
    compare = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[sign]
    def expected(name, value):
        missing = sign == "!=" and isinstance(value, str)          # as in pandas
        return [missing if record["parameters"].get(name) is None else compare(record["parameters"][name], value) for record in several]
    wide = [record for record, held in zip(several, expected("dim", number)) if held]
    assert query_records(several, f"dim {sign} {number}") == wide
    assert query_records(several, f"dim {sign} {number} and seed < 2") == [record for record in wide if record["seed"] < 2]
    assert query_records(several, f"cell {sign} {word!r}") == [record for record, held in zip(several, expected("cell", word)) if held]
    assert query_records(several, "rate == 1") == several[-1:], "a record without the parameter is not selected"
    assert query_records([], "dim == 8") == []


@pytest.mark.parametrize("condition, said", [
    ("dimm == 8", "unknown name 'dimm'. Did you mean 'dim'?"), ("`officia <= 100: accuracy` > 0", "Did you mean 'official <= 100: accuracy'"),
    ("encoder == xyz", "unknown name 'xyz'. Known: id, experiment"), ("zzz == 8", "encoder, dim, rate, balanced, limit, "),
    ("dim", "it is not true or false"), ("dim = 8", "it is not true or false"), ("1 == 1", "is no query"), ("dim == 8\nseed == 0", "is no query: "),
    ("dim > 'wide'", "is no query: "), ("encoder > 5", "is no query: "), ("dim ==", "is no query: invalid syntax"), ("", "is no query: expr cannot be an empty"),
    ("dim[", "is no query: "), ("'a", "is no query: "), ("dim == @dim", "unknown name 'dim'"), ("dim.nothing()", "is no query: "), ("lambda: 8", "is no query: "),
    ("`dim", "is no query: ")])
def test_an_invalid_query_is_rejected_in_one_line(condition, said):
    with pytest.raises(RecordError, match=re.escape(said)) as error:
        query_records([make()], condition)
    assert "\n" not in str(error.value)


def test_the_columns_of_the_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    parameters = {"dim": 16, "device": "cuda", "threads": 5, "steps": 9, "wide number": 2**70}
    several = [make(), make(seed=1, legs=[], parameters=parameters, metrics={"other": {"nll": 2.5, "count": 3}}), make(experiment="boy", finished=False)]
    for record in several:
        append(record, folder=tmp_path)
    frame = load("toy", folder=tmp_path)
    assert frame["id"].tolist() == [record["id"] for record in several[:2]] and len(load(folder=tmp_path)) == 3
    assert frame["steps_done"].tolist() == [250, 0] and frame["stale"].tolist() == [True, True] and frame["wall_s"].tolist() == [121.0, 121.0]
    assert frame["device"].tolist() == ["a processor"] * 2 and frame["threads"].tolist() == [2, 2]
    assert frame["parameters.device"][1] == "cuda" and frame["parameters.threads"][1] == 5 and frame["steps"][1] == 9
    assert frame["wide number"].isna().tolist() == [True, False] and frame["wide number"][1] == 2**70 and frame["other: count"].dtype == "Int64" and frame["other: count"].isna().tolist() == [True, False]
    assert {name: str(frame[name].dtype) for name in ("seed", "dim", "rate", "balanced", "encoder", "finished", "official <= 100: accuracy")} == {
        "seed": "Int64", "dim": "Int64", "rate": "Float64", "balanced": "boolean", "encoder": "string", "finished": "boolean", "official <= 100: accuracy": "Float64"}
    for query in ("dim > 8", "seed == 0 and `official <= 100: accuracy` > 0.5", "`parameters.device` == 'cuda'", "encoder in ['crvnn']", "8 <= dim < 16"):
        pandas.testing.assert_frame_equal(load("toy", query, tmp_path), frame.query(query))
        assert len(load("toy", query, tmp_path)) == 1
    assert len(load("boy", "not finished", tmp_path)) == 1 and len(load("girl", folder=tmp_path)) == 0
    assert frame["id"].is_unique and load("girl", folder=tmp_path).columns.tolist() == frame.columns.tolist()[:len(load("girl", folder=tmp_path).columns)]


def test_the_remedy_is_named_where_pandas_is_missing(tmp_path):
    (tmp_path / "_toc.yml").write_text("")
    append(make(), folder=tmp_path / "nbs" / "results")
    code = ("import sys; import rvnnbook.lab.records; assert 'pandas' not in sys.modules; sys.modules[sys.argv[1]] = None\n"
            "from rvnnbook.cli import main; sys.exit(main(['results', *sys.argv[2:]]))")
    checked = python(code, "pandas", "--check", cwd=tmp_path)
    assert checked.stdout == "valid records: 1\n", checked.stderr
    for module, words in (("pandas", ("toy", "--mean")), ("pandas", ("--where", "seed == 0")), ("pandas", ("--csv", tmp_path / "x.csv")), ("pyarrow", ("--parquet", tmp_path / "x.parquet"))):
        done = python(code, module, *words, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr == (f"rvnnbook: this needs {module}, which is not installed. "
                                                        "Remedy: pip install 'rvnnbook[export]'\n")
    assert not (tmp_path / "x.csv").exists() and not (tmp_path / "x.parquet").exists()


MIXED = [make(), make(seed=1, parameters={"encoder": "a,b\n\"c\"", "dim": "wide"}, metrics={"other": {"nll": 2, "count": 3}}),
         make(seed=2, experiment="boy", parameters={"encoder": None, "dim": 0.5}, metrics={"other": {"nll": 1.5}})]


def test_csv_says_what_the_records_say(tmp_path):
    as_frame(MIXED).to_csv(tmp_path / "runs.csv", index=False)
    with open(tmp_path / "runs.csv", newline="", encoding="utf8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row, record in zip(rows, MIXED):
        assert row["id"] == record["id"] and row["experiment"] == record["experiment"] and row["stale"] == "True"
        for name in ("encoder", "dim", "rate"):
            value = record["parameters"].get(name)
            assert row[name] == ("" if value is None else str(value))
        for split, name in (("official <= 100", "accuracy"), ("other", "nll"), ("other", "count")):
            value = record["metrics"].get(split, {}).get(name)
            assert row[f"{split}: {name}"] == "" if value is None else float(row[f"{split}: {name}"]) == value
    as_frame([]).to_csv(tmp_path / "none.csv", index=False)
    assert (tmp_path / "none.csv").read_text().startswith("id,experiment,profile")


def test_parquet_says_what_the_records_say(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed. Remedy: pip install 'rvnnbook[export]'")
    write_parquet(as_frame(MIXED), tmp_path / "runs.parquet")
    found = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    for row, record in zip(found, MIXED, strict=True):
        assert {name: row[name] for name in Record.model_fields if name in row} == {name: record.get(name) for name in Record.model_fields if name in row} and row["stale"] is True
        for name in ("encoder", "rate", "balanced"):
            assert row[name] == record["parameters"].get(name) and type(row[name]) is type(record["parameters"].get(name))
        assert row["dim"] == str(record["parameters"]["dim"])    # words and numbers in one column are words
        for split, name in (("official <= 100", "accuracy"), ("other", "nll"), ("other", "count")):
            assert row[f"{split}: {name}"] == record["metrics"].get(split, {}).get(name)
    assert type(found[1]["other: nll"]) is float and type(found[0]["seed"]) is int
    assert list(found[0]) == list(as_frame(MIXED))
    write_parquet(as_frame([]), tmp_path / "none.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


# ---- the command, and what is committed

def command(*words, cwd):
    return subprocess.run([Path(sys.executable).with_name("rvnnbook"), "results", *words], cwd=cwd, capture_output=True, text=True)


def test_the_command(tmp_path):
    (tmp_path / "_toc.yml").write_text("")
    folder = tmp_path / "nbs" / "results"
    folder.mkdir(parents=True)
    assert command(cwd=tmp_path).stdout == "no records\n" and command("--check", cwd=tmp_path).stdout == "valid records: 0\n"
    append(make(), folder=folder)
    append(make(experiment="another", seed=7), folder=folder)
    shown = command(cwd=tmp_path)
    assert shown.returncode == 0 and [line.split()[:2] for line in shown.stdout.splitlines()] == [["experiment", "records"], ["another", "1"], ["toy", "1"]]
    shown = command("--where", "seed >= 0", cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout.startswith("another\n") and "\ntoy\n" in shown.stdout and not shown.stderr
    missing = command("--where", "experiment == toy", cwd=tmp_path)
    assert missing.returncode == 2 and missing.stderr.startswith("rvnnbook: experiment == toy: words are quoted, as in 'text'; unknown name 'toy'")
    one = command("toy", cwd=folder)
    assert one.stdout.startswith("toy\n") and "another" not in one.stdout and one.stdout.endswith(" True\n")
    missing = command("boy", cwd=tmp_path)
    assert missing.returncode == 2 and missing.stderr == "rvnnbook: no records of 'boy'; there are: another, toy\n"
    assert command("--check", cwd=tmp_path).stdout == "valid records: 2\n"
    for name in ("toy", "another"):
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write("{\n")
    done = command("--check", cwd=tmp_path)
    assert done.returncode == 1 and not done.stdout and re.fullmatch(r"rvnnbook: another\.jsonl:2: .*\ntoy\.jsonl:2: .*\n", done.stderr)
    done = command("toy", "--check", cwd=tmp_path)
    assert done.returncode == 1 and "another" not in done.stderr
    done = command("toy", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("rvnnbook: toy.jsonl:2: not a whole JSON line")
    machine(tmp_path / "away", [make(), make(seed=5)])
    (folder / "another.jsonl").unlink()
    (folder / "toy.jsonl").unlink()
    assert command("merge", tmp_path / "away", cwd=tmp_path).stdout == "records added: 2\n"
    assert command("merge", tmp_path / "away", cwd=tmp_path).stdout == "records added: 0\n"
    shown = command("toy", "--where", "seed >= 5", "--where", "profile == 'cpu'", cwd=tmp_path)
    assert len(shown.stdout.splitlines()) == 3 and not shown.stderr
    assert command("--csv", tmp_path / "x.csv", cwd=tmp_path).stdout == f"2 records in {tmp_path / 'x.csv'}\n"
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 3
    assert command("--mean", "--csv", tmp_path / "x.csv", cwd=tmp_path).stdout == f"means of 2 records in {tmp_path / 'x.csv'}\n"
    row, = csv.DictReader(open(tmp_path / "x.csv", newline="", encoding="utf8"))
    assert row["seed"] == "0 5" and row["official <= 100: accuracy"] == "0.75" and row["official <= 100: accuracy ±"] == "0.0"
    assert command("--mean", "--where", "seed > 9", "--csv", tmp_path / "x.csv", cwd=tmp_path).stdout.startswith("means of 0 records")
    with open(tmp_path / "away" / "toy.jsonl", "a") as file:
        file.write("{\n")
    done = command("merge", tmp_path / "away", cwd=tmp_path)
    assert done.returncode == 1 and "records added: 0\nrejected:\naway/toy.jsonl:3: not a whole JSON line" in done.stderr
    for words in (["merge"], ["toy", "another"], ["--where", "dimm == 3"], ["--where", "dim = 3"], ["--where", "dim >"]):
        done = command(*words, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    outside = command(cwd="/")
    assert outside.returncode == 2 and "no clone of the book here" in outside.stderr


def test_identities_of_committed_records_are_those_of_their_text():
    "Ids, identities and trace hashes, computed from the lines without the module that wrote them."
    def hashed(content, size):
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=size).hexdigest()
    folder, count = ROOT / "nbs" / "results", 0
    for path in sorted(folder.glob("*.jsonl")):
        read = {record["id"]: record for record in read_records(path.stem)}
        for raw in map(json.loads, path.read_text().splitlines()):
            assert raw["id"] == hashed({name: value for name, value in raw.items() if name != "id"}, 8)
            asked = {name: value for name, value in current_parameters(raw).items() if name not in ("profile", "seed")}
            found = read[raw["id"]]
            assert identity(found["experiment"], found["parameters"], found["seed"]) == hashed([raw["experiment"], asked, raw["seed"]], 8)
            if raw["trace"]:
                assert hashed(json.loads((folder / "traces" / f"{raw['id']}.json").read_text()), 6) == raw["trace"]
            count += 1
    assert count >= 278


def test_weights_have_the_checksums_that_stand_beside_them():
    folder = ROOT / "rvnnbook" / "weights"
    sums = {name: checksum for checksum, name in map(str.split, (folder / "SHA256SUMS").read_text().splitlines())}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")} == sums


def test_committed_records_are_valid_and_have_their_traces():
    folder = ROOT / "nbs" / "results"
    if not any(folder.glob("*.jsonl")):
        pytest.skip("no records have been committed yet (nbs/results/*.jsonl)")
    assert check_results(folder) == []


def test_sentiment_runs_of_before_have_the_dropout_of_today(tmp_path):
    old = make(experiment="sentiment", parameters={"task": "sst5", "dim": 32, "dropout": .2})
    new = make(experiment="sentiment", parameters={"task": "sst5", "dropout_in": .4, "dropout": .2, "dropout_out": .4, "vectors": "glove"}, seed=1)
    other = make(experiment="logic", parameters={"dropout": .2})
    for record in (old, new, other):
        append(record, folder=tmp_path)
    translated, same = read_records("sentiment", tmp_path)
    assert translated["parameters"] == {"task": "sst5", "dim": 32, "dropout_in": .2, "dropout": 0.0, "dropout_out": .2, "vectors": "learned"}
    assert translated["id"] == old["id"] and same == new and read_records("logic", tmp_path) == [other]
