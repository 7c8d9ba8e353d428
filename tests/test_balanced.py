"Balanced trees: levels against the recursion, cutting, numbers of calls, what may not matter."
import math
from functools import reduce

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap, simple_tree, tree_from_steps
from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.rvnn import RvNN
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.chunks import CHUNK_RULES, chunk_size, compose_levels, compose_levels_literal, level_lengths, level_trees
from rvnnbook.layers.given_trees import compose_by_height, compose_tree
from rvnnbook.registry import create_encoder

some = settings(deadline=None, max_examples=40)
lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=5)
arities, rules, seeds = st.integers(2, 12), st.sampled_from(CHUNK_RULES), st.integers(0, 10**6)


def batch(lengths, dim=4, seed=0, extra=0):
    "Nodes, NaN on padding, and their mask."
    mask = torch.nn.functional.pad(length_mask(torch.tensor(lengths)), (0, extra))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan), mask


def slopes(root, inputs, seed=0):
    push = torch.randn(root.shape, generator=torch.Generator().manual_seed(seed), dtype=root.dtype)
    return torch.autograd.grad((root * push).sum(), inputs, allow_unused=True)


def mixed(nodes):
    "A cell that minds order and number: a list of vectors to one."
    return sum((place + 1.5) * node.sin() for place, node in enumerate(nodes)).tanh() + len(nodes) / 10


def mixed_all(chunks, real):
    "The same for many chunks."
    weights = (torch.arange(chunks.shape[1]) + 1.5) * real
    return (weights[..., None] * chunks.sin()).sum(1).tanh() + real.double().sum(1, keepdim=True) / 10


# ---- sizes

