"The efficient beam: arena and replay against the literal form, enumeration, trees, gradients at any sharpness, memory."
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import length_mask, tree_from_steps
from rvnnbook.layers.compiled_beam import compiled_search
from rvnnbook.encoders.efficient_beam import EfficientBeam, PairScorer
from rvnnbook.literal import literal_search
from rvnnbook.layers.given_trees import compose_by_height
from rvnnbook.layers.tree_search import (
    active_counts, arena_search, choose_proposals, _final_trees, hash_pair, initial_scores, label_nodes, LineageScores, _merge_rows, _pack_rows, plan_replay, replay, Search,
    search_and_replay, survivors)
from tests.helpers import DIM, answers, assert_same, batch_of

few = settings(deadline=None, max_examples=25)
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def make(seed=0, beam=3, sharper=1.0, train=False, **options):
    torch.manual_seed(seed)
    encoder = EfficientBeam(DIM, beam, **{"score_dim": 4, "hidden": 10, **options}).double().train(train)
    with torch.no_grad():
        encoder.scorer[1].weight *= sharper
    return encoder


# ---- two forms

@few
@given(lengths, st.integers(1, 7), seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 30.0, 3000.0]),
       st.sampled_from(["gelu", "relu"]), st.integers(0, 2), st.booleans())
@example([9, 1, 2, 7], 5, 0, True, 0.3, 300.0, "gelu", 2, False)
@example([9, 1, 2, 7], 5, 0, True, 0.3, 300.0, "gelu", 2, True)
def test_arena_is_literal_form(sizes, beam, seed, train, dropout, sharper, activation, padding, compiled):
    encoder = make(seed, beam, sharper, train, dropout=dropout, activation=activation,
                   compiled=compiled)
    x, mask = batch_of(sizes, seed)
    x, mask = torch.nn.functional.pad(x, (0, 0, 0, padding)), torch.nn.functional.pad(mask, (0, padding))
    literal, arena = (answers(encoder, x, mask, form, seed) for form in (literal_search, search_and_replay))
    assert_same(arena, literal)


@few
@given(lengths, st.integers(1, 6), seeds, st.booleans(), st.sampled_from([arena_search, compiled_search]))
def test_decisions_are_the_same(sizes, beam, seed, train, search):
    encoder, sizes = make(seed, beam, train=train), torch.tensor(sorted(sizes, reverse=True))
    leaves = torch.randn(len(sizes), int(sizes[0]), DIM, dtype=torch.float64)
    states, scores, trees = literal_search(encoder, leaves, sizes, torch.Generator().manual_seed(seed))
    log = search(encoder, leaves, sizes, torch.Generator().manual_seed(seed))
    assert trees is None and isinstance(log, Search)
    assert torch.equal(scores > -torch.inf, log.scores > -torch.inf)
    real = scores > -torch.inf
    assert_same([log.scores[real], log.arena.states[log.roots][real]], [scores[real], states[real]])
    orders = [math.factorial(n - 1) if beam > 1 else 1 for n in sizes.tolist()]
    assert all(int(alive) <= min(count, beam) for alive, count in zip(real.sum(1), orders))
    if not train:
        assert real.sum(1).tolist() == [min(count, beam) if beam > 1 else 1 for count in map(math.factorial, (sizes - 1).tolist())]


def test_single_precision_in_both_forms():
    encoder, (x, mask) = make(3, 5, train=True).float(), batch_of([12, 7, 3], 3)
    literal, arena = (answers(encoder, x.float(), mask, form) for form in (literal_search, search_and_replay))
    assert_same(arena, literal, 1e-4)


def test_no_gradients_are_no_replay():
    encoder, (x, mask) = make(1, 4), batch_of([8, 3, 1], 1)
    with torch.no_grad():
        plain = encoder(x, mask).root
    assert_same([plain], [encoder(x, mask).root])
    assert plain.grad_fn is None


# ---- against enumeration

