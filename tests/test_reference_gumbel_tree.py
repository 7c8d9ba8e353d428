"The easy-first trees of the chapter equal the library's encoder, sentence by sentence, in values and gradients."
import pytest
import torch

from rvnnbook.core import length_mask
from rvnnbook.encoders.greedy_tree import GreedyTree, tree_noise
from rvnnbook.layers.tree_search import steps_from_merges
from rvnnbook.reference import gumbel_tree
from rvnnbook.reference.gumbel_tree import GumbelTree, replace_pair, straight_through
from tests.helpers import assert_equal_gradients, batch, close, imported_packages

DIM = 6
LENGTHS = [1, 2, 3, 4, 7, 10]


def pair(scorer, choice, temperature):
    torch.manual_seed(0)
    encoder = GreedyTree(DIM, scorer=scorer, choice=choice, temperature=temperature).double().train(choice == "gumbel")
    reference = GumbelTree(DIM, scorer, temperature).double()
    reference.load_state_dict(encoder.state_dict())
    return encoder, reference


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("choice", ["greedy", "gumbel"])
@pytest.mark.parametrize("scorer", ["parent", "pair"])
def test_values_trees_and_gradients_equal_those_of_the_encoder_in_a_padded_batch(scorer, choice, temperature):
    encoder, reference = pair(scorer, choice, temperature)
    x, mask = batch(LENGTHS, DIM)
    x = torch.where(mask[..., None], x, 0.5)                   # finite padding: the literal loop multiplies it by zero
    inputs = [row[:n].clone().requires_grad_() for row, n in zip(x, LENGTHS)]
    padded = torch.stack([torch.cat([row, x[b, len(row):]]) for b, row in enumerate(inputs)])
    out = encoder(padded, mask, generator=torch.Generator().manual_seed(1), trace=True)
    noise = tree_noise(length_mask(torch.tensor(LENGTHS)), torch.Generator().manual_seed(1)).double()
    found = [reference(row, noise[:n - 1, b, :n - 1] if choice == "gumbel" else None)
             for b, (row, n) in enumerate(zip(inputs, LENGTHS))]
    roots = torch.stack([root for root, _ in found])
    close(roots, out.root, 1e-9)
    for (_, merges), tree, n in zip(found, out.trace["trees"].tolist(), LENGTHS):
        assert steps_from_merges(merges, n) == tree[:n]
    slopes = assert_equal_gradients(roots, out.root, inputs, reference.named_parameters(), encoder.named_parameters())
    reached = sum(float(slope.abs().sum()) for name, slope in slopes.items() if name.startswith("scorer"))
    assert (reached > 0) == (choice == "gumbel")


def test_straight_through_has_the_value_of_the_choice_and_the_gradient_of_the_softmax():
    u = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = straight_through(u, 0.5)
    assert y.tolist() == [0, 0, 1]
    push = torch.tensor([5.0, 0.0, 1.0], dtype=torch.float64)
    found, = torch.autograd.grad(y @ push, u)
    wanted, = torch.autograd.grad((u / 0.5).softmax(-1) @ push, u)
    close(found, wanted, 1e-12)


def test_replace_pair_is_a_deletion_and_an_insertion():
    torch.manual_seed(0)
    nodes, parents = torch.randn(6, 3), torch.randn(5, 3)
    for j in range(5):
        wanted = torch.cat([nodes[:j], parents[j:j + 1], nodes[j + 2:]])
        close(replace_pair(nodes, parents, torch.eye(5)[j]), wanted, 1e-6)


def test_only_torch_and_the_reference_are_imported():
    assert imported_packages(gumbel_tree) == {"torch", "crvnn"}
