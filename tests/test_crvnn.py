"Continuous recursion against a slow walk over single positions, against the published form, and against trees that are given."
import copy
import inspect
import math
import pickle
import pydoc
import re
import xml.etree.ElementTree as ET
from functools import partial
from itertools import count, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.utils import prune

from rvnnbook.core import Encoder, batch_gap, length_mask, padding_gap, simple_tree, tree_from_steps
from rvnnbook.encoders import crvnn
from rvnnbook.encoders.crvnn import (
    DECISIONS,
    CRvNN,
    CRvNNParts,
    FastRounds,
    FixedTreeCRvNN,
    PositionIndex,
    PositionScorer,
    _continuous_recursion,
    _has_fast_rounds,
    extract_trees,
    halt_penalty,
    modulated_sigmoid,
    _plain_sigmoid,
    modulated_sigmoid_exp,
    runs_of,
    soft_round,
)
from rvnnbook.literal import crvnn_literal
from rvnnbook.layers import rounds
from rvnnbook.layers.cells import ACTIVATIONS, GRC
from rvnnbook.layers.given_trees import compose_tree
from rvnnbook.layers.masking import add_boundary_tokens, reverse_tokens
from rvnnbook.layers.neighbors import RETRIEVERS, neighbor_weights, retrieve
from rvnnbook.layers.neighbors_linear import CompiledRetriever, DenseNeighbors, neighbor_retrievers
from rvnnbook.show.trees import soft_round_drawing
from tests.golden import SharedNorm
from tests.helpers import randomize_norms
from tests.test_core import boxed, played, random_steps

quick = settings(deadline=None, max_examples=25)
few = settings(deadline=None, max_examples=6)
DIM = 3
lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
COMPETING = [modulated_sigmoid, modulated_sigmoid_exp]
DENSE = list(DECISIONS.values())


ATTRIBUTES = "retriever", "form", "checkpoint", "compaction"


def build(kind=CRvNN, window=2, scorer_activation=None, **options):
    "An encoder in double precision; what is no argument of its constructor is set afterwards."
    later = {name: options.pop(name) for name in ATTRIBUTES if name in options}
    encoder = kind(DIM, **options)
    if window != 2:
        encoder.scorer = PositionScorer(DIM, window, options.get("transition_dim", 64))
    if scorer_activation:
        encoder.scorer.activation = ACTIVATIONS[scorer_activation]
    for name, value in later.items():
        setattr(encoder, name, value)
    return encoder.double().eval()


def make(seed=0, factor=1.0, **options):
    "An encoder in double precision whose scores are multiplied by a factor, with layer norms that show."
    torch.manual_seed(seed)
    encoder = build(**options)
    return randomize_norms(encoder, encoder.scorer[1], factor)


def batch_of(sizes, seed, padding=0):
    mask = length_mask(torch.tensor(sizes), max(sizes) + padding)
    return torch.randn(*mask.shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), mask


def close(found, expected, share=1e-9):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and float((one - other).detach().abs().max()) <= share * max(1, float(other.detach().abs().max()))


def slopes_of(outputs, inputs, seed=0):
    "Gradients of a random weighting of some outputs."
    draw = torch.Generator().manual_seed(seed)
    total = sum((output * torch.randn(output.shape, dtype=output.dtype, generator=draw)).sum() for output in outputs)
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


# ---- one sentence, one position at a time, nothing but scalars and vectors

def walk(e, i, way, kind):
    "Weights that the walker of i gives to the positions it meets: {position: weight}."
    wanted, found = 1.0, {}
    for j in range(i + way, len(e) if way > 0 else -1, way):
        found[j] = (torch.minimum(e[j], torch.as_tensor(wanted)) if kind == "eq5" else wanted * e[j])
        wanted = wanted - found[j]
    return found


def fetched(values, e, i, way, kind):
    return sum((weight * values[j] for j, weight in walk(e, i, way, kind).items()), torch.zeros_like(values[i]))


def slowly(encoder, x, rounds=None):
    "Root, states, existence and rounds of one sentence (n, D), position by position (crvnn Algorithm 1)."
    n, kind = len(x), encoder.retriever
    outer = encoder.norm if isinstance(encoder, SharedNorm) else encoder.leaf_norm
    r = [outer(encoder.leaf(token)) for token in (encoder.start, *x, encoder.end)]
    e = [torch.ones((), dtype=x.dtype)] * (n + 2)
    c_before = [torch.zeros((), dtype=x.dtype)] * (n + 2)
    taken, story = 0, []
    while taken < (n - 1 if rounds is None else rounds) and sum(float(v.detach()) >= encoder.threshold for v in e[1:-1]) > 1:
        lefts, rights = [r], [r]
        for _ in range(encoder.scorer.window):
            lefts.append([fetched(lefts[-1], e, i, -1, kind) for i in range(n + 2)])
            rights.append([fetched(rights[-1], e, i, 1, kind) for i in range(n + 2)])
        u = [torch.zeros((), dtype=x.dtype)] * (n + 2)
        for i in range(1, n):
            seen = [side[i][:DIM] for side in (*lefts[:0:-1], *rights)]
            if encoder.transition.dim:
                came = c_before[i]
                seen.append(came * encoder.transition.composed + (1 - came) * encoder.transition.not_composed)
            hidden = encoder.scorer.activation(encoder.scorer[0].weight @ torch.cat(seen) + encoder.scorer[0].bias)
            u[i] = (encoder.scorer[1].weight @ hidden + encoder.scorer[1].bias).squeeze()
        c = [torch.zeros((), dtype=x.dtype)] * (n + 2)
        for i in range(1, n):
            if encoder.modulation == "scores":
                rivals = fetched(u, e, i, -1, kind).exp() + fetched(u, e, i, 1, kind).exp()
            elif encoder.modulation == "exponentials":
                powers = [u[j].exp() if 1 <= j < n else torch.zeros((), dtype=x.dtype) for j in range(n + 2)]
                rivals = fetched(powers, e, i, -1, kind) + fetched(powers, e, i, 1, kind)
            else:
                rivals = 0
            c[i] = u[i].exp() / (u[i].exp() + rivals + 1)
        c_before = [fetched(c, e, i, -1, kind) for i in range(n + 2)]
        parents = [encoder.cell(lefts[1][i][None], r[i][None])[0] for i in range(n + 2)]
        r = [came * parent + (1 - came) * old for came, parent, old in zip(c_before, parents, r)]
        story.append(torch.stack(c[1:-1]))
        e = [(1 - gone) * there for gone, there in zip(c, e)]
        taken += 1
    r = [state[:DIM] for state in r]
    return r[n], torch.stack(r[1:-1]), torch.stack(e[1:-1]), taken, story