def all_orders(encoder, leaves):
    "Probability and state of every order in which a sentence can be merged."
    if len(leaves) == 1:
        return [(0.0, leaves[0])]
    chances = encoder.scorer(torch.stack(leaves[:-1]), torch.stack(leaves[1:])).log_softmax(0)
    return [(float(chance.detach()) + later, state) for j, chance in enumerate(chances)
            for later, state in all_orders(encoder, leaves[:j] + [encoder.grc(leaves[j], leaves[j + 1])] + leaves[j + 2:])]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_wide_beam_sees_everything(n, train):
    encoder, (x, mask) = make(n, 24, train=train), batch_of([n], n)
    out = encoder(x, mask, trace=True)
    orders = all_orders(encoder, list(encoder.leaf_norm(encoder.leaf(x[0]))))
    assert len(orders) == math.factorial(n - 1) and sum(math.exp(chance) for chance, _ in orders) == pytest.approx(1)
    assert_close(out.root[0], sum(math.exp(chance) * state for chance, state in orders))
    found = out.trace["scores"][0]
    assert sorted(found[found > -torch.inf].tolist()) == pytest.approx(sorted(chance for chance, _ in orders))


@pytest.mark.parametrize("n", [1, 2, 6])
def test_one_hypothesis_is_greedy(n):
    encoder, (x, mask) = make(n, 1, sharper=5.0), batch_of([n], n)
    row = list(encoder.leaf_norm(encoder.leaf(x[0])))
    while len(row) > 1:
        best = int(encoder.scorer(torch.stack(row[:-1]), torch.stack(row[1:])).argmax())
        row[best:best + 2] = [encoder.grc(row[best], row[best + 1])]
    assert_close(encoder(x, mask).root[0], row[0])


def test_noise_draws_from_the_softmax():
    "With one hypothesis and three tokens the first merge is a draw; chi-square with one degree of freedom."
    encoder, (x, _) = make(5, 1, sharper=3.0, train=True), batch_of([3], 5)
    count = 4000
    out = encoder(x.expand(count, -1, -1), torch.ones(count, 3, dtype=torch.bool), trace=True,
                  generator=torch.Generator().manual_seed(0))
    leaves = encoder.leaf_norm(encoder.leaf(x[0]))
    share = encoder.scorer(leaves[:-1], leaves[1:]).softmax(0)[0].item()
    first = int((out.trace["trees"][:, 0] == 1).sum())
    assert 0.1 < share < 0.9
    assert (first - count * share) ** 2 / (count * share * (1 - share)) < 10.8                 # p = 0.001
    quiet = make(5, 1, sharper=3.0, train=True, noise=False)(x, torch.ones(1, 3, dtype=torch.bool), trace=True)
    assert quiet.trace["trees"][0, 0] == (1 if share > .5 else 2)


