"The scan in its forms against a loop that autograd differentiates: values, gradients, padding, pieces, refusals."
import math
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rvnnbook.layers.scan import FORMS, LONG, NARROW, Scan, linear_scan, scan_blocks, _scan_form, scan_loop, _states_before

many = settings(deadline=None, max_examples=60)
EACH = pytest.mark.parametrize("form", FORMS)
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 50, 72, 98, 99, 128, 129]

gates = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-8, 1 - 1e-8, -0.3, 1.1]), st.floats(0, 1), st.floats(-1.2, 1.2))


def plain(f, b, c0):
    "Every step as the equation says, differentiated by PyTorch."
    states = [c0]
    for f_t, b_t in zip(f.unbind(1), b.unbind(1), strict=True):
        states.append(f_t * states[-1] + b_t)
    return torch.stack(states[1:], 1)


def draw(batch, length, dim, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    f, b = (torch.randn(batch, length, dim, generator=gen, dtype=torch.float64) for _ in range(2))
    return [t.to(dtype) for t in (f.sigmoid(), b, torch.randn(batch, dim, generator=gen, dtype=torch.float64))]


def answers(scan, *given, seed=7):
    "States, and gradients of their product with fixed random numbers in everything that was given."
    given = [t.detach().clone().requires_grad_() for t in given]
    c = scan(*given)
    gen = torch.Generator().manual_seed(seed)
    direction = torch.randn(c.shape, generator=gen, dtype=torch.float64).to(c.dtype)
    return c.detach(), *torch.autograd.grad((c * direction).sum(), given)


def assert_same(found, expected, tolerance=1e-12):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.abs().max())))


# ---- the theorem

@EACH
@many
@example(data=None)
@given(st.data())
def test_forms_are_the_loop(form, data):
    if data is None:                                                           # all kinds of gates side by side, many blocks
        f, b, c0 = draw(2, 131, 3)
        f[0, ::2], f[1, 1::3], f[0, 1::5], f[1, ::7] = 0, 1, -0.7, 1.2
        with_start = True
    else:
        batch, dim = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        length = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([49, 72, 98, 100, 128, 162])))
        kind = data.draw(st.sampled_from([gates, st.sampled_from([0.0, 1.0]), st.just(0.0), st.just(1.0)]))
        row = st.lists(kind, min_size=length, max_size=length)
        f = torch.tensor([data.draw(row) for _ in range(batch * dim)], dtype=torch.float64).view(batch, dim, length).mT
        _, b, c0 = draw(batch, length, dim, seed=length)
        with_start = data.draw(st.booleans())
    if with_start:
        assert_same(answers(lambda f, b, c0: linear_scan(f, b, c0, form), f, b, c0), answers(plain, f, b, c0))
    else:
        assert_same(answers(lambda f, b: linear_scan(f, b, form=form), f, b),
                    answers(lambda f, b: plain(f, b, torch.zeros_like(c0)), f, b))


@EACH
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(form, length):
    given = draw(2, length, 3, seed=length)
    assert_same(answers(lambda f, b, c0: linear_scan(f, b, c0, form), *given), answers(plain, *given))
    single = [t.float() for t in given]
    assert_same(answers(lambda f, b, c0: linear_scan(f, b, c0, form), *single), answers(plain, *single), 1e-5)


@EACH
@pytest.mark.parametrize("length", [1, 2, 9, 13])
def test_gradcheck(form, length):
    f, b, c0 = (t.requires_grad_() for t in draw(2, length, 2))
    assert torch.autograd.gradcheck(lambda *given: linear_scan(*given, form), (f, b, c0))
    assert torch.autograd.gradcheck(lambda c0: linear_scan(f.detach(), b.detach(), c0, form), c0)   # each alone
    assert torch.autograd.gradcheck(lambda f: linear_scan(f, b.detach(), None, form), f)
    assert torch.autograd.gradcheck(lambda b: linear_scan(f.detach(), b, None, form), b)


