"The gated recursive cell in compiled loops: against the cell's operations, its derivatives, and where it is not used."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import length_mask
from rvnnbook.layers import cells, compiled_cell
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.compiled_cell import (
    CompiledMix,
    compiled_mix,
    finish_slot,
    gated_gradients,
    gated_sums,
    has_compiled_form,
    mix_formula,
    slot_gradients,
)
from rvnnbook.literal import literal_encoder
from rvnnbook.registry import create_encoder

NEVER, ALWAYS = 10**12, 0
OPTIONS = {"crvnn": {"modulation": "exponentials"}, "bbt_grc": {}, "recurrent_grc": {}}


@pytest.fixture
def compiled_from(monkeypatch):
    return lambda least: monkeypatch.setattr(cells, "COMPILED_FROM", least)


@pytest.fixture
def calls(monkeypatch):
    "How often the loop is called."
    made = []
    monkeypatch.setattr(compiled_cell, "gated_sums", lambda *given: made.append(1) or gated_sums(*given))
    return made


def cell_and_children(rows, dim, hidden=None, seed=0, **options):
    torch.manual_seed(seed)
    cell = GRC(dim, hidden, **options).double()
    return cell, torch.randn(*rows, 2 * dim, dtype=torch.float64, requires_grad=True)


def gradients(mixed, inputs):
    return torch.autograd.grad((mixed * mixed.detach().cos()).sum(), inputs)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["gelu", "gelu_tanh"]),
       st.sampled_from([0, 0.4]), st.integers(0, 99))
def test_values_and_gradients(rows, dim, hidden, activation, dropout, seed):
    cell, below = cell_and_children((rows,), dim, hidden, seed, activation=activation, dropout=dropout)
    inputs, answers = [below, *cell.w1.parameters(), *cell.w2.parameters()], []
    for mix in (cell.mix, lambda below: compiled_mix(cell, below)):
        torch.manual_seed(seed)                                # of dropout
        mixed = mix(below)
        answers.append([mixed, *gradients(mixed, inputs)])
    for mine, theirs in zip(*answers):
        assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_given_factors_and_more_dimensions():
    cell, below = cell_and_children((2, 3), 4, dropout=0.5)
    keep = torch.rand(2, 3, 16, dtype=torch.float64)
    assert_close(compiled_mix(cell, below, keep), cell.mix(below, keep))
    cell.eval()
    turned = below.detach().transpose(0, 1)                    # not contiguous
    assert_close(compiled_mix(cell, turned), cell.mix(turned))
    assert_close(compiled_mix(cell, turned[0, 0]), cell.mix(turned[0, 0]))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_slots_against_autograd(start, rows, dim, dtype, seed):
    "Sum, norm and mixture of one slot, with rows before and behind it that stay as they are."
    torch.manual_seed(seed)
    norm, total, slot = nn.LayerNorm(dim).to(dtype), start + rows, slice(start, start + rows)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    boxes, share, token, carry, grads = (torch.randn(*size, dtype=dtype) for size in (
        (total + rows, 6 * dim), (total, 1), (rows, dim), (rows + 1, dim), (total, dim)))
    z = boxes[slot].clone().requires_grad_()
    mixed = F.glu(z).view(rows, 3, dim).sum(1)
    normed = norm(mixed)
    after = torch.lerp(token, normed, share[slot])
    loss = (after * carry[:rows]).sum() + (normed * grads[slot]).sum()
    at_z, at_normed = torch.autograd.grad(loss, (z, normed))
    boxes[:, 3 * dim:].sigmoid_()
    made, old = [torch.full(size, 7.0, dtype=dtype) for size in ((total, dim), (total, dim), (2, total, 1))], (boxes.clone(), grads.clone())
    scale, shift = (weight.detach().numpy() for weight in norm.parameters())
    given_ = boxes.numpy(), share.numpy()
    finish_slot(*given_, token.numpy(), (scale, shift, norm.eps), *(one.numpy() for one in made), start, rows)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-8}
    assert_close(made[0][slot], mixed.detach(), **close)
    assert_close(made[1][slot], normed.detach(), **close)
    assert_close(boxes[total:, :dim], after.detach(), **close)
    assert all((one[:start] == 7).all() for one in made[:2]) and (made[2][:, :start] == 7).all()
    assert torch.equal(boxes[:total], old[0][:total]) and torch.equal(boxes[total:, dim:], old[0][total:, dim:])
    at_boxes = torch.full((total, 6 * dim), 7.0, dtype=dtype)
    slot_gradients(*given_, scale, made[0].numpy(), *made[2].numpy(), carry.numpy(), grads.numpy(), at_boxes.numpy(), start, rows)
    assert_close(at_boxes[slot], at_z, **close)
    assert_close(grads[slot], at_normed, **close)
    assert (at_boxes[:start] == 7).all() and torch.equal(grads[:start], old[1][:start])


