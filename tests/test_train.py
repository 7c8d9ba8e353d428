"Training: what a killed run becomes, when a run stops, what it keeps, and that two processes do the work of one."
import hashlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

os.environ.setdefault("ACCELERATE_USE_CPU", "true")    # bit-equality is promised where kernels are deterministic

from rvnnbook.data.batches import BucketLoader  # noqa: E402
from rvnnbook.data.listops import collate_listops  # noqa: E402
from rvnnbook.origin import git_state, machine# noqa: E402
from rvnnbook.lab.train import (  # noqa: E402
    CheckpointError, TrainConfig, TrainingError, copy_of, pack_state, read_checkpoint, train, unpack_state)
from rvnnbook.optimization import classification_loss, evaluate_classifier  # noqa: E402
from tests.training import EXAMPLES, TEST, go, go_together, go_until_killed, judge, make_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def timeless(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def without_clock(state):
    "A checkpoint's state without what differs between runs that are the same."
    state = {name: value for name, value in state.items() if name != "legs"}
    return {**state, "history": timeless(state["history"]), "best_row": timeless([state["best_row"]] if state["best_row"] else [])}


def assert_same_run(folder, other):
    (tensors, state), (others, other_state) = read_checkpoint(folder), read_checkpoint(other)
    assert without_clock(state) == without_clock(other_state)
    assert set(tensors) == set(others) == {"model", "best", "optimizer"}
    for kind in tensors:
        assert set(tensors[kind]) == set(others[kind])
        for name, tensor in tensors[kind].items():
            assert tensor.dtype == others[kind][name].dtype and torch.equal(tensor, others[kind][name]), (kind, name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run that nothing came in the way of: its folder, model and outcome."
    folder = tmp_path_factory.mktemp("whole")
    return folder, *go(folder)


# ---- interrupted = uninterrupted

def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not(whole, tmp_path):
    "SIGKILL before a random change of the file system, ever new, until the run gets through; and nothing is unpickled."
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.training"])
    random, codes, steps = Random(0), [], set()
    while not codes or codes[-1] != 0:
        process = context.Process(target=go_until_killed, args=(tmp_path, random.randrange(1, 90)))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
        assert codes[-1] in (0, -signal.SIGKILL) and len(codes) < 100, codes
        steps |= {path.name for path in tmp_path.glob("step-*")}
    assert len(codes) > 5 and any(name.endswith(".part") for name in steps)      # also in the middle of writing
    assert_same_run(whole[0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000025"]
    legs = read_checkpoint(tmp_path)[1]["legs"]
    assert [leg["from_step"] for leg in legs] == [0, *(leg["to_step"] for leg in legs[:-1])] and legs[-1]["to_step"] == 25


@pytest.mark.parametrize("optimizer", ["radam_lookahead", "radam", "adamw"])
def test_one_step_a_call_makes_the_same_run(optimizer, tmp_path):
    straight, outcome = go(tmp_path / "straight", optimizer=optimizer, steps=12)
    for step in range(1, 13):
        model, part = go(tmp_path / "parts", optimizer=optimizer, steps=12, time_budget=0.0)
        assert (part.step, part.finished, part.reason) == (step, step == 12, "limit" if step == 12 else "time")
    assert_same_run(tmp_path / "straight", tmp_path / "parts")
    assert timeless(part.history) == timeless(outcome.history) and timeless([part.best]) == timeless([outcome.best])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), straight.state_dict().values()))
    assert [leg["to_step"] - leg["from_step"] for leg in part.legs] == [1] * 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_writes_a_checkpoint_and_returns(number, whole, tmp_path):
    steps, usual = [], signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)       # a shell's background ignores SIGINT, Ray sets a handler of its own

    def loss(model, batch):
        steps.append(1)
        if len(steps) == 6:
            os.kill(os.getpid(), number)
        return classification_loss(model, batch)

    try:
        _, outcome = go(tmp_path, loss=loss, save_every=1e9)
        assert (outcome.finished, outcome.reason, outcome.step) == (False, "signal", 6)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    assert go(tmp_path)[1].finished
    assert_same_run(whole[0], tmp_path)


