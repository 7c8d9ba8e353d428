"Walks against the matrices of neighbor_weights: values, gradients, exponentials thousands of nats apart, memory."
import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.layers import neighbors_linear
from rvnnbook.layers.neighbors import RETRIEVERS, neighbor_weights, retrieve
from rvnnbook.layers.neighbors_linear import (BLOCK, DENSE_ANY_BATCH, DENSE_MAX_LENGTH, LINEAR_RETRIEVERS, CompiledRetriever,
                                              CumulativeRetriever, StickBreakingRetriever, _block_sums, decayed_sums,
                                              _existence_units, retrieve_exp, _retrieved_logs, _log_decayed_sums, log_sums,
                                              neighbor_retrievers, _rows_at, _receiver_windows, _unit_windows)

many = settings(deadline=None, max_examples=40)
WALKS = {**LINEAR_RETRIEVERS, "eq5 in loops": CompiledRetriever}
CUMULATIVE = pytest.mark.parametrize("cumulative", [CumulativeRetriever, CompiledRetriever])
EACH = pytest.mark.parametrize("side, retriever", list(product(("left", "right"), sorted(WALKS))))


def matrix(exists, side, retriever):
    return neighbor_weights(exists, side, retriever[:3])


def drawn(test):
    "Cases that hypothesis draws inside the test."
    return many(given(st.data())(test))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

quarters = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
near_binary = st.sampled_from([0.0, 1e-9, 2.0**-40, 2.0**-24, 2.0**-20, 1 - 2.0**-24, 1 - 2.0**-20, 1.0])
# In float64 both forms add fine fractions of one without rounding and so agree on ties; other sums that come within rounding of
# one may be decided either way. In float32 the forms agree on any numbers: the matrix, too, adds up in float64 and then rounds.
fine = st.integers(0, 2**40).map(lambda k: k / 2**40)
tiny = st.sampled_from([0.0, 2.0**-40, 2.0**-30, 1 - 2.0**-30, 1.0])
ELEMENTS = {torch.float32: st.one_of(quarters, near_binary, st.floats(0, 1, width=32)), torch.float64: st.one_of(quarters, tiny, fine)}


def sentences(dtype):
    kinds = st.sampled_from([quarters, tiny, st.just(0.0), st.just(1.0), ELEMENTS[dtype]])
    rows = kinds.flatmap(lambda kind: st.lists(kind, min_size=1, max_size=80))
    return st.lists(rows, min_size=1, max_size=3)


def boxed(rows, dtype):
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=dtype)


def random_values(exists, dim, seed):
    return torch.randn(*exists.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=exists.dtype)


def answers(make, exists, values):
    "What is found, and the gradients in existence and values of its product with fixed random numbers."
    exists, values = exists.clone().requires_grad_(), values.clone().requires_grad_()
    found = retrieve(make(exists), values)
    weight = random_values(exists, values.shape[-1], 1)
    return found.detach(), *torch.autograd.grad((found * weight).sum(), (exists, values))


def assert_same(found, expected):
    tolerance = 3e-6 if expected[0].dtype == torch.float32 else 1e-12
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.abs().max())))


# ---- the theorem

@DTYPES
@EACH
@drawn
def test_walk_is_matrix(dtype, side, retriever, data):
    exists = boxed(data.draw(sentences(dtype)), dtype)
    values = random_values(exists, data.draw(st.integers(1, 3)), 0)
    assert_same(answers(lambda e: WALKS[retriever](e, side), exists, values),
                answers(lambda e: matrix(e, side, retriever), exists, values))


def kinds(length):
    generator = torch.Generator().manual_seed(length)
    u, certain = (torch.rand(2, length, generator=generator, dtype=torch.float64) for _ in range(2))
    near = torch.where(certain < .5, 1e-9 * u, 1.0)
    return {"soft": u, "small": u / 100, "ones": u**0, "quarters": (5 * u).floor() / 4, "near": near, "certain": near.round()}


