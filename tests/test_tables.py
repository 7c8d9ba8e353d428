"The papers' tables as data, and ours beside them."
import copy
import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvnnbook.lab.papers import PERCENT, TableError, chosen_runs, paper_table, paper_tables, provenance, summary
from rvnnbook.origin import code_hashes
from rvnnbook.show import tables
from rvnnbook.show.tables import LISTOPS_LENGTHS, RunList, as_text, comparison, folded_runs, listops_runs, run_lines, table_lines, table_notes
from tests.records import make

ROOT = Path(__file__).resolve().parents[1]
CODE = code_hashes(["rvnnbook.core"])


def run(accuracy, seed=0, split="official 200 to 300", **changes):
    return make(seed=seed, metrics={split: {"accuracy": accuracy, "count": 100}}, **{"modules": CODE, **changes})


def test_runs_without_all_tests_of_length_are_left_out(monkeypatch):
    "Such as a short trial, which has tests of its own; chapters draw the others."
    whole = make(experiment="listops", profile="cpu", parameters={"encoder": "crvnn", "dim": 64, "stages": "none"},
                 metrics={split: {"accuracy": .5, "count": 10} for split in LISTOPS_LENGTHS})
    trial = make(experiment="listops", profile="cpu", parameters={"encoder": "crvnn", "dim": 48, "stages": "none"},
                 metrics={"generated, up to 6 tokens": {"accuracy": .9, "count": 10}})
    monkeypatch.setattr(tables, "read_records", lambda name: [whole, trial])
    assert [found.width for found in listops_runs("crvnn")] == [64]


# ---- the papers

def is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def check_table(table):
    "A table with as many cells as columns in each row, and numbers that can be."
    for row, content in table.rows.items():
        assert len(content["cells"]) == len(table.columns), f"{table.name}: row {row!r}, {len(table.columns)} columns"
        for column, cell in zip(table.columns, content["cells"]):
            assert not isinstance(cell, list) or len(cell) == 2, f"{table.name}: {row}, {column}: {cell} is no pair"
            for metric in table.metrics:
                value, spread = table.value(row, column, metric)
                words = isinstance(value, str) and (value == "out_of_memory" or metric == "setting")
                assert value is None or words or is_number(value) and 0 <= value <= (100 if metric in PERCENT else math.inf), (
                    f"{table.name}: {row}, {column}: {value!r} as {metric}")
                assert spread is None or is_number(spread) and spread >= 0, f"{table.name}: {row}, {column}: spread {spread!r}"


@pytest.mark.parametrize("name", paper_tables())
def test_every_number_of_a_table_can_be(name):
    check_table(paper_table(name))


def test_the_tables_are_those_of_the_papers():
    source = ROOT.parent / "shared" / "papers" / "results.yml"
    if not source.exists():
        pytest.skip("the papers' result tables are not beside this checkout (shared/papers/results.yml)")
    import yaml
    expected = yaml.safe_load(source.read_text())
    assert paper_tables() == sorted(expected) and len(expected) == 23
    for name, told in expected.items():
        table = paper_table(name)
        assert table.columns == told["columns"] and list(table.rows) == list(told["rows"])
        assert table.metric == told.get("metric", "setting" if name == "self_iru.table7" else "accuracy_percent")
        assert told["title"] == table.title + ("; median of 3 runs" if table.statistic == "median" else "")
        for row, cells in told["rows"].items():
            quoted = isinstance(cells, dict)
            assert table.rows[row].get("quoted", False) == quoted
            assert table.rows[row]["cells"] == (cells["cells"] if quoted else cells)


def test_every_table_says_where_it_is_from():
    keys = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "references.bib").read_text(), re.M))
    for name in paper_tables():
        table = paper_table(name)
        assert table.paper["cite"] in keys and table.paper["title"] and re.search(r"\d{4}", table.paper["where"])
        assert (table.statistic is None) == (table.runs is None) and table.title
        assert set().union(*table.rows.values()) <= {"cells", "quoted", "note"}


