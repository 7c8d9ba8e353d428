"What the tests of all encoders and the lessons do not reach of the fold from the left and of RNN-GRC."
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap, simple_tree
from rvnnbook.encoders.recurrent_grc import RecurrentGRC
from rvnnbook.encoders.rvnn import RvNN
from rvnnbook.layers.cells import GRC, TreeLSTMCell
from rvnnbook.layers.chunks import STARTS, fold_prefixes
from rvnnbook.layers.given_trees import compose_by_height

few = settings(deadline=None, max_examples=15)
starts = pytest.mark.parametrize("start", STARTS)


def rows(lengths, dim=4, seed=0, extra=0):
    "Vectors of a batch, large on padding, and their mask; a length may be 0."
    mask = length_mask(torch.tensor(lengths), max(1, *lengths, 0) + extra)
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, 1e3), mask


def by_hand(cell, row, start):
    "What is kept after every element of one row."
    begin, rest = (torch.zeros_like(row[0]), row) if start == "zero" else (row[0], row[1:])
    kept = [begin]
    for element in rest:
        kept.append(cell(kept[-1], element))
    return torch.stack(kept[start == "zero":])


def slopes(root, inputs):
    push = torch.linspace(-1, 2, root.numel(), dtype=root.dtype).view_as(root)
    return torch.autograd.grad((root * push).sum(), inputs)


@starts
@few
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), extra=st.integers(0, 2), seed=st.integers(0, 10**6))
def test_every_row_is_folded_alone(start, lengths, extra, seed):
    torch.manual_seed(seed)
    cell, (x, mask) = GRC(4).double(), rows(lengths, seed=seed, extra=extra)
    prefixes = fold_prefixes(cell, x, mask, start)
    assert prefixes.shape == x.shape
    for b, n in enumerate(lengths):
        if not n:
            assert not prefixes[b].any()
            continue
        expected = by_hand(cell, x[b, :n], start)
        assert_close(prefixes[b, :n], expected)
        assert_close(prefixes[b, n:], expected[-1].expand(mask.shape[1] - n, 4))
        assert_close(prefixes[b, -1], reduce(cell, x[b, :n], torch.zeros(4).double()) if start == "zero" else reduce(cell, x[b, :n]))


@starts
@pytest.mark.parametrize("make, width", [(GRC, 4), (TreeLSTMCell, 8)])
def test_any_cell_and_the_left_branching_tree(start, make, width):
    torch.manual_seed(1)
    lengths, cell = [6, 1, 2, 5], make(4).double()
    x, mask = rows(lengths, width)
    x = torch.where(mask[..., None], x, 0).requires_grad_()
    more = start == "zero"
    leaves, there = torch.nn.functional.pad(x, (0, 0, int(more), 0)), torch.nn.functional.pad(mask, (int(more), 0), value=True)
    trees = torch.tensor([simple_tree("left", n + more) + [0] * (6 - n) for n in lengths])
    inputs = (x, *cell.parameters())
    folded, composed = fold_prefixes(cell, x, mask, start)[:, -1], compose_by_height(leaves, trees, there, cell)
    assert_close(folded, composed)
    assert_close(slopes(folded, inputs), slopes(composed, inputs))


@starts
def test_gradcheck(start):
    torch.manual_seed(2)
    cell, (x, mask) = GRC(3, 4).double(), rows([3, 1, 0], 3)
    x = torch.where(mask[..., None], x, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fold_prefixes(cell, x, mask, start), x)
    assert not slopes(fold_prefixes(cell, x, mask, start)[:, -1], (x,))[0][~mask].any()


