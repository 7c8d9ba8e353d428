"Tokens in their trees and prefixes of a text: walls, parents, attention upwards, trees that grow."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import EncoderOutput, length_mask, simple_tree, steps_from_tree, tree_from_steps
from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.rvnn import RvNN
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.chunks import level_trees
from rvnnbook.layers.given_trees import compose_by_height, compose_tree
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.sequence import NextSet, future_gap
from rvnnbook.tasks.tokens import (
    AncestorAttention, GrowingTree, TokenClassifier, TopDown, ancestors, _attend_up, _compose_nodes, compose_prefixes,
    draw_tokens, extend_tree)
from tests.helpers import on_page
from tests.test_core import boxed, random_steps

prefix_tree, = on_page("implementations/beyond", "prefix_tree")
some, few = settings(deadline=None, max_examples=40), settings(deadline=None, max_examples=15)
rows_of = st.lists(random_steps(9), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def attend_up_literal(queries, keys, values, above, slope):
    "Token by token and head by head (rir App. H)."
    found = torch.zeros_like(queries)
    batch, length, heads, width = queries.shape
    for b, j, h in torch.cartesian_prod(*map(torch.arange, (batch, length, heads))).tolist():
        chain = [parent for parent in above[b, j].tolist() if parent >= 0]
        scores = [queries[b, j, h] @ keys[b, parent, h] / width ** .5 - slope[h] * rank
                  for rank, parent in enumerate(chain)]
        if chain:
            shares = torch.stack(scores).softmax(0)
            found[b, j, h] = sum(a * values[b, i, h] for a, i in zip(shares, chain))
    return found


def vectors(mask, dim=4, seed=0, padding=torch.nan):
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, padding)


def slopes(found, inputs, seed=0):
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=found.dtype)
    inputs = tuple(inputs)
    return torch.autograd.grad((found * push).sum() + 0 * sum(part.sum() for part in inputs), inputs)


def leaves_of(tree):
    return [tree] if isinstance(tree, int) else leaves_of(tree[0]) + leaves_of(tree[1])


def parents_of(tree):
    "Every parent by its name, the last token of its left child: {name: subtree}, the outermost first."
    if isinstance(tree, int):
        return {}
    return {leaves_of(tree[0])[-1]: tree, **parents_of(tree[0]), **parents_of(tree[1])}


# ---- which parents stand above a token

@some
@given(rows_of, st.integers(0, 2))
def test_ancestors_are_the_parents_that_contain_a_token(rows, extra):
    trees, mask = (torch.nn.functional.pad(part, (0, extra)) for part in boxed(rows))
    above = ancestors(trees, mask)
    assert above.dtype == torch.int64 and above.shape[:2] == mask.shape
    deepest = 0
    for b, row in enumerate(rows):
        parents = parents_of(tree_from_steps(row))
        for j in range(len(row)):
            chain = [name for name, subtree in parents.items() if j in leaves_of(subtree)]       # outermost first
            deepest = max(deepest, len(chain))
            assert above[b, j].tolist() == chain[::-1] + [-1] * (above.shape[2] - len(chain))
        assert (above[b, len(row):] == -1).all()
    assert above.shape[2] == deepest


def test_ancestors_of_known_trees():
    trees, mask = boxed([[1, 2, 4, 1, 2, 3, 5, 6, 0], [0]])
    above = ancestors(trees, mask)
    assert above[0, 5, :5].tolist() == [4, 5, 2, 6, 7] and above[0, 7].tolist() == [6, 7, -1, -1, -1, -1, -1][:above.shape[2]]
    assert (above[1] == -1).all()
    assert ancestors(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.bool)).shape == (2, 1, 0)
    with pytest.raises(ValueError, match="row 1 is no binary tree"):
        ancestors(torch.tensor([[1, 2, 0], [1, 1, 0]]), torch.ones(2, 3, dtype=torch.bool))


# ---- what stands at the parents

