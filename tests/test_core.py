"Trees as composition steps, masks and the two gaps, against slow loops that know nothing of how the module does it."
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from rvnnbook.core import (
    EncoderOutput,
    batch_gap,
    check_batch,
    check_choice,
    check_counts,
    check_directions,
    check_ids,
    check_range,
    length_mask,
    merge_targets,
    pad_batch,
    padding_gap,
    right_neighbors,
    simple_tree,
    steps_from_tree,
    tree_from_steps,
)

quick = settings(deadline=None, max_examples=40)


# ---- trees drawn without the module: nested pairs by random splits, steps by random orders

@st.composite
def random_trees(draw, longest=12):
    "A binary tree over at most `longest` tokens, as nested pairs of positions."
    def tree(low, high):
        if high - low == 1:
            return low
        split = draw(st.integers(low + 1, high - 1))
        return tree(low, split), tree(split, high)
    return tree(0, draw(st.integers(1, longest)))


def leaves_of(tree):
    return leaves_of(tree[0]) + leaves_of(tree[1]) if isinstance(tree, tuple) else [tree]


def numbered(tree, later=lambda: 1):
    "Steps of a tree in which a parent's round comes `later()` rounds after its children's."
    steps = [0] * len(leaves_of(tree))

    def visit(node):
        if not isinstance(node, tuple):
            return 0
        left, right = visit(node[0]), visit(node[1])
        steps[leaves_of(node[0])[-1]] = max(left, right) + later()
        return steps[leaves_of(node[0])[-1]]
    visit(tree)
    return steps


@st.composite
def random_steps(draw, longest=12):
    "Valid steps: rounds as heights, rounds with gaps, or one composition at a time in any order."
    kind = draw(st.sampled_from(["heights", "gaps", "one at a time"]))
    if kind == "one at a time":
        return list(draw(st.permutations(range(1, draw(st.integers(1, longest)))))) + [0]
    tree = draw(random_trees(longest))
    return numbered(tree, (lambda: draw(st.integers(1, 3))) if kind == "gaps" else lambda: 1)


def played(steps):
    "Play the rounds on a list of living positions: who is sent where, and the tree; None if that is no tree."
    if not steps or steps[-1] != 0 or any(step <= 0 for step in steps[:-1]):
        return None
    alive, nodes, sent = list(range(len(steps))), list(range(len(steps))), list(range(len(steps)))
    for step in sorted(set(steps) - {0}):
        goes = [i for i in alive if steps[i] == step]
        for i in goes:
            right = alive[alive.index(i) + 1]
            if right in goes:
                return None
            sent[i], nodes[right] = right, (nodes[i], nodes[right])
        alive = [i for i in alive if i not in goes]
    return sent, nodes[-1]


def boxed(rows):
    "Rows of steps as a padded batch."
    lengths = [len(row) for row in rows]
    trees = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows])
    return trees, torch.tensor([[i < n for i in range(max(lengths))] for n in lengths])


# ---- trees and steps

@quick
@given(random_trees(20))
def test_tree_to_steps_and_back(tree):
    steps = steps_from_tree(tree)
    assert steps == numbered(tree)
    assert tree_from_steps(steps) == tree


@quick
@given(random_steps())
def test_steps_to_tree(steps):
    tree = tree_from_steps(steps)
    assert tree == played(steps)[1]
    heights = steps_from_tree(tree)
    assert tree_from_steps(heights) == tree
    assert all(height <= step for height, step in zip(heights, steps))      # no order needs fewer rounds than the heights


rows_of_numbers = st.lists(st.integers(-1, 4), max_size=6)


@st.composite
def spoiled_steps(draw):
    "Valid steps with one entry changed: still a tree, or not."
    steps = draw(random_steps(8))
    steps[draw(st.integers(0, len(steps) - 1))] = draw(st.integers(-2, 9))
    return steps


@settings(deadline=None, max_examples=200)
@given(rows_of_numbers | spoiled_steps())
@example([])
@example([1, 1, 0])
@example([1, 0, 0])
@example([0, 1])
@example([2, -1, 0])
def test_rows_that_are_no_tree_are_refused_and_no_others(steps):
    if played(steps) is None:
        with pytest.raises(ValueError):
            tree_from_steps(steps)
        if steps:
            with pytest.raises(ValueError, match="^trees row 1 [^\n]*$"):
                merge_targets(*boxed([[0], steps]))
    else:
        assert tree_from_steps(steps) == played(steps)[1]
        assert right_neighbors(steps) == played(steps)[0]


