"Four ways to fold a sentence along a tree give the same roots and gradients, and each state is copied a fixed number of times."
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rvnnbook.core import simple_tree, tree_from_steps
from rvnnbook.encoders.rvnn import RvNN
from rvnnbook.layers.cells import GRC, TreeLSTMCell
from rvnnbook.layers.given_trees import compose_by_height, compose_tree, _number_nodes
from rvnnbook.reference.rvnn import existence_round
from tests.test_core import boxed, leaves_of, played, random_steps

quick = settings(deadline=None, max_examples=25)
batches = st.lists(random_steps(), min_size=1, max_size=4)


class Lopsided(nn.Module):
    "A cell that treats its children differently and has no structure besides."
    def __init__(self, dim):
        super().__init__()
        self.state_dim, self.left, self.right = dim, nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, left, right):
        return self.left(left).tanh() + self.right(right).sigmoid() * left


def compose_existence(leaves, trees, mask, cell):
    "Roots when all positions are kept, one round for each step that occurs."
    rounds, roots = [step for step in trees.unique().tolist() if step], []
    for states, steps, length in zip(leaves, trees, mask.sum(1).tolist()):
        exists = mask.new_zeros(len(states), dtype=leaves.dtype).index_fill(0, torch.arange(length), 1)
        for step in rounds:
            states, exists = existence_round(states, exists, (steps == step).to(leaves.dtype), cell)
        roots.append(states[length - 1])
    return torch.stack(roots)


CELLS = {"lopsided": Lopsided, "grc": GRC, "lstm": TreeLSTMCell}