def test_known_numbers():
    "A few, read in the papers."
    assert paper_table("crvnn.table4").value("CRvNN", "test") == (99.6, 0.3)
    assert paper_table("design_space.table2").value("NDR 48 layers", "arg_10") == (73.1, None)
    assert paper_table("rir.table2_and_5").value("MEGA", "len_900_1000") == (24.7, 3.6)
    assert paper_table("rir.table1").value("EBT-GRC", "len_1500_2000", "gigabytes") == (10.97, None)
    assert paper_table("rir.table1").value("CRvNN", "len_1500_2000", "minutes") == ("out_of_memory", None)
    assert paper_table("self_iru.table3").value("ON-LSTM", "tree_8", "perplexity") == (52.3, None)
    assert paper_table("self_iru.table7").value("music modelling", "base") == ("linear", None)
    assert paper_table("rir.table7").value("BT-GRC", "len_mm") == (None, None)


@pytest.mark.parametrize("cell", [-1, 100.5, float("nan"), "lots", True, [50, -0.1], [50, "x"], [None, 1, 2], {}], ids=str)
def test_a_damaged_cell_is_found(cell):
    table = paper_table("crvnn.table3")
    rows = copy.deepcopy(table.rows)
    rows["CRvNN"]["cells"][2] = cell
    with pytest.raises(AssertionError, match="crvnn.table3: CRvNN, len_400_500"):
        check_table(replace(table, rows=rows))
    for cells in (rows["CRvNN"]["cells"][:-1], [*rows["CRvNN"]["cells"], 5]):
        rows["CRvNN"]["cells"] = cells
        with pytest.raises(AssertionError, match="8 columns"):
            check_table(replace(table, rows=rows))


@pytest.mark.parametrize("arguments, said", [
    (("crvnn.table33", {}, {}), "unknown table 'crvnn.table33'. Did you mean 'crvnn.table3'?"),
    (("crvnn.table3", {"len_200": "x"}, {"CRvNN": []}), "crvnn.table3: unknown column 'len_200'. Did you mean 'len_200_300'?"),
    (("crvnn.table3", {"len_200_300": "x"}, {"crvnn": []}), "crvnn.table3: unknown row 'crvnn'."),
    (("rir.table1", {"len_200_250": "x"}, {"OM": []}), "rir.table1: unknown metric 'None'. Known: minutes, gigabytes")])
def test_what_the_paper_does_not_have_is_refused(arguments, said):
    with pytest.raises(TableError) as error:
        comparison(*arguments)
    assert str(error.value).startswith(said)


# ---- several seeds

@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_summary(values):
    mean, spread = summary(values, "mean")
    assert mean == pytest.approx(np.mean(values)) and summary(values, None) == (mean, spread)
    assert summary(values, "median")[0] == pytest.approx(np.median(values))
    assert spread is None if len(values) == 1 else spread == pytest.approx(np.std(values, ddof=1))


def test_runs_that_do_not_belong_together_are_not_averaged():
    old, new = run(0.5, seed=1, recorded="2026-01-01T00:00:00Z"), run(0.75, seed=1, recorded="2026-01-02T00:00:00Z")
    wide = run(0.9, parameters={"encoder": "crvnn", "dim": 16})
    assert chosen_runs([new, old, run(0.25)]) == [run(0.25), new], "of one identity the latest; by seed"
    assert chosen_runs([run(0.25), new, wide]) == [run(0.25), new], "other settings apart; more seeds first"
    paper = run(0.1, profile="paper", parameters={"dim": 128})
    assert chosen_runs([run(0.25), new, paper]) == [paper], "the larger profile first"
    halted, cut = (run(0.1, profile=profile, parameters={"dim": 128}, finished=False) for profile in ("cpu", "paper"))
    assert chosen_runs([run(0.25), halted]) == [run(0.25)] and chosen_runs([halted]) == [halted], "finished runs first"
    assert chosen_runs([run(0.25), cut]) == [cut], "which counts less than the profile"
    assert chosen_runs([run(0.9, profile="smoke", seed=3), run(0.5)]) == [run(0.5)]
    assert chosen_runs([]) == []


# ---- beside each other