@quick
@given(st.lists(random_steps(), min_size=1, max_size=4), st.integers(0, 3))
def test_merge_targets(rows, extra):
    trees, mask = boxed(rows)
    trees, mask = (nn.functional.pad(tensor, (0, extra)) for tensor in (trees, mask))
    expected = [played(row)[0] + list(range(len(row), trees.shape[1])) for row in rows]
    for kind in (torch.int64, torch.int32, torch.uint8):
        targets = merge_targets(trees.to(kind), mask)
        assert targets.dtype == torch.int64 and targets.tolist() == expected


@quick
@given(random_steps(6), st.data())
def test_steps_on_padding_are_refused(steps, data):
    trees, mask = boxed([steps, [3, 2, 1, 4, 1, 2, 0]])
    assume(not mask[0].all())
    trees[0, data.draw(st.integers(len(steps), trees.shape[1] - 1))] = data.draw(st.sampled_from([-1, 1, 5]))
    with pytest.raises(ValueError, match="trees row 0"):
        merge_targets(trees, mask)


@pytest.mark.parametrize("trees, complaint", [
    (None, "pass trees="), (torch.tensor([[1, 1, 1, 0]]), "shape"), (torch.tensor([[1., 2., 0.]]), "integers"),
    (torch.tensor([[True, True, False]]), "integers"), (torch.tensor([1, 2, 0]), "shape")])
