"Easy first against a slow walk over Python lists, reuse against every pair in every round, and a straight-through gradient made by hand."
import math
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from rvnnbook.core import batch_gap, length_mask, padding_gap, simple_tree, tree_from_steps
from rvnnbook.encoders import greedy_tree
from rvnnbook.encoders.greedy_tree import (
    GreedyTree, TreeParts, _drawn_trace, _drawn_trees, _find_trees, _replace_position, tree_noise)
from rvnnbook.layers.given_trees import compose_by_height, compose_tree
from rvnnbook.layers.tree_search import merge_pairs
from tests.helpers import on_page

build_tree_trace, = on_page("implementations/greedy_tree", "build_tree_trace")

quick = settings(deadline=None, max_examples=40)
few = settings(deadline=None, max_examples=12)
DIM = 4
SCORERS = ["parent", "pair"]
lengths = st.lists(st.integers(1, 8), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
each = pytest.mark.parametrize("scorer", SCORERS)


def drawn(test):
    "Sentences, seeds and temperatures of the straight-through gradient."
    return few(given(sizes=lengths, seed=seeds, temperature=st.sampled_from([0.5, 1.0, 3.0]))(test))


def make(seed=0, factor=3.0, **options):
    "An encoder in double precision whose scores are multiplied by a factor, with layer norms that show."
    torch.manual_seed(seed)
    encoder = GreedyTree(DIM, **options).double()
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
        for parameter in encoder.scorer.parameters():
            parameter *= factor
    return encoder


def batch_of(sizes, seed, padding=0):
    mask = length_mask(torch.tensor(sizes), max(sizes) + padding)
    x = torch.randn(*mask.shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask[..., None], x, torch.nan), mask


def generator(seed):
    return torch.Generator().manual_seed(seed)


def best_pair(scores, there):
    "y, 1 at the pair with the highest score, the leftmost of equals (rir section 2)."
    best = scores.masked_fill(~there, -torch.inf).argmax(1, keepdim=True)
    return torch.zeros_like(scores).scatter(1, best, 1) * there.any(1, keepdim=True)


def easy_first(leaves, mask, cell, weigh, choose):
    "Easy-first composition that scores all pairs in every round (Choi et al. 2018)."
    pairs, states, rounds = mask.sum(1, keepdim=True) - 1, leaves, []
    for t in range(int(pairs.max())):
        left, right = states[:, :-1], states[:, 1:]
        scores, parents = weigh(left, right)
        parents = cell(left, right) if parents is None else parents
        there = torch.arange(scores.shape[1], device=mask.device) < pairs - t
        picked = choose(scores, there, t)
        states = merge_pairs(states, parents, picked)
        rounds.append((scores.detach(), picked.detach()))
    return states[:, 0], rounds


def straight_through(scores, there, noise, temperature):
    "A hard draw with a soft gradient: straight-through Gumbel-softmax (Choi et al. 2018)."
    noisy = ((scores + noise) / temperature).masked_fill(~there, -torch.inf)
    soft = torch.where(there.any(1, keepdim=True), noisy, 0).softmax(1)
    return best_pair(noisy, there) + (soft - soft.detach())


def greedily(scores, there, t):
    return best_pair(scores, there)


def gradients(roots, inputs, seed=0):
    weights = torch.randn(roots.shape, dtype=roots.dtype, generator=generator(seed))
    return torch.autograd.grad((roots * weights).sum(), inputs, allow_unused=True, materialize_grads=True)


# ---- lists: one sentence, one pair at a time

def slowly(nodes, compose, score):
    "Root, tree and scores by round; of equal scores the first counts."
    nodes, trees, story = list(nodes), list(range(len(nodes))), []
    while len(nodes) > 1:
        scores = [torch.as_tensor(score(one, other)).item() for one, other in zip(nodes, nodes[1:])]
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        story.append(scores)
        nodes[best:best + 2] = [compose(nodes[best], nodes[best + 1])]
        trees[best:best + 2] = [(trees[best], trees[best + 1])]
    return nodes[0], trees[0], story


@each
@few
@given(sizes=lengths, seed=seeds, padding=st.integers(0, 2))
def test_against_lists(scorer, sizes, seed, padding):
    encoder = make(seed, scorer=scorer).eval()
    x, mask = batch_of(sizes, seed, padding)
    out = encoder(x, mask, trace=True)
    assert out.trace["trees"].shape == mask.shape and out.trace["scores"].shape == (max(sizes) - 1, *mask.shape)
    for b, n in enumerate(sizes):
        leaves = encoder.leaf_norm(encoder.leaf(x[b, :n])).unbind()
        if scorer == "parent":
            weigh = lambda one, other: encoder.scorer[0](encoder.grc(one, other))
        else:
            weigh = lambda one, other: encoder.scorer[1](F.gelu(encoder.scorer[0](torch.cat([one, other]))))
        root, tree, story = slowly(leaves, encoder.grc, weigh)
        torch.testing.assert_close(out.root[b], root)
        assert tree_from_steps(out.trace["trees"][b, :n].tolist()) == tree
        assert not out.trace["trees"][b, n:].any()
        for t in range(max(sizes) - 1):
            seen = out.trace["scores"][t, b]
            expected = story[t] if t < n - 1 else []
            torch.testing.assert_close(seen[seen > -math.inf], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(gradients(out.root, list(encoder.grc.parameters())), gradients(
        torch.stack([compose_tree(tree_from_steps(tree[:n].tolist()), list(encoder.leaf_norm(encoder.leaf(row[:n]))), encoder.grc)
                     for tree, row, n in zip(out.trace["trees"], x, sizes)]), list(encoder.grc.parameters())))


# ---- ties, with numbers that are exact

def added(left, right):
    return left + 2 * right


@quick
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
@example([[1, 1, 1, 1], [0], [2, 0, 2]], 1, True)
def test_ties_go_to_the_left(rows, modulus, hands_over):
    "Scores of few values: nearly every round has a tie."
    mask = length_mask(torch.tensor([len(row) for row in rows]), max(map(len, rows)) + 1)
    leaves = torch.zeros(*mask.shape, 1, dtype=torch.float64)
    leaves[mask] = torch.tensor([float(v) for row in rows for v in row], dtype=torch.float64)[:, None]

    def weigh(left, right):
        parents = added(left, right)
        return torch.remainder(parents, modulus)[..., 0], parents if hands_over else None

    seen = []
    root, rounds = easy_first(leaves, mask, added, weigh, greedily)
    told, found = build_tree_trace(rounds, mask), _find_trees(leaves, mask, added, weigh, seen)
    assert found.equal(told["trees"]) and compose_by_height(leaves, found, mask, added).equal(root)
    assert (not seen and not told["scores"].numel()) or torch.stack(seen).equal(told["scores"])
    for b, row in enumerate(rows):
        by_lists = slowly(row, lambda a, b: a + 2 * b, lambda a, b: (a + 2 * b) % modulus)
        assert root[b].item() == by_lists[0] and tree_from_steps(found[b, :len(row)].tolist()) == by_lists[1]


def test_all_equal_is_left_branching():
    "Equal scores throughout: the leftmost pair, every time."
    mask = length_mask(torch.tensor([6, 3]))
    flat = lambda left, right: (torch.zeros(left.shape[:-1]), None)
    found = _find_trees(torch.randn(2, 6, 2), mask, torch.add, flat)
    assert found.tolist() == [simple_tree("left", 6), simple_tree("left", 3) + [0] * 3]


def test_best_pair_and_merge():
    scores = torch.tensor([[1., 3., 3., 9.], [9., 9., 9., 9.], [-5., -7., 0., 0.]])
    there = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
    assert best_pair(scores, there).tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    states = torch.arange(1., 6).expand(3, 5)[..., None]
    merged = merge_pairs(states, 10 * states[:, :-1], best_pair(scores, there))[..., 0]
    assert merged.tolist() == [[1, 20, 4, 5], [1, 2, 3, 4], [10, 3, 4, 5]]


@quick
@given(st.permutations(range(7)), st.integers(0, 2))
def test_join_keeps_a_list(order, row):
    "Thirty positions in three lists of eight tokens and two ends, of which one loses its members in any order."
    links, first = torch.stack([torch.arange(30) - 1, torch.arange(30) + 1]), 10 * row
    kept, alive = links.clone(), list(range(first, first + 10))                # the ends stay
    for gone in order:
        at = alive.index(first + 1 + gone)
        if at == len(alive) - 2:
            continue
        alive.remove(first + 1 + gone)
        to, members = _replace_position(links, torch.tensor([first + 1 + gone]))
        assert to.tolist() == [alive[at]] and members.T.tolist() == [alive[at - 1:at + 1], alive[at:at + 2]]
        assert links[1, alive[:-1]].tolist() == alive[1:] and links[0, alive[1:]].tolist() == alive[:-1]
    others = [place for place in range(30) if place // 10 != row]
    assert links[:, others].equal(kept[:, others])


# ---- reuse

@each
@few
@given(sizes=lengths, seed=seeds)
def test_reuse_is_every_pair_in_every_round(scorer, sizes, seed):
    encoder = make(seed, scorer=scorer)
    x, mask = batch_of(sizes, seed)
    x = x.nan_to_num().requires_grad_()
    out = encoder(x, mask, trace=True)
    root, rounds = easy_first(encoder.leaves(x), mask, encoder.grc, encoder.weigh, greedily)
    told, inputs = build_tree_trace(rounds, mask), [x, *encoder.parameters()]
    torch.testing.assert_close(out.root, root)
    assert out.trace["trees"].equal(told["trees"])
    torch.testing.assert_close(out.trace["scores"], told["scores"].to(out.trace["scores"]))
    for one, other in zip(gradients(out.root, inputs), gradients(root, inputs)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scorer, most", [("parent", 3), ("pair", 1)])
def test_compositions_grow_with_the_length(scorer, most):
    encoder, rows = make(scorer=scorer), []
    encoder.grc.register_forward_hook(lambda cell, given, parents: rows.append(parents[..., 0].numel()))
    for n in (10, 40):
        leaves, mask = torch.randn(2, n, DIM, dtype=torch.float64), torch.ones(2, n, dtype=torch.bool)
        rows.clear()
        _find_trees(leaves, mask, encoder.grc, encoder.weigh)
        assert sum(rows) <= 2 * most * (n - 1) and sum(rows) >= 2 * (n - 1)
        rows.clear()
        easy_first(leaves, mask, encoder.grc, encoder.weigh, greedily)
        assert sum(rows) == 2 * n * (n - 1) // 2


# ---- padding, batch mates, short sentences

@each
@few
@given(sizes=lengths, seed=seeds)
def test_padding_and_batch_mates(scorer, sizes, seed):
    encoder, batch = make(seed, scorer=scorer).eval(), batch_of(sizes, seed, 1)
    assert batch_gap(encoder, *batch) <= 1e-9 and padding_gap(encoder, *batch) <= 1e-9


@each
def test_drawn_trees_ignore_padding_and_later_mates(scorer):
    "A sentence in the same row keeps its noise, whatever the box is like and whoever follows."
    encoder = make(scorer=scorer, choice="gumbel")
    x, mask = batch_of([5, 3, 8, 1], 0, 2)
    together = encoder(x, mask, generator=generator(3), trace=True)
    fewer = encoder(x[:2, :5], mask[:2, :5], generator=generator(3), trace=True)
    torch.testing.assert_close(fewer.root, together.root[:2], rtol=1e-9, atol=1e-11)
    assert fewer.trace["trees"].equal(together.trace["trees"][:2, :5])
    other_first = x.clone()
    other_first[0] += 1                                                # what a mate holds means nothing
    assert encoder(other_first, mask, generator=generator(3)).root[1:].equal(together.root[1:])


@each
@pytest.mark.parametrize("choice", ["greedy", "gumbel"])
def test_one_and_two_tokens(scorer, choice):
    encoder = make(scorer=scorer, choice=choice)
    x, mask = batch_of([1, 2, 1], 0, 1)
    out = encoder(x, mask, trace=True)
    leaves = encoder.leaf_norm(encoder.leaf(x.nan_to_num()))
    expected = torch.stack([leaves[0, 0], encoder.grc(leaves[1, 0], leaves[1, 1]), leaves[2, 0]])
    torch.testing.assert_close(out.root, expected)
    assert out.trace["trees"].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    for slope in gradients(out.root, list(encoder.scorer.parameters())):     # where there is no choice there is nothing to learn
        assert slope.abs().max() < 1e-12
    alone = encoder(x[:1, :1], mask[:1, :1], trace=True)
    torch.testing.assert_close(alone.root[0], leaves[0, 0])
    assert alone.trace["trees"].tolist() == [[0]] and alone.trace["scores"].shape == (0, 1, 1)


# ---- what reaches the scorer

@each
def test_a_greedy_choice_teaches_the_scorer_nothing(scorer):
    x, mask = batch_of([7, 5, 8], 1)
    encoder = make(scorer=scorer)
    for root in (encoder(x, mask).root, easy_first(encoder.leaves(x.nan_to_num()), mask, encoder.grc, encoder.weigh, greedily)[0]):
        names, tensors = zip(*encoder.named_parameters())
        slopes = torch.autograd.grad(root.sum(), tensors, allow_unused=True)
        assert {name for name, slope in zip(names, slopes) if slope is None} == {name for name in names if "scorer" in name}
    drawn = make(scorer=scorer, choice="gumbel")
    slopes = gradients(drawn(x, mask, generator=generator(0)).root, list(drawn.scorer.parameters()))
    assert all(slope.abs().max() > 1e-3 for slope in slopes[:-1]) and slopes[-1].abs().max() < 1e-9     # the last bias shifts all scores


class ByHand(torch.autograd.Function):
    "A hard draw whose gradient is that of the softmax, both written out."
    @staticmethod
    def forward(ctx, scores, noise, temperature):
        noisy = [(u + g) / temperature for u, g in zip(scores.tolist(), noise.tolist())]
        powers = [math.exp(v - max(noisy)) for v in noisy]
        ctx.soft, ctx.temperature = torch.tensor([p / sum(powers) for p in powers], dtype=scores.dtype), temperature
        hard = torch.zeros_like(scores)
        hard[noisy.index(max(noisy))] = 1
        return hard

    @staticmethod
    def backward(ctx, slope):
        return ctx.soft * (slope - (ctx.soft * slope).sum()) / ctx.temperature, None, None


def drawn_slowly(encoder, x, noise):
    "Root of one sentence (n, D) by the published equations, node by node."
    nodes = list(encoder.leaf_norm(encoder.leaf(x)))
    for t in range(len(x) - 1):
        pairs = list(zip(nodes, nodes[1:]))
        parents = [encoder.grc(*pair) for pair in pairs]
        scores = torch.stack([encoder.weigh(*pair)[0] for pair in pairs])
        y = ByHand.apply(scores, noise[t, :len(pairs)], encoder.temperature)
        nodes = [y[i] * parents[i] + sum(y[i + 1:]) * nodes[i] + sum(y[:i]) * nodes[i + 1] for i in range(len(pairs))]
    return nodes[0]


@each
@drawn
def test_straight_through_by_hand(scorer, sizes, seed, temperature):
    encoder = make(seed, 0.5, scorer=scorer, choice="gumbel", temperature=temperature)
    x, mask = batch_of(sizes, seed, 1)
    x = x.nan_to_num().requires_grad_()
    out, noise = encoder(x, mask, generator=generator(seed), trace=True), tree_noise(mask, generator(seed))
    slow = torch.stack([drawn_slowly(encoder, row[:n], noise[:, b]) for b, (row, n) in enumerate(zip(x, sizes))])
    torch.testing.assert_close(out.root, slow)
    inputs = [x, *encoder.parameters()]
    for found, expected in zip(gradients(out.root, inputs), gradients(slow, inputs)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    hard = torch.stack([compose_tree(tree_from_steps(tree[:n].tolist()), list(leaves), encoder.grc)
                        for tree, n, leaves in zip(out.trace["trees"], sizes, encoder.leaf_norm(encoder.leaf(x)))])
    torch.testing.assert_close(out.root, hard)                          # a real tree, not a mixture


def literal_root(encoder, leaves, mask, noise, weigh=None):
    return easy_first(leaves, mask, encoder.grc, weigh or encoder.weigh, lambda u, there, t: straight_through(
        u, there, noise[t, :, :u.shape[1]], encoder.temperature))


@each
@drawn
def test_pairs_composed_once_equal_the_literal_loop(scorer, sizes, seed, temperature):
    encoder = make(seed, 0.5, scorer=scorer, choice="gumbel", temperature=temperature)
    x, mask = batch_of(sizes, seed, 1)
    leaves, noise = encoder.leaves(x.nan_to_num()).detach().requires_grad_(), tree_noise(mask, generator(seed))
    root, rounds = literal_root(encoder, leaves, mask, noise)
    once, table, order = _drawn_trees(encoder, leaves, mask, noise, temperature)
    torch.testing.assert_close(once, root, rtol=0, atol=1e-12)
    torch.testing.assert_close(_drawn_trace(table, order, mask), build_tree_trace(rounds, mask))
    inputs = [leaves, *encoder.grc.parameters(), *encoder.scorer.parameters()]
    for found, expected in zip(gradients(once, inputs), gradients(root, inputs)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@each
@pytest.mark.parametrize("group", [5, 1024])
def test_a_pair_keeps_the_units_that_dropout_gave_it(scorer, group, monkeypatch):
    monkeypatch.setattr(greedy_tree, "GROUP", group)
    encoder = make(3, scorer=scorer, choice="gumbel", dropout=0.4)
    x, mask = batch_of([7, 7, 7], 3)
    leaves, noise = encoder.leaves(x).detach().requires_grad_(), tree_noise(mask, generator(3))
    once, table, order = _drawn_trees(encoder, leaves, mask, noise, 1.0)
    pairs = iter([table.rounds[t][1][order.argsort()] for t in range(6)])

    def weigh(left, right):
        keep = table.keep[next(pairs)].flatten(0, 1).double() / 0.6
        parents = encoder.grc.norm(encoder.grc.mix(torch.cat([left, right], -1).flatten(0, 1), keep))
        return encoder.weigh(left, right, parents.view_as(left))[0], parents.view_as(left)

    root, _ = literal_root(encoder, leaves, mask, noise, weigh)
    assert not table.keep.all() and table.keep.any()
    torch.testing.assert_close(once, root, rtol=0, atol=1e-12)
    inputs = [leaves, *encoder.grc.parameters(), *encoder.scorer.parameters()]
    for found, expected in zip(gradients(once, inputs), gradients(root, inputs)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@each
def test_frozen_parameters_receive_no_gradient(scorer):
    encoder, (x, mask) = make(choice="gumbel", scorer=scorer), batch_of([5, 3, 1], 0)
    encoder(x.nan_to_num(), mask, generator=generator(0)).root.sum().backward()
    full = {name: one.grad for name, one in encoder.named_parameters()}
    for frozen in ("scorer.0.bias", "grc.w1.weight", "grc.norm.bias", "scorer"):
        encoder.zero_grad()
        for name, one in encoder.named_parameters():
            one.requires_grad_(not name.startswith(frozen))
        encoder(x.nan_to_num(), mask, generator=generator(0)).root.sum().backward()
        for name, one in encoder.named_parameters():
            assert one.grad is None if name.startswith(frozen) else torch.equal(one.grad, full[name])


@each
def test_backward_inside_autocast(scorer):
    encoder, (x, mask) = make(choice="gumbel", scorer=scorer).float(), batch_of([5, 3, 1], 0)
    found = []
    for inside in (False, True):
        encoder.zero_grad()
        root = encoder(x.nan_to_num().float(), mask, generator=generator(0)).root
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            root.sum().backward()
        found.append([one.grad for name, one in encoder.named_parameters() if name.startswith(("grc", "scorer"))])
    torch.testing.assert_close(*found)


def test_a_cell_in_evaluation_drops_nothing():
    encoder, (x, mask) = make(choice="gumbel", dropout=0.5), batch_of([5, 3], 0)
    encoder.grc.eval()
    roots = [encoder(x.nan_to_num(), mask, generator=generator(0)).root for _ in range(2)]
    assert torch.equal(*roots)


def test_drawn_trees_compose_about_three_times_the_length():
    encoder, (x, mask) = make(choice="gumbel"), batch_of([20, 20], 0)
    *_, table, _ = _drawn_trees(encoder, encoder.leaves(x), mask, tree_noise(mask), 1.0)
    assert len(table.scores) == 2 * (3 * 20 - 4)


def test_straight_through_is_a_one_hot_with_a_soft_slope():
    torch.manual_seed(0)
    scores, noise = torch.randn(50, 6, dtype=torch.float64, requires_grad=True), torch.randn(50, 6)
    there = torch.arange(6) < torch.randint(0, 7, (50, 1))
    y = straight_through(scores, there, noise, 0.7)
    assert y.detach().equal(best_pair((scores + noise).detach(), there)) and set(y.flatten().tolist()) == {0.0, 1.0}
    a = torch.randn(50, 6).double()
    slope, = torch.autograd.grad((y * a).sum(), scores, retain_graph=True)
    soft = torch.where(there, ((scores + noise) / 0.7).exp(), 0)
    soft = soft / soft.sum(1, keepdim=True).clamp(min=1e-30)
    expected, = torch.autograd.grad((soft * a).sum(), scores)
    torch.testing.assert_close(slope, expected)
    assert not slope[~there].any() and slope.isfinite().all()


def test_ties_of_a_draw_go_to_the_left():
    y = straight_through(torch.zeros(1, 4), torch.tensor([[True] * 4]), torch.tensor([[0., 1., 1., 0.]]), 1.0)
    assert y.tolist() == [[0, 1, 0, 0]]


# ---- chance

@each
def test_the_generator_decides(scorer):
    encoder = make(factor=0.1, scorer=scorer, choice="gumbel")
    x, mask = batch_of([8, 6, 7], 2)
    state = torch.get_rng_state()
    first, again, other = (encoder(x, mask, generator=generator(seed)).root for seed in (5, 5, 6))
    assert first.equal(again) and not first.equal(other) and torch.get_rng_state().equal(state)
    torch.manual_seed(1)
    unguided = encoder(x, mask).root
    torch.manual_seed(1)
    assert encoder(x, mask).root.equal(unguided) and not encoder(x, mask).root.equal(unguided)
    encoder.eval()
    greedy = make(factor=0.1, scorer=scorer).eval()
    assert encoder(x, mask, generator=generator(5)).root.equal(greedy(x, mask).root)


def test_merge_orders_are_drawn_from_the_softmax():
    "Four leaves whose pairs have fixed scores: frequencies of all six orders."
    mask = length_mask(torch.full((4000,), 4))
    u = torch.tensor([1.0, 0.0, -1.0])
    noise = tree_noise(mask, generator(0))
    picks = torch.stack([straight_through(u[:3 - t].expand(4000, -1), mask[:, t + 1:], noise[t, :, :3 - t], 1.0).argmax(1)
                         for t in range(3)], 1)
    for order in product(range(3), range(2), range(1)):
        chance = math.prod(float(u[:3 - t].softmax(0)[pick]) for t, pick in enumerate(order))
        counted = float((picks == torch.tensor(order)).all(1).double().mean())
        assert abs(counted - chance) < 4 * math.sqrt(chance * (1 - chance) / 4000)
    pairs = noise[:3, :, :3].flatten(1).var(1)
    assert ((pairs - math.pi ** 2 / 6).abs() < 0.4).all()               # the variance of Gumbel noise


def test_noise_of_a_sentence_depends_on_its_row_alone():
    whole = tree_noise(length_mask(torch.tensor([3, 9, 5, 1, 7]), 11), generator(4))
    assert whole.shape == (8, 5, 10)
    part = tree_noise(length_mask(torch.tensor([6, 2, 5])), generator(4))
    assert part[:4, 2, :4].equal(whole[:4, 2, :4])
    assert not part[:2, 0, :2].equal(part[:2, 2, :2])
    assert whole[:2, 0, :2].isfinite().all() and tree_noise(length_mask(torch.tensor([1, 1]))).shape == (0, 2, 0)


# ---- precision and refusals

@each
@pytest.mark.parametrize("choice", ["greedy", "gumbel"])
def test_gradcheck_away_from_ties(scorer, choice):
    "In double precision; with the choice held fixed the root is smooth."
    encoder = make(4, scorer=scorer, choice=choice).eval()
    x, mask = batch_of([5, 3], 4)
    x = x.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: encoder(x, mask).root, x)
    assert encoder(x, mask).root.dtype == torch.float64


@each
@pytest.mark.parametrize("train", [False, True])
def test_autocast_scores_in_full_precision(scorer, train):
    torch.manual_seed(0)
    encoder = GreedyTree(8, scorer=scorer, choice="gumbel").train(train)
    x, mask = torch.randn(2, 6, 8), length_mask(torch.tensor([6, 4]))
    with torch.autocast("cpu", torch.bfloat16):
        out = encoder(x, mask, generator=generator(0), trace=True)
    assert out.trace["scores"].dtype == torch.float32 and not out.trace["scores"].isnan().any()
    out.root.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


def test_a_pair_shows_64_channels():
    torch.manual_seed(0)
    shapes = {scorer: [tuple(layer.weight.shape) for layer in TreeParts(80, 8, scorer=scorer).scorer] for scorer in SCORERS}
    assert shapes == {"parent": [(1, 80)], "pair": [(64, 128), (1, 64)]}
    assert [tuple(layer.weight.shape) for layer in TreeParts(6, scorer="pair").scorer] == [(6, 12), (1, 6)]
    parts, (l, r) = TreeParts(80, 8, scorer="pair"), torch.randn(2, 80)
    for side, shift in product((0, 1), (63, 64)):
        pair = [l.clone(), r.clone()]
        pair[side][shift] += 1
        assert torch.equal(parts.weigh(*pair)[0], parts.weigh(l, r)[0]) == (shift == 64)


def test_parameter_names():
    names = [name for name, _ in GreedyTree(8, scorer="pair").named_parameters()]
    assert {name.split(".")[0] for name in names} == {"leaf", "leaf_norm", "grc", "scorer"}
    assert [name for name in names if "scorer" in name] == ["scorer.0.weight", "scorer.0.bias", "scorer.1.weight", "scorer.1.bias"]


@pytest.mark.parametrize("options, said", [
    ({"scorer": "leaf"}, "unknown scorer 'leaf'; known: parent, pair"), ({"choice": "best"}, "unknown choice 'best'; known: greedy, gumbel"),
    ({"temperature": 0.0}, "got 0.0"), ({"temperature": math.nan}, "got nan"), ({"activation": "sine"}, "sine")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        GreedyTree(8, **options)
    assert said in str(error.value)


def test_a_malformed_batch_is_refused():
    with pytest.raises(ValueError, match="dim=8"):
        GreedyTree(8)(torch.zeros(1, 2, 7), torch.ones(1, 2, dtype=torch.bool))
