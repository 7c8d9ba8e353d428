"The page that puts the papers' tables beside our runs: nothing is left out, and its numbers are those of the records."
import ast
import json
import re
import shlex
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rvnnbook.cli import parser
from rvnnbook.lab.papers import COLUMNS, PAPERS, REASONS, Way, paper_table, paper_tables, way_of
from rvnnbook.lab.records import current_names, read_records
from rvnnbook.lab.settings import check_parameters, open_notebook, parse_value
from rvnnbook.registry import list_encoders

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "nbs" / "experiments"
sys.path.insert(0, str(ROOT / "_ext"))
from run_queue import QUEUE  # noqa: E402

ROWS = [(name, row) for name in paper_tables() for row in paper_table(name).rows]
NEW_WAYS = [(name, row, way) for name, row in ROWS if isinstance(way := way_of(name, row), Way)]
ALL_WAYS = [(name, row, one) for name, row, way in NEW_WAYS for one in (way, *way.older)]      # and those that answer while the new have no run

ENCODER_OF = {             # a paper's row -> name in the registry
    "BBT-GRC": "bbt_grc", "BT-GRC": "bt_grc", "BT-GRC-OS": "bt_grc_os", "CRvNN": "crvnn", "EBT-GRC": "ebt_grc", "LSTM": "lstm", "MEGA": "mega",
    "OM": "ordered_memory", "RIR-EBT-GRC": "rir_ebt_grc", "RIR-GRC": "rir_grc", "RNN-GRC": "recurrent_grc", "S4D": "s4d", "Self-IRU": "self_iru",
    "Transformer": "transformer", "Tree-Cell gold trees": "rvnn", "Tree-LSTM gold trees": "tree_lstm", "Universal Transformer": "universal_transformer"}

# No row of a paper leads to these: encoders and experiments of the book's own, and variants that no paper has.
NO_ROW = {
    "encoders": {"ndr_act", "ndr_halt"},
    "experiments": {"beam_states", "bench_beam_tree", "bench_crvnn", "bench_layers", "bench_predict", "gold_trees", "tokens"},
    "models of length_generalization": {"RNN-GRC", "RvNN gold trees", "RIR-EBT-GRC late cut", "RIR-EBT-GRC late cut minus S4D", "RIR-EBT-GRC published training"},
    "models of nested": {"RNN-GRC"},
    "models of design_space": {"NDR-ACT", "NDR-halt", "Universal Transformer"},
    "models of inference": {"LSTM", "LSTM, hypothesis only"},
    "variants of ablation": {"balanced", "other end", "Eq. 13", "Eq. 6"}}