def test_a_second_signal_is_taken_at_its_word(tmp_path):
    steps = []

    def loss(model, batch):
        steps.append(1)
        for _ in range(2 * (len(steps) == 6)):
            signal.raise_signal(signal.SIGINT)
        return classification_loss(model, batch)

    found = signal.signal(signal.SIGINT, signal.default_int_handler)     # in the background of a shell it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, loss=loss)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)
    assert read_checkpoint(tmp_path)[1]["step"] == 5


def test_a_finished_run_is_not_trained_again(whole, tmp_path):
    folder, model, outcome = whole
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again, same = go(folder, model=make_model(seed=5))
    assert same == outcome and {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values()))


def test_a_finished_run_can_be_made_longer(tmp_path):
    go(tmp_path / "parts", epochs=2, steps=None)
    go(tmp_path / "parts", epochs=3, steps=None)
    go(tmp_path / "straight", epochs=3, steps=None)
    assert read_checkpoint(tmp_path / "parts")[1]["step"] == 15
    assert_same_run(tmp_path / "straight", tmp_path / "parts")


def test_whoever_looks_on_changes_nothing(whole):
    "The judge, which draws numbers, and the checkpoints leave no mark on the weights."
    weights = []
    _, outcome = go(judge=lambda model: (weights.append(copy_of(model)), torch.rand(99), {"nll": 1.0})[-1], halve_after=None)
    _, unseen = go(judge=None, check_every=1)
    _, seldom = go(judge=judge, halve_after=None, save_every=1e9)
    assert [row["loss"] for row in timeless(outcome.history)] == [row["loss"] for row in timeless(seldom.history)]
    means = [math.fsum(row["loss"] for row in unseen.history[start:start + 4]) / 4 for start in range(0, 24, 4)]
    assert means == pytest.approx([row["loss"] for row in outcome.history], rel=1e-12)
    assert "nll" not in unseen.history[0] and unseen.best is None


def test_seeds_draw_the_dropout(whole):
    losses = [go(seed=seed, steps=4)[1].history[0]["loss"] for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1] and losses[0] == whole[2].history[0]["loss"]


# ---- checkpoints

def test_a_half_written_checkpoint_is_passed_over(whole, tmp_path):
    go(tmp_path, time_budget=0.0)
    part = tmp_path / "step-00000009.part"
    part.mkdir()
    (part / "state.json").write_text('{"step": 9')
    assert go(tmp_path)[1].finished
    assert_same_run(whole[0], tmp_path)
    assert not part.exists()


def test_an_older_checkpoint_that_was_not_yet_removed_is_passed_over(whole, tmp_path):
    go(tmp_path, time_budget=0.0)
    newest, = tmp_path.iterdir()
    (tmp_path / "step-00000000").mkdir()                       # what is left of a removal that was cut off
    assert go(tmp_path, time_budget=0.0)[1].step == 2 and not newest.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["state.json", "hashes.json", "model.safetensors", "optimizer.safetensors", "best.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused(name, how, whole, tmp_path):
    for path in (whole[0] / "step-00000025").iterdir():
        (tmp_path / "step-00000025").mkdir(exist_ok=True)
        (tmp_path / "step-00000025" / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "step-00000025" / name
    payload = bytearray(victim.read_bytes())
    payload[len(payload) // 2] ^= 1
    victim.write_bytes(payload if how == "flipped" else payload[:-9])
    if how == "gone":
        victim.unlink()
    model = make_model()
    with pytest.raises(CheckpointError, match=r"step-00000025 is damaged \(.*remove it to begin the run anew"):
        go(tmp_path, model=model, steps=30)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), make_model().state_dict().values()))


@pytest.mark.parametrize("change, complaint", [
    ({"learning_rate": 0.02}, "learning_rate = 0.01, now 0.02$"), ({"seed": 3}, "seed = 0, now 3$"),
    ({"size": 4}, "batches.size = 8, now 4$"), ({"examples": EXAMPLES[30:69]}, "batches.examples = 40, now 39$"),
    ({"settings": {"cell": "lstm"}}, "cell = None, now 'lstm'$"), ({"metric": "accuracy"}, "metric = 'nll', now 'accuracy', better"),
    ({"optimizer": "radam", "clip": math.inf}, "optimizer = .* now 'radam', clip = 1.0, now inf$")])
