"The table of encoders, what importing costs, and who may import whom."
import ast
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

import rvnnbook
from rvnnbook.data import text
from rvnnbook.data.batches import BucketLoader, Vocabulary
from rvnnbook.data.listops import collate_listops, make_split
from rvnnbook.lab.records import read_records
from rvnnbook.registry import (
    ENCODERS, _check_values, create_encoder, describe_encoder, encoder_options, export_weights, list_encoders, list_pretrained, read_weights)
from rvnnbook.renamed import RENAMED, RENAMED_OPTIONS
from rvnnbook.optimization import evaluate_classifier
from rvnnbook.tasks.classify import load_pretrained
from tests.training import make_model

PACKAGE = Path(__file__).parents[1] / "rvnnbook"
FLOORS = {"renamed": 0, "core": 1, "data": 1, "layers": 2, "reference": 3, "encoders": 3, "own": 3, "literal": 3, "origin": 1, "registry": 4, "tasks": 4, "optimization": 4, "lab": 5, "show": 5, "cli": 6,
          "_modidx": 7, "__main__": 7, "": 7}          # "": the front door, which nobody inside goes through


# ---- names and options

def refused(name, **options):
    with pytest.raises(ValueError) as error:
        create_encoder(name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_front_door():
    assert rvnnbook.list_encoders is list_encoders and rvnnbook.create_encoder is create_encoder
    assert list_encoders() == sorted(ENCODERS) and {"rvnn", "tree_lstm"} <= set(list_encoders())


@pytest.mark.parametrize("name", list_encoders())
def test_entry(name):
    module, class_name, fixed = ENCODERS[name]
    made = create_encoder(name, dim=8)
    assert type(made) is getattr(importlib.import_module(module), class_name) and made.dim == 8
    assert module.startswith("rvnnbook.encoders.") and set(fixed) < set(inspect.signature(type(made)).parameters)


@pytest.mark.parametrize("name", list_encoders())
@pytest.mark.parametrize("options, said", [({"dim": "8"}, "dim must be int, got '8'"), ({"dim": 8.0}, "dim must be int, got 8.0"),
                                           ({"dim": True}, "dim must be int, got True"), ({"dim": 0}, "dim must be at least 1, got 0")])
def test_width_of_wrong_type_or_size_is_refused(name, options, said):
    assert refused(name, **options) == f"encoder {name!r}: {said}"


def test_values_of_options_are_checked_by_the_stated_type():
    assert refused("ebt_grc", dim=8, dropout="0.1") == "encoder 'ebt_grc': dropout must be float, got '0.1'"
    assert refused("ebt_grc", dim=8, hidden=1.5) == "encoder 'ebt_grc': hidden must be int | None, got 1.5"
    assert create_encoder("ebt_grc", dim=np.int64(8), dropout=0, hidden=None).dim == 8
    for dropout in (-0.1, 1.0):
        assert refused("ebt_grc", dim=8, dropout=dropout) == f"encoder 'ebt_grc': dropout must be in [0, 1), got {dropout}"


def test_the_layer_before_chunking_is_chosen_by_name_or_options():
    assert [create_encoder("rir_ebt_grc", dim=8, pre=pre).s4d is None for pre in (None, "None", "s4d", {}, {"channel_dropout": .5})] == [True, True, False, False, False]
    assert create_encoder("rir_ebt_grc", dim=8, pre={"channel_dropout": .5}).s4d.channels.p == .5
    assert "unexpected keyword argument 'foo'" in refused("rir_ebt_grc", dim=8, pre={"foo": 1})


def test_options_that_hold_containers_or_functions_are_left_to_the_class():
    def make(dim: int, sizes: list[int], table: dict[str, int] | None, act: Callable[[int], int], width: int | None = None): ...
    good = {"dim": 8, "sizes": [1, 2], "table": {"a": 1}, "act": abs}
    _check_values("own", make, {}, good)
    with pytest.raises(ValueError, match="width must be int | None, got 'x'"):
        _check_values("own", make, {}, good | {"width": "x"})


@pytest.mark.parametrize("name", list_encoders())
def test_description_has_a_line_for_every_option(name):
    module, class_name, fixed = ENCODERS[name]
    signature = inspect.signature(getattr(importlib.import_module(module), class_name))
    rows = describe_encoder(name).splitlines()
    assert rows[0].startswith(f"{name}: ") and all("#" in row for row in rows[1:])
    assert all(f"{option}={value!r}" in rows[0] for option, value in fixed.items())
    assert [row.split(":")[0].split("=")[0].strip() for row in rows[1:]] == [p for p in signature.parameters if p not in fixed]


@pytest.mark.parametrize("name", list_encoders())
def test_misspelt_names_and_options(name):
    said = refused(name[:-1] + name[-1] * 2, dim=8)
    assert f"unknown encoder {name + name[-1]!r}. Did you mean" in said and all(known in said for known in list_encoders())
    said = refused(name, dmi=8)
    assert f"unknown option 'dmi' for encoder {name!r}. Did you mean 'dim'? Known: dim" in said
    for option in ENCODERS[name][2]:                                   # what makes the variant is not for sale
        assert f"unknown option {option!r}" in refused(name, dim=8, **{option: 1}) and option not in said
    if inspect.signature(getattr(importlib.import_module(ENCODERS[name][0]), ENCODERS[name][1])).parameters["dim"].default is inspect._empty:
        said = refused(name)
        assert repr(name) in said and "dim" in said


def test_nothing_close():
    said = refused("perceptron")
    assert said.startswith("unknown encoder 'perceptron'. Known: ") and "mean" not in said
    assert "mean" not in refused("rvnn", zzz=1)
    assert "Did you mean 'rvnn'?" in refused("rvn") and "Did you mean 'tree_lstm'?" in refused("treelstm")


@pytest.mark.parametrize("name, known", [("CRvNN", "crvnn"), ("EBT-GRC", "ebt_grc"), ("Tree-LSTM", "tree_lstm"), ("NDR", "ndr")])
def test_names_in_another_spelling(name, known):
    assert f"unknown encoder {name!r}. Did you mean {known!r}?" in refused(name, dim=8)


@pytest.mark.parametrize("function", [create_encoder, describe_encoder, lambda encoder: load_pretrained(encoder, "listops")])
def test_an_encoder_in_place_of_its_name(function):
    with pytest.raises(TypeError, match="^expected the name of an encoder, such as 'crvnn', got LSTM$"):
        function(create_encoder("lstm", dim=4))


@pytest.mark.parametrize("name", [name for name in list_encoders() if "hidden" in encoder_options(name) and name != "tree_lstm"])
def test_a_hidden_layer_without_units_is_refused(name):
    assert refused(name, dim=8, hidden=0) == "hidden must be a whole number from 1, got 0"


def test_variants_differ():
    assert hasattr(create_encoder("rvnn", dim=4), "grc") and hasattr(create_encoder("tree_lstm", dim=4), "tree_lstm")
    assert create_encoder("rvnn", dim=4, hidden=7).grc.w1.out_features == 7


# ---- what importing costs

def loaded_after(statement):
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_is_light():
    loaded = loaded_after("import rvnnbook; rvnnbook.list_encoders(); import rvnnbook.cli; rvnnbook.cli.parser()")
    assert {"rvnnbook", "rvnnbook.registry", "rvnnbook.cli"} <= loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "IPython", "papermill"}


