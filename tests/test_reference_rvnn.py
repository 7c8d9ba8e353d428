"The recursive network of the chapter is the library's encoder, sentence by sentence."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.core import simple_tree
from rvnnbook.encoders.rvnn import RvNN as Encoder
from rvnnbook.reference.rvnn import RvNN, existence_round, merge_nodes, nearest_left_matrix
from tests.helpers import assert_same, batch, slopes
from tests.test_core import boxed

TREES = [[2, 1, 3, 2, 1, 0], [0], simple_tree("left", 5), simple_tree("right", 7), simple_tree("balanced", 8), [1, 0]]


def pair(kind):
    torch.manual_seed(0)
    encoder = Encoder(3, cell=kind).double().eval()
    reference = RvNN(3, cell=kind).double()
    reference.load_state_dict(encoder.state_dict())
    return encoder, reference


@pytest.mark.parametrize("kind", ["grc", "lstm"])
def test_values_and_gradients_of_the_encoder(kind):
    encoder, reference = pair(kind)
    trees, _ = boxed(TREES)
    x, mask = batch([len(steps) for steps in TREES])
    x.requires_grad_()
    fast = encoder(x, mask, trees=trees).root
    plain = torch.stack([reference(row[:len(steps)], steps) for row, steps in zip(x, TREES)])
    assert_close(plain, fast, rtol=0, atol=1e-9)
    assert_same(slopes(plain, [x, *reference.parameters()]), slopes(fast, [x, *encoder.parameters()]), 1e-8)


@pytest.mark.parametrize("kind", ["grc", "lstm"])
@pytest.mark.parametrize("steps", TREES, ids=str)
def test_existence_instead_of_removal_changes_nothing(kind, steps):
    _, reference = pair(kind)
    x = torch.randn(len(steps), 3, dtype=torch.float64, requires_grad=True)
    states, exists = reference.leaves(x), torch.ones(len(steps), dtype=torch.float64)
    for step in range(1, max(steps) + 1):
        composes = torch.tensor([float(s == step) for s in steps], dtype=torch.float64)
        states, exists = existence_round(states, exists, composes, reference.cell)
    assert exists.tolist() == [0] * (len(steps) - 1) + [1]
    by_list = reference(x, steps)
    assert_close(states[-1, :3], by_list, rtol=0, atol=1e-9)
    assert_same(slopes(states[-1, :3], [x, *reference.parameters()]), slopes(by_list, [x, *reference.parameters()]), 1e-8)


def test_nearest_left_matrix_looks_up_existing_positions():
    for number in range(2**6):
        exists = torch.tensor([float(number >> i & 1) for i in range(6)])
        left = nearest_left_matrix(exists)
        for i in range(6):
            existing = [j for j in range(i) if exists[j]]
            assert left[i].nonzero().flatten().tolist() == existing[-1:] and left[i].sum() == bool(existing)


def test_merging_needs_no_recursion():
    depth = 1500
    assert merge_nodes([0] * depth, simple_tree("left", depth), lambda left, right: max(left, right) + 1) == depth - 1
