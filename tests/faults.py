"Sweeps that are killed, files that are damaged and disks that are full, for test_faults."
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from rvnnbook.lab.run import holder
from rvnnbook.lab.records import RecordError, check_results, identity, read_records


TINY_PARAMETERS = '''profile = "smoke"     # "smoke" or "cpu"; only the latter keeps anything
seed = 0              # of the weights and the order of the data
dim = 4               # D, width of a state
steps = 20            # of training
pause = 0.0           # seconds that a step is made longer by'''

TINY_GATE = '''from rvnnbook.lab.settings import strict

run = strict(globals(), {"smoke": {}, "cpu": {}}, seed=range(2**31), dim=range(2, 99),
             steps=range(1, 10**4), pause=(0, 60))'''


TINY_RUN = '''import time

import torch

from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import VOCABULARY, collate_listops, unique_draws
from rvnnbook.lab.run import run_folder
from rvnnbook.lab.records import append, end_to_end, make_trace, new_record
from rvnnbook.origin import code_hashes
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.optimization import classification_loss, evaluate_classifier
from rvnnbook.tasks.classify import Classifier

modules = code_hashes()
torch.manual_seed(run.seed)
torch.set_num_threads(1)
examples = [e for e in unique_draws(150, seed=0) if len(e.tokens) <= 12][:32]
model = Classifier(create_encoder("rvnn", dim=run.dim, dropout=0.1), len(VOCABULARY), 10)

def loss(model, batch):
    time.sleep(run.pause)
    return classification_loss(model, batch)

def judge(model):
    return evaluate_classifier(model, BucketLoader(examples[:8], 8, collate_listops))

folder = run_folder("tiny", run)
outcome = train(model, BucketLoader(examples[8:], 8, collate_listops, seed=run.seed), judge,
                loss=loss, folder=folder and folder / "stage-1", steps=run.steps, check_every=10,
                save_every=0.0, patience=None, seed=run.seed)'''


TINY_RECORD = '''legs, history = end_to_end([outcome])
weights = torch.cat([value.double().flatten() for value in model.state_dict().values()])
scores = {**judge(model), "weights": float(weights @ torch.arange(1.0, len(weights) + 1).double()),
          "count": 8}
trace = make_trace(history)
record = new_record("tiny", vars(run), profile=run.profile, seed=run.seed, modules=modules,
                    metrics={"held out": scores}, rule="best validation", legs=legs, trace=trace)
if folder and outcome.finished:
    append(record, trace)
record["metrics"]'''


def make_clone(
    folder: Path,            # made if it is not there
    seeds: int,              # runs of the sweep
    **parameters,            # of the tiny experiment: steps, pause
) -> Path:                   # the folder
    "Something that looks like a clone of the book, with one tiny experiment and one sweep."
    def cell(source, tag):
        return {"cell_type": "code", "id": tag, "execution_count": None, "outputs": [],
                "metadata": {"tags": [tag] if tag != "gate" else []}, "source": source}
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    cells = [cell(TINY_PARAMETERS, "parameters"), cell(TINY_GATE, "gate"),
             cell(TINY_RUN, "run"), {**cell(TINY_RECORD, "run"), "id": "record"}]
    chapter = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel},
               "cells": cells}
    asked = {"experiment": "nbs/experiments/tiny.ipynb", "profile": "cpu", "notebook": False,
             "workers": 2, "retries": 10**6, "backoff": 0.1, "parameters": parameters,
             "grid": {"seed": list(range(seeds))}}
    (Path(folder) / "nbs" / "experiments").mkdir(parents=True)
    (Path(folder) / "nbs" / "experiments" / "tiny.ipynb").write_text(json.dumps(chapter))
    (Path(folder) / "_toc.yml").write_text("")
    (Path(folder) / "sweep.json").write_text(json.dumps(asked))
    return Path(folder)


def start_sweep(
    clone: Path,             # what `make_clone` gave
    *words: str,             # further words of the command
    largest: int | None = None,      # bytes that a file may have; None: no limit
    **environment: str,      # changed for it
) -> subprocess.Popen:       # with pipes from its output and from its errors
    "Begin the sweep of a clone in a process of its own."
    package = str(Path(__file__).parents[1])
    here = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    first = environment.pop("PYTHONPATH", None)
    path = os.pathsep.join(filter(None, [first, package, here.get("PYTHONPATH")]))
    def tighten():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    return subprocess.Popen(
        [sys.executable, "-m", "rvnnbook", "sweep", "sweep.json", *words], cwd=clone, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=tighten if largest else None,
        env={**here, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment})