def test_a_run_goes_on_with_its_own_settings_or_not_at_all(change, complaint, whole):
    with pytest.raises(CheckpointError, match="other settings: .*" + complaint):
        go(whole[0], **change)


def test_a_run_that_patience_would_have_ended_earlier_is_refused(tmp_path):
    "The metric gets worse at every check; one more check than the patience allows ends a run."
    checks = iter(range(100))
    bad = {"judge": lambda model: {"nll": float(next(checks))}, "check_every": 1, "halve_after": None}
    assert go(tmp_path, **bad, steps=20, patience=5)[1].step == 7
    with pytest.raises(CheckpointError, match="holds a run of 7 steps, but this one ends at step 5"):
        go(tmp_path, **bad, steps=20, patience=3)
    assert go(tmp_path, **bad, steps=20, patience=5)[1].step == 7
    assert go(tmp_path, **bad, steps=20, patience=6)[1].step == 8


def test_an_apple_gpu_is_left_out():
    "Without the option, accelerate chooses it."
    code = ("import torch; torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True\n"
            "from accelerate import Accelerator; assert Accelerator().device.type == 'mps'\n"
            "from accelerate.state import AcceleratorState, PartialState; AcceleratorState._reset_state(True)\n"
            "from tests.training import go; print(next(go()[0].parameters()).device)")
    env = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "cpu"


def test_a_longer_run_is_not_taken_for_a_shorter_one(tmp_path):
    go(tmp_path, steps=8)
    assert go(tmp_path, steps=8)[1].step == 8
    with pytest.raises(CheckpointError, match="holds a run of 8 steps, but this one ends at step 7"):
        go(tmp_path, steps=7)
    assert go(tmp_path, steps=9)[1].step == 9


OWN = """import torch
class Scaled(torch.nn.Module):
    def forward(self, x):
        return {} * x
"""


def test_a_run_of_a_model_of_ones_own_goes_on_with_the_same_code_or_not_at_all(tmp_path, monkeypatch):
    "Layout and comments may change."
    monkeypatch.syspath_prepend(tmp_path)

    def train_with(source, steps):
        (tmp_path / "my_scaled.py").write_text(source)
        sys.modules.pop("my_scaled", None)
        importlib.invalidate_caches()
        model = make_model()
        model.encoder.leaf.register_module("own", importlib.import_module("my_scaled").Scaled())
        return go(tmp_path / "run", model=model, steps=steps)[1].step
    assert train_with(OWN.format(2), 4) == 4
    assert train_with("# a comment\n" + OWN.format(2), 5) == 5
    with pytest.raises(CheckpointError, match="code of my_scaled = '[0-9a-f]{12}', now"):
        train_with(OWN.format(3), 6)
    base = "from my_base import Base\nclass Scaled(Base): pass\n"
    (tmp_path / "my_base.py").write_text(OWN.format(2).replace("Scaled", "Base"))
    with pytest.raises(CheckpointError, match="code of my_base = None, now"):
        train_with(base, 6)


def test_a_checkpoint_with_the_old_name_of_the_metric_goes_on(whole, tmp_path):
    "Checkpoints of earlier versions call the negative log-likelihood surprise."
    go(tmp_path, time_budget=0.0, check_every=1)
    checkpoint, = tmp_path.glob("step-*")
    text = (checkpoint / "state.json").read_text()
    assert text.count('"nll"') == 3, "the metric, its history and its best value"
    (checkpoint / "state.json").write_text(text.replace('"nll"', '"surprise"'))
    hashes = json.loads((checkpoint / "hashes.json").read_text())
    hashes["state.json"] = hashlib.blake2b((checkpoint / "state.json").read_bytes(), digest_size=16).hexdigest()
    (checkpoint / "hashes.json").write_text(json.dumps(hashes))
    _, outcome = go(tmp_path, check_every=1)
    _, expected = go(check_every=1)
    assert timeless(outcome.history) == timeless(expected.history) and timeless([outcome.best]) == timeless([expected.best])
    assert read_checkpoint(tmp_path)[1]["best_row"]["nll"] == outcome.best["nll"]


def test_a_run_of_another_model_is_refused(whole):
    model = make_model()
    model.head[-1] = nn.Linear(6, 11)
    with pytest.raises(RuntimeError, match="size mismatch"):
        go(whole[0], model=model)