def test_numbers_beside_each_other():
    ours = [run(value, seed=seed) for seed, value in enumerate((0.9, 0.96, 0.99))]
    mean = comparison("crvnn.table3", {"len_200_300": "official 200 to 300"}, {"CRvNN": ours}).pairs[0]
    assert (mean.paper, mean.paper_spread, mean.seeds) == (98.51, 1.1, 3)
    assert mean.ours == pytest.approx(95) and mean.ours_spread == pytest.approx(100 * statistics.stdev([0.9, 0.96, 0.99]))
    assert mean.difference == pytest.approx(95 - 98.51)
    median = comparison("design_space.table2", {"len_200_300": "official 200 to 300"}, {"CRvNN": ours}).pairs[0]
    assert median.ours == pytest.approx(96) and median.difference == pytest.approx(96 - 99.9)
    minutes = [make(metrics={"length 1500 to 2000": {"minutes": 2.5}})]
    timed = comparison("rir.table1", {"len_1500_2000": "length 1500 to 2000"}, {"OM": minutes, "CRvNN": minutes}, metric="minutes", of="minutes")
    assert [(pair.paper, pair.ours, pair.difference) for pair in timed.pairs] == [(76.6, 2.5, 2.5 - 76.6), ("out_of_memory", 2.5, None)]
    assert "out of memory" in timed._repr_html_() and "CRvNN, paper: without halting." in timed._repr_html_()


def test_what_is_missing_is_said():
    shown = comparison("rir.table7", {"snli": "official", "len_m": "official length"}, {"BT-GRC": [run(0.8, split="official")], "OM": []})
    assert table_lines(shown) == [["", "", "SNLI", "len m"], ["", "our test", "official", "official length"],
                            ["BT-GRC", "paper", "84.90 ± 0.10", "–"], ["", "ours (cpu, 1 seed)", "80.00", "no run yet"], ["", "difference", "−4.90", "–"],
                            ["OM", "paper", "85.50 ± 0.20", "56.50 ± 3.30"], ["", "ours", "no run yet", "no run yet"]]
    assert not any("Generated" in note for note in table_notes(shown))
    empty = comparison("crvnn.table3", {"len_200_300": "official 200 to 300"}, {})
    assert table_lines(empty) == [["", "", "200 to 300 tokens"], ["", "our test", "official 200 to 300"]] and empty._repr_html_()


def test_every_number_of_ours_says_where_it_is_from():
    runs = [run(0.5), run(0.6, seed=4, legs=[], commit=None, dirty=None, device="a GPU", finished=True)]
    assert provenance(runs) == "cpu profile; seeds 0, 4; a processor, a GPU; commit abababa, unknown"
    stale = run(0.5, modules={**CODE, "rvnnbook.layers.gone": "0" * 12}, finished=False)
    assert provenance([stale]).endswith("commit abababa, unknown; unfinished; stale, since layers.gone changed")
    shown = comparison("crvnn.table3", {"len_200_300": "generated 200 to 300"}, {"CRvNN": [stale]}, also={"gold trees": [run(0.9, split="generated 200 to 300")]})
    assert [line[1] for line in table_lines(shown)[2:]] == ["paper", "ours (cpu, 1 seed, unfinished)", "ours (cpu, 1 seed)"]
    assert table_lines(shown)[4][0] == "gold trees" and shown.pairs[1].paper is None and shown.pairs[1].difference is None
    assert any(note.startswith("Generated test") for note in table_notes(shown))
    quoted = comparison("crvnn.table4", {"test": "official"}, {"OM": []})
    assert table_lines(quoted)[2][:2] == ["OM", "paper (quoted)"]


def test_runs_are_folded_into_one_line_without_a_script():
    fresh, stale = run(0.5), run(0.6, seed=1, id="another", modules={**CODE, "rvnnbook.layers.gone": "0" * 12})
    shown = comparison("crvnn.table3", {"len_200_300": "official 200 to 300"}, {"CRvNN": [fresh]}, also={"<b> & c": [stale]})
    page = ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    (folded,), table = page.iter("details"), page.find("table")
    assert [child.tag for child in folded] == ["summary", "ul"] and not folded.get("open") and not list(page.iter("script"))
    assert folded[0].text == "2 runs behind these numbers; code that 1 of them used has changed since"
    assert [line.text for line in folded.iter("li")] == run_lines(shown.behind) == [
        f"CRvNN, ours: {provenance([fresh])}.", f"<b> & c, ours: {provenance([stale])}."]
    assert "stale" not in "".join(table.itertext()) and not any("stale" in (note.text or "") for note in page.iter("p"))