@DTYPES
@EACH
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 250])
def test_walk_is_matrix_at_length(dtype, side, retriever, length):
    for exists in kinds(length).values():
        exists = exists.to(dtype)
        exists[1, length // 2 + 1:] = 0                                            # padding
        values = random_values(exists, 2, 0)
        assert_same(answers(lambda e: WALKS[retriever](e, side), exists, values),
                    answers(lambda e: matrix(e, side, retriever), exists, values))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tenths", [1, 2, 10 / 3, "random"])
@CUMULATIVE
def test_tenths(side, tenths, cumulative):
    "Sums that are one but for rounding: values and slopes in values agree; slopes in existence do in float32, and need not in float64."
    generator = torch.Generator().manual_seed(0)
    tenths = torch.randint(0, 11, (80,), generator=generator).tolist() if tenths == "random" else [tenths] * 40
    for dtype in (torch.float32, torch.float64):
        exists = (torch.tensor([tenths], dtype=torch.float64) / 10).to(dtype)
        found, to_exists, to_values = answers(lambda e: cumulative(e, side), exists, values := random_values(exists, 3, 0))
        dense, dense_to_exists, dense_to_values = answers(lambda e: neighbor_weights(e, side), exists, values)
        assert_same((found, to_values), (dense, dense_to_values))
        if dtype == torch.float32:
            assert_same((to_exists,), (dense_to_exists,))
        elif len(tenths) == 40:
            assert (to_exists - dense_to_exists).abs().max() > 0.1                             # as long as this holds, the chapter must say so


@CUMULATIVE
def test_small_existence_crosses_many_blocks(cumulative):
    for side in ("left", "right"):
        exists = 0.02 * torch.rand(2, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values = random_values(exists, 3, 0)
        first, stop = cumulative(exists, side).window
        assert (stop - first).max() > 2 * BLOCK
        assert_same(answers(lambda e: cumulative(e, side), exists, values), answers(lambda e: neighbor_weights(e, side), exists, values))


@CUMULATIVE
def test_gradient_at_ties_by_hand(cumulative):
    exists = torch.tensor([[1.0, 0.5, 0.5, 1.0]], requires_grad=True)
    last = (cumulative(exists) @ torch.eye(4)[None])[0, 3]
    found = [torch.autograd.grad(last[j], exists, retain_graph=True)[0][0].tolist() for j in range(3)]
    assert found == [[0, -0.5, -0.5, 0], [0, 1, 0, 0], [0, 0, 1, 0]]


@EACH
def test_slopes(side, retriever):
    exists = torch.rand(1, BLOCK + 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    values = random_values(exists, 1, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda e, v: WALKS[retriever](e, side) @ v, (exists, values))
    scores, least = 9 * values[..., 0].detach(), torch.full_like(exists, 50.0).detach()
    assert torch.autograd.gradcheck(lambda e, u: retrieve_exp(WALKS[retriever](e, side), u, least)[0], (exists, scores.requires_grad_()))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad((WALKS[retriever](exists, side) @ values).square().sum(), exists, create_graph=True)


@EACH
def test_two_steps_of_one_walk(side, retriever):
    exists = kinds(90)["quarters"].float()
    values = random_values(exists, 3, 0)

    def twice(make):
        def both(e):
            walk = make(e)

            class Twice:
                def __matmul__(self, v):
                    return retrieve(walk, retrieve(walk, v)) + retrieve(walk, v)
            return Twice()
        return both

    assert_same(answers(twice(lambda e: WALKS[retriever](e, side)), exists, values),
                answers(twice(lambda e: matrix(e, side, retriever)), exists, values))


@EACH
def test_error_does_not_grow_with_length(side, retriever):
    worst = []
    for length in (200, 2400):
        exists = torch.rand(1, length, generator=torch.Generator().manual_seed(0)) * .4
        values = random_values(exists, 4, 0) + 2
        exact = WALKS[retriever](exists.double(), side) @ values.double()
        worst.append(float((WALKS[retriever](exists, side) @ values - exact).abs().max()))
    assert worst[1] < 3 * worst[0] and worst[1] < 1e-5


# ---- exponentials of any scores

def scores_of(exists, nats, seed=2):
    scores = -nats * torch.rand(exists.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.requires_grad_()


@EACH
@drawn
def test_logarithms_of_what_is_found(side, retriever, data):
    "Thousands of nats below zero and above, exact zeros and ties, some that nobody meets."
    exists = boxed(data.draw(sentences(torch.float64)), torch.float64)
    scores = scores_of(exists, data.draw(st.sampled_from([1.0, 650.0, 1e5])), data.draw(st.integers(0, 9))).detach()
    scores = (scores + data.draw(st.sampled_from([0, 300, 1e5]))).masked_fill(scores_of(exists, 1, 7) < -.7, -torch.inf)
    exact = (matrix(exists, side, retriever).log() + scores[:, None]).logsumexp(-1)
    assert_close(_retrieved_logs(WALKS[retriever](exists, side), scores), exact, rtol=1e-12, atol=1e-12)
    least = scores.nan_to_num(neginf=0.0)
    amounts, base = retrieve_exp(WALKS[retriever](exists, side), scores, least)
    assert torch.equal(base, torch.maximum(_retrieved_logs(WALKS[retriever](exists, side), scores), least))
    assert_close(amounts, (exact - base).exp(), rtol=1e-9, atol=0)
    assert amounts.max() <= 1


def slopes_of_exponentials(side, retriever, exists, least, nats, seed=3):
    "By walk and by matrix, each (gradient in existence, gradient in scores)."
    both = []
    for walks in (True, False):
        e, scores = exists.clone().requires_grad_(), scores_of(exists, nats)
        weights, walk = matrix(e, side, retriever), WALKS[retriever](e, side)
        found, base = retrieve_exp(walk, scores, torch.full_like(scores, least).detach())
        if not walks:
            found = (weights * (scores[:, None] - base[..., None]).exp()).sum(-1)
        toss = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=found.dtype)
        both.append(torch.autograd.grad((found * toss).sum(), (e, scores)))
    return both


@EACH
@drawn
def test_slopes_of_exponentials(side, retriever, data):
    "With bases no less than any score no slope is cut off: zeros and ties have those of the matrix."
    exists = boxed(data.draw(sentences(torch.float64)), torch.float64)
    mine, theirs = slopes_of_exponentials(side, retriever, exists, 0.0, data.draw(st.sampled_from([1.0, 30.0, 600.0])))
    for one, other in zip(mine, theirs, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-13)


@EACH
@pytest.mark.parametrize("length", [1, 2, 5, 33, 300])
def test_slopes_of_exponentials_relative_to_what_is_found(side, retriever, length):
    "Slopes in existence up to the inverse of it: the pull of what is small in existence and great in score."
    for kind, greatest in (("soft", 1e-2), ("small", 1.0)):
        exists = kinds(length)[kind].clamp(min=1e-4)
        mine, theirs = slopes_of_exponentials(side, retriever, exists, -601.0, 600.0)
        for one, other in zip(mine, theirs, strict=True):
            assert one.isfinite().all()
            assert_close(one, other, rtol=1e-8, atol=1e-11)


def slope_in_existence(walk, exists, scores, walker, gradient=1.0):
    exists = torch.tensor([exists], requires_grad=True)
    found, base = retrieve_exp(walk(exists), torch.tensor([scores], dtype=torch.float64), torch.zeros(1, len(scores), dtype=torch.float64))
    return torch.autograd.grad(gradient * found[0, walker], exists)[0][0].tolist()


@CUMULATIVE
def test_slopes_without_bound_are_cut_off(cumulative):
    "Position 1 is not there and would win by e^900; at a tie the edge has no share and would; behind the certain position likewise."
    for gradient in (1.0, -2.0):
        absent = slope_in_existence(cumulative, [1.0, 0.0, 1.0], [0.0, 900.0, 0.0], 2, gradient)
        assert_close(absent, [gradient, gradient, 0.0])                      # gains no more than all there is; there is no edge to lose
        tied = slope_in_existence(cumulative, [1.0, 0.5, 0.5, 1.0], [900.0, 0.0, 0.0, 0.0], 3, gradient)
        assert_close(tied, [0.0, gradient / 2, gradient / 2, 0.0])           # gains e^0, loses half of at most e^0
        for scores in ([0.0, 900.0, 0.0], [-9.0, 900.0, 0.0]):
            absent = slope_in_existence(StickBreakingRetriever, [1.0, 0.0, 1.0], scores, 2, gradient)
            assert_close(absent[1], gradient - gradient * math.exp(scores[0]))
        behind = slope_in_existence(StickBreakingRetriever, [0.5, 1.0, 1.0], [900.0, 0.0, 0.0], 2, gradient)
        assert_close(behind, [0.0, 0.0, 0.0])
    found, _ = retrieve_exp(cumulative(torch.tensor([[1e-30, 1.0]])), torch.tensor([[9e3, 0.0]]).double(), torch.zeros(1, 2).double())
    assert found[0, 1] == 1


@EACH
def test_scores_in_double_existence_in_single(side, retriever):
    exists = kinds(70)["soft"].float().requires_grad_()
    scores = scores_of(exists, 600)
    found, base = retrieve_exp(WALKS[retriever](exists, side), scores, torch.full_like(scores, -600).detach())
    assert found.dtype == base.dtype == torch.float64 and not base.requires_grad
    expected = (matrix(exists, side, retriever).double() * (scores[:, None] - base[..., None]).exp()).sum(-1)
    assert_close(found, expected, rtol=1e-6, atol=0)
    found.sum().backward()
    assert exists.grad.dtype == torch.float32 and scores.grad.dtype == torch.float64


# ---- the parts

@pytest.mark.parametrize("dtype, lenience", [(torch.float32, 2.0**-24), (torch.float64, 0)])
@pytest.mark.parametrize("length", [1, 2046, 2047, 4094, 4095, 100_000])
def test_units(dtype, lenience, length):
    exists = torch.rand(1, length, generator=torch.Generator().manual_seed(0), dtype=dtype)
    units, one, _ = _existence_units(exists)
    assert units[0, :99].tolist() == [round(Fraction(e) * one) for e in exists[0, :99].tolist()]   # to the nearest unit
    exists = torch.ones(1, length, dtype=dtype)
    units, one, rounded = _existence_units(exists)
    assert units.dtype == torch.int64 and rounded / one == lenience
    assert one == 2**52 if length <= 2046 else one >= 2**45
    assert int(units.sum()) == length * one and (length + 1) * one + rounded < 2**63               # room to reach one further
    first, stop = (_unit_windows(units, one + rounded, side)[number] for number, side in enumerate(("left", "right")))
    place = torch.arange(length)
    assert torch.equal(first[0], (place - 1).clamp(min=0)) and torch.equal(stop[0], (place + 2).clamp(max=length))


@pytest.mark.parametrize("side", ["left", "right"])
@many
@given(st.data())
def test_takers_are_the_windows_from_the_other_side(side, data):
    exists = boxed(data.draw(sentences(torch.float64)), torch.float64)
    units, one, rounded = _existence_units(exists)
    windows = _unit_windows(units, one + rounded, side)
    place = torch.arange(exists.shape[-1])
    taken = (windows[0][..., None] <= place) & (place < windows[1][..., None])                  # (B, walker, position)
    first, stop = _receiver_windows(*windows, side)
    assert torch.equal(taken, (first[:, None] <= place[:, None]) & (place[:, None] < stop[:, None]))
    assert (first[:, 1:] >= first[:, :-1]).all() and (stop[:, 1:] >= stop[:, :-1]).all() and (stop >= first).all()


ends = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)).map(sorted), min_size=1, max_size=70)


