"Records for tests, made without a run."
from rvnnbook.lab.records import signature
from rvnnbook.origin import code_hashes

LEG = {"commit": "ab" * 20, "dirty": False, "device": "a processor", "threads": 2, "processes": 1,
       "started": "2026-01-31T11:00:00+00:00", "seconds": 60.5, "from_step": 0, "to_step": 100}


def signed(record):
    "The record with the id that belongs to its content."
    return {**record, "id": signature(record)}


def make(**changes):
    "A valid record; fields can be given."
    return signed({
        "experiment": "toy", "profile": "cpu", "parameters": {"encoder": "crvnn", "dim": 8, "rate": 0.1, "balanced": False, "limit": None},
        "seed": 0, "version": "0.1.0", "legs": [LEG, {**LEG, "commit": None, "dirty": None, "from_step": 100, "to_step": 250}],
        "commit": "cd" * 20, "dirty": True, "modules": {"rvnnbook.core": "0123456789ab"}, "device": "a processor", "threads": 2,
        "libraries": {"python": "3.11.7", "torch": "2.13.0+cpu"}, "wall_s": 121.0, "peak_memory_mb": 300.5,
        "metrics": {"official <= 100": {"accuracy": 0.75, "count": 8933, "nll": 0.5}, "generated 200 to 300": {"accuracy": 0.5}},
        "rule": "best validation accuracy", "finished": True, "trace": None, "recorded": "2026-01-31T12:00:00+00:00", **changes})


def paper_run(accuracy, model="EBT-GRC", split="official, listops_o_test", seed=0, count=10_000, profile="paper", finished=True, trace=None, more={}, **asked):
    "A run of the experiment that has the papers' settings."
    asked = {"model": model, "dim": 128, "longest": 100, "batch_size": 128, "epochs": 100, "test_size": 0} | asked
    metrics = {split: {"accuracy": accuracy, "count": count}} | {name: {"accuracy": share, "count": 2000} for name, share in more.items()}
    return make(experiment="length_generalization", profile=profile, seed=seed, parameters=asked, metrics=metrics, modules=code_hashes(["rvnnbook.core"]),
                finished=finished, trace=trace)