def steps_made(
    clone: Path,             # made by `make_clone`
) -> int:                    # of all runs together
    "Steps of all newest checkpoints of a clone."
    found = {}
    for path in Path(clone).glob("runs/tiny-*/stage-1/step-????????"):
        found[path.parent] = max(found.get(path.parent, 0), int(path.name.removeprefix("step-")))
    return sum(found.values())


def kill_runs(
    clone: Path,             # made by `make_clone`
):
    "Kill every run that holds its lock."
    for path in Path(clone).glob("runs/*.lock"):
        if process := holder(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

def under_fire(
    clone: Path,                 # made by `make_clone`
    marks: Iterable[float],      # total steps at which the sweep is killed, increasing
    generator: random.Random,    # of how long after
) -> list[dict]:                 # a row for each blow: steps made, whether the sweep died alone
    "Run the sweep of a clone, kill it at each mark, then run it to its end."
    blows = []
    for mark in marks:
        process, lock = start_sweep(clone), Path(clone) / "runs" / "sweeps" / "sweep" / "lock"
        while process.poll() is None and not (lock.exists() and holder(lock) == process.pid):
            time.sleep(0.01)
        while process.poll() is None and steps_made(clone) < mark:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.15))
        if process.poll() is None:
            alone = len(blows) % 2 == 1
            process.kill()
            if not alone:
                kill_runs(clone)
            blows.append({"steps": steps_made(clone), "alone": int(alone)})
        process.communicate()
    said = start_sweep(clone).communicate()
    if not said[0].endswith("all runs are finished\n"):
        raise RuntimeError(f"the sweep did not come to its end: {' '.join(said)}")
    return blows


def scores(
    clone: Path,             # made by `make_clone`
) -> dict[str, list]:        # metrics of every record, by the identity of its run
    "Metrics of the recorded runs of a clone."
    found = {}
    for record in read_records("tiny", Path(clone) / "nbs" / "results"):
        key = identity("tiny", record["parameters"], record["seed"])
        found.setdefault(key, []).append(record["metrics"])
    return found

def compare(
    calm: dict[str, list],   # scores of an undisturbed clone
    shot: dict[str, list],   # scores of the same sweep with kills
) -> dict[str, int]:
    "Numbers of lost runs, of doubled runs and of records with other metrics."
    return {"records": sum(map(len, shot.values())),
            "lost": sum(key not in shot for key in calm),
            "doubled": sum(len(found) > 1 for found in shot.values()),
            "unequal": sum(metrics != calm[key][0] for key, found in shot.items()
                           if key in calm for metrics in found)}


def damage(
    path: Path,                  # a file that is not empty
    generator: random.Random,    # random
) -> str:                        # what was done, in words
    "Cut a file short or flip one of its bits."
    content = bytearray(path.read_bytes())
    place = generator.randrange(len(content))
    if generator.random() < 0.5:
        path.write_bytes(content[:place])
        return f"cut after {place} of {len(content)} bytes"
    bit = generator.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def injure(
    folder: Path,                # holds the files, sound
    look: Callable,              # look(): reads them, and returns what it has read
    refusals: tuple,             # errors that are clear, if they name something in the folder
    times: int,                  # how often
    generator: random.Random,    # random
) -> tuple[Counter, list]:       # how often each happened; in words, what went wrong
    "Damage one file at a time, look, and put it back."
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    sound, known, tally, faults = look(), [path.read_bytes() for path in files], Counter(), []
    for _ in range(times):
        path = generator.choice(files)
        done = damage(path, generator)
        try:
            verdict = "equal" if look() == sound else "wrong"
        except refusals as error:
            names = {part for file in files for part in (file.name, file.parent.name)}
            verdict = "refused" if any(name in str(error) for name in names) else "unclear"
        except Exception:
            verdict = "unclear"
        tally[verdict] += 1
        if verdict in ("wrong", "unclear"):
            faults.append(f"{path.name}: {done}: {verdict}")
        path.write_bytes(known[files.index(path)])
    return tally, faults


def checkpoint_to_injure(
    folder: Path,            # to write it to
) -> tuple[Callable, tuple]: # look, and its clear errors
    "A small checkpoint, and how it is read."
    import torch

    from rvnnbook.lab.train import CheckpointError, read_checkpoint, write_checkpoint
    torch.manual_seed(0)
    tensors = {name: {"weight": torch.randn(6, 5), "bias": torch.randn(6)}
               for name in ("model", "optimizer")}
    write_checkpoint(folder, 7, tensors, {"step": 7, "losses": [0.25, 1], "position": None})
    def look():
        found, state = read_checkpoint(folder)
        return {name: {key: tensor.tolist() for key, tensor in group.items()}
                for name, group in found.items()}, state
    return look, (CheckpointError,)