@pytest.mark.parametrize("changed, said", [([], "1 run behind these numbers; its code is unchanged"), ([0], "1 run behind these numbers; code that it used has changed since"),
                                           ([0, 1], "2 runs behind these numbers; code that each used has changed since")], ids=str)
def test_the_line_counts_runs_and_changed_code(changed, said):
    runs = [run(0.5, seed=seed, id=f"{seed}", **({"modules": {**CODE, "rvnnbook.layers.gone": "0" * 12}} if seed in changed else {}))
            for seed in range(max(1, len(changed)))]
    assert ET.fromstring(folded_runs([("a", runs), ("b", runs), ("c", [])]))[0].text == said


def test_a_page_lists_its_runs_once():
    shown = comparison("crvnn.table3", {"len_200_300": "official 200 to 300"}, {"CRvNN": [run(0.5)]})
    listed = RunList()
    tables = [listed.table(shown), listed.table(shown)]
    html = [one._repr_html_() for one in tables] + [listed.html("t", table_lines(shown), [], [("LSTM", [run(0.5)])])]
    assert not any("<details" in one for one in html) and "<details" in shown._repr_html_()
    assert [line.text for line in ET.fromstring(listed._repr_html_()).iter("li")] == run_lines(listed.behind) == [
        f"{name}: {provenance([run(0.5)])}." for name in ("CRvNN, ours", "LSTM")]
    assert table_lines(tables[0]) == table_lines(shown), "nothing else is left out"


@pytest.mark.parametrize("also, said", [({}, "CRvNN"), ({"a & b": [], "c": [], "d": []}, "CRvNN, a &amp; b and 2 more rows")], ids=str)
def test_a_folded_table_says_what_is_in_it(also, said):
    shown = comparison("crvnn.table3", {"len_200_300": "official 200 to 300"}, {"CRvNN": [run(0.5)]}, also=also)
    html = RunList().table(shown, folded=True)._repr_html_()
    assert html.startswith(f"<details><summary>Table 3 of Modeling Hierarchical Structures with Continuous Recursive Neural Networks: {said}</summary>")
    inside = ET.fromstring(html)[1]
    assert ["".join(cell.itertext()) for cell in inside.find("table").iter() if cell.tag in ("th", "td")] == [cell for line in table_lines(shown) for cell in line]
    assert not list(inside.iter("details")), "the runs are listed elsewhere"


@pytest.mark.parametrize("name", paper_tables())
def test_a_table_shows_itself_everywhere(name):
    table = paper_table(name)
    of = table.metric[0] if isinstance(table.metric, list) else None
    columns = {column: f"official <b> | {column}" for column in table.columns}
    ours = [run(0.5, split=split) for split in columns.values()][:1]
    shown = comparison(name, columns, {row: ours for row in table.rows}, of=of)
    page = ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    rows = page.findall(".//tr")
    assert len({len(row) for row in rows}) == 1 and len(rows) == len(table_lines(shown)) and len(rows[0]) == len(table.columns) + 2
    assert ["".join(cell.itertext()) for row in rows for cell in row] == [cell for line in table_lines(shown) for cell in line]
    assert page.find(".//caption").text == table.title and {th.get("scope") for th in page.iter("th")} == {"row", "col"}
    assert not re.search(r"#[0-9a-f]{3}|rgb|(?<!-)color:(?!inherit)|background:", shown._repr_html_()), "the colours are the page's"
    plain = as_text(table.title, table_lines(shown), table_notes(shown))
    assert all(cell in plain for line in table_lines(shown) for cell in line) and table.paper["title"] in plain


def test_the_data_is_one_row_a_line():
    "So that a change of one number is a change of one line."
    text = (ROOT / "rvnnbook" / "data" / "paper_results.json").read_text()
    held = json.loads(text)["tables"]
    assert text.count('{"cells": ') == sum(len(table["rows"]) for table in held.values()) == len(re.findall(r'^    ".*": \{"cells": .*\},?$', text, re.M))