@pytest.mark.parametrize("modulation, retriever, options", [
    *product(DECISIONS, RETRIEVERS, [{}]), ("scores", "eq5", {"transition_dim": 0, "window": 1, "scorer_activation": "relu"}),
    ("exponentials", "eq5", {"kind": SharedNorm, "window": 3, "activation": "gelu_tanh"}), ("none", "eq6", {"threshold": 0.3}),
    ("exponentials", "eq5", {"cell": "lstm"}), ("scores", "eq5", {"checkpoint": True})])
@few
@given(lengths, seeds, st.sampled_from([0.3, 1.0, 4.0]), st.sampled_from(["dense", "linear"]))
def test_position_by_position(modulation, retriever, options, sizes, seed, factor, form):
    encoder = make(seed, factor, modulation=modulation, retriever=retriever, form=form, **{"transition_dim": 2, **options})
    x, mask = batch_of(sizes, seed, padding=1)
    x.requires_grad_()
    out = encoder(x, mask, trace=True)
    alone = [slowly(encoder, row[:n]) for row, n in zip(x, sizes)]
    close(out.root, [root for root, *_ in alone])
    assert out.trace["rounds"].tolist() == [taken for *_, taken, _ in alone]
    for b, (n, (_, states, exists, taken, story)) in enumerate(zip(sizes, alone)):
        close([out.states[b, :n], out.trace["existence"][-1, b, :n]], [states, exists])
        close(out.trace["composition"][:taken, b, :n], story)
        assert not out.trace["composition"][taken:, b].any() and not out.states[b, n:].any()
        assert out.trace["existence"][taken:, b].eq(out.trace["existence"][-1, b]).all()
    inputs = [x, *encoder.parameters()]
    close(slopes_of([out.root], inputs), slopes_of([torch.stack([root for root, *_ in alone])], inputs), 1e-7)


# ---- the published form

@quick
@given(lengths, seeds, st.integers(0, 3), st.sampled_from([0.0, 1.0, 10.0]), st.booleans(), st.booleans(), st.sampled_from([0.05, 0.3]))
@example([1], 0, 0, 1.0, True, True, 0.05)
def test_published_form_without_its_constant(sizes, seed, padding, factor, competing, transition, threshold):
    encoder = make(seed, factor, modulation="exponentials" if competing else "none", transition_dim=2 * transition,
                   threshold=threshold, kind=CRvNN if transition else SharedNorm)
    x, mask = batch_of(sizes, seed, padding)
    x.requires_grad_()
    states, exists, rounds = crvnn_literal(encoder, x, mask, epsilon=0)
    encoder.max_rounds = lambda mask: rounds
    out = encoder(x, mask, trace=True)
    close([out.states, out.trace["existence"][-1]], [states, exists], 1e-8)
    assert [r for r, n in zip(out.trace["rounds"].tolist(), sizes) if n > 1] == [r for r, n in zip(rounds.tolist(), sizes) if n > 1]
    inputs = [x, *encoder.parameters()]
    close(slopes_of([out.states], inputs), slopes_of([states], inputs), 1e-6)


@quick
@given(lengths, seeds, st.integers(0, 3))
def test_published_numbers_of_rounds(sizes, seed, padding):
    "A sentence that never halts gets one round a token, and one more where the box has room."
    encoder = make(seed, modulation="exponentials", threshold=1e-9)
    x, mask = batch_of(sizes, seed, padding)
    width = mask.shape[1]
    assert crvnn_literal(encoder, x, mask)[2].tolist() == [min(width, n + 1) if n > 1 else 1 for n in sizes]
    assert encoder(x, mask, trace=True).trace["rounds"].tolist() == [n - 1 for n in sizes]


def test_published_form_reads_its_neighbors_in_the_batch():
    "So the promise that encoders keep would notice."
    encoder = make(0, 300.0, modulation="exponentials")
    x, mask = batch_of([6] * 16, 0)
    alone = torch.cat([crvnn_literal(encoder, x[b:b + 1], mask[b:b + 1])[0] for b in range(16)])
    assert (crvnn_literal(encoder, x, mask)[0] - alone).abs().max() > 0.01


# ---- decisions

def dense(left, right):
    return DenseNeighbors(torch.stack([left, right], 1))