def test_a_failed_write_leaves_the_last_checkpoint(whole, tmp_path, monkeypatch):
    go(tmp_path, time_budget=0.0)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            go(tmp_path)
    assert read_checkpoint(tmp_path)[1]["step"] == 1
    go(tmp_path)
    assert_same_run(whole[0], tmp_path)


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3),
                   st.builds(lambda v: torch.tensor(v, dtype=torch.float64), st.lists(st.floats(allow_nan=False), max_size=3)))
keys = st.one_of(st.integers(-3, 3), st.text(max_size=2), st.tuples(st.integers(0, 3), st.integers(0, 3)))
states = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=3)))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b)


@settings(max_examples=200, deadline=None)
@given(states)
def test_a_state_packed_written_and_unpacked_is_the_state(state):
    tensors = {}
    text = json.dumps(pack_state(state, tensors))
    assert same(unpack_state(json.loads(text), tensors), state)


def test_what_is_no_data_is_not_packed():
    with pytest.raises(TypeError, match="state/a/1 is complex, which a checkpoint cannot hold"):
        pack_state({"a": [1, 2j]}, {})


# ---- when a run stops, and what it keeps

def scripted(values, metric="nll"):
    "A judge that says what it is told, and the weights that it saw."
    left, seen = iter(values), []

    def judge(model):
        assert not model.training
        seen.append(copy_of(model))
        return {metric: next(left)}

    return judge, seen


def test_halving_and_stopping_come_at_the_exact_checks():
    judge, seen = scripted([5, 4, 4, 6, 4.5, 3, 3, 3, 3, 3, 3, 3, 0])      # best at the second and the sixth check
    model, outcome = go(judge=judge, check_every=1, steps=None, halve_after=3, patience=4)
    # The third check in a row without improvement halves; a tie is none. After the fifth in a row it is over.
    assert [row["learning_rate"] for row in outcome.history] == [1e-2] * 5 + [5e-3] * 4 + [2.5e-3] * 2
    assert (outcome.finished, outcome.reason, outcome.step, outcome.best["step"]) == (True, "stalled", 11, 6)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in seen[5].items())
    assert not torch.equal(seen[5]["head.1.weight"], seen[10]["head.1.weight"])


def test_the_count_of_bad_checks_survives_interruptions(tmp_path):
    values = [5, 4, 4, 6, 4.5, 3, 3, 3, 3, 3, 3]
    for step, value in enumerate(values, 1):
        _, outcome = go(tmp_path, judge=scripted([value])[0], check_every=1, steps=None, halve_after=3, patience=4, time_budget=0.0)
        assert outcome.finished == (step == len(values))
    assert [row["learning_rate"] for row in outcome.history] == [1e-2] * 5 + [5e-3] * 4 + [2.5e-3] * 2


@pytest.mark.parametrize("optimizer", ["radam_lookahead", "adamw"])
def test_rewind_and_decay_survive_interruptions(optimizer, tmp_path):
    "A rewind restores weights and optimizer of the best check, also after every step has been interrupted."
    values = [5, 4, 6, 6, 3, 6, 6, 2, 9, 9, 9, 9]
    rewound = {"rewind": 3, "halve_after": 2, "patience": None, "steps": 12}
    for name, recipe in {"rewound": rewound, "decayed": {"decay": .5, "decay_after": 2, "halve_after": None, "patience": None, "steps": 12}}.items():
        straight, outcome = go(tmp_path / name, judge=scripted(values)[0], check_every=1, optimizer=optimizer, **recipe)
        for step, value in enumerate(values[:outcome.step]):
            model, part = go(tmp_path / f"{name} parts", judge=scripted([value])[0], check_every=1, optimizer=optimizer, **recipe, time_budget=0.0)
            assert part.finished == (step + 1 == outcome.step)
        assert timeless(part.history) == timeless(outcome.history)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), straight.state_dict().values()))
        rates = [row["learning_rate"] for row in outcome.history]
        assert rates == ([1e-2] * 4 + [5e-3] * 3 + [2.5e-3] * 3 if name == "rewound" else [1e-2] * 3 + [1e-2 / 2 ** k for k in range(1, 10)])
        assert outcome.reason == ("stalled" if name == "rewound" else "limit")


