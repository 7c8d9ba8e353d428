"""The first page: its numbers are those of the records, its tree is complete, its addresses are those of settings.ini."""
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "nbs" / "results" / "length_generalization.jsonl"
sys.path.insert(0, str(ROOT / "_ext"))
import landing  # noqa: E402


def test_headline_numbers_come_from_the_records():
    runs = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    table, _, below = landing.headline(RECORDS).partition("<p>")
    table = ET.fromstring(table)
    rows = [[cell.text for cell in row] for row in table.iter("tr")][1:]
    assert [row[0] for row in rows] == list(landing.SHOWN)
    for model, near, far, seeds in rows:
        every = [run for run in runs if run["profile"] == "paper" and run["parameters"]["model"] == model and run["metrics"]]
        mine = [max((run for run in every if run["seed"] == seed), key=lambda run: run["legs"][-1]["to_step"])
                for seed in sorted({run["seed"] for run in every})]
        all_seeds, mine = len(mine), [run for run in mine if run["metrics"]["official, listops_o_test"]["accuracy"] >= .9]
        for shown, (split, _) in zip((near, far), landing.COLUMNS):
            assert shown == f"{100 * fmean(run['metrics'][split]['accuracy'] for run in mine):.1f} %"
        assert seeds == f"{len(mine)} of {all_seeds}" and mine
        cut = sum(run["parameters"]["epochs"] < 100 for run in mine)
        assert f"Width {mine[0]['parameters']['dim']};" in below
        assert f"{model}: {cut} of {len(mine)} trainings cut short" in below


def test_headline_without_a_record_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="no record of EBT-GRC"):
        landing.headline(tmp_path / "none.jsonl")


def test_soft_tree_has_both_trees_and_every_token():
    svg = ET.fromstring(landing.soft_tree())
    leaves = [mark.text for mark in svg.iter("text")]
    assert leaves == landing.EXPRESSION.split()
    assert [len(group.findall("path")) for group in svg.findall("g")] == [2 * (len(leaves) - 1)] * 2
    assert "The value is 9." in svg.get("aria-label")


def test_doors_lead_only_to_pages_that_exist():
    assert "play.html" not in landing.doors({"nbs/findings"}) and "findings.html" in landing.doors({"nbs/findings"})


def test_addresses_follow_from_the_settings():
    about = landing.settings(ROOT / "nbs")
    assert landing.address(about) == about["doc_host"] + about["doc_baseurl"] + "/"