def some_weights(rows, n, seed, kind="eq5"):
    exists = torch.rand(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [neighbor_weights(exists, side, kind) for side in ("left", "right")]


@pytest.mark.parametrize("rule", DENSE)
def test_slopes_of_decisions(rule):
    scores = 2 * torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    allowed = torch.tensor([[False, True, True, True, False], [False, True, False, False, False]])
    left, right = (torch.rand(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) + 0.1 for s in (1, 2))
    assert torch.autograd.gradcheck(lambda *given: rule(given[0], allowed, dense(*given[1:])),
                                    [tensor.requires_grad_() for tensor in (scores, left, right)])


@pytest.mark.parametrize("modulation, form", list(product(["scores", "exponentials"], ["dense", "linear"])))
def test_slopes_of_the_encoder(modulation, form):
    encoder = make(3, 2.0, modulation=modulation, form=form, transition_dim=2, hidden=4, window=1, penalty=0.5)
    x, mask = batch_of([4, 1, 3], 3)
    names, values = zip(*encoder.named_parameters())

    def outcome(x, *values):
        out = torch.func.functional_call(encoder, dict(zip(names, values)), (x, mask))
        return out.root, out.loss
    assert encoder(x, mask, trace=True).trace["rounds"].tolist() == [3, 0, 2]
    assert torch.autograd.gradcheck(outcome, (x.requires_grad_(), *values), fast_mode=True)


@quick
@given(st.integers(2, 7), seeds, st.sampled_from([1.0, 30.0, 1e4]), st.sampled_from(list(RETRIEVERS)))
def test_decisions_at_any_height(n, seed, height, kind):
    "Probabilities in single precision are those in double precision, and gradients are finite, however large the scores."
    draw = torch.Generator().manual_seed(seed)
    scores = (height * (2 * torch.rand(3, n, generator=draw) - 1)).requires_grad_()
    allowed = torch.rand(3, n, generator=draw) < 0.8
    weights = [side.float() for side in some_weights(3, n, seed, kind)]
    for rule in DENSE:
        composes = rule(scores, allowed, dense(*weights))
        exact = rule(scores.double(), allowed, dense(*(side.double() for side in weights)))
        assert (composes >= 0).all() and (composes <= 1).all() and (composes[~allowed] == 0).all()
        assert (composes - exact).abs().max() < 3e-7 * (1 + height)
        slope, = torch.autograd.grad(composes.sum(), scores)
        assert slope.isfinite().all()


@pytest.mark.parametrize("rule", COMPETING)
def test_the_winner_takes_it(rule):
    "Scores of ten thousand: nobody but the highest goes, and nobody at all where all are low."
    crowd = dense(*(neighbor_weights(torch.ones(2, 6), side) for side in ("left", "right")))
    allowed = torch.tensor([[False, True, True, True, True, False]] * 2)
    scores = torch.tensor([[0, -1e4, 1e4, 9e3, 1e4, 0.], [0, -1e4, -1e4, -1e4, -1e4, 0.]], requires_grad=True)
    composes = rule(scores, allowed, crowd)
    assert composes.tolist() == [[0, 0, 1, 0, 1, 0], [0] * 6]
    slope, = torch.autograd.grad(composes.sum(), scores)
    assert slope.isfinite().all()


@pytest.mark.parametrize("weight", [1.0, 1e-20, 1e-37, 1e-40, 1e-45])
def test_a_rival_that_hardly_exists(weight):
    "Its weight may be a number of which the inverse is infinite: slopes stay finite."
    scores, left = torch.tensor([[500., 0., 0.]], requires_grad=True), torch.zeros(1, 3, 3)
    left[0, 1, 0] = weight
    left.requires_grad_()
    composes = modulated_sigmoid_exp(scores, torch.tensor([[True, True, False]]), dense(left, torch.zeros(1, 3, 3)))
    slopes = torch.autograd.grad(composes.sum(), [scores, left])
    assert composes.isfinite().all() and all(slope.isfinite().all() for slope in slopes)
    assert weight < 1e-37 or composes[0, 1] == 0           # while there is any of it, it wins by far


@quick
@given(st.integers(3, 8), seeds, st.sampled_from(COMPETING))
def test_certain_neighbors_share_less_than_one(n, seed, rule):
    scores = 4 * torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    alive = torch.rand(4, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    crowd = dense(*(neighbor_weights(alive.double(), side) for side in ("left", "right")))
    composes = rule(scores, torch.ones(4, n, dtype=torch.bool), crowd)
    for row, there in zip(composes.tolist(), alive):
        row = [row[i] for i in there.nonzero().squeeze(1)]
        assert all(one + other < 1 for one, other in zip(row, row[1:]))


def test_plain_scores_share_nothing():
    "So the test above would notice."
    assert (_plain_sigmoid(torch.full((1, 2), 4.), torch.tensor(True)) > 0.9).all()


@pytest.mark.parametrize("rule", DENSE)
def test_rows_decide_alone(rule):
    "A sentence's decision does not change by a bit when another one has huge scores."
    scores, weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), dense(*(w.float() for w in some_weights(2, 6, 0)))
    allowed = torch.tensor([[False, True, True, True, False, False], [False, True, True, True, True, False]])
    calm = rule(scores, allowed, weights)
    stormy = rule(torch.stack([scores[0], 1e4 * scores[1]]), allowed, weights)
    assert torch.equal(calm[0], stormy[0]) and not torch.equal(calm[1], stormy[1])


@quick
@given(lengths, seeds, st.sampled_from([1.0, 100.0, 1e4, 1e6]), st.sampled_from(["dense", "linear"]), st.sampled_from(list(DECISIONS)))
@example([4], 0, 1e4, "linear", "exponentials")
def test_single_precision_at_large_scores(sizes, seed, factor, form, modulation):
    encoder = make(seed, factor, modulation=modulation, form=form).float()
    x, mask = batch_of(sizes, seed)
    x = x.float().requires_grad_()
    out = encoder(x, mask)
    slopes = slopes_of([out.root, out.loss], [x, *encoder.parameters()])
    assert out.root.isfinite().all() and all(slope.isfinite().all() for slope in slopes)


# ---- the recursion

class Oracle:
    "Decides by trees that are given; every state carries the number of its sentence in its last channel."
    def __init__(self, trees, kind):
        self.trees, self.kind, self.batches = F.pad(trees, (1, 1)), kind, []

    def __call__(self, states, exists, allowed, arrived, senders):
        rows = states[:, 1, -1].long()
        self.batches.append(rows.tolist())
        steps = self.trees[rows].double().masked_fill(~(allowed & (exists > 0)), math.inf)
        composes = (steps == steps.amin(1, keepdim=True)).double()
        left = neighbor_weights(exists, "left", self.kind)
        numbers = torch.arange(allowed.numel()).view(*allowed.shape, 1)
        assert senders.gather(numbers).flatten().tolist() == numbers[allowed].flatten().tolist()
        return composes, retrieve(left, composes[..., None]), retrieve(left, states)


@pytest.mark.parametrize("kind", RETRIEVERS)
@quick
@given(st.lists(random_steps(9), min_size=1, max_size=4), seeds)
@example([[0]], 0)
def test_certain_decisions_are_the_recursive_network(kind, rows, seed):
    torch.manual_seed(seed)
    cell, (trees, mask) = GRC(DIM).double(), boxed(rows)
    x = torch.randn(*mask.shape, DIM, dtype=torch.float64, requires_grad=True)
    names = torch.arange(len(rows)).double()[:, None, None].expand(*mask.shape, 1)
    framed, there, tokens = add_boundary_tokens(torch.cat([x, names], -1), mask, *torch.zeros(2, DIM + 1).double())
    oracle = Oracle(trees, kind)

    def cell_on_vectors(left, right):
        return torch.cat([cell(left[:, :-1], right[:, :-1]), right[:, -1:]], -1)
    (states, exists, taken), rounds = _continuous_recursion(
        framed, there.double(), tokens, mask.sum(1) - 1, oracle, cell_on_vectors, 0.01)
    root = states[torch.arange(len(rows)), mask.sum(1), :-1]
    by_tree = torch.stack([compose_tree(played(row)[1], list(leaf.unbind()), cell) for row, leaf in zip(rows, x)])
    close([root], [by_tree], 1e-10)
    close(slopes_of([root], [x, *cell.parameters()]), slopes_of([by_tree], [x, *cell.parameters()]), 1e-8)
    assert taken.tolist() == [len(set(row) - {0}) for row in rows]
    assert oracle.batches == [[b for b, row in enumerate(rows) if len(set(row) - {0}) > t] for t in range(int(taken.max()))]
    assert [numbers.tolist() for numbers, *_ in rounds] == oracle.batches
    assert (exists[:, 1:-1] * mask).tolist() == [[float(i == len(row) - 1) for i in range(mask.shape[1])] for row in rows]


@quick
@given(lengths, seeds, st.sampled_from([1.0, 30.0]), st.sampled_from([0.01, 0.3, 0.9]))
def test_halting(sizes, seed, factor, threshold):
    "A sentence stops after the first round that leaves one token above the threshold, or after n - 1."
    encoder = make(seed, factor, threshold=threshold)
    x, mask = batch_of(sizes, seed)
    story = encoder(x, mask, trace=True).trace
    exists = story["existence"]
    assert len(exists) == int(story["rounds"].max()) + 1 and (exists[1:] <= exists[:-1]).all() and not exists[:, ~mask].any()
    for b, (n, taken) in enumerate(zip(sizes, story["rounds"].tolist())):
        counts = [(row >= threshold).sum() for row in exists[:, b]]
        assert taken <= n - 1 and all(count > 1 for count in counts[:taken]) and (taken == n - 1 or counts[taken] == 1)
        assert (exists[:, b, n - 1] == 1).all() and not story["composition"][:, b, n - 1].any()


@pytest.mark.parametrize("rounds", [0, 1, 2, 9])
def test_a_budget_is_kept(rounds):
    encoder = make(0, threshold=1e-9)
    x, mask = batch_of([5, 1, 3], 0)
    encoder.max_rounds = lambda mask: torch.full((3,), rounds)
    out = encoder(x, mask, trace=True)
    assert out.trace["rounds"].tolist() == [rounds, 0, rounds]
    close(out.root, [slowly(encoder, row[:n], rounds)[0] for row, n in zip(x, (5, 1, 3))])


def test_start_and_end_stand_around_the_tokens():
    x, mask = batch_of([2, 4], 0)
    start, end = torch.full((DIM,), 7.).double(), torch.full((DIM,), 8.).double()
    framed, there, tokens = add_boundary_tokens(x * mask[..., None], mask, start, end)
    assert torch.equal(framed[0], torch.stack([start, x[0, 0], x[0, 1], end, 0 * end, 0 * end]))
    assert torch.equal(framed[1], torch.stack([start, *x[1], end]))
    assert there.int().tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6] and tokens.int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]]


