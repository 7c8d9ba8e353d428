"The loops of compiled retrieval: against sums of single windows, with numba and without, and inside CRvNN."
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.encoders.crvnn import CRvNN
from rvnnbook.layers import neighbors_linear
from rvnnbook.layers.compiled_neighbors import (Windows, retrieve_gradients, retrieve_log_sums, retrieve_sums, window_gradients,
                                                window_log_sums, window_sums)
from rvnnbook.layers.neighbors_linear import CompiledRetriever, neighbor_retrievers

ROOT = Path(__file__).parents[1]
many = settings(deadline=None, max_examples=60)


@st.composite
def windows_of(draw, length):
    "Beginnings and ends that never fall; windows may be empty, overlap or skip positions."
    ends = [sorted(draw(st.lists(st.integers(0, length), min_size=length, max_size=length))) for _ in range(2)]
    return [min(pair) for pair in zip(*ends)], [max(pair) for pair in zip(*ends)]


@st.composite
def problems(draw):
    length, batch, dim = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    first, stop = (torch.tensor(rows) for rows in zip(*(draw(windows_of(length)) for _ in range(batch))))
    edge = torch.from_numpy(numbers.integers(0, length, (batch, length)))
    return [torch.from_numpy(numbers.random(shape)) for shape in ((batch, length), (batch, length, dim), (batch, length, dim))], (
        first, stop, edge, *(torch.from_numpy(numbers.random((batch, length))) for _ in range(2)))


def inside(first, stop):
    "Whether position j is in the window of position i, (B, N, N)."
    place = torch.arange(first.shape[1])
    return (first[..., None] <= place) & (place < stop[..., None])


@many
@given(problems())
def test_sums_and_gradients_of_any_windows(problem):
    (exists, values, grad), (first, stop, edge, rest, slope) = problem
    rows = torch.arange(len(exists))[:, None]
    whole = inside(first, stop).double()
    found = retrieve_sums(exists, values, Windows(first, stop, edge, rest, slope))
    assert_close(found, whole @ (exists[..., None] * values) + rest[..., None] * values[rows, edge])
    at_exists, at_values = retrieve_gradients(exists, values, grad, Windows(first, stop, edge, rest, slope))
    missed = slope * (grad * values[rows, edge]).sum(-1)
    taken = whole @ grad
    assert_close(at_exists, (values * taken).sum(-1) - (whole @ missed[..., None]).squeeze(-1))
    to_edges = torch.zeros_like(values)
    for b, i in np.ndindex(*edge.shape):
        to_edges[b, edge[b, i]] += rest[b, i] * grad[b, i]
    assert_close(at_values, exists[..., None] * taken + to_edges)


@many
@given(problems(), st.sampled_from([1.0, 700.0, 1e5]), st.booleans())
def test_log_sums_of_any_windows(problem, nats, absent):
    (_, values, more), (first, stop, *_) = problem
    logs = torch.stack([values, more])[..., 0] * nats
    if absent:
        logs = logs.masked_fill(logs < nats / 3, -torch.inf)
    found = retrieve_log_sums(logs, first, stop)
    expected = logs[..., None, :].masked_fill(~inside(first, stop), -torch.inf).logsumexp(-1)
    assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_small_sum_survives_a_large_term_that_left():
    logs, first, stop = torch.tensor([[0.0, -900, -900, -900]]).double(), torch.tensor([[0, 0, 1, 2]]), torch.tensor([[1, 2, 3, 4]])
    assert_close(retrieve_log_sums(logs, first, stop), torch.tensor([[0, 0, -900 + math.log(2), -900 + math.log(2)]]).double())


def test_log_sums_of_infinities_and_of_what_is_not_a_number():
    logs = torch.tensor([[torch.inf, torch.inf, -torch.inf, torch.nan, 1.0, -torch.inf]]).double()
    place = torch.arange(6)[None]
    alone, pairs = retrieve_log_sums(logs, place, place + 1), retrieve_log_sums(logs, place, (place + 2).clamp(max=6))
    assert torch.equal(alone.nan_to_num(9, 8, 7), logs.nan_to_num(9, 8, 7))
    assert torch.equal(pairs.nan_to_num(9, 8, 7), torch.logaddexp(logs, torch.cat([logs[:, 1:], logs[:, 5:]], 1)).nan_to_num(9, 8, 7))


def test_existence_that_is_not_a_number_stays_inside_its_sentence():
    exists = torch.rand(3, 200, generator=torch.Generator().manual_seed(0))
    values = torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(1))
    expected = CompiledRetriever(exists) @ values
    for bad in (torch.nan, torch.inf, -1.0, 5.0):
        spoiled = exists.clone()
        spoiled[1, ::3] = bad
        spoiled.requires_grad_()
        found = CompiledRetriever(spoiled) @ values
        found.sum().backward()
        assert torch.equal(found[::2], expected[::2]) and spoiled.grad[::2].isfinite().all()