def test_an_encoder_brings_no_other_and_no_figures():
    loaded = loaded_after("import rvnnbook; rvnnbook.create_encoder('rvnn', dim=4)")
    assert {name for name in loaded if name.startswith("rvnnbook.encoders.")} == {"rvnnbook.encoders.rvnn"}
    assert "torch" in loaded and not loaded & {"rvnnbook.show", "rvnnbook.lab", "matplotlib", "IPython"}


# ---- names

SAME_MEANING = {"MissingFileError": "each data module's own error for a missing file, also a FileNotFoundError"}


def definitions():
    "Public functions and classes: name -> modules that define it; commands are named after what they run."
    found = {}
    for name, source in modules().items():
        if name not in ("rvnnbook.cli", "rvnnbook._modidx"):
            for node in ast.parse(source).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    return found


def test_public_names_are_unique():
    "Only a reference model has its name from the model or layer that it explains."
    found = definitions()
    again = {}
    for name, homes in found.items():
        references = [home for home in homes if home.startswith("rvnnbook.reference.")]
        others = [home for home in homes if home not in references]
        explained = all(home.startswith(("rvnnbook.encoders.", "rvnnbook.layers.")) for home in others)
        if len(references) > 1 or len(others) > 1 or references and not explained:
            again[name] = homes
    assert set(again) == set(SAME_MEANING), again