@some
@given(rows_of, seeds)
def test_nodes_are_the_subtrees(rows, seed):
    torch.manual_seed(seed)
    (trees, mask), cell = boxed(rows), GRC(4).double()
    x = vectors(mask, seed=seed, padding=0).requires_grad_()
    nodes, by_tree, calls = _compose_nodes(x, trees, mask, cell), torch.zeros(*mask.shape, 4).double(), []
    for b, row in enumerate(rows):
        for name, subtree in parents_of(tree_from_steps(row)).items():
            by_tree[b, name] = compose_tree(subtree, list(x[b]), cell)
    assert_close(nodes, by_tree, rtol=0, atol=1e-12)
    inputs = (x, *cell.parameters())
    assert_close(slopes(nodes, inputs), slopes(by_tree, inputs), rtol=0, atol=1e-10)
    _compose_nodes(x, trees, mask, lambda left, right: calls.append(len(left)) or cell(left, right))
    assert sum(calls) == sum(len(row) - 1 for row in rows) and len(calls) == len(trees[trees > 0].unique())    # no more than the fold itself
    whole = [max(range(len(row)), key=row.__getitem__) for row in rows]
    roots = compose_by_height(x, trees, mask, cell)
    for b, row in enumerate(rows):
        assert_close(roots[b], nodes[b, whole[b]] if len(row) > 1 else x[b, 0])


def test_nodes_in_half_precision_are_kept_as_the_leaves_are():
    trees, mask = boxed([[1, 2, 0]])
    nodes = _compose_nodes(torch.ones(1, 3, 2), trees, mask, lambda left, right: (left + right).bfloat16())
    assert nodes.dtype == torch.float32 and nodes[0, :, 0].tolist() == [2, 3, 0]


# ---- attention upwards