@many
@given(ends)
def test_sums_over_windows(windows):
    windows = sorted(windows), sorted(windows, reverse=True)
    length = max(70, len(windows[0]))
    values = torch.randint(-9, 9, (2, length, 3), generator=torch.Generator().manual_seed(0)).double()
    for order in windows:                                                          # the table of powers takes any windows
        first, stop = ([end[k] for end in order] + [order[-1][k]] * (length - len(order)) for k in (0, 1))
        expected = torch.stack([values[:, i:j].sum(1) for i, j in zip(first, stop)], 1)
        first, stop = (torch.tensor([end, end]) for end in (first, stop))
        parts = torch.stack([values, -values]).clamp(min=0)[..., 0].log()              # any number of leading axes
        assert_close((log_sums(parts, first, stop).exp()), torch.stack([torch.stack([part[:, i:j].exp().sum(1) for i, j in
                     zip(first[0].tolist(), stop[0].tolist())], 1) for part in parts]), rtol=1e-13, atol=1e-13)
        if (first.diff() >= 0).all() and (stop.diff() >= 0).all():
            assert torch.equal(_block_sums(values, first, stop), expected)
            assert torch.equal(_block_sums(values.float(), first, stop), expected.float())


@pytest.mark.parametrize("length", [1, 2, BLOCK, 2 * BLOCK])
def test_sum_over_everything(length):
    values, first, stop = torch.ones(1, length, 1), torch.zeros(1, length, dtype=torch.int64), torch.full((1, length), length)
    assert (_block_sums(values, first, stop) == length).all()
    assert_close(log_sums(torch.zeros(1, length), first, stop), torch.full((1, length), math.log(length)))
    assert (log_sums(torch.zeros(1, length), first, first) == -torch.inf).all()
    assert log_sums(torch.zeros(0, length), first[:0], stop[:0]).shape == (0, length)


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 3 * BLOCK, BLOCK**2 + 1])
def test_decayed_sums(length):
    generator = torch.Generator().manual_seed(length)
    keep = torch.rand(2, length, generator=generator, dtype=torch.float64)
    keep[0, ::5], keep[1, ::3] = 0, 1
    values = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    memory = [torch.zeros(2, 3, dtype=torch.float64)]
    for k, v in zip(keep.unbind(1), values.unbind(1)):
        memory.append(memory[-1] * k[:, None] + v)
    expected = torch.stack(memory[:-1], 1)
    assert_close(decayed_sums(keep, values), expected)
    assert_close(decayed_sums(keep.flip(1), values.flip(1), "right"), expected.flip(1))
    logs = _log_decayed_sums("left", keep.log(), values.abs()[..., 0].log())
    assert_close(logs.exp(), decayed_sums(keep, values.abs())[..., 0])
    assert torch.equal(_log_decayed_sums("right", keep.log().flip(1), values.abs()[..., 0].log().flip(1)), logs.flip(1))


