"""Many runs from one file: what is refused, what is tried again, and what survives a kill at any moment."""
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvnnbook.lab.run import holder, recorded_runs
from rvnnbook.lab.records import identity, latest, read_records
from rvnnbook.lab.settings import ParameterError, check_model, check_parameters, open_notebook, parse_value
from rvnnbook.lab.sweep import (_cancel_queued, Order, SweepSettings, SweepTask, attempt_run, check_tasks, command_of, make_plan, make_run, outcome,
                                poll_states, read_sweep_text, rows)

ROOT = Path(__file__).resolve().parents[1]
# A run without PyTorch: it counts to `steps` in a file, goes on from there, and leaves a record whose number depends on every step.
LIGHT = {
    "parameters": "profile = 'smoke'\nseed = 0\nsteps = 40\ntrouble = 'none'\nminutes = 0.0",
    "gate": "from rvnnbook.lab.settings import strict\nrun = strict(globals(), {'smoke': {}, 'cpu': {}}, seed=range(99), steps=range(1, 999),"
            " trouble={'none', 'raise', 'die', 'later', 'stop', 'refuse'}, minutes=(0, 99))",
    "run": """
import json, os, signal, sys, time
from datetime import datetime, timezone
from rvnnbook.lab.run import run_folder
from rvnnbook.lab.records import append, signature
folder = run_folder("light", run, ("minutes",))
if folder:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts", "a") as file:
        file.write(f"{os.getpid()}\\n")
class Ends(Exception):
    def __init__(self, status):
        self.status = status
state = [0, run.seed]
if folder and (folder / "state").exists():
    state = json.loads((folder / "state").read_text())
while state[0] < run.steps:
    state = [state[0] + 1, (state[1] * 48271 + state[0]) % 2147483647]
    if folder:
        (folder / "part").write_text(json.dumps(state))
        os.replace(folder / "part", folder / "state")
    time.sleep(0.01)
    if state[0] == 5 and run.trouble != "none":
        starts = len((folder / "starts").read_text().split())
        if run.trouble in ("raise", "die", "refuse"): (folder / "state").unlink()
        if run.trouble == "raise": 1 / 0
        if run.trouble == "die": os.kill(os.getpid(), 9)
        if run.trouble == "later" and starts < 3: (folder / "state").unlink(); 1 / 0
        if run.trouble == "stop": raise Ends(75)
        if run.trouble == "refuse": raise Ends(2)
record = {"experiment": "light", "profile": run.profile, "seed": run.seed,
          "parameters": {"steps": run.steps, "trouble": run.trouble}, "version": "0.1.0", "legs": [], "commit": None, "dirty": None,
          "modules": {}, "device": "none", "threads": 1, "libraries": {"python": "3", "torch": "none"}, "wall_s": 0.0,
          "peak_memory_mb": 0.0, "metrics": {"count": {"value": state[1], "count": 1}}, "rule": "last", "finished": True, "trace": None,
          "recorded": datetime.now(timezone.utc).isoformat(timespec="microseconds")}
if folder:
    append({"id": signature(record), **record})
"""}


def cell(source, *tags):
    return {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": source}


NOTEBOOK = {"cells": [cell(LIGHT["parameters"], "parameters"), cell(LIGHT["gate"]), cell(LIGHT["run"], "run")]}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    monkeypatch.delenv("RVNNBOOK_RUNS", raising=False)          # a run in this process may have set it
    return make_clone(tmp_path / "clone")


def make_clone(folder):
    (folder / "nbs" / "experiments").mkdir(parents=True)
    (folder / "_toc.yml").write_text("")
    (folder / "nbs" / "experiments" / "light.ipynb").write_text(json.dumps(NOTEBOOK))
    return folder


def write(clone, name="some", **asked):
    asked = {"experiment": "nbs/experiments/light.ipynb", "profile": "cpu", "notebook": False, "workers": 2, "backoff": 0.05, **asked}
    (clone / f"{name}.json").write_text(json.dumps(asked))
    return f"{name}.json"


def start(clone, *words, **environment):
    "A sweep that hears all signals, even where the tests were begun in the background or below `nohup`."
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    return subprocess.Popen([sys.executable, "-m", "rvnnbook", "sweep", *map(str, words)], cwd=clone, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
                            preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)])