def test_loops_against_autograd():
    torch.manual_seed(0)
    parts, below, grad = (torch.randn(7, width, dtype=torch.float64) for width in (12, 6, 3))
    gates = torch.cat([parts[:, :9].sigmoid(), parts[:, 9:]], 1)
    mixed, at_parts, at_below = (torch.empty_like(one) for one in (grad, parts, below))
    gated_sums(gates.numpy(), below.numpy(), mixed.numpy())
    gated_gradients(gates.numpy(), below.numpy(), grad.numpy(), at_parts.numpy(), at_below.numpy())
    parts.requires_grad_(), below.requires_grad_()
    values = torch.cat([below, parts[:, 9:]], 1).view(7, 3, 3)
    expected = (values * parts[:, :9].sigmoid().view(7, 3, 3)).sum(1)
    assert_close(mixed, expected.detach())
    for mine, theirs in zip((at_parts, at_below), torch.autograd.grad(expected, (parts, below), grad)):
        assert_close(mine, theirs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dropped", [False, True])
def test_first_and_second_derivatives(approximate, dropped):
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (5, 4), (5,), (8, 5), (8,))]
    keep = 2 * torch.randint(2, (3, 5)).double() if dropped else None
    assert_close(CompiledMix.apply(*inputs, keep, approximate), mix_formula(*inputs, keep, approximate))
    first, again = (torch.autograd.grad(CompiledMix.apply(*inputs, keep, approximate).square().sum(), inputs, create_graph=graph)
                    for graph in (False, True))
    for one, other in zip(first, again):
        assert_close(one, other)
    assert torch.autograd.gradcheck(CompiledMix.apply, (*inputs, keep, approximate))
    assert torch.autograd.gradgradcheck(CompiledMix.apply, (*inputs, keep, approximate))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("frozen", range(5))
def test_inputs_without_gradient(frozen, create_graph):
    cell, below = cell_and_children((6,), 3)
    inputs = [below, *cell.w1.parameters(), *cell.w2.parameters()]
    inputs[frozen].requires_grad_(False)
    wanted = [one for one in inputs if one.requires_grad]
    found, expected = (torch.autograd.grad(mix(below).square().sum(), wanted, create_graph=create_graph)
                       for mix in (lambda below: compiled_mix(cell, below), cell.mix))
    for mine, theirs in zip(found, expected):
        assert_close(mine, theirs)


def test_size_decides(calls, compiled_from):
    cell, below = cell_and_children((2, 8), 4)
    compiled_from(below.numel() + 1)
    plain = cell.mix(below)
    assert not calls
    compiled_from(below.numel())
    assert_close(cell.mix(below), plain)
    assert calls


@pytest.mark.parametrize("name", ["crvnn", "ebt_grc", "rir_ebt_grc", "bt_grc_os", "gumbel_tree", "ordered_memory"])
def test_literal_forms_use_operations(name, calls, compiled_from):
    compiled_from(ALWAYS)
    mask = length_mask(torch.tensor([9, 7, 2]))
    literal_encoder(name, 8)(torch.randn(3, 9, 8), mask, generator=torch.Generator())
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_encoders(name, dtype, dropout, calls, compiled_from):
    lengths, answers = torch.tensor([60, 41, 7, 1]), []
    mask = length_mask(lengths)
    for least in (NEVER, ALWAYS):
        compiled_from(least)
        torch.manual_seed(3)
        encoder = create_encoder(name, dim=12, dropout=dropout, **OPTIONS[name]).to(dtype)
        x = torch.randn(4, 60, 12, dtype=dtype, requires_grad=True)
        out = encoder(x, mask, generator=torch.Generator().manual_seed(0))
        answers.append([out.root, *torch.autograd.grad((out.root.sin()).sum() + out.loss, [x, *encoder.parameters()], allow_unused=True)])
        assert bool(calls) == (least == ALWAYS)
    bound = 1e-9 if dtype == torch.float64 else 2e-3
    for mine, theirs in zip(*answers):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_close(mine, theirs, rtol=bound, atol=bound)


