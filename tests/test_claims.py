"The page of claims: each claim is a faithful reading of the papers' numbers, and its verdict follows from the records."
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from rvnnbook.lab.papers import Way, paper_table, way_of
from rvnnbook.origin import code_hashes
from tests.records import make, paper_run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "nbs" / "claims.ipynb"
CODE = code_hashes(["rvnnbook.core"])


@pytest.fixture(scope="module")
def page():
    "The names that the page defines, its cells run one by one."
    names = {}
    for cell in json.loads(PAGE.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    return names


def cells_of(check):
    return [cell for cell in check[1:3] if isinstance(cell, tuple)]


# ---- the claims

def test_every_claim_is_answered_in_one_way_and_told_once(page):
    claims = page["CLAIMS"]
    assert len(claims) >= 50 and len({claim.text for claim in claims}) == len(claims)
    for claim in claims:
        assert sum(map(bool, (claim.checks, claim.lesson, claim.reason))) == 1
        assert claim.paper in page["TITLES"] and claim.text.endswith(".") and claim.where
    assert {claim.paper for claim in claims} == set(page["TITLES"]) and page["Claim"]("rir", "1", "a").checks == ()


def test_every_check_names_cells_of_the_papers(page):
    for claim in page["CLAIMS"]:
        for check in claim.checks:
            assert check.kind in ("above", "close", "cheaper") and cells_of(check) and check.margin >= 0
            for name, row, column, metric in cells_of(check):
                table = paper_table(name)
                assert row in table.rows and column in table.columns
                assert metric in (table.metric if isinstance(table.metric, list) else [table.metric])
                assert isinstance(way_of(name, row), Way), f"{name}, {row}: no run can answer this"
            assert len({cell[0].split(".")[0] for cell in cells_of(check)} | {claim.paper}) == 1, "the claim of one paper, on its own numbers"


def test_the_papers_numbers_fulfill_their_claims(page):
    "Computed once more: a rule that the paper itself fails would be a wrong reading."
    small = {"negative_log_likelihood", "perplexity"}
    compared = 0
    for claim in page["CLAIMS"]:
        for kind, *sides, margin in claim.checks:
            left, right = (paper_table(side[0]).value(*side[1:])[0] if isinstance(side, tuple) else side for side in sides)
            if kind == "cheaper":
                assert right > margin * left, claim.text
            elif kind == "close":
                assert abs(left - right) <= margin, claim.text
            else:
                assert left > right + margin or math.isclose(left, right + margin), claim.text
            compared += 1
    assert compared > 150
    losses = [check for claim in page["CLAIMS"] for check in claim.checks if check.left[3] in small]
    assert losses and all("Self-IRU" in check.right[1] for check in losses), "the favored model has the smaller loss"


def test_chapters_that_support_a_claim_have_lessons(page):
    lessons = {claim.lesson for claim in page["CLAIMS"]} - {""}
    assert lessons
    for name in lessons:
        code = ["".join(cell["source"]) for cell in json.loads((ROOT / "nbs" / name).read_text())["cells"] if cell["cell_type"] == "code"]
        assert sum("assert" in source for source in code) > 5, name


# ---- the rule

SPLIT = "generated, length_900_1000"


def ours(page, shares, **changes):
    "Records of EBT-GRC and RIR-EBT-GRC at 900 to 1000 tokens, some seeds each."
    records = [paper_run(share, model, split=SPLIT, seed=seed, **({"count": 2000} | changes))
               for model, found in zip(("EBT-GRC", "RIR-EBT-GRC"), shares) for seed, share in enumerate(found)]
    checks = page["above"]("rir.table2_and_5", "EBT-GRC", "RIR-EBT-GRC", "len_900_1000", 1)
    return page["judge_claim"](page["Claim"]("rir", "4", "Better.", checks), records)


@pytest.mark.parametrize("shares, changes, said", [
    (([.99, .98, .985], [.90, .91, .905]), {}, "supported"), (([.90, .91, .905], [.99, .98, .985]), {}, "contradicted"),
    (([.99, .98, .985], [.98, .97, .975]), {}, "uncertain"), (([.99], [.97]), {}, "uncertain"), (([.99], [.90]), {}, "supported"),
    (([.99], []), {}, "not examined"), (([.99], [.19]), {}, "supported"), (([.19], [.99]), {}, "not learned"), (([.99], [.19]), {"profile": "cpu"}, "not learned"),
    (([.99], [.90]), {"profile": "cpu"}, "smaller scale"),
    (([.99], [.90]), {"count": 500, "test_size": 500}, "smaller scale"), (([.99], [.90]), {"finished": False}, "smaller scale"),
    (([.99], [.90]), {"epochs": 20}, "smaller scale"), (([.99], [.90]), {"dim": 64}, "smaller scale")], ids=str)
def test_a_verdict_follows_from_the_runs(page, shares, changes, said):
    assert ours(page, shares, **changes)[0] == said


def test_one_comparison_that_fails_decides(page):
    found = {"EBT-GRC": .99, "RIR-EBT-GRC": .90, "BBT-GRC": .95}
    records = [paper_run(share, model, split=SPLIT, count=2000) for model, share in found.items()]
    told = {}
    for losers in (["RIR-EBT-GRC"], ["RIR-EBT-GRC", "RIR-GRC"], ["RIR-EBT-GRC", "BBT-GRC"]):
        checks = page["above"]("rir.table2_and_5", "EBT-GRC", losers, "len_900_1000", 3)
        told[losers[-1]] = page["judge_claim"](page["Claim"]("rir", "4", "Better.", checks), records)[0]
    assert told == {"RIR-EBT-GRC": "supported", "RIR-GRC": "not examined", "BBT-GRC": "uncertain"}
    checks = page["above"]("rir.table2_and_5", "RIR-EBT-GRC", ["EBT-GRC", "RIR-GRC"], "len_900_1000")
    assert page["judge_claim"](page["Claim"]("rir", "4", "Better.", checks), records)[0] == "contradicted", "whatever else is missing"


def test_close_and_a_fixed_value(page):
    def told(check, *shares):
        records = [paper_run(share, model, split=SPLIT, count=2000, seed=seed) for model, share in zip(("EBT-GRC", "RIR-EBT-GRC"), shares)
                   for seed in range(4)]
        return page["compare"](check, records).word
    near, = page["close"]("rir.table2_and_5", "EBT-GRC", "RIR-EBT-GRC", "len_900_1000", 2)
    assert [told(near, .97, share) for share in (.975, .965, .94, .92, 1.0)] == ["holds", "holds", "uncertain", "fails", "fails"]
    assert told(near, .19, .19) == told(near, .97, .2) == "not learned", "two models that fail are not equally good"
    least, = page["at_least"]("rir.table2_and_5", "EBT-GRC", "len_900_1000", 95.0)
    assert [told(least, share) for share in (.96, .94, .93)] == ["holds", "uncertain", "fails"]


def test_times_are_compared_on_one_machine_only(page):
    def told(device, crvnn, memory):
        def one(encoder, seconds, where):
            return make(experiment="bench_efficiency", parameters={"samples": 50, "encoders": encoder}, device=where, modules=CODE,
                        metrics={f"81 to 100 tokens, {encoder}": {"seconds": seconds, "count": 9, "memory_mb": 10.0}})
        check, = page["cheaper"]("crvnn.table6", "CRvNN", "OM", "len_81_100", 3)
        return page["compare"](check, [one("crvnn", crvnn, "one core"), one("ordered_memory", memory, device)]).word
    assert told("one core", 1.0, 3.4) == "holds" and told("one core", 1.0, 2.6) == "fails"
    assert told("one core", 1.0, 3.1) == told("one core", 1.0, 2.9) == "uncertain", "less than a tenth from three times"
    assert told("another core", 1.0, 3.4) == told("another core", 1.0, 2.6) == "uncertain"


def test_a_difference_of_a_few_megabytes_decides_nothing(page):
    def told(one, other):
        metrics = {f"200 to 250 tokens, {encoder}": {"seconds": 1.0, "count": 9, "memory_mb": memory}
                   for encoder, memory in (("ebt_grc", one), ("bt_grc", other))}
        check, = page["cheaper"]("rir.table1", "EBT-GRC", "BT-GRC", "len_200_250:gigabytes")
        return page["compare"](check, [make(experiment="bench_efficiency", parameters={"samples": 100, "encoders": "ebt_grc; bt_grc"},
                                            modules=CODE, metrics=metrics)]).word
    assert [told(26.0, other) for other in (36.0, 29.0, 23.0, 16.0)] == ["holds", "uncertain", "uncertain", "fails"]


def test_a_parser_without_a_grammar_is_no_evidence(page):
    records = [make(experiment="parsing", profile="paper", modules=CODE, metrics={"published, geo, test": {"exact_match": share, "count": 280, "accuracy": share}},
                    parameters={"encoder": "bilstm", "task": "geo", "base": "linear", **own})
               for share, own in ((.8, {"decoder": "lstm"}), (.95, {"decoder": "self_iru", "depth": 1}))]
    check, = page["above"]("self_iru.table5", "TranX + Self-IRU", "TranX (their run)", "geo")
    assert page["compare"](check, records).word == "smaller scale"


def test_a_full_training_whose_settings_the_paper_does_not_state_is_uncertain(page):
    check, = page["above"]("self_iru.table4", "Self-IRU", "LSTM", "nottingham")
    found = page["compare"](check)
    assert found.word == "uncertain" and abs(found.gap) > found.noise, "the difference alone would decide"


def test_uncertainty_is_that_of_the_seeds_and_of_the_test(page):
    cell = ("rir.table2_and_5", "EBT-GRC", "len_900_1000", "accuracy_percent")
    for shares in ([.99], [.99, .97], [.99, .97, .98]):
        found = page["answer"](cell, [paper_run(share, split=SPLIT, seed=seed, count=2000) for seed, share in enumerate(shares)])
        spread = statistics.stdev(100 * share for share in shares) if len(shares) > 1 else 2.0
        share = statistics.median(shares)
        expected = math.hypot(spread / math.sqrt(len(shares)), 100 * math.sqrt(share * (1 - share) / 2000))
        assert math.isclose(page["standard_error"](found, cell[3]), expected)
    mega = ("rir.table2_and_5", "MEGA", "near_iid", "accuracy_percent")
    old = make(experiment="nested", parameters={"model": "MEGA"}, modules=CODE, metrics={"official, listops_o_test": {"accuracy": .7, "count": 500}})
    single = math.hypot(.26, 100 * math.sqrt(.7 * .3 / 500))
    assert math.isclose(page["standard_error"](page["answer"](mega, [old]), mega[3]), single), "a single seed takes the paper's deviation"


def test_a_small_test_and_a_loss_are_shown(page):
    share = paper_run(.99, split=SPLIT, count=60, test_size=60), paper_run(.5, "BBT-GRC", split=SPLIT, count=2000)
    check, = page["above"]("rir.table2_and_5", "EBT-GRC", "BBT-GRC", "len_900_1000")
    assert page["shown"](page["compare"](check, share), True) == "EBT-GRC 99 (1 seed, 60 examples) against BBT-GRC 50 (1 seed)"
    losses = [(claim, outcome) for claim, _, outcome in page["judged"] if outcome and outcome.check.left[3] == "negative_log_likelihood"]
    assert losses and all(page["shown"](outcome, False).startswith("Self-IRU") for _, outcome in losses), "the favored model first"


# ---- the page

def test_every_claim_has_one_line_and_a_verdict(page):
    lines = [line for paper in page["TITLES"] for line in page["claim_lines"](paper)]
    assert [line[0] for line in lines] == [claim.text for claim in page["CLAIMS"]]
    assert all(len(line) == len(page["HEAD"]) and line[1] in page["WORDS"] and line[6] for line in lines)
    assert sum(sum(told.values()) for told in page["counted"].values()) == len(lines)
    decided = [claim for claim, said, _ in page["judged"] if said in ("supported", "contradicted")]
    assert sum(sum(told.values()) for told in page["decided_on"].values()) == len(decided)
    assert page["decided_in_words"]().startswith(f"{len(decided)} are decided")
    for paper in page["TITLES"]:
        html = page["claim_table"](paper).data
        assert html.count("<tr") == len(page["claim_lines"](paper)) + 1


def test_no_conclusion_rests_on_a_run_that_was_not_trained_in_full(page):
    for claim, said, outcome in page["judged"]:
        if said in ("supported", "contradicted") and outcome and outcome.check.kind != "cheaper":
            for check, cell in itertools.chain(*([(check, cell) for cell in cells_of(check)] for check in claim.checks)):
                found = page["answer"](cell)
                if said == "supported" or check == outcome.check:
                    assert found.runs and {run["profile"] for run in found.runs} == {"paper"} and found.verdict in ("reproduced", "differs", "not learned",
                                                                                                                    "undecided")


def test_numbers_on_the_page_are_those_of_the_records(page):
    raw = {record["id"]: record for path in (ROOT / "nbs" / "results").glob("*.jsonl") for record in map(json.loads, path.read_text().splitlines())}
    compared = 0
    for claim, _, outcome in page["judged"]:
        if outcome is None or None in outcome.numbers or outcome.check.kind == "cheaper":
            continue
        for number, cell in zip(outcome.numbers[2:], cells_of(outcome.check)):
            found, table = page["answer"](cell), paper_table(cell[0])
            if cell[3] != "accuracy_percent":
                continue
            values = [100 * raw[run["id"]]["metrics"][found.pair.split].get("accuracy", math.nan) for run in found.runs]
            middle = statistics.median if table.statistic == "median" else statistics.fmean
            assert math.isclose(number, middle(values)) and re.search(r"\d", page["shown"](outcome, True))
            compared += 1
    assert compared > 20 or not raw
