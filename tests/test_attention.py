"Geometric attention against walks in exact arithmetic and against its literal form: values, slopes, extremes, what is kept."
import math
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.literal import geometric_window, windows
from rvnnbook.layers.attention import NearestMatch, geometric_attention, geometric_literal, _outward_order, seen_keys, _sums_before
from rvnnbook.layers.neighbors import neighbor_weights

many = settings(deadline=None, max_examples=60)
DIRECTIONS = pytest.mark.parametrize("direction", [None, "left", "right"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
GOLDEN = sorted((Path(__file__).parent / "golden" / "ops").glob("geometric_attention_*.safetensors"))


def walk(i, n, direction=None):
    "Places in the order in which a query on i asks them, told step by step."
    for away in range(1, n):
        if i + away < n and direction != "left":
            yield i + away
        if i - away >= 0 and direction != "right":
            yield i - away


def first_match(row, i, direction=None):
    "Weights of one query: at each place some of what is left stays."
    weights, left_over = [0 * row[0]] * len(row), 1
    for j in walk(i, len(row), direction):
        weights[j] = left_over * row[j]
        left_over = left_over * (1 - row[j])
    return weights


def drawn(*shape, scale=3.0, seed=0, dtype=torch.float64):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_slopes(form, logits, seed=1):
    logits = logits.detach().clone().requires_grad_()
    found = form(logits)
    push = drawn(*found.shape, scale=1, seed=seed, dtype=torch.float32).to(found.dtype)
    return found.detach(), torch.autograd.grad((found * push).sum(), logits)[0]


def literal(logits, direction=None, mask=None):
    "The literal form of scores, of one direction and with some keys only."
    matches = logits.sigmoid() * seen_keys(logits.shape[-1], direction)
    return geometric_literal(matches if mask is None else matches * mask)


# ---- the formula

quarters = st.sampled_from([Fraction(0), Fraction(1), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)])
squares = st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(quarters, min_size=n, max_size=n), min_size=n, max_size=n))


@many
@given(squares)
def test_the_literal_form_is_the_walk(rows):
    found = geometric_literal(torch.tensor([[float(c) for c in row] for row in rows], dtype=torch.float64))
    for i, row in enumerate(rows):                                     # quarters and their products are exact in float64
        assert [Fraction(a) for a in found[i].tolist()] == first_match(row, i)


@DIRECTIONS
@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_the_order_is_the_walk(n, direction):
    order = _outward_order(n)
    assert order.dtype == torch.int64 and order.shape == (n, n)
    for i, (own, *row) in enumerate(order.tolist()):
        assert own == i and row == list(walk(i, n))
        assert [j for j in row if seen_keys(n, direction)[i, j]] == list(walk(i, n, direction))
        assert not seen_keys(n, direction)[i, i]
        first, stop = (end[i].tolist() for end in windows(n))
        for place, j in enumerate(row):
            assert set(range(first[j], stop[j])) - {i} == set(row[:place])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_sums_before(n):
    values = drawn(2, n, n).masked_fill(torch.eye(n, dtype=torch.bool), 0)
    order = _outward_order(n)
    for table, backwards in ((order, False), (order.flip(-1).roll(1, -1), True)):
        found = _sums_before(values, table)
        for i in range(n):
            row = list(walk(i, n))[::-1] if backwards else list(walk(i, n))
            assert not found[:, i, i].any()
            for place, j in enumerate(row):
                assert_close(found[:, i, j], values[:, i, row[:place]].sum(-1), rtol=0, atol=1e-14)


numbers = st.one_of(st.sampled_from([0.0, -0.0, 60.0, -60.0, math.inf, -math.inf, 1e4, -1e4, 1.0]), st.floats(-20, 20, width=32))


@st.composite
def tables(draw, elements=numbers):
    heads, n = draw(st.sampled_from([(), (2,), (2, 3), (1, 1, 2)])), draw(st.integers(1, 9))
    kind = draw(st.sampled_from([elements, st.just(draw(elements)), st.sampled_from([60.0, -60.0])]))
    count = math.prod(heads) * n * n
    return torch.tensor(draw(st.lists(kind, min_size=count, max_size=count)), dtype=torch.float64).view(*heads, n, n)