# ---- penalty

@quick
@given(lengths, seeds)
def test_penalty(sizes, seed):
    mask = length_mask(torch.tensor(sizes))
    exists = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).round(decimals=1) * mask
    exists[torch.arange(len(sizes)), mask.sum(1) - 1] = 1
    penalty = halt_penalty(exists, mask)
    assert penalty.tolist() == pytest.approx([math.log(float(row.sum())) for row in exists], abs=1e-12)
    assert (penalty >= 0).all() and ((penalty == 0) == (exists.sum(1) == 1)).all()


def test_who_pays():
    x, mask = batch_of([6, 1, 4], 0)
    out = make(0, threshold=0.3, penalty=0.5)(x, mask, trace=True)
    paid, exists = out.trace["penalty"], out.trace["existence"][-1]
    assert float(out.loss.detach()) == pytest.approx(0.5 * float(paid.mean()))
    assert ((exists >= 0.3).sum(1) == 1).tolist() == [True, True, False]
    assert paid[1] == 0 and (paid[[0, 2]] > 0).all()                  # a sentence that has halted pays, too


# ---- trees

def merged(rounds):
    "The tree that is made when positions join their right neighbor in the order of their rounds, left ones first in a round."
    parts = [(i, i) for i in range(len(rounds))]              # (last position, tree)
    for _, i in sorted((round_, i) for i, round_ in enumerate(rounds[:-1])):
        at = next(at for at, (last, _) in enumerate(parts) if last == i)
        (_, left), (last, right) = parts[at:at + 2]
        parts[at:at + 2] = [(last, (left, right))]
    return parts[0][1]


@st.composite
def tables(draw):
    "A composition table of up to five rounds, with many zeros, halves and ones, and its lengths."
    sizes = draw(lengths)
    number = st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.1, 0.4]) | st.floats(0, 1, width=32)
    rounds = draw(st.integers(0, 5))
    cells = draw(st.lists(number, min_size=rounds * len(sizes) * max(sizes), max_size=rounds * len(sizes) * max(sizes)))
    return torch.tensor(cells).view(rounds, len(sizes), max(sizes)), sizes


@settings(deadline=None, max_examples=100)
@given(tables())
def test_any_table_has_a_tree(given_):
    table, sizes = given_
    trees = extract_trees(table, length_mask(torch.tensor(sizes)))
    assert trees.dtype == torch.int64 and trees.shape == (len(sizes), max(sizes))
    for b, (n, row) in enumerate(zip(sizes, trees.tolist())):
        sums = [[math.fsum(column[:t + 1]) for t in range(len(column))] for column in table[:, b, :n].T.tolist()]
        rounds = [next((t for t, total in enumerate(column) if total >= 0.5), len(column)) for column in sums]
        assert tree_from_steps(row[:n]) == merged(rounds) and not any(row[n:])
        assert max(row) < n and played(row[:n])[1] == merged(rounds)


def test_long_sums_are_taken_in_double_precision():
    "Twenty-five times 0.02 is less than one half in single precision's own numbers, but not if its sums are rounded as well."
    table = torch.tensor([[[0.02, 0.0, 0.0]]] * 24 + [[[0.02, 1.0, 0.0]]])
    assert 25 * table[0, 0, 0].double() < 0.5
    assert extract_trees(table, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[2, 1, 0]]


@settings(deadline=None, max_examples=50)
@given(st.lists(random_steps(), min_size=1, max_size=4))
def test_certain_decisions_are_read_back(rows):
    trees, mask = boxed(rows)
    table = (trees == torch.arange(1, int(trees.max()) + 1)[:, None, None]).float()
    for row, found in zip(rows, extract_trees(table, mask).tolist()):
        assert tree_from_steps(found[:len(row)]) == played(row)[1]


