"When a number counts as reproduced, and which runs answer which row."
import itertools
import math
import re
import statistics
import xml.etree.ElementTree as ET
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rvnnbook.lab.runs import code_hashes
from rvnnbook.lab.tables import paper_table
from rvnnbook.lab.verdicts import (VERDICTS, Way, answer_row, headline, last_digit, verdict_lines, verdict_notes, overview, tolerance, judge_number, versus,
                                   waiting, way_of)
from tests.records import make

CODE = code_hashes(["rvnnbook.core"])
spreads = st.one_of(st.none(), st.floats(0, 20))
counts = st.integers(1, 30)


def run(accuracy, split="official", encoder="crvnn", experiment="listops", seed=0, count=1000, **changes):
    given = {"modules": CODE, "parameters": {"encoder": encoder}, **changes}
    return make(experiment=experiment, seed=seed, metrics={split: {"accuracy": accuracy, "count": count}}, **given)


# ---- the rule

@given(spreads, counts, spreads, counts, st.floats(0, 5), st.sampled_from([0, .01, .1, 1]))
def test_a_tolerance_grows_with_what_is_uncertain(spread, runs, ours, seeds, chance, digit):
    allowed = tolerance(spread, runs, ours, seeds, chance, digit)
    assert allowed >= max(2 * chance, digit / 2) - 1e-12
    assert math.isclose(allowed, tolerance(ours, seeds, spread, runs, chance, digit), abs_tol=1e-12), "both sides count alike"
    assert tolerance(spread, runs + 1, ours, seeds + 1, chance, digit) <= allowed + 1e-12
    assert tolerance(spread, runs, ours, seeds, chance + 1, digit + 1) > allowed
    if spread is not None and ours is not None:
        assert tolerance(spread + 1, runs, ours + 1, seeds, chance, digit) > allowed
    else:
        known = spread if ours is None else ours
        assert math.isclose(allowed, tolerance(known, runs, known, seeds, chance, digit)), "who has a deviation lends it"
    assert tolerance(spread, None, ours, seeds, chance, digit) == tolerance(spread, 1, ours, seeds, chance, digit)


def test_the_rule_is_wrong_one_time_in_twenty():
    "Against numpy's draws: two sides that scatter differently, many seeds each, and the rounding of neither."
    random = np.random.default_rng(0)
    one, other = random.normal(90, 2, (4000, 12)), random.normal(90, .5, (4000, 25))
    apart = abs(one.mean(1) - other.mean(1))
    allowed = [tolerance(a, 12, b, 25) for a, b in zip(one.std(1, ddof=1), other.std(1, ddof=1))]
    assert .04 < (apart > allowed).mean() < .09


@given(st.integers(0, 10**5), st.integers(0, 3))
def test_the_last_digit_is_that_of_the_decimal(number, places):
    value = float(Decimal(number).scaleb(-places))
    text = f"{number / 10 ** places:.{places}f}".rstrip("0").rstrip(".")
    expected = Decimal(1).scaleb(-len(text.partition(".")[2]))
    assert math.isclose(last_digit(value), expected)
    assert last_digit(int(number)) == 1


def test_every_case_of_a_verdict():
    "Written down once more, case by case."
    expected = {(False, False, False): "smaller scale", (False, False, True): "smaller scale", (False, True, False): "differs",
                (False, True, True): "differs", (True, False, False): "smaller scale", (True, False, True): "reproduced",
                (True, True, False): "reproduced", (True, True, True): "reproduced"}
    for close, full, own in itertools.product([False, True], repeat=3):
        for sign in (1, -1):
            assert judge_number(sign * (.9 if close else 1.1), 1.0, full, own) == expected[close, full, own]
        assert judge_number(None, 1.0, full, own) == "not run"
    assert judge_number(1.0, 1.0, True, True) == "reproduced" and set(expected.values()) | {"not run"} == set(VERDICTS)


# ---- one number

def judged(records, table="crvnn.table4", row="CRvNN", column="test"):
    return answer_row(paper_table(table), row, column, "accuracy_percent", records)