OLD = [(module, old, new) for module, names in RENAMED.items() for old, new in names.items()]


@pytest.mark.parametrize("module, old, new", OLD)
def test_an_old_name_is_refused_with_the_new_one(module, old, new):
    home = importlib.import_module(f"rvnnbook.{module}")
    with pytest.raises(ImportError) as error:
        exec(f"from rvnnbook.{module} import {old}")
    room, _, name = new.rpartition(".")
    assert str(error.value) == f"rvnnbook.{module}.{old} is renamed to {f'rvnnbook.{new}' if room else new}"
    there = importlib.import_module(f"rvnnbook.{room}") if room else home
    assert hasattr(there, name) and old not in vars(home)


def test_an_old_option_is_refused_with_what_replaces_it():
    for name, options in RENAMED_OPTIONS.items():
        for option, now in options.items():
            assert f"unknown option {option!r} for encoder {name!r}. It is renamed to {now}." in refused(name, dim=8, **{option: 1})
    encoder = create_encoder("crvnn", dim=8)
    assert all(hasattr(encoder, name) for name in ("checkpoint", "compaction", "form", "retriever", "scorer"))
    assert "activation" in inspect.signature(type(encoder)).parameters


def test_an_encoder_has_at_most_ten_options():
    assert all(len(encoder_options(name)) <= 10 for name in list_encoders())


def test_the_import_hook_lists_no_distribution_twice():
    "A meta path finder that also finds distributions would double what `importlib.metadata` lists."
    subprocess.run([sys.executable, "-c", "from importlib.metadata import distributions\nbefore = len(list(distributions()))\n"
                    "import rvnnbook\nassert len(list(distributions())) == before"], check=True)