@DIRECTIONS
@DTYPES
@many
@given(st.data())
def test_library_and_literal_form(dtype, direction, data):
    "Ties, certainties of both signs, infinite scores, any number of leading axes."
    logits = data.draw(tables()).to(dtype)
    found, slopes = with_slopes(lambda s: geometric_attention(s, direction=direction), logits)
    wanted, exact = with_slopes(lambda s: literal(s, direction), logits.double())
    assert found.dtype == slopes.dtype == dtype and found.shape == logits.shape
    assert_close(found.double(), wanted, rtol=0, atol=1e-14 if dtype == torch.float64 else 3e-7)
    assert_close(slopes.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)
    assert (found >= 0).all() and (found <= 1).all() and found.sum(-1).max() <= 1 + 4 * torch.finfo(dtype).eps * logits.shape[-1]
    assert not found.diagonal(dim1=-2, dim2=-1).any() and not slopes.diagonal(dim1=-2, dim2=-1).any()


@many
@given(tables(st.floats(-8, 8)))
def test_window_form(logits):
    for mine, theirs in zip(with_slopes(geometric_window, logits), with_slopes(literal, logits), strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_slopes_against_differences():
    logits = drawn(2, 5, 5).requires_grad_()
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    for normalize, direction in product((False, True), (None, "left", "right")):
        assert torch.autograd.gradcheck(lambda s: geometric_attention(s, mask, normalize, direction), logits)


def test_second_derivatives():
    logits = drawn(2, 4, 4).requires_grad_()
    assert torch.autograd.gradgradcheck(geometric_attention, logits)
    push = drawn(4, 4, scale=1)
    second = [torch.autograd.functional.hessian(lambda s: (form(s) * push).sum(), logits[0].detach()) for form in (geometric_attention, literal)]
    assert_close(*second, rtol=0, atol=1e-13)
    assert second[0].abs().max() > 1e-2


# ---- large numbers and small

@DTYPES
@DIRECTIONS
@pytest.mark.parametrize("size", [60.0, 1e4, math.inf])
def test_certain_scores(dtype, direction, size):
    logits = torch.where(drawn(3, 2, 40, 40) > 0, size, -size).to(dtype)
    found, slopes = with_slopes(lambda s: geometric_attention(s, normalize=True, direction=direction), logits)
    assert found.isfinite().all() and slopes.isfinite().all()
    for i in range(40):                                                # the first yes gets everything
        for row, weights in zip(logits[:, :, i].flatten(0, 1), found[:, :, i].flatten(0, 1)):
            yes = next((j for j in walk(i, 40, direction) if row[j] > 0), None)
            if size > 60 or yes is not None:
                assert weights.argmax() == (yes or 0) and abs(weights.sum() - int(yes is not None)) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 8.0, 30.0])
def test_digits_in_single_precision(scale):
    "As good as a number near one can be, where the window form has lost three digits or more."
    logits = drawn(2, 300, 300, scale=scale, dtype=torch.float32)
    push = drawn(2, 300, 300, scale=1, seed=1, dtype=torch.float32)
    errors = {}
    for form in (geometric_attention, geometric_window):
        results = []
        for dtype in (torch.float32, torch.float64):
            s = logits.to(dtype).requires_grad_()
            weights = (form if dtype == torch.float32 else geometric_attention)(s)
            results.append((weights.detach(), torch.autograd.grad((weights * push.to(dtype)).sum(), s)[0]))
        errors[form] = [float((found.double() - exact).abs().max()) for found, exact in zip(*results)]
    assert errors[geometric_attention][0] < 2e-7 and errors[geometric_attention][1] < 3e-7
    if scale > 1:
        assert errors[geometric_window][0] > 50 * errors[geometric_attention][0]