@pytest.mark.parametrize("accuracy, changes, said", [        # the paper: 99.6, mean of five, deviation 0.3
    (.993, {"profile": "paper"}, "reproduced"), (.97, {"profile": "paper"}, "differs"), (1.0, {"profile": "paper"}, "reproduced"),
    (.993, {}, "reproduced"), (.97, {}, "smaller scale"), (.993, {"split": "generated"}, "smaller scale"),
    (.993, {"split": "generated", "profile": "paper"}, "reproduced"), (.97, {"split": "generated", "profile": "paper"}, "differs"),
    (.97, {"profile": "paper", "finished": False}, "smaller scale"), (.993, {"profile": "paper", "finished": False}, "reproduced"),
    (.993, {"encoder": "lstm"}, "not run"), (.993, {"experiment": "logic"}, "not run"), (.993, {"split": "official, longer"}, "not run")], ids=str)
def test_a_run_and_its_verdict(accuracy, changes, said):
    assert judged([run(accuracy, **changes)]).verdict == said


@pytest.mark.parametrize("accuracy", [.875, .5])
@pytest.mark.parametrize("profile", ["cpu", "paper"])
def test_a_stand_in_neither_reproduces_nor_differs(accuracy, profile):
    own = {"encoder": "bilstm", "decoder": "lstm", "task": "geo", "base": "linear"}
    found = judged([run(accuracy, experiment="parsing", split="published, geo, test", profile=profile, **own)],
                   "self_iru.table5", "TranX (their run)", "geo")
    assert math.isclose(found.pair.ours, 100 * accuracy) and found.verdict == "smaller scale"


@given(st.lists(st.integers(900, 1000), min_size=1, max_size=4), st.integers(10, 10**4))
def test_an_answer_is_computed_from_the_runs(shares, count):
    records = [run(share / 1000, seed=seed, count=count) for seed, share in enumerate(shares)]
    found = judged(records)
    ours = [share / 10 for share in shares]
    assert math.isclose(found.pair.ours, statistics.fmean(ours)) and found.pair.seeds == len(shares)
    spread = statistics.stdev(ours) if len(ours) > 1 else .3
    share = statistics.fmean(ours) / 100
    by_test = 1e4 * share * (1 - share) / count
    expected = 2 * math.sqrt(.3 ** 2 / 5 + spread ** 2 / len(ours) + max(0, by_test)) + .05
    assert math.isclose(found.allowed, expected, rel_tol=1e-6)
    assume(abs(abs(found.pair.difference) - expected) > 1e-6)
    assert found.verdict == ("reproduced" if abs(statistics.fmean(ours) - 99.6) < expected else "smaller scale")


def test_seeds_that_were_asked_different_tests_are_not_mixed():
    one, two, three = (run(share, split=split, seed=seed) for seed, (share, split) in enumerate(
        [(.5, "generated"), (.99, "official"), (.98, "official")]))
    for records in ([one, two, three], [three, two, one]):
        found = judged(records)
        assert math.isclose(found.pair.ours, 98.5) and found.pair.seeds == 2 and {r["seed"] for r in found.runs} == {1, 2}
    assert math.isclose(judged([one]).pair.ours, 50)


def test_the_median_is_taken_where_the_paper_takes_it():
    records = [run(share, split="generated, 900 to 1000 tokens", encoder="ebt_grc", seed=seed) for seed, share in enumerate((.3, .99, .98))]
    assert math.isclose(judged(records, "rir.table2_and_5", "EBT-GRC", "len_900_1000").pair.ours, 98)
    assert judged(records, "rir.table2_and_5", "EBT-GRC", "arg_10").verdict == "not run"


def test_time_and_memory_come_in_the_papers_units():
    measured = {"200 to 250 tokens, crvnn": {"seconds": 1.5, "count": 9, "memory_mb": 1570.0}, "200 to 250 tokens, crvnn, literal": {"seconds": 9.0}}
    records = [make(experiment="bench_efficiency", parameters={"samples": 100, "encoders": "crvnn; lstm"}, metrics=measured, modules=CODE)]
    table = paper_table("rir.table1")
    minutes, gigabytes = (answer_row(table, "CRvNN", "len_200_250", metric, records) for metric in table.metric)
    assert math.isclose(minutes.pair.ours, 2.5) and (minutes.pair.paper, minutes.metric) == (1.5, "minutes")
    assert math.isclose(gigabytes.pair.ours, 1.57) and gigabytes.pair.paper == 1.57 and gigabytes.verdict == "smaller scale"
    beyond = answer_row(table, "CRvNN", "len_1500_2000", "minutes", records)
    assert beyond.verdict is None and beyond.pair.paper == "out_of_memory"
    assert answer_row(paper_table("crvnn.table6"), "CRvNN", "len_81_100", "minutes", records).verdict == "not run"