@EACH
def test_known_scans(form):
    "Gates of one: a running sum. Nothing added: a running product. Gates of zero: what is added."
    f, b, c0 = draw(2, 75, 3)
    ones, zeros = torch.ones_like(b), torch.zeros_like(b)
    assert_close(linear_scan(ones, b, form=form), b.cumsum(1), rtol=0, atol=1e-12)
    assert_close(linear_scan(f, zeros, c0, form), f.cumprod(1) * c0[:, None], rtol=1e-12, atol=0)
    assert torch.equal(linear_scan(zeros, b, c0, form), b)
    assert torch.equal(linear_scan(ones, zeros, c0, form), c0[:, None].expand_as(b))


@EACH
@pytest.mark.parametrize("length", LENGTHS)
def test_from_the_other_end(form, length):
    "Begun behind the last step, a form is itself on what is turned round."
    f, b, c0 = draw(2, length, 3, seed=length)
    turned = FORMS[form](f.flip(1), b.flip(1), c0).flip(1)
    assert_close(FORMS[form](f, b, c0, back=True), turned, rtol=0, atol=1e-13)        # a product rounds by its order
    assert torch.equal(_states_before(b, c0)[:, 1:], b[:, :-1]) and torch.equal(_states_before(b, c0)[:, 0], c0)
    assert torch.equal(_states_before(b, c0, back=True), _states_before(b.flip(1), c0).flip(1))


def test_by_hand():
    f, b = torch.tensor([[[2.], [0.5], [-1.]]]), torch.tensor([[[1.], [2.], [3.]]])
    c0 = torch.tensor([[10.]])
    for form in FORMS:
        c, to_f, to_b, to_c0 = answers(lambda f, b, c0, form=form: linear_scan(f, b, c0, form)[:, -1:].expand(1, 3, 1), f, b, c0)
        assert c.flatten().tolist() == [-9.5] * 3                              # 21, 12.5, -9.5
        assert_close(to_f / to_b, torch.tensor([[[10.], [21.], [12.5]]]))      # the memory before each step
        assert_close(to_c0, 2 * to_b[:, 0])
        assert_close(to_b / to_b[:, -1:], torch.tensor([[[-0.5], [-1.], [1.]]]))


# ---- use

@EACH
@many
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 99))
def test_pieces(form, cuts, seed):
    "Carried from piece to piece, and cut anywhere, the memory and all gradients are those of the whole."
    def in_pieces(f, b, c0):
        found = []
        for piece_f, piece_b in zip(f.split(cuts, 1), b.split(cuts, 1), strict=True):
            found.append(linear_scan(piece_f, piece_b, c0, form))
            c0 = found[-1][:, -1]
        return torch.cat(found, 1)
    given = draw(2, sum(cuts), 2, seed)
    assert_same(answers(in_pieces, *given), answers(lambda f, b, c0: linear_scan(f, b, c0, form), *given))


@EACH
@many
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 20))
def test_padding_and_batch_mates(form, lengths, more):
    "Gates of one and nothing added keep the state; who else is in the batch does not matter; no gradient comes from padding."
    width = max(lengths) + more
    f, b, c0 = draw(len(lengths), width, 2, seed=width)
    padding = (torch.arange(width) >= torch.tensor(lengths)[:, None])[..., None]
    f, b = (t.masked_fill(padding, math.nan) for t in (f, b))

    def padded(f, b, c0):
        return linear_scan(f.masked_fill(padding, 1), b.masked_fill(padding, 0), c0, form)
    c, to_f, to_b, to_c0 = answers(padded, f, b, c0)
    assert not to_f[padding.expand_as(f)].any() and not to_b[padding.expand_as(b)].any()
    for row, length in enumerate(lengths):
        alone = linear_scan(f[row:row + 1, :length], b[row:row + 1, :length], c0[row:row + 1], form)[0]
        assert_close(c[row, :length], alone, rtol=0, atol=1e-13)
        assert_close(c[row, length - 1:], alone[-1:].expand(width - length + 1, 2), rtol=0, atol=1e-13)
    assert to_c0.isfinite().all()