@pytest.mark.parametrize("module", sorted(RENAMED))
def test_an_unknown_name_is_refused_as_usual(module):
    home = importlib.import_module(f"rvnnbook.{module}")
    assert not hasattr(home, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from rvnnbook.{module} import no_such_name")


# ---- floors

def modules():
    "Source of every module of the package, by dotted name."
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported(name, source, names, is_package=False):
    "Which of the package's modules a source imports, anywhere in it; and the other packages."
    ours, others = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[:len(name.split(".")) - node.level + is_package] if node.level else []
            wanted = [(".".join(base + ([node.module] if node.module else [])), alias.name) for alias in node.names]
        else:
            continue
        for module, part in wanted:
            if module.split(".")[0] == "rvnnbook":
                ours.add(f"{module}.{part}" if f"{module}.{part}" in names else module)
            else:
                others.add(module.split(".")[0])
    return ours, others


def floor(name):
    return FLOORS[(name.split(".") + [""])[1]]


def breaches(sources):
    "What breaks the order of floors, in words."
    found, uses = [], {}
    for name, source in sources.items():
        uses[name], others = imported(name, source, sources, f"{name}.__init__" in sources or name == "rvnnbook")
        if floor(name) <= 4:
            found += [f"{name} imports {other}" for other in sorted(others & {"matplotlib", "IPython", "ipywidgets"})]
        found += [f"{name} imports {other}, which is above it" for other in sorted(uses[name]) if floor(other) > floor(name)]
    def visit(name, above):
        if name in above:
            found.append("circle: " + " -> ".join([*above[above.index(name):], name]))
            return
        if name not in done:
            for other in sorted(uses.get(name, ())):
                visit(other, [*above, name])
            done.add(name)
    done = set()
    for name in sorted(uses):
        visit(name, [])
    return found


def test_floors():
    sources = modules()
    assert {"rvnnbook", "rvnnbook.core", "rvnnbook.encoders.rvnn", "rvnnbook.show.plots"} <= set(sources)
    assert breaches(sources) == []


# What an encoder takes from another one beside an encoder that it contains or specializes. This table may only shrink.
BORROWED = {}


def borrowed(sources):
    "Names that encoders import from other encoders, less those of encoders: {(importer, lender): names}."
    rooms = {name: ast.parse(source) for name, source in sources.items() if name.startswith("rvnnbook.encoders.")}
    bases = {node.name: {getattr(base, "id", "") for base in node.bases} for tree in rooms.values() for node in tree.body
             if isinstance(node, ast.ClassDef)}
    encoders, found = {"Encoder"}, {}
    while grown := {name for name, above in bases.items() if above & encoders} - encoders:
        encoders |= grown
    for name, tree in rooms.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = ".".join(name.split(".")[:-node.level]) + "." if node.level else ""
                lender = base + (node.module or "")
                wanted = [(lender, {alias.name for alias in node.names} - encoders)]
                if lender.rstrip(".") == "rvnnbook.encoders":              # a whole module: everything in it
                    wanted = [(f"rvnnbook.encoders.{alias.name}", {"*"}) for alias in node.names]
            elif isinstance(node, ast.Import):
                wanted = [(alias.name, {"*"}) for alias in node.names]
            else:
                continue
            for other, names in wanted:
                if other in rooms and names:
                    found.setdefault((name.split(".")[-1], other.split(".")[-1]), set()).update(names)
    return found


def test_encoders_lend_each_other_no_helpers():
    "RIR contains CRvNN, and BalancedTree is a RvNN; what several encoders need is in layers."
    assert borrowed(modules()) == BORROWED


@pytest.mark.parametrize("line, names", [
    ("from .crvnn import CRvNN", None), ("from .efficient_beam import EfficientBeam", None), ("from ..layers.masking import compact", None),
    ("from .crvnn import CRvNN, modulated_sigmoid", {"modulated_sigmoid"}), ("def late():\n    from .crvnn import DECISIONS", {"DECISIONS"}),
    ("from . import crvnn", {"*"}), ("import rvnnbook.encoders.crvnn as c", {"*"}),
    ("from rvnnbook.encoders.crvnn import runs_of", {"runs_of"})])
def test_a_borrowed_helper_is_noticed(line, names):
    sources = modules()
    sources["rvnnbook.encoders.mega"] += f"\n{line}\n"
    found = borrowed(sources)
    assert found.pop(("mega", "crvnn"), None) == names and found == BORROWED


@pytest.mark.parametrize("name, line, said", [
    ("rvnnbook.core", "from .layers import cells", "rvnnbook.core imports rvnnbook.layers.cells, which is above it"),
    ("rvnnbook.encoders.rvnn", "def draw():\n    from ..show.plots import figure", "rvnnbook.encoders.rvnn imports rvnnbook.show.plots"),
    ("rvnnbook.layers.cells", "import rvnnbook.encoders.rvnn as r", "rvnnbook.layers.cells imports rvnnbook.encoders.rvnn"),
    ("rvnnbook.data.listops", "from rvnnbook import create_encoder", "rvnnbook.data.listops imports rvnnbook, which"),
    ("rvnnbook.data.listops", "def draw():\n    import matplotlib.pyplot", "rvnnbook.data.listops imports matplotlib"),
    ("rvnnbook.layers.neighbors", "from .cells import GRC", None),
    ("rvnnbook.show.plots", "from . import trees", "circle: rvnnbook.show.trees -> rvnnbook.show.plots -> rvnnbook.show.trees")])
def test_breaches_are_noticed(name, line, said):
    sources = modules()
    sources[name] += f"\n{line}\n"
    found = breaches(sources)
    assert found == [] if said is None else len(found) >= 1 and any(text.startswith(said) for text in found)


# ---- weights that come with the package

FILES = sorted((PACKAGE / "weights").glob("*.safetensors"))


def test_weights_are_few_and_small():
    assert "crvnn-listops" in [path.stem for path in FILES]
    assert all(path.stat().st_size <= 1.25 * 2**20 for path in FILES)       # RIR-EBT-GRC of width 128: 571 275 half-precision numbers
    assert sum(path.stat().st_size for path in FILES) <= 10 * 2**20


def test_pretrained_models_are_listed():
    assert list_pretrained() == [tuple(path.stem.split("-")) for path in FILES] and ("ebt_grc", "sst5") in list_pretrained()
    known = ", ".join(f"'{task}' for {name}" for name, task in list_pretrained())
    assert refused("lstm", weights="listops").endswith(f"Known: {known}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights(path):
    name, _, task = path.stem.partition("-")
    tensors, about = read_weights(name, task)
    encoder, model = create_encoder(name, weights=task), load_pretrained(name, task)
    assert model.state_dict().keys() == tensors.keys() and not model.training
    for key, tensor in tensors.items():
        assert tensor.isfinite().all() and torch.equal(tensor, tensor.half().float())
        assert torch.equal(model.state_dict()[key], tensor)
    for key, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, tensors[f"encoder.{key}"])
    assert about["encoder"] == name and about["run"] in [record["id"] for record in read_records()]
    assert f"do not fit {{'dim': {encoder.dim + 2}}}; they were made with" in refused(name, weights=task, dim=encoder.dim + 2)
    assert f"no weights 'nothing' for encoder '{name}'" in refused(name, weights="nothing")


def test_damaged_weights_are_refused(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "rvnnbook", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "rvnnbook" / "weights" / "crvnn-listops.safetensors"
    load = [sys.executable, "-c", "import rvnnbook; print(rvnnbook.__file__); rvnnbook.create_encoder('crvnn', weights='listops')"]
    whole = path.read_bytes()
    for at in (None, 0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole if at is None else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        done = subprocess.run(load, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.stdout.startswith(str(tmp_path))
        assert (done.returncode == 0) == (at is None) and ("crvnn-listops.safetensors is damaged" in done.stderr) == (at is not None)


def asked(task, about):
    "The test that a record of a task tells of, a sample of it, and how it is put into a batch."
    if task.startswith("listops"):
        name = "generated, length_200_300" if about["encoder"] == "rir_ebt_grc" else "generated, 200 to 300 tokens"    # of another experiment
        return name, make_split(500, seed=200, length=(200, 300))[:60], collate_listops
    treebank = next(Path(__file__).parents[2].glob("shared/data/sst/trees/test.*"), None)
    if treebank is None:
        pytest.skip("the folder shared/data/sst with the published treebank is not beside the checkout")
    sentences = [tree._replace(tokens=tuple(map(str.lower, tree.tokens))) for tree in text.read_trees(treebank)][::2]
    words = Vocabulary(json.loads(about["vocabulary"]), text.UNKNOWN)
    return "SST-5 test", sentences, partial(text.collate_text, vocabulary=words, labels=text.GRADES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights_are_those_of_the_recorded_run(path):
    "A sample of what the record claims, measured again."
    name, _, task = path.stem.partition("-")
    _, about = read_weights(name, task)
    record, = (record for record in read_records() if record["id"] == about["run"])
    split, sample, put = asked(task, about)
    claimed = record["metrics"][split]
    found = evaluate_classifier(load_pretrained(name, task), BucketLoader(sample, 20, put))["accuracy"]
    spread = (claimed["accuracy"] * (1 - claimed["accuracy"]) / len(sample)) ** 0.5
    assert abs(found - claimed["accuracy"]) <= 4 * spread + 2 / len(sample)


def test_exported_weights(tmp_path):
    model, path = make_model(), tmp_path / "weights.safetensors"
    export_weights(model, path, {"experiment": "listops", "steps": 25})
    fresh = make_model(seed=3)
    load_model(fresh, path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"experiment": "listops", "steps": "25"}
    for tensor, other in zip(model.parameters(), fresh.parameters()):
        assert other.dtype == torch.float32 and torch.equal(tensor.half().float(), other)
    assert path.stat().st_size < 3 * sum(tensor.numel() for tensor in model.parameters()) + 5000
    nn.init.constant_(model.embedding.weight, 1e5)
    with pytest.raises(ValueError, match="embedding.weight has values that are too large for torch.float16"):
        export_weights(model, path)


@pytest.mark.parametrize("case, read", [({}, [1, 2]), ({"case": "lower"}, [1, 2]), ({"case": "kept"}, [0, 2])])
def test_loaded_words_keep_their_case_if_the_run_kept_it(case, read, monkeypatch):
    from rvnnbook.tasks import classify
    model = classify.Classifier(create_encoder("lstm", dim=4), 3, 2)
    about = {"vocabulary": json.dumps(["<unk>", "good", "film"]), "options": '{"dim": 4}', "classifier": '{"classes": 2}', **case}
    monkeypatch.setattr(classify, "read_weights", lambda *_: (model.state_dict(), about))
    vocabulary = classify.load_pretrained("lstm", "some").vocabulary
    assert list(vocabulary.encode("Good film")) == read