def sweep(clone, *words, **environment):
    process = start(clone, *words, **environment)
    out, said = process.communicate(timeout=200)
    return process.returncode, out, said


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def results(clone):
    "Metrics by identity; an error if a run has two records."
    found = {}
    for record in read_records("light", clone / "nbs" / "results"):
        key = identity("light", record["parameters"], record["seed"])
        assert key not in found, "a run was made twice"
        found[key] = record["metrics"]
    return found


def left_over(clone):
    "Processes that hold the lock of a run."
    return [process for lock in clone.glob("runs/*.lock") if (process := holder(lock))]


def value(seed, steps=40):
    for step in range(steps):
        seed = (seed * 48271 + step) % 2147483647
    return seed


def steps_done(clone):
    total = 0
    for path in clone.glob("runs/light-*/state"):
        total += json.loads(path.read_text())[0]
    return total


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return found


# Files

@pytest.mark.parametrize("asked, said", [
    ({"grd": {}}, "unknown setting 'grd'. Did you mean 'grid'?"),
    ({"grid": {"seed": []}}, "grid is {'seed': []}: List should have at least 1 item"),
    ({"zip": {"seed": [1], "steps": [1, 2]}}, "all of one length"),
    ({"grd": {}, "retries": 0, "limit": -1}, "retries is 0: Input should be greater than or equal to 1; limit is -1: Input should be greater than 0"),
    ({"workers": "many"}, "workers is 'many': Input should be 'cores' or Input should be a valid integer"), ({"workers": True}, "workers is True"), ({"retries": 0}, "retries is 0"),
    ({"limit": 0}, "limit is 0: Input should be greater than 0"), ({"backoff": -1}, "backoff is -1"), ({"limit": "1h"}, "limit is '1h'"), ({"notebook": 1}, "notebook is 1"),
    ({"grid": {"seed": [0, 100]}}, "run 2 (seed=100): seed is 100: Input should be less than 99"),
    ({"grid": {"sede": [0]}}, "Did you mean 'seed'?"),
    ({"grid": {"seed": ["0"]}}, "seed is '0': Input should be a valid integer"),
    ({"list": [{"seed": 1}, {"steps": 40, "seed": 1}]}, "is the same as run 1"),
    ({"list": [{"seed": 1}, {"minutes": 5, "seed": 1}]}, "is the same as run 1"),
    ({"grid": {"seed": [1]}, "parameters": {"seed": 2}}, "'seed' is given in two places"),
    ({"profile": "cpu", "grid": {"profile": ["smoke"]}}, "'profile' is given in two places"), ({"profile": "cpu", "parameters": {"profile": "smoke"}}, "'profile' is given in two places"),
    ({"experiment": "nbs/none.ipynb"}, "there is no notebook nbs/none.ipynb"),
])
def test_a_sweep_that_cannot_be_meant_is_refused_before_anything_starts(clone, monkeypatch, asked, said):
    monkeypatch.chdir(clone)
    write(clone, **asked)
    before = files(clone)
    with pytest.raises(ParameterError) as error:
        make_plan("some.json")
    assert said in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("some.json: ")
    assert files(clone) == before


def test_the_sweeps_of_the_readme_are_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    night, small = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for parameters in (re.search("parameters: .*\n", night)[0], small):
        (tmp_path / "night.yml").write_text(re.sub("parameters: .*\n", lambda _: parameters, night))
        plan = make_plan(tmp_path / "night.yml")
        assert len(plan.tasks) == 6 and plan.settings["workers"] == 2 and {task.run.profile for task in plan.tasks} == {"cpu"}
        assert all(f"dim: {task.given['dim']}" in parameters for task in plan.tasks)


@pytest.mark.parametrize("text, said", [
    ("a: 1\na: 2", "'a' appears twice"), ("a: [1", "invalid YAML"), ("a: {b: 1, b: 2}", "'b' appears twice"), ("", "Input should be a valid dictionary"),
    ("a: &x [*x]", "invalid YAML"), ("? [1]\n: 2", "invalid YAML"), ("a: 1\n\tb: 2", "invalid YAML")])
