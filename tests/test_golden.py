"The recorded results of the published code, and whether their checker notices when something is wrong."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests import golden

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests" / "golden").glob("**/*.safetensors"))
ORIGINALS = Path(__file__).parents[2] / "shared" / "golden"
WITH_PARAMETERS = [path for path in FILES if path.parent.name != "ops"]
# Parameters that no output depends on, such as a bias that moves all scores alike: "folder/parameter".
WITHOUT_EFFECT: set[str] = {"bt_grc/scorer.0.bias", "bt_grc_os/scorer.0.bias", "ebt_grc/scorer.1.bias", "rir_ebt_grc/scorer.1.bias",
                            "ordered_memory/om.beta.bias", "ordered_memory_original/om.beta.bias", "rir_om/om.beta.bias"}


def name(path):
    return f"{path.parent.name}/{path.stem}"


def load(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


@pytest.fixture
def copy(tmp_path):
    "Writes a changed copy: copy(path, key=tensor or None to leave it out) -> its path."
    def write(path, changes):
        tensors, about = load(path)
        tensors = {key: value for key, value in (tensors | changes).items() if value is not None}
        target = tmp_path / path.parent.name / path.name
        target.parent.mkdir(exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, target, about)
        return target
    return write


def moved(tensor, by):
    "One entry changed; a whole number by one."
    tensor = tensor.clone()
    tensor.view(-1)[0] += by if tensor.is_floating_point() else 1
    return tensor


def test_there_are_files():
    assert {"bbt_grc/equal", "bbt_grc/ragged", "heads/classifier_10way_mlp", "heads/siamese_3way_batched_pair",
            "ops/crvnn_neighbor_grad", "crvnn/ragged", "crvnn_original/batch_max_quirk", "crvnn_original/equal", "bt_grc/equal_b5",
            "bt_grc_os/train_ragged_b3", "ebt_grc/equal_b5", "ndr/ragged_unnormalized", "ndr/scalar_gate", "s4d_layer/equal_postnorm",
            "s4d_layer/ragged_prenorm", "s4d_stack/equal", "recurrent_grc/equal", "rir_grc/chunk5_equal", "rir_grc/nonchunk_ragged",
            "rir_crvnn/nonchunk_equal", "ops/onesoft_b3_train", "ops/stochastic_topk_masked", "rir_ebt_grc/chunk5_rba_ragged_noSSM",
            "rir_ebt_grc/chunk5_stringit_ragged_noSSM", "rir_ebt_grc/chunk5_stringit_equal", "mega/equal", "mega/ragged_prenorm",
            "ordered_memory/equal", "ordered_memory_original/ragged_right_pad", "ordered_memory_original/ragged_left_pad_output_last",
            "rir_om/nonchunk_equal", "ops/geometric_attention_padded_normalized",
            "ops/geometric_attention_plain_unnormalized"} <= set(map(name, FILES))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file(path):
    assert golden.check(str(path)) == []


# ---- injected faults

@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_changed_output_is_noticed(path, copy):
    tensors, _ = load(path)
    assert golden.check(copy(path, {})) == []                          # copying alone changes nothing
    masks = [value for key, value in tensors.items() if key.startswith("in.mask")]
    assert masks and all(mask.view(-1)[0] for mask in masks)           # so entry 0 is one that is compared
    for key, value in tensors.items():
        if key in golden.not_compared(tensors):
            continue
        if key.startswith("out."):
            wrong = golden.check(copy(path, {key: moved(value, 1e-3)}))
        elif key.startswith("grad."):
            wrong = golden.check(copy(path, {key: moved(value, 1e-3 * float(value.abs().max()))}))
        else:
            continue
        assert [line.split(":")[0] for line in wrong] == [key]


@pytest.mark.parametrize("path", WITH_PARAMETERS, ids=name)
def test_a_changed_parameter_is_noticed(path, copy):
    tensors, _ = load(path)
    parameters = [key for key in tensors if key.startswith("param.")]
    assert parameters
    noise = torch.Generator().manual_seed(0)
    unnoticed = set()
    for key in parameters:
        value = tensors[key].float()
        if not golden.check(copy(path, {key: value + 0.1 * torch.randn(value.shape, generator=noise)})):
            unnoticed.add(f"{path.parent.name}/{key[6:]}")
    assert unnoticed <= WITHOUT_EFFECT


@pytest.mark.parametrize("path", WITH_PARAMETERS, ids=name)
def test_parameters_must_be_those_of_the_module(path, copy):
    tensors, _ = load(path)
    key = next(key for key in tensors if key.startswith("param."))
    for changes in ({key: None}, {"param.stranger": torch.zeros(1)}, {key: tensors[key][:0]}):
        with pytest.raises(RuntimeError):
            golden.check(copy(path, changes))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_outputs_must_be_there(path, copy, capsys):
    tensors, _ = load(path)
    key = next(key for key, value in tensors.items() if key.startswith("out.") and value.is_floating_point())
    assert golden.check(copy(path, {"out.stranger": torch.zeros(1)})) == ["not computed: out.stranger"]
    assert golden.main([str(copy(path, {key: tensors[key][:1]}))]) == 1 and "shape" in capsys.readouterr().out
    assert golden.check(copy(path, {key: torch.full_like(tensors[key], torch.nan)})) == [f"{key}: error nan"]


def test_a_file_that_records_nothing_is_no_proof(copy):
    path = FILES[0]
    nothing = {key: None for key in load(path)[0] if key.startswith(("out.", "grad."))}
    try:
        wrong = golden.check(copy(path, nothing))
    except Exception as error:
        wrong = [str(error)]
    assert wrong


# ---- the command

def test_command(copy, tmp_path):
    good, garbage = FILES[0], tmp_path / "garbage.safetensors"
    tensors, about = load(FILES[1])
    key = next(key for key in tensors if key.startswith("out."))
    wrong = copy(FILES[1], {key: moved(tensors[key], 1e-3)})
    garbage.write_bytes(b"no tensors here")

    def run(*paths):
        done = subprocess.run([sys.executable, "-m", "tests.golden", *map(str, paths)], cwd=ROOT, text=True, capture_output=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        return done.returncode, done.stdout.splitlines(), done.stderr

    status, lines, _ = run(*FILES)
    assert status == 0 and lines == [f"ok   {path.parent.name}/{path.name}" for path in FILES]
    status, lines, _ = run(garbage, wrong, tmp_path / "missing.safetensors", good)
    assert status == 1 and len(lines) == 4
    assert lines[0].startswith(f"FAIL {tmp_path.name}/garbage.safetensors  ") and "Error" in lines[0]
    assert lines[1].startswith(f"FAIL {wrong.parent.name}/{wrong.name}  {key}: error")
    assert lines[2].startswith("FAIL") and lines[3].startswith("ok ")
    status, lines, said = run()
    assert status == 1 and not lines and said.startswith("usage:")


def test_statuses(copy, tmp_path, capsys):
    tensors, _ = load(FILES[0])
    key = next(key for key in tensors if key.startswith("out."))
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"\x00" * 100)
    wrong = copy(FILES[0], {key: moved(tensors[key], 1e-3)})
    for paths, status in (([FILES[0]], 0), ([wrong], 1), ([garbage], 1), ([wrong, FILES[1]], 1), ([FILES[1], garbage], 1)):
        assert golden.main(list(map(str, paths))) == status
        assert len(capsys.readouterr().out.splitlines()) == len(paths)


def test_a_model_without_a_module_fails(tmp_path, capsys):
    path = tmp_path / "unknown.safetensors"
    save_file({"in.mask": torch.ones(1, 1)}, path, {"model": "perceptron", "case": "one", "config": json.dumps({})})
    assert golden.main([str(path)]) == 1
    assert "no module yet for perceptron/one" in capsys.readouterr().out


# ---- the originals, where they are

@pytest.fixture
def originals():
    if not ORIGINALS.is_dir():
        pytest.skip("the folder shared/golden with the original recordings is not beside the checkout")
    return ORIGINALS


def test_copies_are_the_originals(originals):
    for path in FILES:
        original = originals / path.relative_to(ROOT / "tests" / "golden")
        assert original.exists() and original.read_bytes() == path.read_bytes(), name(path)


def test_original_neighbor_files(originals):
    paths = sorted((originals / "ops").glob("crvnn_neighbor_*.safetensors"))
    assert len(paths) >= 4
    assert golden.main(list(map(str, paths))) == 0