def test_equal_generators_give_equal_searches():
    encoder, (x, mask) = make(2, 3, train=True), batch_of([9, 4], 2)
    first, second, other = (encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


# ---- trees

@few
@given(lengths, st.integers(1, 5), seeds, st.booleans())
def test_every_hypothesis_is_its_tree(sizes, beam, seed, train):
    encoder, (x, mask) = make(seed, beam, train=train), batch_of(sizes, seed)
    out = encoder(x, mask, trace=True, generator=torch.Generator().manual_seed(seed))
    trees, weights = out.trace["beams"], out.trace["weights"]
    assert trees.shape == (len(sizes), beam, max(sizes)) and weights.sum(1).tolist() == pytest.approx([1] * len(sizes))
    leaves, root = encoder.leaf_norm(encoder.leaf(x)), torch.zeros(len(sizes), DIM, dtype=torch.float64)
    for k in range(beam):
        real = weights[:, k] > 0
        if real.any():
            states = compose_by_height(leaves[real], trees[real, k], mask[real], encoder.grc)
            root[real] = root[real] + weights[real, k, None] * states
    assert_close(out.root, root)
    best = weights.argmax(1)
    assert torch.equal(out.trace["trees"], trees[torch.arange(len(sizes)), best])


# ---- the parts

@given(st.integers(2, 9), st.data())
def test_merging_a_row(width, data):
    pick = data.draw(st.integers(0, width - 2))
    row, pairs = [0, *range(1, width + 1), 0], [float(j) for j in range(width + 1)]
    left, right = torch.tensor([-1.0, -2.0]).view(torch.int32).tolist()
    packed = _pack_rows(torch.tensor([row]), torch.tensor([pairs]))
    rows = _merge_rows(packed.mT[None], 2 * pick + torch.arange(7)[None, :, None],
                       torch.tensor([[[left], [99], [right]]], dtype=torch.int32), torch.arange(2 * width + 2))[0].mT
    row[pick + 1:pick + 3] = [99]
    pairs[pick:pick + 3] = [-1.0, -2.0]
    assert rows[:, ::2].tolist() == [row] and rows[:, 1:-2:2].view(torch.float32).tolist() == [pairs]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_who_is_still_going(sizes):
    sizes = sorted(sizes, reverse=True)
    assert active_counts(torch.tensor(sizes)) == [sum(n > step + 1 for n in sizes) for step in range(sizes[0])]


def test_choice():
    logits = torch.tensor([[[0.0, 2.0, -torch.inf], [1.0, 1.5, 1.0]]]).double()
    codes, scores = choose_proposals(logits, torch.tensor([[-1.0, -0.5]]).double())
    chances = logits.log_softmax(-1)
    proposals = {(0, 1): -1 + chances[0, 0, 1], (0, 0): -1 + chances[0, 0, 0], (1, 1): -.5 + chances[0, 1, 1]}
    assert [(int(b), int(j)) for b, j in zip(codes[0] % 2, codes[0] // 2)] == [(0, 1), (1, 1)]
    assert_close(scores[0], torch.stack([proposals[0, 1], proposals[1, 1]]))
    assert initial_scores(2, 3, logits).tolist() == [[0, -math.inf, -math.inf]] * 2


def test_halves_are_the_scorer():
    scorer, nodes = PairScorer(4).double(), torch.randn(5, 9, dtype=torch.float64)
    as_right, as_left = torch.nn.functional.linear(nodes[:, :4], *scorer.split()).chunk(2, -1)
    for left, right in itertools.product(range(5), repeat=2):
        assert_close(scorer.finish(as_left[left] + as_right[right]), scorer(nodes[left], nodes[right]))


def test_keys_tell_trees_apart():
    keys = set()
    leaves = hash_pair(torch.arange(6), torch.arange(6))
    everything = [(key, str(number)) for number, key in enumerate(leaves)]
    for _ in range(2):
        everything += [(hash_pair(left, right), f"({one} {other})") for left, one in everything for right, other in everything]
    names = {name for _, name in everything}
    keys = {int(key) for key, _ in everything}
    assert len(names) == len(keys) > 1000


def test_twins_are_replayed_once():
    encoder = make(4, 5)
    leaves, sizes = torch.randn(1, 12, DIM, dtype=torch.float64), torch.tensor([12])
    log = arena_search(encoder, leaves, sizes)
    lines, = survivors([log])
    heights, keys = label_nodes([lines], len(log.arena.nodes))
    trees = [tree_from_steps(steps) for steps in _final_trees([lines], log.roots, sizes)[0].tolist()]

    def inner(tree):
        return {tree} | inner(tree[0]) | inner(tree[1]) if isinstance(tree, tuple) else set()
    different = set().union(*map(inner, trees))
    plan = plan_replay([lines], 12, len(log.arena.nodes))
    assert len(plan.children) == sum(plan.counts) == len(different)
    apart = plan_replay([lines], 12, len(log.arena.nodes), twins=False)
    assert len(apart.children) == len(lines.made.unique()) > len(different)
    for tree, root in zip(trees, log.roots[0]):
        assert int(heights[root]) == depth(tree)
    assert len({int(keys[root]) for root in log.roots[0]}) == len(set(trees))


def depth(tree):
    return 1 + max(map(depth, tree)) if isinstance(tree, tuple) else 0


def test_slopes_of_the_replay():
    encoder = make(6, 3, activation="gelu_tanh")
    leaves, sizes = torch.randn(2, 6, DIM, dtype=torch.float64), torch.tensor([6, 4])
    log = arena_search(encoder, leaves, sizes)
    plan = plan_replay(survivors([log]), 10, len(log.arena.nodes))
    flat = leaves[length_mask(sizes)].clone().requires_grad_()
    keep = (torch.rand(len(plan.children), 10) < .7).double() / .7
    assert torch.autograd.gradcheck(lambda x: replay(encoder.grc, x, plan, keep), flat)
    weights = list(encoder.grc.parameters())
    assert torch.autograd.gradcheck(lambda *given: replay(encoder.grc, flat.detach(), plan, keep), weights)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(replay(encoder.grc, flat, plan).square().sum(), flat, create_graph=True)


@pytest.mark.parametrize("spread", [1.0, 100.0, 5000.0])
def test_slopes_of_lineages(spread):
    "Against the sum written out, where chances lie within anything."
    draw, steps, count = torch.Generator().manual_seed(1), 9, 12
    births = torch.randint(0, steps, (count,), generator=draw)
    deaths = torch.tensor([*range(steps), 2, 5, 8]) + 1
    births = torch.minimum(births, deaths - 1)
    logits = (spread * torch.randn(count, generator=draw, dtype=torch.float64)).requires_grad_()
    alive = (births[:, None] <= torch.arange(steps)) & (torch.arange(steps) < deaths[:, None])           # (P, T)
    norms = torch.where(alive, logits[:, None], -torch.inf).logsumexp(0)
    chosen = [next(k for k in range(count) if deaths[k] == step + 1) for step in range(steps)]
    written_out = (logits[chosen] - norms).sum()
    pairs = torch.full((1, 1, steps, 3), count)
    born = torch.zeros(1, 1, steps, 3, dtype=torch.int64)
    for step, k in enumerate(chosen):
        pairs[0, 0, step, 1], born[0, 0, step, 1] = k, births[k]
    for k in range(steps, count):
        pairs[0, 0, deaths[k] - 1, 0], born[0, 0, deaths[k] - 1, 0] = k, births[k]
    scored = torch.ones(1, 1, steps, dtype=torch.bool)
    score = LineageScores.apply(logits, pairs, born, scored, norms.detach()[None, None])
    assert_close(score[0, 0], written_out)
    slopes = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (score.sum(), written_out)]
    assert_close(*slopes, rtol=1e-9, atol=1e-12)


# ---- what it costs, and the door

def test_nothing_kept_grows_with_the_square():
    encoder, most = make(0, 3).float(), []
    for length in (30, 240):
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            encoder(torch.randn(1, length, DIM), torch.ones(1, length, dtype=torch.bool))
        most.append(sum(kept))
    assert most[1] < 10 * most[0]                                                  # 8 times the tokens; 64 would be the square


def test_half_precision_around_it():
    encoder, (x, mask) = make(2).float(), batch_of([5, 3], 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        root = encoder(x.float(), mask).root
    assert root.dtype == torch.float32 and root.isfinite().all()
    root.sum().backward()


@pytest.mark.parametrize("option, value", [("beam", 0), ("score_dim", 0), ("hidden", 0)])
def test_what_is_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be a whole number from 1, got 0"):
        EfficientBeam(4, **{option: value})


def test_options_arrive():
    encoder = EfficientBeam(100, 2, hidden=7, activation="relu", dropout=0.25)
    assert encoder.scorer.width == 64 and encoder.grc.w1.out_features == 7 and encoder.grc.dropout.p == 0.25
    assert EfficientBeam(8).scorer.width == 8 and EfficientBeam(8).beam == 5
    names = {name for name, _ in encoder.named_parameters()}
    assert names == {f"{layer}.{kind}" for layer in ("leaf", "leaf_norm", "grc.w1", "grc.w2", "grc.norm", "scorer.0", "scorer.1")
                     for kind in ("weight", "bias")}