@few
@given(lengths, seeds, st.sampled_from([1.0, 30.0]))
def test_a_story_can_be_drawn(sizes, seed, factor):
    "Every frame is complete: the parents whose senders have reached one half, and two bars a token."
    encoder = make(seed, factor)
    x, mask = batch_of(sizes, seed)
    story = encoder(x, mask, trace=True).trace
    assert torch.equal(story["trees"], extract_trees(story["composition"], mask))
    for b, n in enumerate(sizes):
        before = torch.zeros(n, dtype=torch.float64)
        for exists, composes in zip(story["existence"][:, b, :n].double(), story["composition"][:, b, :n].double()):
            svg = soft_round_drawing(story["trees"][b].tolist(), range(n), exists.tolist(), composes.tolist(), before.tolist())
            kinds = [mark.get("class") for mark in ET.fromstring(svg).iter()]
            before = before + composes
            assert kinds.count("level") == 2 * n and kinds.count("parent") == int((before[:-1] >= 0.5).sum())


# ---- other ways to the same numbers, and other numbers

def same_weights(one, **options):
    "Another encoder with the weights of the first."
    other = build(**options)
    other.load_state_dict(one.state_dict())
    return other


@pytest.mark.parametrize("competition", ["scores", "exponentials"])
@quick
@given(st.integers(3, 8), seeds, st.sampled_from([1.0, 30.0, 3e4]))
@example(3, 0, 3e4)
def test_walks_compete_as_matrices_do(competition, n, seed, height):
    draw = torch.Generator().manual_seed(seed)
    scores = height * torch.randn(3, n, dtype=torch.float64, generator=draw)
    exists = torch.rand(3, n, dtype=torch.float64, generator=draw)         # no zeros: there the matrix form cuts slopes off
    allowed = torch.rand(3, n, generator=draw) < 0.7
    leaves = [tensor.requires_grad_() for tensor in (scores, exists)]
    found = [DECISIONS[competition](scores, allowed, neighbor_retrievers(exists, form=form))
             for form in ("dense", "linear")]
    slopes = [slopes_of([composes], leaves) for composes in found]
    assert all(slope.isfinite().all() for pair in slopes for slope in pair)
    close(found[:1], found[1:], 1e-9)
    close(*slopes, 1e-7)


@quick
@given(lengths, seeds, st.integers(0, 2), st.sampled_from([1.0, 5.0]), st.sampled_from(["grc", "lstm"]))
def test_the_first_token_is_the_last_of_a_sentence_turned_over(sizes, seed, padding, factor, cell):
    last = make(seed, factor, cell=cell)
    first = same_weights(last, cell=cell, root="first")
    x, mask = batch_of(sizes, seed, padding)
    one, other = first(x, mask, trace=True), last(reverse_tokens(x, mask), mask, trace=True)
    close([one.root, one.states, one.loss], [other.root, reverse_tokens(other.states, mask), other.loss])
    for name in ("existence", "composition"):
        close(one.trace[name], [reverse_tokens(row, mask) for row in other.trace[name]])
    assert one.trace["rounds"].tolist() == other.trace["rounds"].tolist()

    def mirrored(tree, n):
        return tuple(mirrored(part, n) for part in tree[::-1]) if isinstance(tree, tuple) else n - 1 - tree
    for n, tree, image in zip(sizes, one.trace["trees"].tolist(), other.trace["trees"].tolist()):
        assert tree_from_steps(tree[:n]) == mirrored(tree_from_steps(image[:n]), n)


def test_turning_twice_is_nothing():
    x, mask = batch_of([4, 1, 6], 0, padding=2)
    assert reverse_tokens(x, mask)[0, :4].equal(x[0, :4].flip(0)) and reverse_tokens(x, mask)[0, 4:].equal(x[0, 4:])
    assert reverse_tokens(reverse_tokens(x, mask), mask).equal(x)


@quick
@given(lengths, seeds, st.sampled_from([0.0, 0.5]), st.sampled_from(["last", "first"]))
def test_rounds_computed_twice_are_the_same_rounds(sizes, seed, dropout, root):
    "Bit for bit, with the same units dropped."
    x, mask = batch_of(sizes, seed)
    found = []
    for again in (False, True):
        encoder = make(seed, dropout=dropout, root=root, checkpoint=again).train()
        leaves = [x.clone().requires_grad_(), *encoder.parameters()]
        out = encoder(leaves[0], mask)
        found.append([out.root, *slopes_of([out.root, out.loss], leaves)])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("shape", ["left", "right", "balanced"])
@pytest.mark.parametrize("cell", ["grc", "lstm"])
@few
@given(sizes=lengths, seed=seeds)
def test_without_structure_it_is_a_recursive_network(shape, cell, sizes, seed):
    encoder = make(seed, kind=FixedTreeCRvNN, shape=shape, cell=cell)
    x, mask = batch_of(sizes, seed, padding=1)
    out = encoder(x, mask, trace=True)
    for b, n in enumerate(sizes):
        steps = simple_tree(shape, n)
        tree = tree_from_steps(steps)
        root = compose_tree(tree, list(encoder.leaves(x[b, :n])), lambda left, right: encoder.cell(left[None], right[None])[0])
        close([out.root[b]], [root[:DIM]])
        assert out.trace["trees"][b].tolist() == steps + [0] * (mask.shape[1] - n)
    assert out.loss == 0 and batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9


# ---- rounds with a backward pass by hand

class Plain(CRvNN):
    "CRvNN that computes every round by soft_round, since its method `decide` is another."
    def decide(self, *given, **options):
        return super().decide(*given, **options)


def plainly(encoder, **options):
    "The same encoder with rounds by soft_round."
    other = same_weights(encoder, kind=Plain, **options).train(encoder.training)
    for one, copied in zip(encoder.parameters(), other.parameters(), strict=True):
        copied.requires_grad_(one.requires_grad)
    assert _has_fast_rounds(encoder) and not _has_fast_rounds(other)
    return other


def round_of(encoder, sizes, seed, everywhere):
    "Inputs of a round in the middle of a sentence, and its senders and receivers."
    draw, framed = torch.Generator().manual_seed(seed), length_mask(torch.tensor(sizes) + 2, max(sizes) + 3)
    states = torch.randn(*framed.shape, DIM, dtype=torch.float64, generator=draw)
    exists = torch.rand(*framed.shape, dtype=torch.float64, generator=draw) * framed
    arrived = torch.rand(*framed.shape, 1, dtype=torch.float64, generator=draw)
    allowed = length_mask(torch.tensor(sizes), framed.shape[1])
    allowed[:, 0] = False                                          # START; the last token is at the place of the size
    runs = (PositionIndex(), PositionIndex()) if everywhere else runs_of(allowed)
    return [one.requires_grad_() for one in (states, exists, arrived)], allowed, runs


def compute_round(encoder, inputs, allowed, runs, fast):
    states, exists, arrived = inputs
    layer = encoder.transition.fold(encoder.scorer[0])
    a_round = FastRounds(encoder, layer) if fast else soft_round
    return a_round(states, exists, allowed, arrived, partial(encoder.decide, layer=layer), encoder.cell, runs)