def test_a_thousand_weak_matches():
    "Factors near one keep few digits of what they lack to it; their logarithms keep all."
    n = 1200
    row = torch.full((1, 1, n), -9.0)
    found = geometric_attention(row.expand(1, n, n))[0, 0]
    match = torch.sigmoid(torch.tensor(-9.0, dtype=torch.float64))
    exact = match * (1 - match) ** torch.arange(n - 1)
    assert ((found[1:].double() - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    logits = drawn(2, 30, 30, dtype=torch.float32).to(dtype)
    found, slopes = with_slopes(geometric_attention, logits)
    wanted, exact = with_slopes(geometric_attention, logits.float())
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert slopes.dtype == dtype and torch.equal(slopes, exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(geometric_attention(logits.float()), wanted)


# ---- who is there, and who looks where

@many
@given(tables(st.floats(-8, 8)), st.integers(0, 4), st.booleans(), st.sampled_from([None, "left", "right"]))
def test_padding_is_not_felt(logits, more, normalize, direction):
    logits = logits.view(-1, *logits.shape[-2:])
    n = logits.shape[-1]
    padded = F.pad(logits, (0, more, 0, more), value=math.nan).requires_grad_()
    mask = (torch.arange(n + more) < n).expand(len(logits), -1)
    found = geometric_attention(padded, mask, normalize, direction)
    alone, exact = with_slopes(lambda s: geometric_attention(s, None, normalize, direction), logits)
    assert_close(found[:, :n, :n].detach(), alone, rtol=0, atol=1e-14)
    assert not found[:, :n, n:].any()
    push = drawn(*alone.shape, scale=1, seed=1, dtype=torch.float32).double()
    slopes, = torch.autograd.grad((found[:, :n, :n] * push).sum(), padded)
    assert_close(slopes[:, :n, :n], exact, rtol=0, atol=1e-12)
    assert not slopes[:, :n, n:].any()


@many
@given(st.data())
def test_any_keys_may_be_missing(data):
    "Also those in the middle, also all; a row in which nobody is left sums to zero."
    logits = data.draw(tables(st.floats(-8, 8)))
    logits = logits.view(-1, 1, *logits.shape[-2:]).expand(-1, 2, -1, -1)
    n = logits.shape[-1]
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=len(logits), max_size=len(logits))))
    found, slopes = with_slopes(lambda s: geometric_attention(s, mask), logits)
    wanted, exact = with_slopes(lambda s: literal(s, mask=mask[:, None, None].double()), logits)
    assert_close(found, wanted, rtol=0, atol=1e-14)
    assert_close(slopes, exact, rtol=0, atol=1e-12)
    for normalize in (False, True):
        empty, flat = with_slopes(lambda s: geometric_attention(s, mask & False, normalize), logits)
        assert not empty.any() and not flat.any()


@DIRECTIONS
def test_batch_mates_and_heads_are_strangers(direction):
    logits = drawn(4, 3, 17, 17)
    mask = torch.arange(17) < torch.tensor([17, 1, 9, 4])[:, None]
    both = geometric_attention(logits, mask, direction=direction)
    for b, h in product(range(4), range(3)):
        assert_close(geometric_attention(logits[b:b + 1, h:h + 1], mask[b:b + 1], direction=direction)[0, 0], both[b, h], rtol=0, atol=1e-15)


def test_in_the_mirror():
    "Left and right change places; looking both ways, only the second of two equally near keys notices."
    logits = drawn(2, 11, 11)
    mirrored = logits.flip(-2, -1)
    assert_close(geometric_attention(mirrored, direction="right").flip(-2, -1), geometric_attention(logits, direction="left"))
    found, other = geometric_attention(logits), geometric_attention(mirrored).flip(-2, -1)
    for i, j in product(range(11), range(11)):
        mirror, same = 2 * i - j, torch.isclose(found[:, i, j], other[:, i, j], rtol=1e-12, atol=0)
        assert same.all() if not 0 <= mirror < 11 or i == j else not same.any()
        if 0 <= mirror < 11 and j > i:                                 # the one on the right does not wait for its twin
            assert (found[:, i, j] > other[:, i, j]).all() and (found[:, i, mirror] < other[:, i, mirror]).all()


def test_normalisation():
    logits = drawn(2, 8, 8)
    mask = torch.tensor([[True] * 8, [True] + [False] * 7])
    plain, divided = (geometric_attention(logits, mask, normalize) for normalize in (False, True))
    sums = plain.sum(-1, keepdim=True)
    assert_close(divided, torch.where(sums > 0, plain / sums, 0))
    assert_close(divided.sum(-1), torch.tensor([[1.0] * 8, [0.0] + [1.0] * 7], dtype=torch.float64))
    tiny = geometric_attention(torch.full((1, 2, 2), -40.0, dtype=torch.float64), normalize=True)
    assert_close(tiny[0, 0, 1], torch.tensor(math.exp(-40) / 1e-12, dtype=torch.float64), rtol=1e-9, atol=0)


def test_rows_and_what_is_left_of_them():
    logits = drawn(3, 9, 9)
    nobody = torch.where(seen_keys(9), torch.sigmoid(-logits), 1).prod(-1)
    assert_close(geometric_attention(logits).sum(-1), 1 - nobody)


def test_the_smallest():
    for shape in ((1, 1), (3, 1, 1), (2, 4, 1, 1), (0, 5, 5), (2, 0, 3, 3), (0, 0)):
        logits = torch.full(shape, 5.0, requires_grad=True)
        found = geometric_attention(logits)
        found.sum().backward()
        assert found.shape == logits.grad.shape == shape and not found.any() and not logits.grad.any()
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert not geometric_attention(torch.zeros(2, 4, 1, 1), mask, normalize=True, direction="left").any()