def folded(rows, kind, seed):
    "Roots of a batch and gradients of a random weighting, four ways."
    torch.manual_seed(seed)
    cell = CELLS[kind](3).double()
    trees, mask = boxed(rows)
    leaves = torch.randn(*mask.shape, cell.state_dim, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(rows), cell.state_dim, dtype=torch.float64)
    by_tree = torch.stack([compose_tree(played(row)[1], list(leaf.unbind()), cell) for row, leaf in zip(rows, leaves)])
    ways = {"tree": by_tree, "one pass": compose_by_height(leaves, trees, mask, cell),
            "rounds": compose_by_height(leaves, trees, mask, lambda left, right: cell(left, right)),
            "existence": compose_existence(leaves, trees, mask, cell)}
    inputs = [leaves, *cell.parameters()]
    return ways, {way: torch.autograd.grad((root * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
                  for way, root in ways.items()}, mask


@pytest.mark.parametrize("kind", CELLS)
@quick
@given(batches, st.integers(0, 10**6))
@example([[2, 0]], 0)                            # a round in which nobody composes
def test_four_ways_are_one(kind, rows, seed):
    roots, slopes, mask = folded(rows, kind, seed)
    for way in ("rounds", "one pass", "existence"):
        assert roots[way].shape == roots["tree"].shape
        assert (roots[way] - roots["tree"]).abs().max() <= 1e-10, way
        for found, expected in zip(slopes[way], slopes["tree"]):
            assert (found - expected).abs().max() <= 1e-10, way
        assert not slopes[way][0][~mask].any(), way


def test_the_cell_is_asked_in_order():
    "The comparison above would notice exchanged children."
    cell = Lopsided(3)
    left, right = torch.randn(2, 5, 3)
    assert (cell(left, right) - cell(right, left)).abs().min(dim=0).values.max() > 1e-3


@quick
@given(batches)
def test_order_of_leaves(rows):
    "The root is made of its own leaves, in their order: the digits of a number."
    trees, mask = boxed(rows)
    leaves = torch.stack([torch.arange(mask.shape[1]).expand(mask.shape), torch.ones(mask.shape)], -1).double()
    join = lambda left, right: torch.stack([left[:, 0] * 16 ** right[:, 1] + right[:, 0], left[:, 1] + right[:, 1]], -1)
    for (number, count), row in zip(compose_by_height(leaves, trees, mask, join).tolist(), rows):
        assert int(count) == len(row) and int(number) == sum(i * 16 ** (len(row) - 1 - i) for i in range(len(row)))


@quick
@given(batches)
def test_numbers_of_nodes(rows):
    "Name every node by what it composes, and compare with the tree."
    trees, mask = boxed(rows)
    children, counts, roots = _number_nodes(trees, mask)
    nodes, parents = [(b, i) for b, row in enumerate(rows) for i in range(len(row))], iter(children)
    for count in counts:                          # a round composes nodes of the rounds before it, each of them once
        nodes += [(nodes[left], nodes[right]) for left, right in [next(parents) for _ in range(count)]]
    assert len(nodes) == sum(2 * len(row) - 1 for row in rows) and sum(counts) == len(children)
    assert counts == [sum(row.count(step) for row in rows) for step in sorted(set().union(*rows) - {0})]
    assert sorted([*(child for pair in children for child in pair), *roots]) == list(range(len(nodes)))
    named = lambda tree, b: tuple(named(part, b) for part in tree) if isinstance(tree, tuple) else (b, tree)
    assert [nodes[root] for root in roots] == [named(tree_from_steps(row), b) for b, row in enumerate(rows)]


@pytest.mark.parametrize("kind", CELLS)
def test_slopes(kind):
    torch.manual_seed(0)
    cell = CELLS[kind](2).double()
    trees, mask = boxed([[2, 1, 5, 2, 1, 0], [0], [3, 1, 2, 0]])
    leaves = torch.randn(*mask.shape, cell.state_dim, dtype=torch.float64, requires_grad=True)
    names, values = zip(*cell.named_parameters())

    def root(leaves, *values):
        return compose_by_height(leaves, trees, mask, lambda l, r: torch.func.functional_call(cell, dict(zip(names, values)), (l, r)))
    assert torch.autograd.gradcheck(root, (leaves, *values))


# ---- the cells

def sigmoid(z):
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_grc_by_hand(activation):
    torch.manual_seed(0)
    cell = GRC(3, hidden=5, activation=activation).double()
    nn.init.normal_(cell.norm.weight)
    nn.init.normal_(cell.norm.bias)
    left, right = torch.randn(2, 3, dtype=torch.float64)
    bend = {"relu": lambda z: max(z, 0), "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2}[activation]
    hidden = [bend((row @ torch.cat([left, right]) + b).item()) for row, b in zip(cell.w1.weight, cell.w1.bias)]
    z = [(row @ torch.tensor(hidden).double() + b).item() for row, b in zip(cell.w2.weight, cell.w2.bias)]
    mixed = [sigmoid(z[i]) * float(left[i]) + sigmoid(z[3 + i]) * float(right[i]) + sigmoid(z[6 + i]) * z[9 + i] for i in range(3)]
    mean = sum(mixed) / 3
    scale = math.sqrt(sum((m - mean) ** 2 for m in mixed) / 3 + 1e-5)
    expected = [(m - mean) / scale * w.item() + b.item() for m, w, b in zip(mixed, cell.norm.weight, cell.norm.bias)]
    torch.testing.assert_close(cell(left, right), torch.tensor(expected, dtype=torch.float64))


def test_tree_lstm_by_hand():
    torch.manual_seed(0)
    cell = TreeLSTMCell(2).double()
    left, right = torch.randn(2, 4, dtype=torch.float64)
    z = (cell.gates.weight @ torch.cat([left[:2], right[:2]]) + cell.gates.bias).tolist()
    c = [sigmoid(z[i]) * math.tanh(z[8 + i]) + sigmoid(z[2 + i]) * float(left[2 + i]) + sigmoid(z[4 + i]) * float(right[2 + i])
         for i in range(2)]
    h = [sigmoid(z[6 + i]) * math.tanh(c[i]) for i in range(2)]
    torch.testing.assert_close(cell(left, right), torch.tensor(h + c, dtype=torch.float64))
    assert TreeLSTMCell(2).gates.bias[2:6].tolist() == [1] * 4 and TreeLSTMCell(2, 3.0).gates.bias[2:6].tolist() == [3] * 4


def test_sizes():
    assert (GRC(4).w1.out_features, GRC(4, 7).w1.out_features, GRC(4).state_dim, TreeLSTMCell(4).state_dim) == (16, 7, 4, 8)
    with pytest.raises(ValueError, match="'tanh'; known: gelu, gelu_tanh, relu"):
        GRC(4, activation="tanh")
    with pytest.raises(ValueError, match="'gru'; known: grc, lstm"):
        RvNN(4, cell="gru")


def test_options_reach_the_cell():
    encoder = RvNN(4, hidden=6, activation="relu", dropout=0.25)
    assert encoder.cell is encoder.grc and encoder.grc.w1.out_features == 6
    assert encoder.grc.activation is F.relu and encoder.grc.dropout.p == 0.25
    assert RvNN(4, cell="lstm").cell.gates.out_features == 20


def test_encoder_by_definition():
    torch.manual_seed(0)
    trees, mask = boxed([[2, 1, 3, 2, 1, 0], [0], [1, 2, 0]])
    x = torch.randn(*mask.shape, 4, dtype=torch.float64)
    for kind in ("grc", "lstm"):
        encoder = RvNN(4, cell=kind).double()
        out = encoder(x, mask, trees=trees, trace=True)
        assert torch.equal(out.trace["trees"], trees)
        for root, tokens, row, kept in zip(out.root, x, trees.tolist(), mask):
            leaves = encoder.leaf(tokens[kept])
            leaves = F.layer_norm(leaves, (4,)) if kind == "grc" else leaves
            tree = played(row[:len(leaves)])[1]
            torch.testing.assert_close(root, compose_tree(tree, list(leaves), encoder.cell)[:4], rtol=0, atol=1e-10)


# ---- what folding costs

class Moved(TorchDispatchMode):
    "Counts the numbers in the results of all operations: of states (floating point) and of bookkeeping (integers)."
    def __init__(self):
        super().__init__()
        self.states = self.bookkeeping = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                if tensor.is_floating_point():
                    self.states += tensor.numel()
                else:
                    self.bookkeeping += tensor.numel()
        return result


def numbers_moved(compose, steps):
    trees, mask = torch.tensor([steps]), torch.ones(1, len(steps), dtype=torch.bool)
    leaves = torch.ones(1, len(steps), 4, requires_grad=True)
    with Moved() as moved:
        compose(leaves, trees, mask, lambda left, right: (left - right).tanh()).sum().backward()
    assert leaves.grad.isfinite().all()
    return moved


@pytest.mark.parametrize("shape", ["left", "right", "balanced"])
def test_each_state_is_copied_a_fixed_number_of_times(shape):
    cost = {n: numbers_moved(compose_by_height, simple_tree(shape, n)).states for n in (128, 256)}
    assert cost[256] < 2.5 * cost[128]


def test_bookkeeping_grows_as_the_states_do():
    cost = {n: numbers_moved(compose_by_height, simple_tree("left", n)).bookkeeping for n in (128, 256)}
    assert cost[256] < 2.5 * cost[128]


@pytest.mark.parametrize("kind", ["grc", "lstm"])
def test_three_thousand_tokens_to_the_left(kind):
    torch.manual_seed(0)
    encoder, steps = RvNN(4, cell=kind), simple_tree("left", 3000)
    x = torch.randn(1, 3000, 4, requires_grad=True)
    root = encoder(x, torch.ones(1, 3000, dtype=torch.bool), trees=torch.tensor([steps])).root
    (root * torch.randn(4)).sum().backward()
    assert root.isfinite().all() and x.grad.isfinite().all() and x.grad[0, -1].any()
    with torch.no_grad():                        # the definition, without its recursion
        leaves = encoder.leaf_norm(encoder.leaf(x[0])).unbind()
        state = leaves[0]
        for leaf in leaves[1:]:
            state = encoder.cell(state, leaf)
    torch.testing.assert_close(root[0], state[:4], rtol=0, atol=1e-4)


def test_leaves_of_helper():
    assert leaves_of(((0, 1), (2, (3, 4)))) == [0, 1, 2, 3, 4]


def test_cost_does_not_follow_the_number_of_a_round():
    "Rounds are names: a tree whose only round is the billionth is still one call of the cell."
    calls = []
    def cell(left, right):
        calls.append(len(left))
        return left + right
    trees, mask, leaves = torch.tensor([[10**9, 0]]), torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2, 3)
    assert compose_by_height(leaves, trees, mask, cell).tolist() == [[2, 2, 2]]
    assert calls == [1]