@pytest.mark.parametrize("optimizer", ["radam_lookahead", "adamw"])
def test_a_cosine_schedule_survives_interruptions(optimizer, tmp_path):
    recipe = {"warm_up": 3, "halve_after": None, "patience": None, "steps": 10, "check_every": 1, "optimizer": optimizer}
    straight, outcome = go(tmp_path / "straight", **recipe)
    rates = [row["learning_rate"] for row in outcome.history]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2] + [5e-3 * (1 + math.cos(math.pi * t / 7)) for t in range(7)], rel=1e-12)
    for _ in range(10):
        model, part = go(tmp_path / "parts", **recipe, time_budget=0.0)
    assert part.finished and timeless(part.history) == timeless(outcome.history)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), straight.state_dict().values()))
    with pytest.raises(CheckpointError, match="limit = 10, now 11"):
        go(tmp_path / "parts", **recipe | {"steps": 11})


@pytest.mark.parametrize("optimizer", ["radam_lookahead", "adamw"])
def test_weights_with_rates_of_their_own(optimizer, tmp_path):
    "Against torch with two groups; all schedules change both rates by one factor, also after interruptions."
    schedules = {"halved": {"halve_after": 2, "patience": None}, "rewound": {"halve_after": 2, "patience": None, "rewind": 5},
                 "decayed": {"halve_after": None, "patience": None, "decay": .5}, "cosine": {"halve_after": None, "patience": None, "warm_up": 2}}
    for name, recipe in schedules.items():
        recipe |= {"steps": 6, "check_every": 1, "optimizer": optimizer, "rates": {"head": 1e-3}}
        values = [5, 6, 6, 6, 6, 6]
        straight, outcome = go(tmp_path / name, judge=scripted(values)[0], **recipe)
        plain = go(judge=scripted(values)[0], **recipe | {"rates": None})[0]
        one = go(judge=scripted(values)[0], **recipe | {"rates": {".": 1e-3}})[0]
        for value in values:
            model, _ = go(tmp_path / f"{name} parts", judge=scripted([value])[0], **recipe, time_budget=0.0)
        tensors, state = read_checkpoint(tmp_path / f"{name} parts")
        packed = json.dumps(state["optimizer"])
        lrs = [float(found) for found in re.findall(r'"lr", ([0-9.e-]+)', packed)]
        assert len(lrs) >= 2 and math.isclose(lrs[0], 10 * lrs[1])
        same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), straight.state_dict().values())]
        assert all(same) and not all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
        assert not all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), one.state_dict().values()))
    with pytest.raises(ValueError, match="rates name no weights of the model: tail"):
        go(rates={"tail": 1.0})


@pytest.mark.parametrize("metric, better, best", [("accuracy", None, 3), ("nll", None, 1), ("f1", "max", 3), ("accuracy", "min", 1)])
def test_better_is_what_the_metric_means(metric, better, best):
    judge, seen = scripted([0.1, 0.5, 0.9, 0.9, math.nan], metric)
    model, outcome = go(judge=judge, check_every=1, steps=5, metric=metric, better=better)
    assert outcome.best["step"] == best
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in seen[best - 1].items())


def test_a_metric_that_is_never_a_number_keeps_the_last_weights():
    _, outcome = go(judge=scripted([math.nan] * 9)[0], check_every=1, steps=None, patience=2)
    assert outcome.best is None and outcome.step == 3
    _, outcome = go(judge=scripted([math.nan] * 9)[0], check_every=1, steps=6, patience=None, halve_after=2, rewind=5)
    assert outcome.best is None and outcome.step == 6, "nothing to go back to"


def test_the_history_says_what_happened(whole):
    _, _, outcome = whole
    assert [row["step"] for row in outcome.history] == [4, 8, 12, 16, 20, 24]
    assert [row["epoch"] for row in outcome.history] == [0.8, 1.6, 2.4, 3.2, 4.0, 4.8]
    assert all(set(row) == {"step", "epoch", "loss", "accuracy", "nll", "learning_rate", "seconds"} for row in outcome.history)
    assert sorted(row["seconds"] for row in outcome.history) == [row["seconds"] for row in outcome.history]
    assert outcome.best == min(outcome.history, key=lambda row: row["nll"])
    leg, = outcome.legs
    assert (leg["from_step"], leg["to_step"], leg["processes"], leg["threads"]) == (0, 25, 1, torch.get_num_threads())
    assert {name: leg[name] for name in ("commit", "dirty")} == git_state() and leg["device"] == machine("cpu")["device"]