def test_without_gradients(calls, compiled_from):
    cell, below = cell_and_children((9,), 4)
    plain = cell(*below.chunk(2, 1))
    compiled_from(ALWAYS)
    with torch.inference_mode():
        assert_close(cell(*below.detach().chunk(2, 1)), plain.detach())
    assert calls


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(cell):
    cell.w1.register_forward_hook(lambda module, given, out: out + 1)


@pytest.mark.parametrize("change", [
    hooked, lambda cell: setattr(cell, "w2", Twice(16, 16).double()), lambda cell: setattr(cell.w1, "bias", None),
    lambda cell: nn.utils.parametrizations.weight_norm(cell.w1),
    lambda cell: cell.w2.register_full_backward_hook(lambda module, at_in, at_out: None),
    lambda cell: cell.dropout.register_forward_hook(lambda module, given, out: 2 * out)],
    ids=["forward hook", "own layer", "no bias", "weight norm", "backward hook", "hook of dropout"])
def test_other_layers_keep_their_operations(change, calls, compiled_from):
    cell, below = cell_and_children((9,), 4)
    change(cell)
    assert not has_compiled_form(cell, below)
    compiled_from(NEVER)
    plain = cell.mix(below)
    compiled_from(ALWAYS)
    assert_close(cell.mix(below), plain)
    assert not calls


def test_relu_and_half_precision_keep_their_operations(calls, compiled_from):
    compiled_from(ALWAYS)
    cell, below = cell_and_children((9,), 4, activation="relu")
    assert cell.mix(below).isfinite().all() and not has_compiled_form(cell, below)
    cell, below = cell_and_children((9,), 4)
    assert has_compiled_form(cell, below) and not has_compiled_form(cell, below.float())
    assert cell.bfloat16().mix(below.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert not has_compiled_form(cell.float(), below.float())
        assert cell.mix(below.float()).isfinite().all()
    assert not calls


def test_transformations_keep_their_operations(calls, compiled_from):
    cell, below = cell_and_children((9,), 4)
    compiled_from(NEVER)
    plain = [cell.mix(below), torch.func.jacrev(lambda row: cell.mix(row))(below.detach()[0])]
    compiled_from(ALWAYS)
    assert_close(torch.func.vmap(cell.mix)(below), plain[0])
    assert_close(torch.func.jacrev(lambda row: cell.mix(row))(below.detach()[0]), plain[1])
    exported = torch.export.export(cell, tuple(below.detach().chunk(2, 1)))
    assert_close(exported.module()(*below.detach().chunk(2, 1)), cell.norm(plain[0]))
    assert not calls


def test_without_numba(calls, compiled_from, monkeypatch):
    monkeypatch.setattr(compiled_cell, "numba", None)
    cell, below = cell_and_children((9,), 4)
    plain = cell.mix(below)
    compiled_from(ALWAYS)
    assert_close(cell.mix(below), plain)
    assert not calls


def test_stored_numbers(compiled_from):
    cell, below = cell_and_children((50,), 4)
    weights = {parameter.data_ptr() for parameter in cell.parameters()}
    for least, expected in ((NEVER, 16), (ALWAYS, 10)):
        compiled_from(least)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.update({(one.data_ptr(), one.shape): one.numel()}) or one, lambda one: one):
            mixed = cell.mix(below)
        assert mixed.requires_grad
        assert sum(size for (place, _), size in sizes.items() if place not in weights) == 50 * 4 * expected