def test_what_is_refused():
    for shape in ((3,), (2, 3), (2, 4, 3)):
        with pytest.raises(ValueError, match=rf"logits must be \(\.\.\., N, N\), got \({shape[0]},"):
            geometric_attention(torch.zeros(shape))
    logits = torch.zeros(2, 3, 4, 4)
    for mask in (torch.ones(2, 3), torch.ones(3, 4), torch.ones(4), torch.ones(2, 1, 4), torch.ones(2, 3, 4)):
        with pytest.raises(ValueError, match=rf"a mask of shape \({mask.shape[0]},.*does not fit logits of shape \(2, 3, 4, 4\)"):
            geometric_attention(logits, mask.bool())
    with pytest.raises(ValueError, match=r"\(4, 4\) does not fit logits of shape \(4, 4\)"):
        geometric_attention(torch.zeros(4, 4), torch.ones(4, 4, dtype=torch.bool))
    for call in (seen_keys, lambda n, direction: geometric_attention(torch.zeros(n, n), direction=direction)):
        with pytest.raises(ValueError, match="direction must be 'left', 'right' or None, got 'up'"):
            call(3, "up")


def test_inputs_are_left_as_they_were():
    logits, mask = drawn(2, 6, 6), torch.arange(6).expand(2, 6) < 4
    before = logits.clone()
    for normalize, direction in product((False, True), (None, "left", "right")):
        with_slopes(lambda s: geometric_attention(s, mask, normalize, direction), logits)
        found = geometric_attention(logits, None, normalize, direction)
        found.zero_()                                                  # the caller's own
    assert torch.equal(logits, before)


# ---- CRvNN

@many
@given(st.lists(st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=12))
def test_retrieval_is_attention_in_one_direction(row):
    exists = torch.tensor([row], dtype=torch.float64)
    for side in ("left", "right"):
        attention = geometric_attention(exists.logit()[:, None].expand(-1, len(row), -1), direction=side)
        assert_close(attention, neighbor_weights(exists, side, "eq6"), rtol=0, atol=1e-14)
        found = geometric_literal(exists[:, None] * seen_keys(len(row), side))
        assert_close(found, neighbor_weights(exists, side, "eq6"), rtol=0, atol=1e-14)
        certain = exists.round()
        attention = geometric_attention(certain.logit()[:, None].expand(-1, len(row), -1), direction=side)
        for retriever in ("eq5", "eq6"):
            assert torch.equal(attention, neighbor_weights(certain, side, retriever))


# ---- the published code

@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_recorded_slopes_without_rounding(path):
    "The recordings in double precision: what is left of the difference is theirs."
    with safe_open(path, framework="pt") as file:
        tensors, normalize = {key: file.get_tensor(key) for key in file.keys()}, '"normalize": true' in file.metadata()["config"]
    logits = tensors["in.logits"].double().requires_grad_()
    found = geometric_attention(logits, tensors["in.mask"].bool(), normalize)
    slopes, = torch.autograd.grad((found * tensors["in.w"]).sum(), logits)
    assert (found - tensors["out.attention"]).abs().max() < 1e-6
    assert (slopes - tensors["grad.logits"]).abs().max() < 1e-5 * tensors["grad.logits"].abs().max()


def test_recordings_are_there():
    assert len(GOLDEN) == 3


# ---- what it costs

def kept(form, logits):
    "Bytes saved for the way back, each storage once."
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    logits = logits.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention = form(logits)
    attention.sum().backward()
    return sum(storages.values())


def test_two_tables_are_kept():
    logits = drawn(2, 4, 96, 96, dtype=torch.float32)
    table, mask = 4 * logits.numel(), torch.arange(96).expand(2, 96) < 90
    assert kept(geometric_attention, logits) == 2 * table
    assert kept(lambda s: geometric_attention(s, direction="left"), logits) <= 2 * table + 96 * 96
    assert kept(lambda s: geometric_attention(s, mask), logits) <= 2 * table + mask.numel()
    assert kept(geometric_window, logits) > 4 * table


def test_orders_are_made_once_and_serve_everywhere():
    _outward_order.cache_clear()
    with torch.inference_mode():
        geometric_attention(torch.zeros(1, 7, 7))
        geometric_window(torch.zeros(1, 7, 7))
    made = _outward_order.cache_info().misses
    for form in (geometric_attention, geometric_window):
        logits = torch.zeros(1, 7, 7, requires_grad=True)
        form(logits).sum().backward()
        assert logits.grad.isfinite().all()
    assert _outward_order.cache_info().misses == made and _outward_order.cache_info().maxsize is not None
    assert not _outward_order(7).is_inference() and _outward_order(7, "cpu").device.type == "cpu"


def test_a_function_of_its_own_way_back():
    logits = drawn(3, 5, 5)
    assert torch.equal(NearestMatch.apply(logits), geometric_attention(logits))