def weights_of(encoder):
    return [*encoder.scorer.parameters(), *encoder.transition.parameters(), *encoder.cell.parameters()]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("dropout, activation, transition_dim", [(0.0, "gelu", 5), (0.4, "relu", 5), (0.0, "gelu_tanh", 0)])
@quick
@given(st.lists(st.integers(2, 7), min_size=1, max_size=4), seeds, st.booleans())
def test_a_round_by_hand_is_a_soft_round(window, dropout, activation, transition_dim, sizes, seed, everywhere):
    encoder = make(seed, window=window, dropout=dropout, activation=activation, transition_dim=transition_dim,
                   scorer_activation=activation).train()
    inputs, *given = round_of(encoder, sizes, seed, everywhere)
    found = []
    for fast in (True, False):
        torch.manual_seed(seed)
        out = compute_round(encoder, inputs, *given, fast)
        found.append([*out, *slopes_of(out[:3], [*inputs, *weights_of(encoder)])])
    assert found[0][0].grad_fn.name() == "SoftRoundBackward" and not found[0][3].requires_grad
    close(*found, 1e-10)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("modulation, dropout, activation, transition_dim", [
    ("scores", 0.0, "gelu", 5), ("exponentials", 0.4, "gelu", 5), ("none", 0.0, "gelu_tanh", 0)])
@quick
@given(st.lists(st.integers(2, 7), min_size=1, max_size=4), seeds, st.booleans(), st.booleans())
def test_a_compiled_round_is_a_soft_round(window, modulation, dropout, activation, transition_dim, sizes, seed, everywhere, sparse):
    """Values, also of c, and gradients; the same if all positions are computed, since START, the last token and END exist wholly, so nothing
    goes past them. Their existence and that of padding is constant; its gradient is not used and differs."""
    encoder = make(seed, window=window, dropout=dropout, activation=activation, transition_dim=transition_dim, modulation=modulation,
                   scorer_activation=activation, form="linear").train()
    inputs, allowed, runs = round_of(encoder, sizes, seed, everywhere)
    inputs[1].data[length_mask(torch.tensor(sizes) + 2, allowed.shape[1]) & ~allowed] = 1
    found = []
    for fast in (True, False):
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(crvnn, "NEARLY_ALL", math.inf if sparse else 0)
            out = compute_round(encoder, inputs, allowed, runs, fast)
        at_states, at_exists, *slopes = slopes_of(out, [*inputs, *weights_of(encoder)])
        found.append([*out, at_states, at_exists * allowed, *slopes])
    assert found[0][0].grad_fn.name() == "ComposeRowsBackward"
    close(*found, 1e-10)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("form", ["dense", "linear"])
def test_gradients_of_a_round_by_hand(window, everywhere, form):
    encoder = make(0, window=window, hidden=4, transition_dim=2, form=form)
    inputs, allowed, runs = round_of(encoder, [5, 3], 0, everywhere)

    def outputs(*tensors):                                         # the weights are those of the encoder, which change
        return compute_round(encoder, tensors[:3], allowed, runs, fast=True)[:3]
    assert torch.autograd.gradcheck(outputs, [*inputs, *weights_of(encoder)])


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_outputs_without_gradients_count_as_zero(form):
    encoder = make(0, form=form)
    inputs, *given = round_of(encoder, [5, 3], 0, False)
    for which in range(3):
        found = [slopes_of([compute_round(encoder, inputs, *given, fast)[which]], [*inputs, *weights_of(encoder)])
                 for fast in (True, False)]
        close(*found, 1e-10)


def gradients(encoder, *batches, seed=0):
    "Roots of some batches, and gradients of one loss over all of them in token vectors and parameters."
    torch.manual_seed(seed)
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    outs = [encoder(x, mask) for x, (_, mask) in zip(leaves, batches)]
    wanted = [*leaves, *(one for one in encoder.parameters() if one.requires_grad)]
    return [*(out.root for out in outs), *slopes_of([one for out in outs for one in (out.root, out.states, out.loss)], wanted)]


@pytest.mark.parametrize("options", [
    {}, {"checkpoint": True}, {"dropout": 0.3}, {"dropout": 0.3, "checkpoint": True}, {"root": "first"}, {"form": "linear"},
    {"form": "linear", "checkpoint": True, "dropout": 0.3}, {"form": "linear", "modulation": "exponentials", "root": "first"}], ids=str)
@pytest.mark.parametrize("most", [1, 20, 2 ** 14])
@few
@given(lengths, seeds, st.sampled_from([1.0, 5.0]))
def test_encoders_have_the_gradients_of_soft_rounds(options, most, sizes, seed, factor):
    "However many rows a product of the weights' gradients takes; with two forward passes before the backward pass."
    encoder = make(seed, factor, **options).train()
    batches = batch_of(sizes, seed, 1), batch_of([5, 2], seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROWS_PER_PRODUCT", {"cpu": most})
        for given in (batches[:1], batches):
            close(gradients(encoder, *given), gradients(plainly(encoder, **options), *given))


@pytest.mark.parametrize("trained", ["scorer", "transition", "grc", "grc.w1.weight", "grc.norm.bias", "scorer.1.bias", "leaf", "start"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"form": "linear"}], ids=str)
def test_frozen_parameters_get_no_gradients(trained, options):
    encoder, (x, mask) = make(3, **options), batch_of([6, 3], 0)
    for name, one in encoder.named_parameters():
        one.requires_grad_(f"{name}.".startswith(f"{trained}."))
    close(gradients(encoder, (x, mask)), gradients(plainly(encoder, **options), (x, mask)))
    encoder(x, mask).root.square().sum().backward()                # no gradient in the token vectors
    assert all((one.grad is not None) == one.requires_grad for one in encoder.parameters())


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_several_backward_passes(form):
    "Each counts once: over the same graph, for some gradients only, after one that was not for weights, after one that failed."
    encoder, (x, mask) = make(3, form=form), batch_of([6, 3], 0)
    other, x = plainly(encoder, form=form), x.requires_grad_()
    chosen = [[x], [*encoder.parameters()], [x], [encoder.grc.w1.weight], [encoder.scorer[0].weight, x]]
    names = {id(one): name for name, one in encoder.named_parameters()}
    outs = encoder(x, mask), other(x, mask)

    def slopes(out, module, wanted):
        found = dict(module.named_parameters())
        return torch.autograd.grad(out.states.square().sum() + out.loss, [found[names[id(one)]] if id(one) in names else one for one in wanted],
                                   retain_graph=True)
    for wanted in chosen * 2:
        close(slopes(outs[0], encoder, wanted), slopes(outs[1], other, wanted))

    owner = rounds.CumulativeNeighbors if form == "dense" else CompiledRetriever
    calls, after = count(), owner.gradients

    def fail(*given):
        assert next(calls) < 2
        return after(*given)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(owner, "gradients", fail)
        slopes(outs[0], encoder, [*encoder.parameters()])
    for _ in range(2):
        for one, module in zip(outs, (encoder, other)):
            (one.states.square().sum() + one.loss).backward(retain_graph=True)
    close([one.grad for one in encoder.parameters()], [one.grad for one in other.parameters()])


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_changed_weights_and_second_derivatives_are_refused(form):
    encoder, (x, mask) = make(0, form=form), batch_of([4, 2], 0)
    out = encoder(x.requires_grad_(), mask).states.square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out, encoder.grc.w1.weight, create_graph=True)
    out = encoder(x, mask).states.square().sum()
    with torch.no_grad():
        encoder.grc.w1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_rounds_by_hand_without_gradients(form):
    encoder, (x, mask) = make(0, form=form), batch_of([4, 2, 7], 0)
    expected = encoder(x, mask)
    with torch.no_grad():
        found = encoder(x, mask)
    assert found.states.equal(expected.states) and not found.root.requires_grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_copies_have_rounds_by_hand(activation):
    encoder, given = make(0, activation=activation), batch_of([4, 2, 7], 0)
    expected = gradients(plainly(encoder, activation=activation), given)
    encoder(*given)                                                # nothing of a forward pass is kept
    for copied in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert _has_fast_rounds(copied)
        close(gradients(copied, given), expected)


