"""The experiment on logic: what its page does not show of it, the splits and the other encoders."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rvnnbook.lab.settings import ParameterError, check_parameters
from rvnnbook.registry import list_encoders
from tests.helpers import JUPYTER, without

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "nbs" / "experiments" / "logic.ipynb"
NOTEBOOK = json.loads(EXPERIMENT.read_text())


def test_the_gate_takes_every_encoder_and_every_profile():
    for name in list_encoders():
        for profile in ("smoke", "cpu", "paper"):
            run = check_parameters(NOTEBOOK, {"encoder": name, "profile": profile, "split": "C"})
            assert (run.encoder, run.profile, run.split, run.longest) == (name, profile, "C", 6)
    run = check_parameters(NOTEBOOK, {"profile": "paper"})
    assert (run.dim, run.batch_size, run.dropout_in, run.dropout, run.dropout_out) == (200, 128, .1, .1, .3)   # crvnn App. B


@pytest.mark.parametrize("given, said", [
    ({"encoder": "elmo"}, "encoder is 'elmo': Input should be"), ({"split": "D"}, "Input should be 'A', 'B', 'C' or 'none'"),
    ({"stages": "2:10:32"}, "stages is '2:10:32'"), ({"operators": 6}, "unknown parameter 'operators'")])
def test_the_gate_refuses(given, said):
    with pytest.raises(ParameterError) as error:
        check_parameters(NOTEBOOK, given)
    assert said in str(error.value)


@pytest.mark.parametrize("encoder, split, tests", [
    ("lstm", "C", ["split C"]), ("rvnn", "none", [f"{k} operators" for k in range(1, 13)])])
def test_a_smoke_run_measures_what_the_split_asks_and_keeps_nothing(tmp_path, tmp_path_factory, encoder, split, tests):
    words = ["run", EXPERIMENT, "--no-notebook", "-p", f"encoder={encoder}", "-p", f"split={split}"]
    hidden = {**os.environ, "PYTHONPATH": without(tmp_path_factory.mktemp("path"), *JUPYTER)}
    done = subprocess.run([sys.executable, "-m", "rvnnbook", *map(str, words)], cwd=tmp_path, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    assert re.findall(r"'generated, ([\w ]+)': \{'accuracy': [01]\.", done.stdout) == ["held out", *tests]
    assert "'finished': True" in done.stdout and not any(path.is_file() for path in tmp_path.rglob("*"))