@pytest.mark.parametrize("readout", ["end", "mean"])
@pytest.mark.parametrize("directions", [1, 2])
@starts
@few
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_the_encoder_sentence_by_sentence(start, directions, readout, lengths, seed):
    torch.manual_seed(seed)
    encoder, (x, mask) = RecurrentGRC(6, directions, start, readout).double().eval(), rows(lengths, 6, seed)
    out = encoder(x, mask, trace=True)
    assert not out.states[~mask].any() and torch.equal(out.trace["states"], out.states)
    for b, n in enumerate(lengths):
        tokens = encoder.leaf_norm(encoder.leaf(x[b, :n]))
        if directions == 1:
            states = ends = by_hand(encoder.fwd, tokens, start)
            end = ends[-1]
        else:
            forward = by_hand(encoder.fwd, tokens[:, :3], start)
            backward = by_hand(encoder.bwd, tokens[:, 3:].flip(0), start).flip(0)
            states = encoder.out(torch.cat([forward, backward], -1))
            end = encoder.out(torch.cat([forward[-1], backward[0]]))
        assert_close(out.states[b, :n], states)
        assert_close(out.root[b], end if readout == "end" else states.mean(0))
    assert batch_gap(encoder, x, mask) <= 1e-12 and padding_gap(encoder, x, mask) <= 1e-12


def test_recursive_network_with_the_same_weights():
    torch.manual_seed(3)
    lengths = [5, 1, 2]
    reader, network = RecurrentGRC(4, start="first").double(), RvNN(4).double()
    names = {"leaf": "leaf", "leaf_norm": "leaf_norm", "fwd": "grc"}
    network.load_state_dict({f"{names[key.split('.')[0]]}.{key.split('.', 1)[1]}": value for key, value in reader.state_dict().items()})
    x, mask = rows(lengths)
    x = torch.where(mask[..., None], x, 0).requires_grad_()
    trees = torch.tensor([simple_tree("left", n) + [0] * (5 - n) for n in lengths])
    found = []
    for encoder, kwargs in ((reader, {}), (network, {"trees": trees})):
        root = encoder(x, mask, **kwargs).root
        found.append([root, *slopes(root, (x, *encoder.parameters()))])
    assert len(found[0]) == len(found[1])
    by_shape = [sorted(part, key=lambda t: (t.shape, float(t.detach().abs().sum()))) for part in found]
    for ours, theirs in zip(*by_shape):
        assert_close(ours, theirs)


def test_halves_do_not_mix_before_the_last_map():
    torch.manual_seed(4)
    encoder, (x, mask) = RecurrentGRC(6, directions=2).double(), rows([5, 3], 6)
    encoder.leaf = encoder.leaf_norm = encoder.out = torch.nn.Identity()
    states = encoder(x, mask).states
    changed = x.clone()
    changed[:, 1, :3] += 1
    moved = (encoder(changed, mask).states != states)
    assert not moved[..., 3:].any() and not moved[:, 0].any() and moved[0, 1:, :3].any(-1).all()
    changed = x.clone()
    changed[:, 1, 3:] += 1
    moved = (encoder(changed, mask).states != states)
    assert not moved[..., :3].any() and not moved[:, 2:].any() and moved[:, :2, 3:].any(-1).all()
    assert_close(fold_prefixes(encoder.fwd, x[..., :3], mask)[mask], states[..., :3][mask])


def test_one_direction_never_looks_ahead():
    torch.manual_seed(5)
    encoder, (x, mask) = RecurrentGRC(4).double(), rows([6])
    changed = x.clone()
    changed[:, 3] += 1
    before, after = encoder(x, mask).states, encoder(changed, mask).states
    assert torch.equal(before[:, :3], after[:, :3]) and ((before - after)[:, 3:].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("options, said", [
    (dict(dim=7, directions=2), "dim=7"), (dict(dim=8, directions=3), "got directions=3"), (dict(dim=8, directions=0), "got directions=0"),
    (dict(dim=8, start="last"), "'last'; known: zero, first"), (dict(dim=8, readout="start"), "'start'; known: end, mean"),
    (dict(dim=8, activation="tanh"), "'tanh'")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        RecurrentGRC(**options)
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="'middle'; known: zero, first"):
        fold_prefixes(torch.add, *rows([2]), "middle")


def test_widths():
    one, two = RecurrentGRC(8), RecurrentGRC(8, directions=2, hidden=10)
    assert one.bwd is None and one.fwd.dim == 8 and one.fwd.w1.out_features == 32
    assert two.fwd.dim == two.bwd.dim == 4 and two.fwd.w1.out_features == two.bwd.w1.out_features == 10
    assert not hasattr(one.out, "weight") and two.out.weight.shape == (8, 8)
