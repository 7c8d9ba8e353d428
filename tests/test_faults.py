"""Faults: damages of every kind are refused or harmless, and a sweep comes right from what befalls it."""
import random

import pytest

from rvnnbook.lab.records import make_trace, new_record
from tests.faults import (CIRCUMSTANCES, checkpoint_to_injure, circumstance, compare, damage, data_to_injure, full_disk, injure,
                          make_clone, records_to_injure, scores, start_sweep, under_fire)


def toy_records():
    traces = [make_trace([{"step": step, "loss": 2.3 / (step + number)} for step in range(1, 20)]) for number in range(3)]
    records = [new_record("toy", {"dim": 4}, profile="cpu", seed=seed, modules={}, rule="last", wall_s=1.0, trace=trace,
                          metrics={"test": {"accuracy": 0.5, "count": 2}}) for seed, trace in enumerate(traces)]
    return records, traces


@pytest.mark.parametrize("make", [checkpoint_to_injure, data_to_injure, lambda place: records_to_injure(place, *toy_records())],
                         ids=["checkpoint", "data", "records"])
@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files_are_refused_or_harmless(tmp_path, make, seed):
    tally, wrong = injure(tmp_path, *make(tmp_path), 100, random.Random(seed))
    assert wrong == [] and tally["refused"] >= 90 and tally.total() == 100


def test_a_damage_always_changes_the_file(tmp_path):
    for seed in range(200):
        (tmp_path / "file").write_bytes(b"x" * 5)
        said = damage(tmp_path / "file", random.Random(seed))
        assert (tmp_path / "file").read_bytes() != b"x" * 5 and ("cut" in said or "flipped" in said)


def test_injuries_are_undone(tmp_path):
    look, refusals = checkpoint_to_injure(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    injure(tmp_path, look, refusals, 20, random.Random(0))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_full_disk_is_told_and_nothing_is_recorded(tmp_path):
    clone = make_clone(tmp_path / "clone", 1, steps=10)
    assert full_disk(clone) and scores(clone) == {}


def calm(folder, seeds, steps):
    clone = make_clone(folder, seeds, steps=steps)
    out, said = start_sweep(clone).communicate()
    assert out.endswith("all runs are finished\n"), out + said
    return scores(clone)


@pytest.mark.long
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_bad_circumstances_are_told_and_come_right(tmp_path, name):
    expected = calm(tmp_path / "calm", 2, 20)
    assert circumstance(make_clone(tmp_path / "clone", 2, steps=20), name, expected) == {"count": 1, "told": 1, "came_right": 1}


@pytest.mark.long
def test_a_sweep_under_fire_comes_to_the_same_end(tmp_path):
    expected = calm(tmp_path / "calm", 3, 40)
    clone = make_clone(tmp_path / "shot", 3, steps=40)
    blows = under_fire(clone, sorted(random.Random(0).uniform(0, 110) for _ in range(26)), random.Random(1))
    assert len(blows) >= 20 and {blow["alone"] for blow in blows} == {0, 1}
    assert compare(expected, scores(clone)) == {"records": 3, "lost": 0, "doubled": 0, "unequal": 0}