def questions(rows, seed, heads=2, width=3):
    trees, mask = boxed(rows)
    parts = [vectors(torch.ones_like(mask), heads * width, seed + i).unflatten(-1, (heads, width)).requires_grad_() for i in range(3)]
    slope = torch.randn(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    return parts, ancestors(trees, mask), slope


@few
@given(rows_of, seeds)
def test_one_operation_is_the_loop(rows, seed):
    parts, above, slope = questions(rows, seed)
    (found, shares), literal = _attend_up(*parts, above, slope), attend_up_literal(*parts, above, slope)
    assert_close(found, literal, rtol=0, atol=1e-12)
    assert_close(slopes(found, (*parts, slope)), slopes(literal, (*parts, slope)), rtol=0, atol=1e-12)
    there = (above >= 0)[:, :, None].expand_as(shares)
    assert not shares[~there].any() and (shares[there] > 0).all()
    assert_close(shares.sum(-1), there.any(-1).double())


def test_slopes_of_attention():
    parts, above, slope = questions([[2, 1, 3, 0], [0], [1, 0]], 0, heads=1, width=2)
    assert torch.autograd.gradcheck(lambda *inputs: _attend_up(*inputs[:3], above, inputs[3])[0], (*parts, slope))


def test_nobody_is_asked_who_does_not_stand_above():
    "NaN would be handed on; a large number that is not asked for must not matter."
    parts, above, slope = questions([[1, 2, 0], [2, 1, 3, 1, 0]], 3)
    found, _ = _attend_up(*parts, above, slope)
    with torch.no_grad():
        for part in parts[1:]:
            part[0, 2:] = 1e6                    # places of no parent
            part[1, 4] = -1e6
    assert_close(_attend_up(*parts, above, slope)[0], found)


def test_a_steep_slope_asks_the_innermost_only():
    parts, above, _ = questions([[1, 2, 4, 1, 2, 3, 5, 6, 0]], 1)
    nearest = torch.full((2,), 1e4, dtype=torch.float64)
    found, shares = _attend_up(*parts, above, nearest)
    assert_close(found[0], parts[2][0, above[0, :, 0]])
    assert_close(shares[..., 0], torch.ones(1, 9, 2).double())


def test_heads_divide_the_width():
    for heads in (3, 0):
        with pytest.raises(ValueError, match=f"{heads} heads.*width of 8"):
            AncestorAttention(8, heads)
    torch.manual_seed(0)
    layer = AncestorAttention(6, 2).double()
    trees, mask = boxed([[2, 1, 0]])
    tokens, nodes, above = vectors(mask, 6), vectors(mask, 6, 1), ancestors(trees, mask)
    keys, values = (part.unflatten(-1, (2, 3)) for part in layer.key_value(nodes).chunk(2, -1))
    found = attend_up_literal(layer.query(tokens).unflatten(-1, (2, 3)), keys, values, above, layer.slope)
    assert_close(layer(tokens, nodes, above)[0], layer.norm(tokens + layer.out(found.flatten(2))))


# ---- any tree

MAKERS = {"gold": lambda: RvNN(8), "gold, LSTM": lambda: RvNN(8, "lstm"), "balanced": lambda: BalancedTree(8), "growing": lambda: GrowingTree(8),
          "gumbel": lambda: create_encoder("gumbel_tree", dim=8), "beam": lambda: create_encoder("bt_grc", dim=8, beam=3),
          "efficient": lambda: create_encoder("ebt_grc", dim=8, beam=3)}


@pytest.mark.parametrize("name", MAKERS)
@few
@given(rows_of, seeds, st.integers(0, 2))
def test_states_know_their_sentence_and_no_other(name, rows, seed, extra):
    torch.manual_seed(seed)
    model = TopDown(MAKERS[name](), heads=2).double().eval()
    trees, mask = boxed(rows)
    x = vectors(mask, 8, seed)
    together = model(x, mask, trees=trees, trace=True)
    assert isinstance(together, EncoderOutput) and together.states.shape == x.shape and not together.states[~mask].any()
    assert_close(together.root, model.encoder(x, mask, trees=trees).root)
    assert model(x, mask, trees=trees).trace is None and {"trees", "above", "shares"} <= set(together.trace)
    wide_trees, wide_mask = (torch.nn.functional.pad(part, (0, extra)) for part in (trees, mask))
    wide = torch.nn.functional.pad(x, (0, 0, 0, extra), value=torch.nan)
    assert_close(model(wide, wide_mask, trees=wide_trees).states[:, :mask.shape[1]], together.states, rtol=0, atol=1e-9)
    for b, n in enumerate(mask.sum(1).tolist()):
        alone = model(x[b:b + 1, :n], mask[b:b + 1, :n], trees=trees[b:b + 1, :n])
        assert_close(alone.states[0], together.states[b, :n], rtol=0, atol=1e-9)


def test_states_are_made_of_the_tree_that_was_found():
    "Whatever finds the tree: the same parameters on the same tree give the same states."
    torch.manual_seed(0)
    finder, given_trees = TopDown(create_encoder("bt_grc", dim=8, beam=3), 2).double().eval(), TopDown(RvNN(8), 2).double().eval()
    given_trees.load_state_dict({key: value for key, value in finder.state_dict().items() if "scorer" not in key})
    mask = length_mask(torch.tensor([7, 1, 5]))
    x = vectors(mask, 8)
    found = finder(x, mask, trace=True)
    assert_close(found.states, given_trees(x, mask, trees=found.trace["trees"]).states)
    nested = TopDown(create_encoder("rir_ebt_grc", dim=8, beam=1, arity=3), 2).double().eval()
    given_trees.load_state_dict({key: value for key, value in nested.state_dict().items() if "scorer" not in key and "s4d" not in key})
    result = nested(x, mask, trace=True)
    assert_close(result.states, given_trees(nested.encoder.s4d(x, mask), mask, trees=result.trace["trees"]).states)
    given_trees.load_state_dict({key: value for key, value in finder.state_dict().items() if "scorer" not in key})
    other = level_trees(mask)
    assert not torch.equal(other, found.trace["trees"])
    assert (given_trees(x, mask, trees=other).states - found.states).abs().max() > 1e-3


def test_a_token_hears_what_stands_elsewhere_in_its_sentence():
    torch.manual_seed(0)
    model, (trees, mask) = TopDown(RvNN(8)).double(), boxed([[1, 2, 4, 1, 2, 3, 5, 6, 0], [1, 0]])
    x = vectors(mask, 8, padding=0).requires_grad_()
    slope, = torch.autograd.grad(model(x, mask, trees=trees).states[0, 5].square().sum() + 0, x)
    heard = slope.abs().sum(-1) > 0
    assert heard[0].all() and not heard[1].any()
    assert all(grad.abs().sum() > 0 for grad in slopes(model(x, mask, trees=trees).states, model.encoder.parameters()))


@pytest.mark.parametrize("name", ["lstm", "crvnn", "ordered_memory"])
def test_who_has_no_tree_to_ask(name):
    with pytest.raises(ValueError, match=f"{type(create_encoder(name, dim=8)).__name__} has no tree"):
        TopDown(create_encoder(name, dim=8))


# ---- scores of tokens

def test_scores_are_those_of_the_states():
    torch.manual_seed(0)
    model, (trees, mask) = TokenClassifier(TopDown(RvNN(8)), 5, 3), boxed([[2, 1, 0], [0]])
    ids = torch.tensor([[1, 4, 0], [2, 0, 0]])
    out = model(ids, mask, trees=trees, trace=True)
    states = model.encoder(model.embedding(ids), mask, trees=trees).states
    assert_close(out.states, model.head(states))
    assert out.states.shape == (2, 3, 3)
    assert torch.equal(out.trace["trees"], trees) and out.root.shape == (2, 8) and model(ids, mask, trees=trees).trace is None


@pytest.mark.parametrize("vocabulary, classes, option", [(0, 3, "vocabulary"), (5, 0, "classes")])
def test_sizes_of_token_classifiers_are_checked(vocabulary, classes, option):
    with pytest.raises(ValueError, match=f"{option} must be a whole number from 1, got 0"):
        TokenClassifier(create_encoder("lstm", dim=8), vocabulary, classes)


# ---- trees that grow

def low(t):
    return next(2 ** a for a in range(t.bit_length(), -1, -1) if t % 2 ** a == 0)


@some
@given(st.integers(1, 300))
def test_tree_of_a_prefix(t):
    tree = prefix_tree(t)
    assert leaves_of(tree) == list(range(t)) and max(steps_from_tree(tree)) <= 2 * (t.bit_length() - 1)
    if t & (t - 1) == 0:
        assert steps_from_tree(tree) == simple_tree("balanced", t)
    else:
        assert tree[0] == prefix_tree(t - low(t))
        assert steps_from_tree(tree)[t - low(t):] == simple_tree("balanced", low(t))


@some
@given(st.integers(1, 200))
def test_growing_is_addition(n):
    calls, kept = [], ()
    for t in range(1, n + 1):
        before = len(calls)
        kept = extend_tree(kept, t - 1, lambda left, right: calls.append(1) or (left, right))
        assert [size for size, *_ in kept] == [2 ** a for a in range(9, -1, -1) if t >> a & 1]
        assert len(calls) - before == (low(t).bit_length() - 1) + (t != low(t))
    assert kept[-1][2] == prefix_tree(n) and len(calls) == 2 * n - n.bit_count() - n.bit_length()
    assert [leaf for _, block, _ in kept for leaf in leaves_of(block)] == list(range(n))


def test_growing_leaves_the_past_alone():
    "What was kept can be grown in two directions."
    kept = ()
    for t in range(7):
        kept = extend_tree(kept, t, lambda *pair: pair)
    copy = tuple(kept)
    one, other = extend_tree(kept, 7, lambda *pair: pair), extend_tree(kept, 8, lambda *pair: pair)
    assert kept == copy and leaves_of(one[-1][2])[-1] == 7 and leaves_of(other[-1][2])[-1] == 8


@few
@given(st.integers(1, 24), st.integers(1, 2), seeds)
def test_all_prefixes_at_once(n, batch, seed):
    torch.manual_seed(seed)
    x, cell, calls = torch.randn(batch, n, 3).double().requires_grad_(), GRC(3).double(), []

    def counted(left, right):
        calls.append(left.shape[1])
        return cell(left, right)

    found = compose_prefixes(x, counted)
    literal = torch.stack([torch.stack([compose_tree(prefix_tree(t + 1), list(row), cell) for t in range(n)]) for row in x])
    assert_close(found, literal, rtol=0, atol=1e-11)
    inputs = (x, *cell.parameters())
    assert_close(slopes(found, inputs), slopes(literal, inputs), rtol=0, atol=1e-9)
    assert sum(calls) == 2 * n - n.bit_count() - n.bit_length() and len(calls) <= 2 * n.bit_length()


def test_slopes_of_prefixes():
    torch.manual_seed(0)
    x, cell = torch.randn(2, 7, 2).double().requires_grad_(), GRC(2).double()
    assert torch.autograd.gradcheck(lambda t: compose_prefixes(t, cell), x)


def test_sums():
    x = torch.randn(2, 21, 3).double()
    assert_close(compose_prefixes(x, torch.add), x.cumsum(1))


@pytest.mark.parametrize("cell", ["grc", "lstm"])
@few
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), seeds, st.integers(0, 2))
def test_growing_tree(cell, lengths, seed, extra):
    torch.manual_seed(seed)
    growing, scratch = GrowingTree(4, cell).double().eval(), RvNN(4, cell).double().eval()
    scratch.load_state_dict(growing.state_dict())
    mask = torch.nn.functional.pad(length_mask(torch.tensor(lengths)), (0, extra))
    x = vectors(mask, seed=seed)
    out = growing(x, mask, trace=True)
    assert growing(x, mask).trace is None and not out.states[~mask].any()
    assert_close(out.root, scratch(x, mask, trees=out.trace["trees"]).root, rtol=0, atol=1e-12)
    for b, n in enumerate(lengths):
        kept = ()
        for t in range(1, n + 1):
            tree = torch.tensor([steps_from_tree(prefix_tree(t))])
            alone = scratch(x[b:b + 1, :t], mask[b:b + 1, :t], trees=tree).root[0]
            state, kept = growing.step(x[b:b + 1, t - 1], kept)
            assert_close(out.states[b, t - 1], alone, rtol=0, atol=1e-12)
            assert_close(state[0], alone, rtol=0, atol=1e-12)
        assert_close(out.root[b], out.states[b, n - 1], rtol=0, atol=0)