def test_the_best_weights_can_be_had_from_the_folder(whole):
    folder, model, outcome = whole
    fresh = make_model(seed=7)
    tensors, state = read_checkpoint(folder)
    fresh.load_state_dict(tensors["best"])
    assert state["best_row"] == outcome.best and evaluate_classifier(fresh, TEST)["nll"] == outcome.best["nll"]


@pytest.mark.parametrize("options, complaint", [
    ({"precision": "fp16"}, "precision is 'fp16': Input should be 'no' or 'bf16'"), ({"optimizer": "sgd"}, "optimizer is 'sgd': Input should be 'radam_lookahead'"),
    ({"steps": None}, "one of steps, epochs and patience must end the run"), ({"decay": .9, "rewind": 2}, "exclude each other"),
    ({"warm_up": -1, "halve_after": None}, "warm_up is -1"), ({"warm_up": 5}, "warm_up excludes halve_after, decay and rewind"), ({"warm_up": 5, "halve_after": None, "rewind": 2}, "warm_up excludes"), ({"warm_up": 5, "halve_after": None, "steps": None, "patience": 3}, "warm_up needs a limit"), ({"metric": "f1"}, "say whether f1 is better"),
    ({"halve_after": None, "rewind": 2}, "rewind needs halve_after"), ({"check_every": -3}, "check_every is -3"), ({"halve_after": 0}, "halve_after is 0"), ({"rewind": 0}, "rewind is 0"), ({"better": "more"}, "better is 'more'"),
    ({"learning_rate": 0.0}, "learning_rate is 0.0: Input should be greater than 0"), ({"steps": 2.5}, "steps is 2.5: "), ({"learning_rat": 1.0}, "Did you mean 'learning_rate'"),
    ({"clip": -1.0, "weight_decay": -1.0}, "weight_decay is -1.0: .* greater than or equal to 0; clip is -1.0: "), ({"judge": lambda model: {"f1": 1.0}}, r"gave \['f1'\], but the metric is nll")])
def test_recipes_that_cannot_be_meant_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        go(**options)


@pytest.mark.parametrize("bound", [{"steps": 2}, {"epochs": 1}, {"time_budget": 0.0}, {"judge": judge, "steps": 5}])
def test_a_training_without_a_bound_is_refused(bound):
    "Without a judge it never stalls, whatever its patience."
    batches = BucketLoader(EXAMPLES[30:70], 8, collate_listops, seed=1)
    with pytest.raises(ValueError, match="this training would never end: give steps, epochs, time_budget or judge"):
        train(make_model(), batches)
    assert train(make_model(), batches, **bound).step > 0


def test_a_training_that_ends_before_its_first_check_is_refused():
    batches = BucketLoader(EXAMPLES[30:70], 8, collate_listops, seed=1)
    with pytest.raises(ValueError, match="the training ends at step 3, before its first check at step 5"):
        train(make_model(), batches, judge, steps=3)


def test_every_setting_of_a_training_has_a_description():
    assert all(field.description for field in TrainConfig.model_fields.values())


# ---- a step

def test_a_loss_or_a_gradient_that_is_no_number_stops_the_run(tmp_path):
    def spoiled(spoil):
        count = []

        def loss(model, batch):
            count.append(1)
            value = classification_loss(model, batch)
            return value if len(count) < 5 else value + spoil(model.head[-1].bias.sum())
        return loss

    for name, spoil in (("loss", lambda x: x * math.nan), ("gradient", lambda x: (x - x).sqrt())):
        with pytest.raises(TrainingError, match="step 5: the loss is .*, its gradient's norm .*nan.*keeps the last checkpoint"):
            go(tmp_path / name, loss=spoiled(spoil))
        (tensors, state) = read_checkpoint(tmp_path / name)
        assert state["step"] == 4 and all(tensor.isfinite().all() for tensor in tensors["model"].values())