@pytest.mark.parametrize("form, dtype", list(product(FORMS, [torch.float32, torch.float64])))
def test_layouts(form, dtype):
    "Time first in memory, expanded gates, gradients that are expanded: the same numbers."
    f, b, c0 = draw(3, 40, 2, dtype=dtype)
    expected = answers(plain, f, b, c0)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (f, b)]
    assert_same(answers(lambda f, b, c0: linear_scan(f, b, c0, form), *turned, c0), expected, 1e-5 if dtype == torch.float32 else 1e-12)
    gate = f[:, :1, :1].clone()
    assert_same(answers(lambda gate, b: linear_scan(gate.expand_as(b), b, form=form), gate, b),
                answers(lambda gate, b: plain(gate.expand_as(b), b, torch.zeros_like(c0)), gate, b), 1e-5 if dtype == torch.float32 else 1e-12)
    b.requires_grad_()
    linear_scan(f, b, c0, form).sum().backward()                               # the gradient is one number, expanded
    slope, = torch.autograd.grad(plain(f, b, c0).sum(), b)
    assert_close(b.grad, slope)


@EACH
def test_what_was_given_is_left_alone(form):
    given = draw(2, 40, 3)
    kept = [t.clone() for t in given]
    c = linear_scan(*given, form)
    assert all(map(torch.equal, given, kept))
    assert all(c.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in given)