def test_broken_yaml_is_an_error_in_one_line(text, said):
    with pytest.raises(ParameterError, match=said) as error:
        check_model(SweepSettings, read_sweep_text(text))
    assert "\n" not in str(error.value)


def test_yaml_guesses_no_types():
    text = "a: 1e-3\nb: 5:15\nc: 'no'\nd: no\ne: true\nf: None\ng: '1'\nh: 0x10\ni:\nj: 2026-01-01\nk: [1, a]"
    assert read_sweep_text(text) == {"a": 0.001, "b": "5:15", "c": "no", "d": "no", "e": True, "f": None, "g": "1", "h": 16, "i": None,
                                     "j": "2026-01-01", "k": [1, "a"]}


names = st.sampled_from(["a", "b", "c", "d", "e"])
lists = st.dictionaries(names, st.lists(st.integers(), min_size=1, max_size=3), max_size=2)


@given(lists, st.lists(st.dictionaries(names, st.integers(), max_size=2), max_size=3), lists)
def test_rows_are_the_product_or_refused(grid, listed, zipped):
    zipped = {name: values[:1] * 2 for name, values in zipped.items()}
    try:
        found = rows(check_model(SweepSettings, {"experiment": "x", "grid": grid, "list": listed, "zip": zipped}))
    except ParameterError:
        assert any(set(one) & set(other) for one, other in itertools.combinations([grid, zipped], 2)) or any(
            set(row) & (set(grid) | set(zipped)) for row in listed)
        return
    expected = max(1, len(listed)) * (2 if zipped else 1)
    for values in grid.values():
        expected *= len(values)
    assert len(found) == expected
    assert all(set(row) >= set(grid) | set(zipped) for row in found)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()))
def test_a_value_arrives_as_it_was_asked_for(value):
    plan = type("plan", (), {"experiment": "x", "settings": {"notebook": True, "limit": None}})
    got = parse_value(command_of(plan, SweepTask("", "", {"name": value}, None))[-1].removeprefix("name="))
    assert got == value and type(got) is type(value)


def test_records_of_this_book_are_recognised(monkeypatch):
    "What the gate makes of a record's parameters has the identity of the record, for the newest run of each experiment."
    monkeypatch.chdir(ROOT)
    seen = 0
    for path in sorted((ROOT / "nbs" / "results").glob("*.jsonl")):
        notebook = ROOT / "nbs" / "experiments" / path.name.replace(".jsonl", ".ipynb")
        if not notebook.exists() or path.stem.startswith(("bench", "faults")):
            continue                                  # those are also made by other commands
        found = latest(read_records(path.stem, path.parent))
        record = ([one for one in found if not one.get("revalidated")] or found)[-1]
        known = vars(check_parameters(open_notebook(notebook), {"profile": record["profile"]}))
        given = {name: value for name, value in record["parameters"].items() if name in known}
        task, = check_tasks(open_notebook(notebook), path.stem, [{**given, "profile": record["profile"], "seed": record["seed"]}])
        assert set(known) - {"profile", "seed", "minutes", "measure_now"} <= set(record["parameters"]), path
        assert task.key in recorded_runs(path.stem, vars(task.run)) or not record["finished"]
        seen += 1
    assert seen >= 4


# States

def test_a_dead_worker_is_a_failure(tmp_path):
    from concurrent.futures import Future
    future = Future()
    future.set_exception(OSError("No space left\non device"))
    assert outcome(future, tmp_path / "stop") == ("failed", "OSError: No space left on device")