@pytest.mark.parametrize("form", ["dense", "linear"])
@pytest.mark.parametrize("part", ["grc.w1", "grc.norm", "scorer.0"])
def test_weights_registered_in_another_order(form, part):
    "After pruning has ended, a weight is the last parameter of its layer."
    encoder, given = make(3, form=form), batch_of([6, 3], 0)
    expected = gradients(plainly(encoder, form=form), given)
    layer = encoder.get_submodule(part)
    prune.remove(prune.identity(layer, "weight"), "weight")
    assert [*dict(layer.named_parameters())] == ["bias", "weight"] and _has_fast_rounds(encoder)
    in_order = {name: place for place, name in enumerate(dict(make(3, form=form).named_parameters()))}
    found = gradients(encoder, given)
    slopes = dict(zip((name for name, _ in encoder.named_parameters()), found[2:]))
    close([*found[:2], *(slopes[name] for name in in_order)], expected)


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_recomputed_rounds_have_the_weights_of_the_call(form):
    "Under functional_call, also if the backward pass runs later."
    encoder, (x, mask) = make(3, form=form), batch_of([6, 3], 0)
    weights = {name: torch.randn_like(one).requires_grad_() for name, one in encoder.named_parameters()}
    found = []
    for again in (False, True):
        encoder.checkpoint = again
        out = torch.func.functional_call(encoder, weights, (x, mask))
        found.append(slopes_of([out.root, out.loss], [*weights.values()]))
    close(*found)


@pytest.mark.parametrize("form", ["dense", "linear"])
def test_activations_with_settings_of_their_own(form):
    for activation in (partial(F.gelu), partial(F.relu, inplace=False)):
        encoder, given = make(3, form=form), batch_of([6, 3], 0)
        other = plainly(encoder, form=form)
        for one in (encoder, other):
            one.scorer.activation = one.grc.activation = activation
        close(gradients(encoder, given), gradients(other, given))


def test_other_settings_have_soft_rounds():
    for options in ({"retriever": "eq6"}, {"cell": "lstm"}):
        assert not _has_fast_rounds(build(**options))
    for options in ({"modulation": "none"}, {"modulation": "exponentials"}, {"form": "linear", "activation": "relu"}):
        encoder = make(0, **options)
        inputs, *given = round_of(encoder, [5, 3], 0, False)
        assert compute_round(encoder, inputs, *given, fast=True)[0].grad_fn.name() != "SoftRoundBackward"
    assert not _has_fast_rounds(SharedNorm(DIM)) and _has_fast_rounds(build(form="linear", window=3, dropout=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not _has_fast_rounds(build())
    encoder, seen = make(0), []
    encoder.grc.register_forward_hook(lambda *given: seen.append(len(given)))
    assert not _has_fast_rounds(encoder)
    encoder(*batch_of([4], 0))
    assert len(seen) == 3
    encoder = build()
    encoder.grc.w1 = torch.nn.Linear(2 * DIM, 4 * DIM, bias=False)
    encoder.grc.activation = torch.tanh
    assert not _has_fast_rounds(encoder)
    encoder = make(0, form="linear")
    x, mask = batch_of([5, 3], 0)
    close(gradients(encoder, (x, mask)), gradients(plainly(encoder, form="linear"), (x, mask)))


# ---- compaction

@quick
@given(st.lists(random_steps(9), min_size=1, max_size=4), seeds)
@example([[0]], 0)
def test_taking_out_who_is_gone_changes_nothing(rows, seed):
    "Where decisions are certain, a position of existence zero is met by nobody."
    torch.manual_seed(seed)
    cell, (trees, mask) = GRC(DIM).double(), boxed(rows)
    x = torch.randn(*mask.shape, DIM, dtype=torch.float64)

    def decide(states, exists, allowed, arrived, senders):
        steps = states[..., -1].masked_fill(~(allowed & (exists > 0)), math.inf)
        composes = (steps == steps.amin(1, keepdim=True)).double()
        left = neighbor_weights(exists, "left")
        return composes, retrieve(left, composes[..., None]), retrieve(left, states)

    def cell_on_vectors(left, right):
        return torch.cat([cell(left[:, :-1], right[:, :-1]), right[:, -1:]], -1)
    framed, there, tokens = add_boundary_tokens(torch.cat([x, trees[..., None].double()], -1), mask, *torch.zeros(2, DIM + 1).double())
    setting = framed, there.double(), tokens, mask.sum(1) - 1, decide, cell_on_vectors, 0.01
    (whole, exists, taken), rounds = _continuous_recursion(*setting)
    (states, still, again), shorter = _continuous_recursion(*setting, compaction=1e-3)
    roots = torch.arange(len(rows)), mask.sum(1)
    close([states[roots]], [whole[roots]], 1e-12)
    assert still.equal(exists) and again.equal(taken)
    assert [places.shape[1] for *_, places in shorter] == [int((e > 0).sum(1).max()) for _, e, *_ in rounds]


@quick
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), seeds, st.sampled_from([1e-6, 1e-3, 9e-3]), st.integers(2, 3))
def test_who_is_taken_out_does_not_depend_on_others(sizes, seed, compaction, window):
    encoder = make(seed, 5.0, compaction=compaction, window=window)
    x, mask = batch_of(sizes, seed, padding=1)
    assert batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9