def test_a_step_is_the_optimiser_s_own():
    "The loop against eleven lines of plain torch: clipping, decay and Lookahead included."
    model, _ = go(model=make_model(0.0), judge=None, steps=12, clip=0.1)
    plain = make_model(0.0).train()
    parameters = list(plain.parameters())
    optimizer = torch.optim.RAdam(parameters, 1e-2, weight_decay=1e-2, decoupled_weight_decay=True)
    slow = [tensor.detach().clone() for tensor in parameters]
    batches = BucketLoader(EXAMPLES[30:70], 8, collate_listops, seed=1)
    for step in range(1, 13):
        optimizer.zero_grad()
        classification_loss(plain, batches.next()).backward()
        assert nn.utils.clip_grad_norm_(parameters, 0.1) > 0.1
        optimizer.step()
        if step % 5 == 0:
            with torch.no_grad():
                for fast, anchor in zip(parameters, slow):
                    fast.copy_(anchor + 0.8 * (fast - anchor))
                    anchor.copy_(fast)
    for tensor, other in zip(model.parameters(), parameters):
        assert_close(tensor, other)


def test_frozen_and_unused_parameters():
    "Frozen ones stay as they are; one that took no part in a step has gradient zero there."
    model = make_model()
    model.embedding.weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3))
    frozen = model.embedding.weight.clone()
    go(model=model, judge=None, steps=10)
    assert torch.equal(model.embedding.weight, frozen) and not torch.equal(model.in_proj.weight, make_model().in_proj.weight)
    decayed = (1 - 1e-4) ** 5                                   # five steps; then Lookahead goes 0.8 of the way
    expected = 1 + 0.8 * (decayed - 1)
    assert_close(model.spare.detach(), torch.full((3,), expected * (1 + 0.8 * (decayed - 1))))


def test_lower_precision_trains_in_it_and_keeps_the_weights_whole():
    kinds = set()

    def loss(model, batch):
        out = model(batch.ids, batch.mask, trees=batch.trees)
        kinds.add(out.logits.dtype)
        return nn.functional.cross_entropy(out.logits.float(), batch.labels)

    model, outcome = go(precision="bf16", loss=loss)
    assert kinds == {torch.bfloat16} and all(tensor.dtype == torch.float32 for tensor in model.parameters())
    exact = go()[1]
    assert outcome.history[-1]["loss"] != exact.history[-1]["loss"]
    assert outcome.history[-1]["loss"] == pytest.approx(exact.history[-1]["loss"], rel=0.02)


def test_the_bar_is_silent_off_a_terminal(capfd):
    go(steps=4)
    assert capfd.readouterr() == ("", "")


# ---- two processes

def test_two_processes_come_to_what_one_does(tmp_path):
    "Launched by accelerate, each in a leg of one step and another to the end."
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
               "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "tests.training", tmp_path / "two"]
    (tmp_path / "two").mkdir()
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads((tmp_path / "two" / "outcome.json").read_text())
    _, one = go_together(tmp_path / "one")
    assert [leg["processes"] for leg in two["legs"]] == [2, 2] and [leg["from_step"] for leg in two["legs"]] == [0, 1]
    (tensors, _), (others, other) = read_checkpoint(tmp_path / "one"), read_checkpoint(tmp_path / "two")
    for kind in tensors:
        for name, tensor in tensors[kind].items():
            assert_close(tensor, others[kind][name], rtol=0, atol=1e-12)
    for row, twin in zip(one.history, two["history"], strict=True):
        assert {**row, "seconds": 0} == pytest.approx({**twin, "seconds": 0}, abs=1e-12)
    assert len(set(other["random"]["cpu"])) == 2                        # each process draws for itself
    with pytest.raises(CheckpointError, match="processes = 2, now 1"):
        go_together(tmp_path / "two")


# ---- small things

def test_outside_git_nothing_is_claimed(monkeypatch, tmp_path):
    assert len(git_state()["commit"]) == 40 if (ROOT / ".git").exists() else git_state()["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))                   # no git there
    assert git_state() == {"commit": None, "dirty": None}


def test_the_machine_is_named():
    found = machine("cpu", 2)
    assert found["device"] and found["threads"] == torch.get_num_threads() and found["processes"] == 2