def test_a_run_that_ends_by_the_signal_of_a_stop_is_stopped(tmp_path):
    "Before a run handles signals, SIGTERM ends it at once."
    (tmp_path / "stop").touch()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    order = Order(command, tmp_path / "log.txt", tmp_path / "stop", {}, str(tmp_path))
    assert make_run(order).word == "stopped"
    (tmp_path / "stop").unlink()
    order = order._replace(command=[sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"])
    assert make_run(order) == ("failed", "died of signal 15")


def test_a_run_that_ignores_a_stop_is_killed(tmp_path, monkeypatch):
    from rvnnbook.lab import sweep as module
    monkeypatch.setattr(module, "KILL_AFTER", 1.0)
    (tmp_path / "stop").touch()
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    order = Order([sys.executable, "-c", deaf], tmp_path / "log.txt", tmp_path / "stop", {}, str(tmp_path))
    assert make_run(order).word == "stopped"


def test_what_a_run_prints_is_in_its_log_at_once(tmp_path):
    "Errors, too; the last line says how the run ended."
    text = "import sys, time\nprint('out')\nprint('error', file=sys.stderr)\ntime.sleep(600)"
    order = Order([sys.executable, "-c", text], tmp_path / "log.txt", tmp_path / "stop", {}, str(tmp_path))
    ended = []
    thread = threading.Thread(target=lambda: ended.append(make_run(order)))
    thread.start()
    try:
        until(lambda: order.log.exists() and order.log.read_text() == "out\nerror\n", 20)
        assert not ended
    finally:
        order.stop.touch()
        thread.join()
    assert ended == [("stopped", "died of signal 15")] and order.log.read_text() == "out\nerror\ndied of signal 15\n"


def test_a_lock_is_recognised_while_its_holder_prints_into_the_same_log(tmp_path):
    "The holder is left over from a killed sweep, whose log the new sweep continues."
    text = "import sys; print('rvnnbook: this run is locked by process 7', file=sys.stderr); print('step'); sys.exit(75)"
    order = Order([sys.executable, "-c", text], tmp_path / "log.txt", tmp_path / "stop", {}, str(tmp_path))
    assert make_run(order) == ("stopped", "this run is locked by process 7")


def test_a_stop_that_comes_early_is_not_lost(clone, monkeypatch):
    "A signal may come as soon as there is a handler."
    from rvnnbook.lab import sweep as module
    monkeypatch.chdir(clone)
    plan, handle = make_plan(write(clone, grid={"seed": [0]})), module.handle_signals

    @contextlib.contextmanager
    def struck(*arguments):
        with handle(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            yield
    monkeypatch.setattr(module, "handle_signals", struck)
    assert [state.word for state in module.sweep(plan).values()] == ["stopped"] and not results(clone)


def test_jobs_in_the_queue_of_slurm_are_cancelled_once():
    cancelled = []
    class Job:
        def __init__(self, state): self.state = state
        def cancel(self, check): cancelled.append((self, check))
    waiting, running = Job("PENDING"), Job("RUNNING")
    assert _cancel_queued([waiting, running]) == [waiting] and cancelled == [(waiting, False)]


def test_an_error_of_the_sweep_itself_stops_its_runs(clone, monkeypatch):
    from rvnnbook.lab.sweep import sweep as make
    monkeypatch.chdir(clone)
    plan = make_plan(write(clone, workers=2, grid={"seed": [0, 1]}, parameters={"steps": 998}))
    def fail(*_):
        raise OSError(28, "No space left on device")
    before = signal.signal(signal.SIGUSR1, fail)
    threading.Thread(target=lambda: until(lambda: steps_done(clone) > 20) and os.kill(os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(OSError, match="No space left"):
            make(plan)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps_done(clone) < 1996 and not results(clone) and left_over(clone) == []


def test_a_run_that_starts_below_the_root_sees_the_records(clone, monkeypatch):
    "Also where no sweep asks for it; a run whose record is gone is made again."
    monkeypatch.chdir(clone)
    file = write(clone, grid={"seed": [0]})
    assert sweep(clone, file)[0] == 0
    plan = make_plan(file)
    for place in (clone, clone / "nbs"):
        command = command_of(plan, plan.tasks[0])
        command[4] = str(clone / plan.experiment)
        log = clone / "log.txt"
        state = attempt_run(Order(command, log, clone / "stop", {"PYTHONPATH": str(ROOT)}, str(place)))
        assert state == ("finished", "") and log.read_text().endswith("this run has a record\n")
    assert len(results(clone)) == 1
    (clone / "nbs/results/light.jsonl").unlink()
    assert poll_states(plan)[plan.tasks[0].key].word == "to do"
    assert sweep(clone, file)[0] == 0 and len(results(clone)) == 1


def test_a_job_of_slurm_is_requeued_once_for_several_signals(tmp_path):
    code = """
import os, signal, sys, threading
from pathlib import Path
from rvnnbook.lab.sweep import Order, SlurmRun
folder, calls = Path(sys.argv[1]), []
def requeue(number, frame):
    calls.append(number)
    for again in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        os.kill(os.getpid(), again)
    (folder / "stop").touch()
signal.signal(signal.SIGUSR2, requeue)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
run = SlurmRun(Order([sys.executable, "-c", "import time; time.sleep(100)"], folder / "log.txt", folder / "stop", {}, str(folder)))
print(run().word, calls == [signal.SIGTERM])
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "stopped True\n", done.stderr


def test_a_failure_is_still_told_when_the_sweep_stops_before_the_next_attempt(tmp_path):
    stop = tmp_path / "stop"
    command = [sys.executable, "-c", f"open({str(stop)!r}, 'w'); raise SystemExit('no such data')"]
    state = attempt_run(Order(command, tmp_path / "log.txt", stop, {}, str(tmp_path), retries=3, backoff=60.0))
    assert state == ("failed", "no such data")
    assert attempt_run(Order(command, tmp_path / "log.txt", stop, {}, str(tmp_path))) == ("stopped", "not begun")


# Real runs

def attempts(clone):
    "How often each run was tried."
    return sorted(len(path.read_text().split()) for path in clone.glob("runs/light-*/starts"))


def test_a_sweep_tries_again_gives_up_and_goes_on(clone):
    file = write(clone, list=[{"seed": 0}, {"seed": 1}] + [{"trouble": word} for word in ("raise", "die", "later", "refuse", "stop")])
    code, out, said = sweep(clone, file, "--dry-run")
    assert code == 0 and out.endswith("7 to do\n") and "runs" not in os.listdir(clone)
    code, out, said = sweep(clone, file)
    assert code == 75 and said.startswith("rvnnbook: stopped") and said.count("\n") == 1, said
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "ZeroDivisionError: division by zero" in lines["trouble=raise"] and "died of signal 9" in lines["trouble=die"]
    assert all("  failed  " in lines[f"trouble={word}"] for word in ("raise", "die"))
    assert "refused" in lines["trouble=refuse"] and "finished" in lines["trouble=later"] and "stopped" in lines["trouble=stop"]
    assert attempts(clone) == [1, 1, 1, 1, 3, 3, 3]
    logs = "".join(path.read_text() for path in (clone / "runs/sweeps/some").glob("*.txt"))
    assert logs.count("Traceback") == 5 and logs.count("rvnnbook: ") == 7
    shown = sweep(clone, file, "--status")[1]
    assert shown.endswith("3 finished, 2 failed, 1 refused, 1 stopped\n") and "cell 3 raised ZeroDivisionError: division by zero" in shown and "died of signal 9" in shown
    assert len(results(clone)) == 3 and {"value": value(1), "count": 1} in [found["count"] for found in results(clone).values()]
    code, out, _ = sweep(clone, file)                    # what was stopped goes on, and what failed is tried again
    assert code == 1 and attempts(clone) == [1, 1, 2, 2, 3, 6, 6] and len(results(clone)) == 4


def test_killed_at_any_moment_nothing_is_lost_or_doubled(clone):
    "The sweep dies, sometimes with its runs, sometimes alone; what is left over finishes under its lock."
    generator = random.Random(0)
    file = write(clone, grid={"seed": [0, 1, 2, 3]})
    marks = sorted(generator.uniform(0, 155) for _ in range(6))
    for number, mark in enumerate(marks):
        process = start(clone, file)
        until(lambda: process.poll() is not None or steps_done(clone) >= mark)
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        process.communicate()
        if number % 2:
            for process in left_over(clone):
                os.kill(process, signal.SIGKILL)
    code, out, said = sweep(clone, file)
    assert code == 0 and out.endswith("all runs are finished\n"), (out, said)
    assert sorted(found["count"]["value"] for found in results(clone).values()) == sorted(value(seed) for seed in range(4))
    before = files(clone), attempts(clone)
    assert sweep(clone, file)[0] == 0 and (files(clone), attempts(clone)) == before      # finished: nothing is begun


def test_two_sweeps_and_a_limit(clone):
    file = write(clone, grid={"seed": [0, 1]}, parameters={"steps": 900})
    process = start(clone, file)
    until(lambda: steps_done(clone) > 20)
    code, _, said = sweep(clone, file)
    assert code == 75 and f"this sweep is locked by process {process.pid} (" in said and said.count("\n") == 1
    assert "running" in sweep(clone, file, "--status")[1]
    process.terminate()
    out, said = process.communicate(timeout=60)
    assert process.returncode == 75 and said == "rvnnbook: stopped; run the same command again to resume\n" and results(clone) == {}
    made = steps_done(clone)
    code, out, said = sweep(clone, write(clone, grid={"seed": [0, 1]}, parameters={"steps": 900}, limit=2))
    assert code == 75 and made <= steps_done(clone) < 1800 and "stopped" in out, (out, said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_sweep_and_its_runs_save_themselves(clone, number):
    process = start(clone, write(clone, grid={"seed": [0]}, parameters={"steps": 300}))
    until(lambda: steps_done(clone) > 20)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 75 and said == "rvnnbook: stopped; run the same command again to resume\n", (out, said)
    assert 20 < steps_done(clone) < 300 and results(clone) == {}


def test_a_run_that_was_killed_with_its_sweep_goes_on(clone):
    file = write(clone, grid={"seed": [0, 1]}, parameters={"steps": 900}, workers=2)
    process = start(clone, file)
    until(lambda: steps_done(clone) > 20)
    assert "2 running" in sweep(clone, file, "--status")[1]
    process.kill()
    process.communicate()
    assert "2 running" in sweep(clone, file, "--status")[1]             # they go on without it
    for process in left_over(clone):
        os.kill(process, signal.SIGKILL)
    until(lambda: "2 to do" in sweep(clone, file, "--status")[1])
    assert sweep(clone, file)[0] == 0 and len(results(clone)) == 2


def test_a_clock_that_jumps_changes_nothing(clone, tmp_path):
    "A clock that goes a day forward or back at every look."
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(
        "import random, time\nreal = time.time\ntime.time = lambda: real() + random.choice((-86400, 86400, 10**9))\n")
    file = write(clone, list=[{"seed": 0}, {"seed": 1, "trouble": "later"}])
    began = time.monotonic()
    code, out, said = sweep(clone, file, PYTHONPATH=f"{tmp_path / 'clock'}:{ROOT}")
    assert code == 0 and time.monotonic() - began < 60, said
    assert len(results(clone)) == 2


def test_smoke_stays_below_build_and_progress_off_a_terminal_is_silent(clone):
    file = write(clone, profile="smoke", grid={"seed": [0, 1]})
    before = files(clone)
    code, out, said = sweep(clone, file)
    assert code == 0 and said == ""
    assert all(name.startswith("build/") for name in set(files(clone)) - set(before))
    write(clone, profile=None, grid={"seed": [0, 1]})                  # the notebook says smoke where the file says nothing
    code, out, _ = sweep(clone, file)
    assert code == 0 and out.endswith("all runs are finished\n")
    assert all(name.startswith("build/") for name in set(files(clone)) - set(before))
    assert sweep(clone, file, "--status")[1].endswith("2 finished\n")
    write(clone, profile="smoke", parameters={"trouble": "raise"})     # smoke runs leave no record and hold no lock
    assert sweep(clone, file)[2] == "rvnnbook: 1 of 1 runs failed\n"
    assert "cell 3 raised" in (shown := sweep(clone, file, "--status")[1]) and shown.endswith("1 failed\n")
    write(clone, profile="smoke", parameters={"steps": 900})
    process = start(clone, file)
    until(lambda: "1 running" in sweep(clone, file, "--status")[1])
    process.terminate()
    process.communicate(timeout=60)
    assert sweep(clone, file, "--status")[1].endswith("1 stopped\n")


def test_progress_on_a_terminal_is_one_line(clone):
    import fcntl
    import pty
    import struct
    import termios
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen([sys.executable, "-m", "rvnnbook", "sweep", write(clone, grid={"seed": [0, 1]}, workers=1)], cwd=clone,
                               stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += (piece := os.read(master, 4096))
        except OSError:
            break
        if not piece:
            break
    assert process.wait() == 0
    lines = shown.decode().replace("\x1b[K", "").split("\r")
    assert any(" 1/2 " in line for line in lines) and any(" 2/2 " in line for line in lines), lines
    assert shown.count(b"\n") == 1


# Ray, on two nodes of this machine

@pytest.fixture(scope="module")
def two_nodes():
    "The address of a cluster of two nodes with one core each, without dashboard and with small object stores."
    from ray.cluster_utils import Cluster
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))                 # its workers import this package
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name in [name for name in os.environ if name.startswith("RVNNBOOK_")]:
            patch.delenv(name)
        node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        for attempt in range(3):              # Ray gives a node thirty seconds to start, which a busy machine may exceed
            cluster = Cluster()
            try:
                cluster.add_node(**node)
                cluster.add_node(**node, resources={"second": 2})
                break
            except Exception:
                cluster.shutdown()
                if attempt == 2:
                    raise
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


def test_ray_loses_a_worker_and_no_run(clone, monkeypatch, two_nodes):
    from rvnnbook.lab.sweep import sweep as make
    monkeypatch.chdir(clone)
    plan = make_plan(write(clone, grid={"seed": [0, 1, 2]}, parameters={"steps": 200}))
    workers = []

    def strike():
        until(lambda: steps_done(clone) > 20)
        workers.extend(psutil.Process(run).ppid() for run in left_over(clone))
        os.kill(min(workers), signal.SIGKILL)
    thread = threading.Thread(target=strike)
    thread.start()
    found = make(plan, engine="ray", address=two_nodes)
    thread.join()
    assert workers and [state.word for state in found.values()] == ["finished"] * 3
    assert sorted(found["count"]["value"] for found in results(clone).values()) == sorted(value(seed, 200) for seed in range(3))


def test_sigterm_ends_a_sweep_on_ray_with_checkpoints(clone, two_nodes):
    file = write(clone, grid={"seed": [0, 1]}, parameters={"steps": 600})
    process = start(clone, file, "--engine", "ray", "--address", two_nodes)
    until(lambda: steps_done(clone) > 20)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 75 and said.endswith("rvnnbook: stopped; run the same command again to resume\n"), (out, said)
    assert 20 < steps_done(clone) < 1200 and results(clone) == {}


def test_ray_gets_custom_resources(clone, two_nodes):
    "Only the second node has the resource."
    file = write(clone, grid={"seed": [0, 1]}, resources={"num_cpus": 1, "second": 1})
    assert sweep(clone, file, "--engine", "ray", "--address", two_nodes)[0] == 0 and len(results(clone)) == 2
    code, _, said = sweep(clone, write(clone, resources={"num_cpus": "many"}), "--engine", "ray", "--address", two_nodes)
    assert code == 2 and "resources: " in said


# submitit, with processes of this machine in the place of Slurm

def submitted(clone):
    "Processes of submitit that execute the jobs of a clone."
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "submitit.core._submit" in words and str(clone) in " ".join(words):
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_preempted_job_is_requeued_and_goes_on(clone, number):
    file = write(clone, grid={"seed": [0]}, parameters={"steps": 400}, resources={"timeout_min": 5})
    process = start(clone, file, "--engine", "slurm", "--address", "local")
    until(lambda: steps_done(clone) > 20)
    job, = submitted(clone)
    os.kill(job, number)
    until(lambda: submitted(clone) and job not in submitted(clone))
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0 and out.endswith("all runs are finished\n"), (out, said)
    assert [found["count"]["value"] for found in results(clone).values()] == [value(0, 400)]
    log, = (clone / "runs/sweeps/some").glob("*.txt")
    assert len((clone / "runs").glob("light-*/starts").__next__().read_text().split()) == 2, log.read_text()     # it went on


def test_sigterm_ends_a_sweep_on_submitit_with_checkpoints(clone):
    file = write(clone, grid={"seed": [0, 1]}, parameters={"steps": 600})
    process = start(clone, file, "--engine", "slurm", "--address", "local")
    until(lambda: steps_done(clone) > 20)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 75 and said.endswith("rvnnbook: stopped; run the same command again to resume\n"), (out, said)
    assert 20 < steps_done(clone) < 1200 and results(clone) == {}
    code, _, said = sweep(clone, write(clone, resources={"timeout": 5}), "--engine", "slurm", "--address", "local")
    assert code == 2 and "resources: " in said and said.count("\n") == 1