def test_a_window_that_empties_leaves_nothing():
    values = torch.tensor([[[1e30], [1.0], [1.0], [1.0]]])
    first, stop, edge = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 1, 3, 4]]), torch.zeros(1, 4, dtype=torch.int64)
    found = retrieve_sums(torch.ones(1, 4), values, Windows(first, stop, edge, torch.zeros(1, 4), torch.zeros(1, 4)))
    assert found.flatten().tolist() == [torch.tensor(1e30).item(), 0, 1, 1]


def test_python_and_machine_code_agree():
    numbers = np.random.default_rng(0)
    exists, values, grad = numbers.random((2, 9)), numbers.random((2, 9, 4)), numbers.random((2, 9, 4))
    walk = CompiledRetriever(torch.from_numpy(exists))
    windows, takers = (Windows(*(tensor.numpy() for tensor in (*ends, walk.edge, walk.rest, walk.slope.double())))
                       for ends in (walk.window, walk.takers))
    results = []
    for compiled in (True, False):
        sums, gradients, logs = (f if compiled else f.py_func for f in (window_sums, window_gradients, window_log_sums))
        boxes = [np.empty_like(one) for one in (values, exists, values, exists)]
        sums(exists, values, windows, boxes[0])
        gradients(exists, values, grad, takers, *boxes[1:3])
        logs(np.log(exists), windows.first, windows.stop, boxes[3])
        results.append(boxes)
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14)


def test_tensors_with_gaps_in_memory():
    torch.manual_seed(0)
    exists, values = torch.rand(9, 2).double().T, torch.randn(4, 9, 2).double().permute(2, 1, 0)
    results = []
    for pair in ((exists, values), (exists.contiguous(), values.contiguous())):
        leaves = [tensor.detach().requires_grad_() for tensor in pair]
        found = CompiledRetriever(leaves[0]) @ leaves[1]
        grad = torch.randn(4, 2, 9, generator=torch.Generator().manual_seed(1)).double().permute(1, 2, 0)
        results.append((found, *torch.autograd.grad(found, leaves, grad)))
    for one, other in zip(*results):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_in_half_precision(dtype):
    torch.manual_seed(0)
    exists, values = torch.rand(2, 20), torch.randn(2, 20, 3).to(dtype).requires_grad_()
    found = CompiledRetriever(exists) @ values
    found.sum().backward()
    assert found.dtype == values.grad.dtype == dtype
    assert_close(found, (CompiledRetriever(exists) @ values.float()).to(dtype))


@pytest.mark.parametrize("modulation", ["scores", "exponentials"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_crvnn_with_loops_and_without(monkeypatch, modulation, checkpoint):
    results = []
    for numba in (True, False):
        monkeypatch.setattr(neighbors_linear, "_has_numba", lambda: numba)
        torch.manual_seed(0)
        encoder = CRvNN(8, modulation=modulation).double()
        encoder.form, encoder.checkpoint = "linear", checkpoint
        x, mask = torch.randn(3, 50, 8).double(), torch.arange(50) < torch.tensor([50, 31, 4])[:, None]
        x = (x * mask[..., None]).requires_grad_()
        found = encoder(x, mask)
        loss = found.root.square().sum() + found.loss
        results.append((found.root, found.states, *torch.autograd.grad(loss, [x, *encoder.parameters()])))
        assert type(neighbor_retrievers(torch.rand(1, 9), form="linear").left) is (
            CompiledRetriever if numba else neighbors_linear.CumulativeRetriever)
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-11)


SCRIPT = """
{before}
import sys, torch
from rvnnbook.encoders.crvnn import CRvNN
torch.manual_seed(0)
encoder = CRvNN(4, modulation="exponentials").double()
encoder.form = "linear"
x = torch.randn(1, 12, 4).double()
found = encoder(x, torch.ones(1, 12, dtype=torch.bool))
found.root.sum().backward()
print("rvnnbook.layers.compiled_neighbors" in sys.modules, "sympy" in sys.modules, *found.root[0].tolist(), *encoder.start.grad.tolist())
"""


def run_script(before="", **variables):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    loaded, slow, *numbers = done.stdout.split()
    assert slow == "False", "sympy takes half a second to import"
    return loaded == "True", [float(number) for number in numbers]


def test_numba_may_be_missing_or_switched_off():
    loaded, numbers = run_script()
    assert loaded
    loaded, others = run_script("import sys; sys.modules['numba'] = None")
    assert not loaded and np.allclose(numbers, others, rtol=1e-11)
    loaded, others = run_script(NUMBA_DISABLE_JIT="1")
    assert loaded and np.allclose(numbers, others, rtol=1e-11)
