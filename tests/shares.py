"""What the time of a training step is spent on: `python -m tests.shares` measures it and appends a record to nbs/results."""
import time
from contextlib import ExitStack
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile

from rvnnbook.lab.records import append, new_record
from rvnnbook.lab.subjects import SUBJECTS, problem, take_step
from rvnnbook.encoders import rir_beam
from rvnnbook.layers import compiled_beam, compiled_cell, compiled_neighbors, tree_search
from rvnnbook.layers.s4d import S4DLayer
from rvnnbook.origin import code_hashes

DIM = 128
CASES = {"crvnn": [(90, 64, True), (500, 1, False), (2000, 1, False)], "bbt_grc": [(1000, 1, False)],
         "bt_grc_os": [(90, 16, True)], "rir_ebt_grc": [(90, 64, True), (2000, 1, False)]} | {
    name: [(90, 64, True)] for name in ("beam_tree", "gumbel_tree", "ordered_memory")}
KINDS = {
    "products": "mm addmm bmm baddbmm mv addmv",
    "elementwise": "gelu gelu_backward relu threshold threshold_backward clamp_min sigmoid sigmoid_backward glu glu_backward exp log softmax "
                   "_softmax _softmax_backward_data logsumexp native_layer_norm native_layer_norm_backward mul div addcmul lerp sub tanh",
    "memory": "copy cat index index_select gather scatter scatter_add fill zero add where embedding_dense_backward index_add index_copy "
              "index_fill masked_fill index_put _index_put_impl clone empty sum stack masked_scatter",
}
LOOPS = [                      # compiled, of searches, of cells and of neighbors
    (module, name) for module, names in (
        (compiled_beam, "select_pairs write_nodes gated_sums"), (compiled_cell, "gated_sums gated_gradients finish_slot slot_gradients"),
        (compiled_neighbors, "window_sums window_gradients window_log_sums")) for name in names.split()]
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}


def seconds_in_loops(step):
    "Seconds that a step spends in compiled loops."
    spent = 0.0

    def timed(loop):
        def call(*args):
            nonlocal spent
            began = time.perf_counter()
            found = loop(*args)
            spent += time.perf_counter() - began
            return found
        return call
    with ExitStack() as stack:
        for module, name in LOOPS:
            stack.enter_context(patch.object(module, name, timed(getattr(module, name))))
        step()
    return spent


PHASES = {                     # of a step of RIR-EBT-GRC: name -> what is called in it
    "S4D layer": [(S4DLayer, "forward")],
    "search": [(rir_beam, "search_levels")],
    "final trees": [(tree_search, "survivors"), (tree_search, "plan_replay")],
    "their nodes": [(tree_search, "replay_forward")],
    "their scores": [(tree_search, "score_pairs"), (tree_search, "lineage_scores")],
    "gradients of nodes": [(tree_search.Replay, "backward")],
    "gradients of scores": [(tree_search.LineageScores, "backward")],
    "other gradients": [(torch.Tensor, "backward")],
}


def seconds_of_phases(step):
    "Seconds that a step spends in each phase; a phase called within another counts for itself only."
    spent, open_calls = dict.fromkeys(PHASES, 0.0), []

    def timed(phase, call):
        def timed_call(*args, **kwargs):
            open_calls.append(0.0)                         # seconds of the phases within this call
            began = time.perf_counter()
            found = call(*args, **kwargs)
            passed = time.perf_counter() - began
            spent[phase] += passed - open_calls.pop()
            if open_calls:
                open_calls[-1] += passed
            return found
        return staticmethod(timed_call) if call in (tree_search.Replay.backward, tree_search.LineageScores.backward) else timed_call
    with ExitStack() as stack:
        for phase, calls in PHASES.items():
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, timed(phase, getattr(owner, name))))
        step()
    return spent


def phase_shares(subject, length, batch, ragged):
    "Medians over five steps of the share of each phase, and `rest`; without profiling."
    torch.set_num_threads(1)
    about = SUBJECTS[subject]
    step = partial(take_step, about.library, *problem(about.make, length, batch, DIM, ragged=ragged))
    step()
    steps = []
    for _ in range(5):
        began = time.perf_counter()
        spent = seconds_of_phases(step)
        whole = time.perf_counter() - began
        steps.append({phase: seconds / whole for phase, seconds in spent.items()} | {"seconds": whole})
    found = {name: median(one[name] for one in steps) for name in steps[0]}
    return found | {"rest": 1 - sum(found[phase] for phase in PHASES)}


def step_shares(subject, length, batch, ragged):
    """Seconds of a step, and the shares of its time by kind of operation; `rest`: everything else, such as compiled loops and calls;
    `largest`: of the one operation that takes most, products aside; `loops`: of compiled loops, without profiling."""
    torch.set_num_threads(1)
    about = SUBJECTS[subject]
    make = partial(about.make, compiled=True) if subject == "beam_tree" else about.make
    inputs, shares, largest = problem(make, length, batch, DIM, ragged=ragged), dict.fromkeys(KINDS, 0.0), 0.0
    for _ in range(2):                                     # loads what is loaded once, and allocates memory
        take_step(about.library, *inputs)
    began = time.perf_counter()
    spent = seconds_in_loops(partial(take_step, about.library, *inputs))
    loops = spent / (time.perf_counter() - began)
    began = time.perf_counter()
    with profile() as profiled:
        take_step(about.library, *inputs)
    seconds = time.perf_counter() - began
    for event in profiled.key_averages():
        share = event.self_cpu_time_total / 1e6 / seconds
        if kind := KIND_OF.get(event.key.removeprefix("aten::").removesuffix("_")):
            shares[kind] += share
        if kind != "products" and event.key.startswith("aten::"):
            largest = max(largest, share)
    assert sum(shares.values()) < 1, f"{subject}: more than the whole step"
    return {"seconds": seconds} | shares | {"rest": 1 - sum(shares.values()), "largest": largest, "loops": loops}


if __name__ == "__main__":
    started, modules = time.monotonic(), code_hashes()
    metrics = {f"n {'<=' if ragged else '='} {length}, batch {batch}, {subject}": step_shares(subject, length, batch, ragged)
               for subject, cases in CASES.items() for length, batch, ragged in cases}
    metrics |= {f"n {'<=' if ragged else '='} {length}, batch {batch}, rir_ebt_grc, phases": phase_shares("rir_ebt_grc", length, batch, ragged)
                for length, batch, ragged in CASES["rir_ebt_grc"]}
    append(new_record("bench_shares", {"dim": DIM, "threads": 1}, profile="cpu", seed=0, modules=modules, metrics=metrics,
                      rule="time of one profiled step, after three others; phases: medians of five steps without profiling", wall_s=round(time.monotonic() - started, 1)))