def test_rows():
    values = torch.arange(24.).view(2, 4, 3)
    assert _rows_at(values, torch.tensor([[3, 0, 3], [1, 1, 2]])).tolist() == [[[9, 10, 11], [0, 1, 2], [9, 10, 11]],
                                                                           [[15, 16, 17], [15, 16, 17], [18, 19, 20]]]


# ---- what it costs

@EACH
def test_nothing_kept_is_a_matrix(side, retriever):
    length, dim, kept = 600, 8, []

    def keep(tensor):
        kept.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    exists = torch.rand(1, length, requires_grad=True)
    values = torch.randn(1, length, dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        walk = WALKS[retriever](exists, side)
        (walk @ values).sum().backward()
        scores = values[..., 0].detach().double().requires_grad_()
        retrieve_exp(walk, scores, torch.zeros_like(scores))[0].sum().backward()
    assert kept and max(kept) <= (length + BLOCK) * dim
    held = [t for value in vars(walk).values() for t in (value if isinstance(value, tuple) else [value]) if torch.is_tensor(t)]
    assert held and max(t.numel() for t in held) <= length
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        matrix(exists, side, retriever) @ values
    assert max(kept) >= length**2                                                  # the hooks would have seen one


# ---- the door

@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("side, retriever", list(product(("left", "right"), sorted(RETRIEVERS))))
def test_forms(monkeypatch, side, retriever, numba):
    monkeypatch.setattr(neighbors_linear, "_has_numba", lambda: numba)
    loops = numba and retriever == "eq5"
    longest, linear = DENSE_MAX_LENGTH["compiled" if loops else "cpu"], CompiledRetriever if loops else LINEAR_RETRIEVERS[retriever]
    exists, values = torch.rand(2, longest + 1), torch.randn(2, longest + 1, 3)
    weights = neighbor_weights(exists, side, retriever)
    assert torch.equal(getattr(neighbor_retrievers(exists, retriever, "dense"), side), weights)
    for form in ("linear", "auto"):
        walk = getattr(neighbor_retrievers(exists, retriever, form), side)
        assert type(walk) is linear
        assert_close(retrieve(walk, values), weights @ values, rtol=0, atol=1e-5)
    assert torch.equal(getattr(neighbor_retrievers(exists[:1, 1:], retriever), side), neighbor_weights(exists[:1, 1:], side, retriever))
    assert type(getattr(neighbor_retrievers(exists[:, 1:], retriever, "linear"), side)) is linear


def test_when_loops_are_used():
    "On the CPU, in single and double precision, for Eq. 5, and not while PyTorch compiles."
    exists = torch.rand(1, 9)
    kinds = {torch.float32: CompiledRetriever, torch.float64: CompiledRetriever, torch.bfloat16: CumulativeRetriever}
    for dtype, kind in kinds.items():
        assert type(neighbor_retrievers(exists.to(dtype), form="linear").left) is kind
    assert type(neighbor_retrievers(exists, "eq6", "linear").left) is StickBreakingRetriever
    assert not neighbors_linear.has_compiled_sums(exists.to("meta"), "eq5")
    assert not torch.compile(lambda e: neighbors_linear.has_compiled_sums(e, "eq5"), backend="eager")(exists)


def test_defaults():
    exists = torch.tensor([[1.0, 0.5, 0.5, 1.0]])
    assert torch.equal(neighbor_retrievers(exists).left, neighbor_weights(exists))
    assert torch.equal(neighbor_retrievers(exists, form="linear").left @ torch.eye(4)[None], neighbor_weights(exists))
    assert torch.equal(StickBreakingRetriever(exists) @ torch.eye(4)[None], neighbor_weights(exists, "left", "eq6"))
    assert LINEAR_RETRIEVERS.keys() == RETRIEVERS.keys()


@pytest.mark.parametrize("numba, where", [(True, "compiled"), (False, "cpu")])
def test_length_is_chosen_by_size(monkeypatch, numba, where):
    monkeypatch.setattr(neighbors_linear, "_has_numba", lambda: numba)
    monkeypatch.setitem(DENSE_MAX_LENGTH, where, 103)
    monkeypatch.setitem(DENSE_ANY_BATCH, where, 100)
    for side in ("left", "right"):
        assert torch.is_tensor(getattr(neighbor_retrievers(torch.rand(1, 103)), side))
        assert not torch.is_tensor(getattr(neighbor_retrievers(torch.rand(1, 104)), side))
        assert torch.is_tensor(getattr(neighbor_retrievers(torch.rand(3, 101)), side))          # 3 * 101 * 1 <= 103 * 3 < 2 * 102 * 2
        assert not torch.is_tensor(getattr(neighbor_retrievers(torch.rand(2, 102)), side))
        assert torch.is_tensor(getattr(neighbor_retrievers(torch.rand(50, 100)), side))         # any batch


def test_length_is_chosen_by_device():
    assert DENSE_MAX_LENGTH["compiled"] < DENSE_MAX_LENGTH["cpu"] <= 1000 <= DENSE_MAX_LENGTH["cuda"]       # not measured there
    elsewhere = DENSE_MAX_LENGTH["cuda"]
    assert torch.is_tensor(neighbor_retrievers(torch.rand(1, elsewhere, device="meta")).left)
    assert not torch.is_tensor(neighbor_retrievers(torch.rand(1, elsewhere + 1, device="meta"), retriever="eq6").left)


def test_what_is_refused():
    exists = torch.rand(2, 5)
    for form in ("auto", "dense", "linear"):
        with pytest.raises(ValueError, match="'eq7'; known: eq5, eq6"):
            neighbor_retrievers(exists, "eq7", form)
    with pytest.raises(ValueError, match="unknown form 'fast'; known: auto, dense, linear"):
        neighbor_retrievers(exists, form="fast")
    for walk in LINEAR_RETRIEVERS.values():
        with pytest.raises(ValueError, match="unknown side 'up'; known: left, right"):
            walk(exists, "up")
        with pytest.raises(ValueError, match=r"\(2, 4, 3\) do not fit existence of shape \(2, 5\)"):
            walk(exists) @ torch.rand(2, 4, 3)
        with pytest.raises(ValueError, match=r"\(2, 5\) do not fit existence of shape \(2, 5\)"):
            walk(exists) @ torch.rand(2, 5)
        for scores, least in ((1, 2), (2, 1)):
            with pytest.raises(ValueError, match=rf"scores of shape \({scores}, 5\) and bases of shape \({least}, 5\) do not fit "
                                                 r"existence of shape \(2, 5\)"):
                retrieve_exp(walk(exists), torch.rand(scores, 5), torch.rand(least, 5))


@EACH
def test_full_precision_under_autocast(side, retriever):
    exists, values = torch.rand(1, 300), torch.randn(1, 300, 4)
    expected = WALKS[retriever](exists, side) @ values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(WALKS[retriever](exists, side) @ values, expected)


@EACH
def test_what_is_not_a_number_is_found_not_hidden(side, retriever):
    exists, values = torch.rand(2, 90), torch.randn(2, 90, 2)
    exists[0, 45] = torch.nan
    found = WALKS[retriever](exists, side) @ values
    assert found[0].isnan().any() and found[1].isfinite().all()
    assert (WALKS[retriever](exists[:0], side) @ values[:0]).shape == (0, 90, 2)               # and no sentence at all