@quick
@given(lengths, seeds, st.sampled_from([1.0, 5.0]), st.sampled_from(["last", "first"]))
def test_taking_out_who_hardly_exists_changes_little(sizes, seed, factor, root):
    whole = make(seed, factor, root=root)
    small = same_weights(whole, root=root, compaction=1e-10)
    x, mask = batch_of(sizes, seed, padding=1)
    one, other = whole(x, mask, trace=True), small(x, mask, trace=True)
    close([one.root, one.loss], [other.root, other.loss], 1e-4)
    close([one.trace["existence"]], [other.trace["existence"]], 1e-4)
    assert batch_gap(small, x, mask) < 1e-9 and padding_gap(small, x, mask) < 1e-9


def test_who_is_taken_out_is_seen_no_more():
    "A large share of the sentence taken out: the boxes get narrower, and the numbers differ."
    whole = make(0, 20.0)
    small = same_weights(whole, compaction=0.009)
    x, mask = batch_of([30, 12], 0)
    one, other = whole(x, mask, trace=True), small(x, mask, trace=True)
    out = other.trace["existence"] == 0
    assert out[-1, 0].any() and not torch.equal(one.root, other.root)
    assert (out[1:] | ~out[:-1]).all()                             # who is out stays out
    assert one.trace["existence"][1:][out[1:] & ~out[:-1] & mask].max() < 0.5


def test_compaction_is_refused_in_training():
    encoder = make(0, compaction=1e-4).train()
    x, mask = batch_of([4], 0)
    with pytest.raises(ValueError, match="compaction=0.0001 is for inference: in training it makes gradients wrong"):
        encoder(x, mask)
    with torch.no_grad():
        assert encoder(x, mask).root.equal(encoder.eval()(x, mask).root)
    encoder.train().train_compacted = True
    assert encoder(x, mask).root.requires_grad


# ---- options

@pytest.mark.parametrize("option, value, known", [
    ("modulation", "softmax", "scores, exponentials, none"), ("activation", "tanh", "gelu, gelu_tanh, relu"),
    ("cell", "gru", "grc, lstm"), ("root", "middle", "last, first")])
def test_unknown_options_are_refused_by_name(option, value, known):
    with pytest.raises(ValueError, match=f"unknown {option} '{value}'; known: {known}"):
        CRvNN(4, **{option: value})


def test_unknown_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown shape 'up'; known: left, right, balanced"):
        FixedTreeCRvNN(4, "up")


@pytest.mark.parametrize("attribute, value, said", [
    ("retriever", "eq7", "unknown retriever 'eq7'; known: eq5, eq6"), ("form", "matrix", "unknown form 'matrix'; known: auto, dense, linear"),
    ("compaction", -0.5, "compaction must be in [0, 0.01), got -0.5"), ("compaction", 0.01, "compaction must be in [0, 0.01), got 0.01")])
def test_attributes_out_of_range_are_refused_in_forward(attribute, value, said):
    encoder = CRvNN(4)
    setattr(encoder, attribute, value)
    with pytest.raises(ValueError, match=re.escape(said)):
        encoder(torch.randn(1, 3, 4), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("option, value", [("window", 0), ("transition_dim", -1)])
def test_sizes_of_the_scorer_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        PositionScorer(4, **{option: value})


@pytest.mark.parametrize("option, value", [("transition_dim", -1), ("transition_dim", -100), ("threshold", 0.0), ("threshold", 1.0),
                                           ("penalty", -0.1), ("hidden", 0)])
def test_numbers_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must be [^,]*(, 1\\)|, inf\\)|), got {value}$"):
        CRvNN(4, **{option: value})


def test_a_norm_that_the_cell_does_not_have_is_refused():
    with pytest.raises(ValueError, match="shared norm belongs to the GRC"):
        SharedNorm(4, cell="lstm")


def test_options_arrive():
    encoder = CRvNN(4, hidden=6, activation="relu", dropout=0.25, transition_dim=5)
    assert encoder.grc.w1.out_features == 6 and encoder.grc.activation is F.relu and encoder.grc.dropout.p == 0.25
    assert encoder.scorer[0].in_features == 5 * 4 + 5 and encoder.scorer.activation is F.relu and encoder.cell is encoder.grc
    assert PositionScorer(4, 3, 5)[0].in_features == 7 * 4 + 5
    assert PositionScorer(4, activation="gelu_tanh").activation(torch.tensor(1.)) == F.gelu(torch.tensor(1.), approximate="tanh")
    assert not list(CRvNN(4, transition_dim=0).transition.parameters())
    names = {shared: {name for name, _ in (SharedNorm if shared else CRvNN)(4).named_parameters()} for shared in (False, True)}
    assert {name for name in names[True] ^ names[False] if name.endswith("weight")} == {"norm.weight", "leaf_norm.weight", "grc.norm.weight"}
    assert len(inspect.signature(CRvNN).parameters) == 10


def test_parts_are_attributes_and_help_says_what_is_computed():
    encoder = CRvNN(4)
    assert [name for name, _ in encoder.named_children()] == ["scorer", "transition", "leaf", "grc", "leaf_norm"]
    assert CRvNN.__mro__[1:3] == (CRvNNParts, Encoder) and "forward" in vars(CRvNN)
    shown = pydoc.render_doc(encoder, renderer=pydoc.plaintext)
    for line in ("soft composition in every round (crvnn section 3)", "Encode sentences: root (B, D), states (B, N, D)", "token vectors (B, N, D)"):
        assert line in shown


def test_rows_are_read_and_written_at_their_positions():
    rows = PositionIndex(torch.tensor([2, 3, 4]))
    values = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    new = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    flat = values.detach().flatten(0, 1)
    assert rows.gather(values).equal(flat[2:5]) and rows.scatter(values, new).equal(torch.cat([flat[:2], new, flat[5:]]).view(2, 3, 2))
    assert torch.autograd.gradcheck(lambda old, new: (rows.gather(old), rows.scatter(old, new)), (values, new))