def test_trees_of_the_wrong_kind(trees, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        merge_targets(trees, torch.ones(1, 3, dtype=torch.bool))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tree", [((0, 2), 1), (1, 0), (0, 1, 2), ((0,), 1), 1, (0, (0, 1)), (0, "1")])
def test_pairs_that_are_no_tree(tree):
    with pytest.raises(ValueError):
        steps_from_tree(tree)


@pytest.mark.parametrize("length", range(1, 34))
def test_simple_trees(length):
    left, right = 0, length - 1
    for i in range(1, length):
        left, right = (left, i), (length - 1 - i, right)
    level = list(range(length))                                      # pairs from the left, an odd one waits at the end
    while len(level) > 1:
        level = [tuple(level[i:i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    assert tree_from_steps(simple_tree("left", length)) == left
    assert tree_from_steps(simple_tree("right", length)) == right
    assert tree_from_steps(simple_tree("balanced", length)) == level[0]
    for shape in ("left", "right"):
        assert simple_tree(shape, length) == numbered(tree_from_steps(simple_tree(shape, length)))
    assert max(simple_tree("balanced", length)) == (length - 1).bit_length()


def test_simple_tree_refuses():
    with pytest.raises(ValueError, match="'up'.*left, right, balanced"):
        simple_tree("up", 3)
    with pytest.raises(ValueError, match="length 0"):
        simple_tree("left", 0)


def test_deep_trees_need_no_recursion():
    tree = 0
    for i in range(1, 5000):
        tree = (tree, i)
    steps = steps_from_tree(tree)
    assert steps == [*range(1, 5000), 0]
    node, depth = tree_from_steps(steps), 0
    while isinstance(node, tuple):
        assert node[1] == 4999 - depth
        node, depth = node[0], depth + 1
    assert (node, depth) == (0, 4999)


# ---- batches

@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_pad_batch_and_masks(lengths, extra):
    sentences = [torch.randn(n, 2, dtype=torch.float64) + 9 for n in lengths]      # no zeros among the tokens
    x, mask = pad_batch(sentences)
    assert x.dtype == torch.float64 and x.shape == (len(lengths), max(lengths), 2)
    for row, kept, sentence in zip(x, mask, sentences):
        assert kept.tolist() == [i < len(sentence) for i in range(max(lengths))]
        assert torch.equal(row[:len(sentence)], sentence) and not row[len(sentence):].any()
    assert torch.equal(length_mask(torch.tensor(lengths)), mask)
    wide = length_mask(torch.tensor(lengths), max(lengths) + extra)
    assert wide.dtype == torch.bool and torch.equal(wide, nn.functional.pad(mask, (0, extra)))


@quick
@given(st.integers(1, 3).flatmap(lambda rows: st.integers(1, 5).flatmap(lambda width: st.lists(
    st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))))
def test_masks_are_refused_exactly_when_tokens_do_not_come_first(rows):
    mask = torch.tensor(rows)
    bad = [number for number, row in enumerate(rows) if not row[0] or sorted(row, reverse=True) != row]
    if bad:
        with pytest.raises(ValueError, match=f"mask row {bad[0]} must"):
            check_batch(torch.zeros(*mask.shape, 2), mask)
    else:
        x = torch.where(mask[..., None], torch.randn(*mask.shape, 2), torch.nan)
        kept = x.clone()
        checked = check_batch(x, mask)
        assert torch.equal(checked, kept.nan_to_num(0)) and torch.equal(x.isnan(), kept.isnan())


TOKENS = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("x, mask, complaint", [
    (torch.zeros(2, 3), TOKENS, r"floating-point \(B, N, D\).*\(2, 3\)"),
    (torch.zeros(2, 3, 4, 1), TOKENS, r"\(2, 3, 4, 1\)"),
    (torch.zeros(2, 3, 4, dtype=torch.int64), TOKENS, "torch.int64"),
    (torch.zeros(2, 3, 5), TOKENS, "width 5.*dim=4"),
    (torch.zeros(2, 3, 4), TOKENS.float(), "bool of shape.*torch.float32"),
    (torch.zeros(2, 3, 4), TOKENS.long(), "torch.int64"),
    (torch.zeros(2, 3, 4), TOKENS[:1], r"\(1, 3\)"),
    (torch.zeros(2, 3, 4), TOKENS[..., None], r"\(2, 3, 1\)"),
    (torch.zeros(2, 3, 4), torch.tensor([[1, 0, 0], [0, 0, 0]]).bool(), r"mask row 1.*\[0, 0, 0\]"),
    (torch.zeros(2, 3, 4), torch.tensor([[1, 1, 1], [0, 1, 1]]).bool(), "mask row 1")])
def test_malformed_batches(x, mask, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        check_batch(x, mask, dim=4)
    assert "\n" not in str(error.value)


def test_a_box_without_places_is_refused():
    with pytest.raises(ValueError):
        check_batch(torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.bool))


@pytest.mark.parametrize("check, said", [
    (lambda: check_choice("lag", 3, (0, 1)), "unknown lag 3; known: 0, 1"),
    (lambda: check_counts(beam=1, layers=0), "layers must be a whole number from 1, got 0"),
    (lambda: check_counts(2, classes="10"), "classes must be a whole number from 2, got '10'"),
    (lambda: check_counts(least=True), "least must be a whole number from 1, got True"),
    (lambda: check_counts(0, depth=2.0), "depth must be a whole number from 0, got 2.0"),
    (lambda: check_range(0, 1, least=1.0), "least must be in [0, 1), got 1.0"),
    (lambda: check_range(0, penalty=-1), "penalty must be in [0, inf), got -1"),
    (lambda: check_range(0, penalty=float("nan")), "penalty must be in [0, inf), got nan"),
    (lambda: check_range(0, penalty="1"), "penalty must be in [0, inf), got '1'"),
    (lambda: check_directions(3, 8), "directions must be 1, or 2 if dim is even, got directions=3, dim=8"),
    (lambda: check_directions(2, 7), "directions must be 1, or 2 if dim is even, got directions=2, dim=7"),
    (lambda: check_ids("labels", torch.tensor([0, 3, 4]), 3), "labels must be in [0, 3), got 3"),
    (lambda: check_ids("labels", torch.tensor([-2]), 3), "labels must be in [0, 3), got -2"),
    (lambda: check_ids("labels", torch.ones(1), 3), "labels must be a tensor of integers, got torch.float32 of shape (1,)"),
    (lambda: check_ids("labels", [1], 3), "labels must be a tensor of integers, got list"),
    (lambda: check_batch([[1.0]], TOKENS), "x must be a floating-point (B, N, D) tensor, got list"),
    (lambda: check_batch(torch.zeros(3, 8), TOKENS), "x must be a floating-point (B, N, D) tensor, got torch.float32 of shape (3, 8); one sentence is a batch with B = 1"),
    (lambda: check_batch(torch.ones(2, 3, 4), None), "mask must be bool of shape (2, 3), got NoneType")])
def test_options_and_ids_out_of_range(check, said):
    with pytest.raises(ValueError) as error:
        check()
    assert str(error.value) == said


def test_options_and_ids_in_range():
    check_counts(beam=1, layers=np.int64(3), hidden=None)
    check_range(0, 1, threshold=0, least=0.99)
    check_directions(2, 8)
    check_ids("labels", torch.tensor([[0, 2]]), 3)
    check_ids("labels", torch.empty(0, dtype=torch.int64), 3)


def test_width_is_checked_only_if_asked():
    assert check_batch(torch.ones(2, 3, 5), TOKENS).shape == check_batch(torch.ones(2, 3, 5), TOKENS, 5).shape == (2, 3, 5)


def test_padding_gets_no_gradient_through_check_batch():
    x, mask = torch.ones(1, 3, 2, requires_grad=True), torch.tensor([[True, True, False]])
    check_batch(x, mask).sum().backward()
    assert torch.equal(x.grad[0], torch.tensor([[1., 1.], [1., 1.], [0., 0.]]))


def test_encoding_defaults():
    encoding = EncoderOutput(torch.ones(1))
    assert encoding._fields == ("root", "states", "loss", "trace") and encoding[1:] == (None, 0.0, None)


# ---- the gaps notice what they are for

class Pool(nn.Module):
    "Roots as a function of tokens and mask, which may be written well or badly."
    def __init__(self, pool):
        super().__init__()
        self.pool, self.seen = pool, []

    def forward(self, x, mask, *, trees=None):
        self.seen.append((x.shape, mask.shape, None if trees is None else trees.tolist()))
        return EncoderOutput(self.pool(x, mask))


def mean(x, mask):
    return torch.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdim=True)


X, MASK = pad_batch([torch.linspace(1, 2, 2 * n, dtype=torch.float64).view(n, 2) for n in (2, 4, 1)])


def test_gaps_of_an_encoder_that_keeps_its_promises():
    assert batch_gap(Pool(mean), X, MASK) < 1e-15 and padding_gap(Pool(mean), X, MASK) == 0


@pytest.mark.parametrize("pool, gap", [
    (lambda x, mask: mean(x, mask) + x.shape[1], 3),                   # looks at the width of the box
    (lambda x, mask: mean(x, mask) + torch.arange(len(x))[:, None], 2),        # looks at its place in the batch
    (lambda x, mask: mean(x, mask) - mean(x, mask)[:1], 0.5)])         # looks at the first sentence
def test_batch_gap_finds(pool, gap):
    assert batch_gap(Pool(pool), X, MASK) == pytest.approx(gap, abs=0.2)


def test_padding_gap_finds_width_and_reading():
    assert padding_gap(Pool(lambda x, mask: mean(x, mask) + x.shape[1]), X, MASK) == 3
    assert padding_gap(Pool(lambda x, mask: mean(x, mask) + x.shape[1]), X, MASK, extra=1) == 1
    gap = padding_gap(Pool(lambda x, mask: (x * mask[..., None]).sum(1)), X, MASK)      # nan times 0 is nan
    assert gap != gap
    full = torch.ones(1, 2, dtype=torch.bool)                          # nothing is padded until the gap widens the box
    gap = padding_gap(Pool(lambda x, mask: x.sum(1)), X[:1, :2], full)
    assert gap != gap


def test_gaps_cut_the_trees_along():
    trees = torch.tensor([[1, 0, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]])
    pool = Pool(mean)
    batch_gap(pool, X, MASK, trees)
    assert pool.seen[1:] == [((1, 2, 2), (1, 2), [[1, 0]]), ((1, 4, 2), (1, 4), [[1, 2, 3, 0]]), ((1, 1, 2), (1, 1), [[0]])]
    padding_gap(pool, X, MASK, trees, extra=2)
    assert pool.seen[-1] == ((3, 6, 2), (3, 6), [row + [0, 0] for row in trees.tolist()])


def test_gaps_keep_no_graph():
    x = X.clone().requires_grad_()
    pool = Pool(lambda x, mask: mean(x, mask) if not torch.is_grad_enabled() else 1 / 0)
    assert batch_gap(pool, x, MASK) + padding_gap(pool, x, MASK) < 1e-15