@some
@given(st.integers(1, 3000), st.integers(2, 60))
def test_lengths(n, arity):
    always, late = (level_lengths(n, arity, rule) for rule in CHUNK_RULES)
    levels = len(always) - 1
    assert always[0] == late[0] == n and always[-1] == late[-1] == 1
    assert arity ** levels >= n and (levels == 0 or arity ** (levels - 1) < n)
    assert levels - 1 <= len(late) - 1 <= levels
    assert all(after == math.ceil(before / arity) for before, after in zip(always, always[1:]))
    assert all(before < arity + arity // 2 and after == 1 or after == math.ceil(before / arity) for before, after in zip(late, late[1:]))


@pytest.mark.parametrize("k, n, size", [(5, 6, 6), (5, 7, 5), (4, 5, 5), (4, 6, 4), (3, 3, 3), (3, 4, 3), (2, 3, 2), (30, 44, 44), (30, 45, 30), (30, 2, 30)])
def test_size_when_late(k, n, size):
    assert chunk_size(n, k, "late") == size and chunk_size(n, k) == k


def test_refusals():
    x, mask = batch([3])
    with pytest.raises(ValueError, match="arity=1"):
        compose_levels(x, mask, 1, mixed_all)
    with pytest.raises(ValueError, match="'sometimes'.*always, late"):
        compose_levels(x, mask, 3, mixed_all, "sometimes")


# ---- cutting

def first_chunks(x, mask, arity, rule="always"):
    "The chunks of the first level, as the cell receives them, and which of their places are nodes."
    calls = []

    def cell(chunks, real):
        calls.append((chunks, real))
        return chunks[:, 0]
    compose_levels(x, mask, arity, cell, rule)
    return calls[0]


@some
@given(lengths_of, arities, rules, seeds, st.integers(0, 3))
def test_chunks_are_the_sentence_in_pieces(lengths, arity, rule, seed, extra):
    assume(max(lengths) > 1)
    x, mask = batch(lengths, seed=seed, extra=extra)
    chunks, real = first_chunks(x, mask, arity, rule)
    assert real.dtype == torch.bool and chunks.shape == (*real.shape, 4)
    assert not (real[:, 1:] & ~real[:, :-1]).any() and not chunks[~real].any()         # nodes first, nothing from padding
    assert real.any(0).all()                                                           # no room for nobody
    pieces = [piece for row, n in zip(x, lengths) for piece in row[:n].split(chunk_size(n, arity, rule)) if len(piece) > 1]
    assert len(pieces) == len(chunks)
    for piece, chunk, there in zip(pieces, chunks, real):
        assert torch.equal(chunk[there], piece)


def test_width_is_that_of_the_sentences():
    x, mask = batch([4, 2], extra=6)
    assert first_chunks(x, mask, 30)[0].shape == (2, 4, 4)


def test_slopes_of_chunks():
    x, mask = batch([7, 3])
    x = torch.where(mask[..., None], x, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: first_chunks(t, mask, 3, "late")[0], x)


# ---- levels

@some
@given(lengths_of, arities, rules, seeds, st.integers(0, 3))
def test_levels_are_the_recursion(lengths, arity, rule, seed, extra):
    x, mask = batch(lengths, seed=seed, extra=extra)
    x.requires_grad_()
    called = []

    def cell(chunks, real):
        called.append(real.sum(1).tolist())
        return mixed_all(chunks, real)

    root = compose_levels(x, mask, arity, cell, rule)
    literal = torch.stack([compose_levels_literal(list(row[:n]), arity, mixed, rule) for row, n in zip(x, lengths)])
    assert_close(root, literal)
    ours, theirs = slopes(root, x)[0], slopes(literal, x)[0]
    assert_close(ours, theirs)
    assert not ours[~mask].any()
    each = [level_lengths(n, arity, rule) for n in lengths]
    assert len(called) == max(map(len, each)) - 1 and all(min(sizes) >= 2 for sizes in called)
    assert sum(size - 1 for sizes in called for size in sizes) == sum(n - 1 for n in lengths)      # a parent of m nodes makes m - 1 go


def test_slopes():
    x, mask = batch([7, 1, 4], dim=2)
    x, cell = torch.where(mask[..., None], x, 0).requires_grad_(), GRC(2).double()
    assert torch.autograd.gradcheck(lambda t: compose_levels(t, mask, 3, mixed_all, "late"), x)
    assert torch.autograd.gradcheck(lambda t: compose_levels(t, mask, 2, lambda pairs, real: cell(*pairs.unbind(1))), x)


def test_results_in_half_precision_are_kept_as_the_leaves_are():
    x, mask = batch([5, 2])
    root = compose_levels(x.float(), mask, 2, lambda chunks, real: mixed_all(chunks, real).bfloat16())
    assert root.dtype == torch.float32 and root.isfinite().all()


# ---- trees

@some
@given(lengths_of, arities, rules, seeds)
def test_trees_of_chunks_from_left_to_right(lengths, arity, rule, seed):
    torch.manual_seed(seed)
    (x, mask), cell = batch(lengths, seed=seed), GRC(4).double()
    trees = level_trees(mask, arity, rule)
    assert not trees[~mask].any()
    root = torch.stack([compose_levels_literal(list(row[:n]), arity, lambda nodes: reduce(cell, nodes), rule) for row, n in zip(x, lengths)])
    assert_close(compose_by_height(torch.where(mask[..., None], x, 0), trees, mask, cell), root)


@some
@given(st.integers(1, 200), rules)
def test_two_to_a_chunk(n, rule):
    assert level_trees(torch.ones(1, n, dtype=torch.bool), 2, rule)[0].tolist() == simple_tree("balanced", n)


def test_pairs_are_the_binary_tree():
    lengths, cell = [1, 2, 3, 11, 16, 17], GRC(4).double()
    x, mask = batch(lengths)
    x.requires_grad_()
    inputs = (x, *cell.parameters())
    root = compose_levels(x, mask, 2, lambda pairs, real: cell(*pairs.unbind(1)))
    along = torch.stack([compose_tree(tree_from_steps(simple_tree("balanced", n)), list(row), cell) for row, n in zip(x, lengths)])
    assert_close(root, along)
    assert_close(slopes(root, inputs), slopes(along, inputs))


# ---- the encoder

@pytest.mark.parametrize("cell", ["grc", "lstm"])
def test_encoder_is_the_network_over_its_trees(cell):
    torch.manual_seed(0)
    encoder, given_trees = BalancedTree(4, cell, dropout=0.3).double().eval(), RvNN(4, cell, dropout=0.3).double().eval()
    given_trees.load_state_dict(encoder.state_dict())
    x, mask = batch([9, 1, 2, 5])
    x.requires_grad_()
    ours = encoder(x, mask, trace=True)
    theirs = given_trees(x, mask, trees=ours.trace["trees"])
    assert ours.root.shape == (4, 4) and ours.states is None
    assert_close(ours.root, theirs.root)
    assert_close(slopes(ours.root, (x, *encoder.parameters())), slopes(theirs.root, (x, *given_trees.parameters())))


@pytest.mark.parametrize("name", ["lstm", "bilstm", "transformer", "crvnn", "ebt_grc"])
@pytest.mark.parametrize("rule", CHUNK_RULES)
def test_any_encoder_is_a_cell(name, rule):
    torch.manual_seed(0)
    inner = create_encoder(name, dim=8).double().eval()
    x, mask = batch([13, 1, 5, 4], 8)

    def nested(x, mask, trees=None):
        return inner(x, mask)._replace(root=compose_levels(x, mask, 4, lambda chunks, real: inner(chunks, real).root, rule))

    assert batch_gap(nested, x, mask) < 1e-9 and padding_gap(nested, x, mask) < 1e-9
    assert_close(nested(x, mask).root[3], inner(x[3:, :4], mask[3:, :4]).root[0])