def records_to_injure(
    folder: Path,            # to write them to
    records: list[dict],     # valid, of one experiment, with traces
    traces: list[dict],      # of them
) -> tuple[Callable, tuple]: # look, and its clear errors
    "Records with their traces, and how they are checked and read."
    from rvnnbook.lab.records import append, read_trace
    for record, trace in zip(records, traces):
        append(record, trace, folder)
    def look():
        if wrong := check_results(folder):
            raise RecordError("; ".join(wrong))
        found = read_records(records[0]["experiment"], folder)
        return found, [read_trace(record, folder) for record in found]
    return look, (RecordError,)


def data_to_injure(
    folder: Path,            # to write them to
) -> tuple[Callable, tuple]: # look, and its clear errors
    "Installed data, one file plain and one packed, and how they are checked before use."
    import hashlib
    import lzma

    from rvnnbook.data.catalog import CatalogError, File, is_sound
    body = "".join(f"{n % 10}\t[MAX {n % 10} {n % 7} ]\n" for n in range(200)).encode()
    files = []
    for name, payload in (("plain.tsv", body), ("packed.tsv.xz", lzma.compress(body))):
        (folder / "toy").mkdir(parents=True, exist_ok=True)
        (folder / "toy" / name).write_bytes(payload)
        digest = hashlib.sha256(body).hexdigest()
        files.append(File(f"toy/{name}", len(body), digest, None))
    def look():
        before = os.environ.get("RVNNBOOK_DATA")
        os.environ["RVNNBOOK_DATA"] = str(folder)
        try:
            wrong = [file.path for file in files if not is_sound(file)]
        finally:
            os.environ.pop("RVNNBOOK_DATA")
            os.environ.update({} if before is None else {"RVNNBOOK_DATA": before})
        if wrong:
            raise CatalogError(f"damaged: {'; '.join(wrong)}")
        return {path.name: (lzma.open if path.suffix == ".xz" else open)(path, "rb").read()
                for path in sorted((folder / "toy").iterdir())}
    return look, (CatalogError,)


@contextlib.contextmanager
def mounted(
    folder: Path,            # that is to be another disk for a while
    *options: str,           # of mount
):                           # whether it worked; only an administrator may
    "Put another disk in the place of a folder."
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", *options, str(folder)]
    try:
        done = subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)

def is_told(
    process: subprocess.Popen,       # a sweep that has to fail
    *words: str,                     # one of them must be said
) -> bool:
    "Whether the sweep failed with a message and without a traceback."
    said = "".join(process.communicate())
    return (process.returncode in (1, 2) and "Traceback" not in said
            and any(word in said for word in words))


def full_disk(
    clone: Path,                     # made by `make_clone`
) -> bool:                           # whether it was told
    "Run the sweep of a clone where there is hardly any room."
    patient = json.loads((clone / "sweep.json").read_text())
    (clone / "sweep.json").write_text(json.dumps({**patient, "retries": 1}))
    small = "-t", "tmpfs", "-o", "size=64k", "tmpfs"
    with mounted(clone / "runs", *small) as done:
        told = is_told(start_sweep(clone, largest=None if done else 4096), "No space", "no room",
                       "No room", "too large", "os error 28", "os error 27")
    (clone / "sweep.json").write_text(json.dumps(patient))
    return told

def two_at_once(
    clone: Path,                     # made by `make_clone`
) -> bool:                           # whether one of them was told
    "Begin the sweep of a clone twice in the same moment."
    both = [start_sweep(clone), start_sweep(clone)]
    said = ["".join(process.communicate()) for process in both]
    told = sorted((process.returncode, "this sweep is locked by process" in text)
                  for process, text in zip(both, said))
    return told == [(0, False), (75, True)]


CIRCUMSTANCES = {"full disk": full_disk, "two at once": two_at_once}

def circumstance(
    clone: Path,                     # new
    name: str,                       # one of CIRCUMSTANCES
    calm: dict[str, list],           # scores of the same sweep, undisturbed
) -> dict[str, int]:
    "Whether the sweep reports the problem, and whether the same command then finishes all runs."
    told = CIRCUMSTANCES[name](clone)
    process = start_sweep(clone)
    process.communicate()
    found = compare(calm, scores(clone))
    well = process.returncode == 0 and not found["lost"] + found["doubled"] + found["unequal"]
    return {"count": 1, "told": int(told), "came_right": int(well)}