def test_gradients_through_steps_are_those_at_once():
    torch.manual_seed(0)
    model, x, kept, states = GrowingTree(4).double(), torch.randn(2, 11, 4).double().requires_grad_(), (), []
    for token in x.unbind(1):
        state, kept = model.step(token, kept)
        states.append(state)
    at_once, inputs = model(x, torch.ones(2, 11, dtype=torch.bool)).states, (x, *model.parameters())
    assert_close(slopes(torch.stack(states, 1), inputs), slopes(at_once, inputs), rtol=0, atol=1e-12)


def test_no_state_knows_what_comes():
    torch.manual_seed(0)
    assert all(future_gap(GrowingTree(8), length) == 0 for length in (2, 5, 8, 9))
    assert NextSet(GrowingTree(8), keys=3)(torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.bool)).states.shape == (1, 4, 3)
    assert future_gap(TopDown(BalancedTree(8))) > 0                       # what comes back down was not read in order


# ---- drawing

def writer(seed=0):
    torch.manual_seed(seed)
    return TokenClassifier(GrowingTree(8), 5, 5).eval()


@few
@given(st.integers(1, 3), st.integers(0, 9), seeds)
def test_drawing_is_encoding_every_prefix_anew(batch, count, seed):
    model, start = writer(seed), torch.arange(batch)
    drawn = draw_tokens(model, start, count, torch.Generator().manual_seed(seed))
    again, gen = start[:, None], torch.Generator().manual_seed(seed)
    for _ in range(count):
        scores = model(again, torch.ones_like(again, dtype=torch.bool)).states[:, -1]
        again = torch.cat([again, torch.multinomial(scores.softmax(-1), 1, generator=gen)], 1)
    assert torch.equal(drawn, again) and drawn.shape == (batch, 1 + count) and not drawn.requires_grad


def test_draws_follow_the_promise():
    model = writer()
    with torch.no_grad():
        model.head.weight.mul_(3)
        promised = model(torch.tensor([[2]]), torch.tensor([[True]])).states[0, 0].softmax(-1)
    drawn = draw_tokens(model, torch.full((4000,), 2), 1, torch.Generator().manual_seed(0))[:, 1]
    assert (drawn[:, None] == torch.arange(5)).float().mean(0).sub(promised).abs().max() < .03


def test_dropout_is_off_where_tokens_are_drawn():
    torch.manual_seed(0)
    model = TokenClassifier(GrowingTree(8, dropout=.5), vocabulary=9, classes=9).train()
    once, again = (draw_tokens(model, torch.arange(9), 20, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(once, again) and not model.training