# ---- a table

def test_a_row_is_as_careful_as_its_worst_number():
    def row(**shares):
        splits = {f"len_{a}_{b}": f"generated, {a} to {b} tokens" for a, b in ((200, 300), (500, 600), (900, 1000))}
        metrics = {splits[column]: {"accuracy": share, "count": 2000} for column, share in shares.items()}
        records = [make(experiment="listops", profile="paper", parameters={"encoder": "crvnn"}, metrics=metrics, modules=CODE)]
        return versus("crvnn.table3", records).verdict("CRvNN")
    assert row(len_200_300=.985, len_500_600=.98) == "reproduced"
    assert row(len_200_300=.985, len_500_600=.80) == "differs"
    assert versus("crvnn.table3", []).verdict("CRvNN") == "not run"


def test_reviews_that_were_cut_are_no_test_of_the_papers():
    paper = paper_table("rir.table6").value("EBT-GRC", "imdb_contrast")[0] / 100
    def told(longest, split="IMDB contrast test"):
        found = run(paper, split, experiment="sentiment", parameters={"model": "EBT-GRC", "phrases": 0, "task": "imdb", "longest": longest})
        shown = versus("rir.table6", [found])
        return shown.verdict("EBT-GRC"), "on the paper's own test: imdb_contrast" in " ".join(verdict_notes(shown))
    assert told(0) == ("reproduced", True) and told(100) == ("smaller scale", False)
    assert told(0, "IMDB test, in part") == ("smaller scale", False)


STALE = run(.9394, modules={"rvnnbook.core": "0" * 12}, seed=3, finished=False)


def test_three_forms_say_the_same_and_mark_what_is_stale():
    shown = versus("crvnn.table4", [STALE, run(.5, encoder="lstm")])
    told = verdict_lines(shown)
    assert [line[0] for line in told if line[0]] == list(shown.table.rows)
    assert ["", "ours (cpu, 1 seed, stale)", "93.94"] in told and ["", "verdict: smaller scale", ""] in told
    assert ["OM", "paper (quoted); no run yet", "99.97 ± 0.01"] in told and ["Havrylov et al.", "paper (quoted)", "99.20 ± 0.50"] in told
    said = " ".join(verdict_notes(shown))
    assert "CRvNN, ours: listops; cpu profile; seed 3; a processor" in said and "stale, since core changed" in said and "unfinished" in said
    assert "No way yet for RL-SPINN, Havrylov et al.: this book does not have the model." in said
    page = ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    assert [["".join(cell.itertext()).replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in page.iter("tr")] == told
    assert page.find("details/summary").text == headline(shown)
    rows = [row for row in shown._repr_markdown_().splitlines() if row.startswith("|")]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[:1] + rows[2:]] == told
    for row, line in zip(str(shown).splitlines()[1:], told):
        assert re.split(r"\s{2,}", row.strip()) == [cell for cell in line if cell]
    assert headline(shown) == "Table 4. ListOps test accuracy: 2 smaller scale, 5 not run, 2 no way"


def test_what_is_run_waits_no_more():
    commands = waiting([versus("crvnn.table2", [])])["logic"]
    assert len(commands) == len(set(commands)) == 7 * 4              # four trainings of each encoder: none, A, B, C
    metrics = {f"published, {k} operators": {"accuracy": .9, "count": 100} for k in range(7, 13)}
    done = make(experiment="logic", parameters={"encoder": "crvnn", "split": "none"}, metrics=metrics, modules=CODE)
    left = waiting([versus("crvnn.table2", [done])])["logic"]
    assert set(commands) - set(left) == {Way("logic", {"encoder": "crvnn"}).command("ops_7")}
    counted = overview([versus("crvnn.table2", [done]), versus("crvnn.table4", []), versus("rir.table3", [])])
    assert {paper: sum(told.values()) for paper, told in counted.items()} == {"crvnn": 19, "rir": 8}
    assert counted["crvnn"]["smaller scale"] == 1 and counted["rir"]["not run"] == 8


def test_a_command_is_read_by_a_shell_as_it_is_meant():
    import shlex
    way = way_of("crvnn.table7", "minus modulated sigmoid")
    assert shlex.split(way.command("listops"))[-2:] == ["-p", "variant=no competition"]