def literal(notebook, name):
    "A dictionary that an experiment writes down, by its keys."
    for cell in open_notebook(EXPERIMENTS / f"{notebook}.ipynb")["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and f"\n{name} = {{" in f"\n{source}":
            found, = (node for node in ast.parse(source).body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
            return ast.literal_eval(found.value)
    raise AssertionError(f"{notebook} has no {name}")


def test_every_row_has_a_way_or_a_reason():
    assert len(paper_tables()) == 23 and sorted(PAPERS["ways"]) == paper_tables()
    reasons = {way for name, row in ROWS if isinstance(way := way_of(name, row), str)}
    assert reasons == set(REASONS), "each reason is a reason for something"
    for name, row, way in ALL_WAYS:
        assert any(way.split(column)[0] for column in paper_table(name).columns), f"{name}, {row}: no column is measured"


def test_the_file_names_the_rows_of_the_tables_and_nothing_else():
    for name in paper_tables():
        rows = PAPERS["ways"][name]
        assert isinstance(rows, str) or [row for row in rows if row != "all"] == list(paper_table(name).rows), name
    assert {way.profile for *_, way in ALL_WAYS} == {"cpu", "paper"} and {way.which for *_, way in ALL_WAYS} == {0, 1}
    assert all(type(way.parameters) is type(way.asked) is dict and type(way.older) is tuple for *_, way in ALL_WAYS)
    with pytest.raises(KeyError):
        way_of("crvnn.table2", "CRvNN balanced tree")
    with pytest.raises(TypeError, match="unexpected keyword argument 'parameter'"):
        Way(**{"experiment": "logic", "parameter": {}})


def test_every_encoder_and_every_experiment_is_led_to():
    models = literal("nested", "MODELS")
    led = {name for _, _, way in ALL_WAYS for name in (way.parameters.get("encoder"), way.asked.get("encoders"))} - {None}
    led |= {models[way.parameters["model"]][0] for *_, way in ALL_WAYS if way.experiment == "nested"}
    recipes = literal("length_generalization", "RECIPES")
    asked = {way.parameters["model"] for *_, way in ALL_WAYS if way.experiment == "length_generalization"}
    assert asked <= set(recipes) and set(recipes) - asked == NO_ROW["models of length_generalization"]
    assert {row for _, row, way in NEW_WAYS if way.experiment == "length_generalization"} == asked | {"RIR-EBT-GRC plus RIR inference"}
    led |= {recipes[model][0] for model in asked}
    networks = literal("design_space", "MODELS")
    asked = {way.parameters["model"] for *_, way in ALL_WAYS if way.experiment == "design_space"}
    assert asked <= set(networks) and set(networks) - asked == NO_ROW["models of design_space"]
    led |= {networks[model] for model in asked}
    pairs = literal("inference", "MODELS")
    compared = {way.parameters["model"] for *_, way in ALL_WAYS if way.experiment == "inference"}
    assert compared <= set(pairs) and set(pairs) - compared == NO_ROW["models of inference"]
    assert all(pairs[model] == ENCODER_OF[model] for model in compared)
    led |= {pairs[model] for model in compared}
    readers = literal("bytes", "MODELS")
    assert {way.parameters["model"] for *_, way in ALL_WAYS if way.experiment == "bytes"} == set(readers)
    assert all(readers[model] == ENCODER_OF[model.removesuffix(" minus S4D")] for model in readers)
    assert led <= set(list_encoders()) and set(list_encoders()) - led == NO_ROW["encoders"]
    assert {path.stem for path in EXPERIMENTS.glob("*.ipynb")} - {way.experiment for *_, way in ALL_WAYS} == NO_ROW["experiments"]
    nested = {way.parameters["model"] for *_, way in ALL_WAYS if way.experiment == "nested"}
    assert set(models) - nested == NO_ROW["models of nested"] and nested <= set(models)
    variants = {way.parameters["variant"] for *_, way in ALL_WAYS if way.experiment == "ablation"}
    assert set(literal("ablation", "VARIANTS")) - variants == NO_ROW["variants of ablation"] and variants <= set(literal("ablation", "VARIANTS"))
    by_encoder = [(row, encoder) for _, row, way in ALL_WAYS for encoder in {way.parameters.get("encoder"), way.asked.get("encoders")} - {None}]
    assert all(ENCODER_OF[row] == encoder for row, encoder in by_encoder if row in ENCODER_OF)
    assert {row for row, _ in by_encoder} - set(ENCODER_OF) == {"Gumbel-Tree LSTM", "BiLSTM", "Stacked BiLSTM", "TranX (their run)", "TranX + Self-IRU",
                                                                *paper_table("self_iru.table6").rows}
    columns = {column for name in paper_tables() for column in paper_table(name).columns}
    assert all(set(found) <= columns for found in COLUMNS.values()), "a column that no paper has"


COMMANDS = sorted({way.command(column) for name, _, way in ALL_WAYS for column in paper_table(name).columns if way.split(column)[0]})


@pytest.mark.parametrize("command, profile", [(command, profile) for command in COMMANDS for profile in ("cpu", "paper")
                                              if profile == "cpu" or "nested.ipynb" not in command],        # it has no such profile
                         ids=lambda word: word.split("experiments/")[-1])
def test_every_command_passes_the_gate_of_its_experiment(command, profile, said=None):
    words = parser().parse_args(shlex.split(command)[1:])
    asked = {name: parse_value(value) for name, _, value in (pair.partition("=") for pair in words.parameter)}
    checked = check_parameters(open_notebook(ROOT / words.notebook), {**asked, "profile": profile})
    assert asked.items() <= vars(checked).items()
    assert words.profile == (said or ("paper" if "length_generalization" in words.notebook else "cpu"))


@pytest.mark.parametrize("command", sorted({job.command(job.seeds[0]) for jobs in QUEUE.values() for job in jobs}), ids=lambda command: command.split("experiments/")[1])
def test_every_command_of_the_queue_passes_the_gate_too(command):
    test_every_command_passes_the_gate_of_its_experiment(command, "paper", "paper")


def test_every_column_of_a_record_is_found_by_its_pattern():
    "Where records are there, the patterns fit the names of their splits: one split a column."
    for experiment, columns in COLUMNS.items():
        path, fitting = ROOT / "nbs" / "results" / f"{experiment}.jsonl", 0
        for record in read_records(experiment):
            asked = {"encoders": record["parameters"].get("encoders", "").split("; ")[0]}
            found = {column: [split for split in record["metrics"] if re.fullmatch(pattern.format_map(asked), split)]
                     for column, (pattern, own) in columns.items() if own.items() <= record["parameters"].items()}
            most = 2 if experiment == "design_space" else 1             # few layers and many
            assert all(len(splits) <= most for splits in found.values()), (experiment, record["id"], found)
            fitting += any(found.values())
        assert fitting or not path.exists(), experiment


# ---- the page

@pytest.fixture(scope="module")
def page():
    "What the page shows: its code, run cell by cell, and what it hands to display."
    shown, names = [], {}
    for cell in open_notebook(ROOT / "nbs" / "versus.ipynb")["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            names["display"] = shown.append
    return names, shown


UNITS = {"accuracy_percent": ("accuracy", 100), "negative_log_likelihood": ("nll", 1), "exact_match_percent": ("exact_match", 100), "perplexity": ("perplexity", 1), "bleu": ("bleu", 1), "gigabytes": ("memory_mb", 1 / 1000)}


def test_every_table_is_shown_once_and_whole(page):
    names, shown = page
    assert sorted(table.table.name for table in shown) == paper_tables()
    for table in shown:
        html = ET.fromstring(table._repr_html_())
        heads = [row[0].text for row in html.iter("tr") if row[0].text]
        assert heads == list(table.table.rows)
    assert sum(sum(told.values()) for told in names["counted"].values()) == len(ROWS)


def test_each_number_on_the_page_is_that_of_the_records(page):
    "From the HTML back to the lines of the files, by another route."
    raw = {record["id"]: record for path in (ROOT / "nbs" / "results").glob("*.jsonl") for record in map(json.loads, path.read_text().splitlines())}
    compared = 0
    for shown in page[1]:
        table = shown.table
        metrics = table.metric if isinstance(table.metric, list) else [table.metric]
        rows = [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(shown._repr_html_()).iter("tr")][2:]
        row, number = None, 0
        for line in rows:
            row, number = (line[0], 0) if line[0] else (row, number)
            if line[1].startswith("paper"):
                metric = metrics[number]
                number += 1
                for column, text in zip(table.columns, line[2:]):
                    value, spread = table.value(row, column, metric)
                    words = "–" if value is None else value.replace("_", " ") if isinstance(value, str) else f"{value:.2f}"
                    assert text == words + (f" ± {spread:.2f}" if spread is not None else "")
            elif line[1].startswith("ours"):
                for column, text in zip(table.columns, line[2:]):
                    if text == "out of memory":
                        one, = (a for a in shown.answers[row] if a.pair.column == column and a.metric == metric)
                        pattern, failed = shown.way(row).split(column)[0], {"out_of_memory": 1}
                        assert not one.runs and any(re.fullmatch(pattern, split) and found == failed for record in raw.values()
                                                    for split, found in record["metrics"].items()), f"{row}, {column}: no such record"
                    elif text not in ("–", "no run yet"):
                        one, = (a for a in shown.answers[row] if a.pair.column == column and a.metric == (metric if len(metrics) > 1 else None))
                        samples = {"rir.table1": 100, "crvnn.table6": 50}.get(table.name, 0)
                        name, unit = UNITS.get(metric) or ("seconds", samples / 60)
                        values = [current_names(raw[run["id"]]["metrics"][one.pair.split])[name] * unit for run in one.runs]
                        middle = (statistics.median if table.statistic == "median" else statistics.fmean)(values)
                        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                        assert text == f"{middle:.2f}{spread}"
                        asked = [{name: told for name, told in raw[run["id"]]["parameters"].items() if name != "epochs"} for run in one.runs]
                        assert len({json.dumps(parameters, sort_keys=True) for parameters in asked}) == 1
                        assert {run["id"] for run in one.runs} <= raw.keys()
                        compared += 1
    assert compared >= 100 or not raw


def test_what_is_waiting_is_not_there(page):
    names, _ = page
    listed = [command for found in names["commands"].values() for command in found]
    assert set(listed) <= set(COMMANDS) and len(listed) == len(set(listed))
    records = names["records"]
    for command in listed:
        words = dict(pair.split("=", 1) for pair in parser().parse_args(shlex.split(command)[1:]).parameter)
        experiment = Path(shlex.split(command)[2]).stem
        if experiment != "bench_efficiency":
            known = [r for r in records if r["experiment"] == experiment and all(str(r["parameters"].get(n)) == v for n, v in words.items())]
            tables = [(name, row, column) for name, row, way in ALL_WAYS for column in paper_table(name).columns
                      if way.split(column)[0] and way.command(column) == command]
            patterns = {way_of(name, row).split(column)[0] for name, row, column in tables}
            assert any(not any(re.fullmatch(p, split) for r in known for split in r["metrics"]) for p in patterns)