@EACH
def test_precision(form):
    "Half precision is lifted, whether it is asked for or comes from autocast; gradients go back to it."
    f, b, c0 = (t.bfloat16() for t in draw(2, 300, 3))
    c, *slopes = answers(lambda f, b, c0: linear_scan(f, b, c0, form), f, b, c0)
    assert c.dtype == torch.float32 and {slope.dtype for slope in slopes} == {torch.bfloat16}
    assert_close(c, plain(f.float(), b.float(), c0.float()), rtol=0, atol=1e-5)
    assert linear_scan(f, b.double(), None, form).dtype == torch.float64
    single = draw(2, 300, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = linear_scan(*single, form)
    assert torch.equal(under, linear_scan(*single, form))
    ones = torch.ones(1, 1000, 1, dtype=torch.float16)
    assert linear_scan(ones, ones * 9, form=form)[0, -1] == 9000


@EACH
def test_long_memories(form):
    "A gate near one over many steps, and one near zero: no overflow, no underflow that matters."
    for gate in (0.0, 1e-30, 0.5, 1 - 1e-7, 1.0):
        f = torch.full((1, 5000, 1), gate)
        c, to_f, to_b = answers(lambda f, b: linear_scan(f, b, form=form), f, torch.ones_like(f))
        exact = plain(f.double(), torch.ones_like(f).double(), torch.zeros(1, 1).double())
        assert_close(c.double(), exact, rtol=1e-4, atol=0)
        assert to_f.isfinite().all() and to_b.isfinite().all()


def test_where_blocks_end_before_the_loop():
    "As long as this holds, the chapter must say so. Gates of at most one cannot do it."
    f, b, c0 = torch.full((1, 50, 1), 1e30), torch.zeros(1, 50, 1), torch.zeros(1, 1)
    assert not linear_scan(f, b, c0, "loop").any() and linear_scan(f, b, c0, "blocks").isnan().any()


def test_steps_in_sequence():
    "2 sqrt(2 T) steps, and never more than a fifth more from T = 50 on; T for the loop."
    class Steps(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            taken.append(operation.overloadpacket.__name__ == "addcmul")
            return operation(*args, **(kwargs or {}))
    taken = []
    for length in (1, 2, 10, 50, 128, 200, 999, 5000):
        f, b, c0 = draw(1, length, 1)
        for form, most in ((scan_loop, length), (scan_blocks, 1.2 * math.sqrt(8 * length) + 3)):
            taken.clear()
            with torch.no_grad(), Steps():
                form(f, b, c0)
            assert sum(taken) <= most, (form, length)
        assert sum(taken) >= min(length, 0.99 * math.sqrt(8 * length))


def test_steps_by_hand():
    f, b, c = 2 * torch.ones(1, 4, 1), torch.arange(1., 5)[None, :, None], torch.zeros(1, 4, 1)
    one = torch.tensor([[1.]])
    assert scan_loop(f, b, one, c=c) is c and c.flatten().tolist() == [3, 8, 19, 42]
    assert scan_loop(f, b, one, back=True).flatten().tolist() == [65, 32, 15, 6]
    assert scan_loop(f.mT, b.mT, one, time=2).flatten().tolist() == [3, 8, 19, 42]
    assert scan_loop(f[:, :0], b[:, :0], one).shape == (1, 0, 1)
    with pytest.raises(ValueError):
        scan_loop(f, b, one, c=c[:, :3])


# ---- choice and refusal

def test_choice_of_the_form():
    assert _scan_form(torch.empty(1, LONG, NARROW)) == _scan_form(torch.empty(NARROW, LONG, 1)) == "blocks"
    assert _scan_form(torch.empty(1, LONG - 1, NARROW)) == _scan_form(torch.empty(1, LONG, NARROW + 1)) == "loop"
    assert _scan_form(torch.empty(2, LONG, NARROW)) == _scan_form(torch.empty(NARROW + 1, LONG, 1)) == "loop"
    assert _scan_form(torch.empty(64, LONG, 64, device="meta")) == "blocks"
    for size in ((1, LONG, 1), (1, LONG, NARROW + 1)):
        f, b, c0 = draw(*size)
        assert torch.equal(linear_scan(f, b, c0), FORMS[_scan_form(b)](f, b, c0))
    f, b, c0 = draw(1, 10 * LONG, 3)
    assert not torch.equal(linear_scan(f, b, c0, "loop"), linear_scan(f, b, c0, "blocks"))    # they round differently


@pytest.mark.parametrize("change, said", [
    (lambda f, b, c0: (f[:, :4], b, c0), r"one shape .* \(2, 4, 3\) and \(2, 5, 3\)"),
    (lambda f, b, c0: (f[..., :1], b, c0), r"\(2, 5, 1\) and \(2, 5, 3\)"),
    (lambda f, b, c0: (f[0], b[0], c0), r"\(5, 3\) and \(5, 3\)"),
    (lambda f, b, c0: (f[:, :0], b[:, :0], c0), r"not be empty, got \(2, 0, 3\)"),
    (lambda f, b, c0: (f[:0], b[:0], c0[:0]), r"not be empty, got \(0, 5, 3\)"),
    (lambda f, b, c0: (f, b, c0[:1]), r"c0 must have shape \(2, 3\), got \(1, 3\)"),
    (lambda f, b, c0: (f, b, c0[:, None]), r"c0 must have shape \(2, 3\), got \(2, 1, 3\)"),
    (lambda f, b, c0: (f, b, c0, "tree"), "unknown form 'tree'; known: loop, blocks")])
def test_refusals(change, said):
    with pytest.raises(ValueError, match=said):
        linear_scan(*change(*draw(2, 5, 3)))


def test_refuses_complex_numbers_and_second_derivatives():
    f, b, c0 = (t.requires_grad_() for t in draw(2, 5, 3))
    with pytest.raises(TypeError, match="must be real, got torch.float64, torch.complex128"):
        linear_scan(f, b.to(torch.complex128), c0)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(Scan.apply(f, b, c0, scan_loop).square().sum(), b, create_graph=True)


# ---- what it costs

@EACH
def test_what_is_kept_and_made(form):
    "Kept: gates, states and the start. Made on the way back: a number of tensors of that size that does not grow."
    f, b, c0 = (t.requires_grad_() for t in draw(2, 200, 3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_scan(f, b, c0, form)
    assert sum(kept) == 2 * f.numel() + c0.numel()
