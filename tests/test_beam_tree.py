"Beam search over trees against plain Python on lists of nodes, against greedy search, and against all merge orders."
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rvnnbook.core import batch_gap, length_mask, padding_gap, tree_from_steps
from rvnnbook.encoders.beam_tree import BeamTree
from rvnnbook.literal import LiteralBeamTree, beam_step, one_step
from rvnnbook.layers.given_trees import compose_tree
from rvnnbook.layers.topk import choice_matrix, one_soft
from rvnnbook.layers.tree_search import follow_back, merge_pairs, propose_pairs, prune_beam, search_states, steps_from_merges
from tests import golden
from tests.helpers import randomize_norms

quick = settings(deadline=None, max_examples=25)
few = settings(deadline=None, max_examples=8)
DIM = 3
GOLDEN = Path(__file__).parent / "golden"
lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
beams = st.integers(1, 6)


def make(seed=0, factor=1.0, kind=BeamTree, **options):
    "An encoder in double precision whose scores are multiplied by a factor, with layer norms that show."
    torch.manual_seed(seed)
    encoder = kind(DIM, **options).double().eval()
    return randomize_norms(encoder, encoder.scorer[0], factor)


def batch_of(sizes, seed, padding=0):
    mask = length_mask(torch.tensor(sizes), max(sizes) + padding)
    return torch.randn(*mask.shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), mask


def leaves_of(encoder, x, n):
    return list(encoder.leaf_norm(encoder.leaf(x[:n])).unbind())


def slopes_of(result, inputs):
    return torch.autograd.grad(result, inputs, allow_unused=True, materialize_grads=True)


# ---- plain Python

def pairs_of(encoder, nodes):
    parents = [encoder.grc(left, right) for left, right in zip(nodes[:-1], nodes[1:])]
    return parents, torch.cat([encoder.scorer[0](parent) for parent in parents]).log_softmax(-1)


def listed_beam(encoder, leaves, width):
    "Hypotheses (score, nodes, merges) of one sentence, without tensors of hypotheses."
    beam = [(leaves[0].new_zeros(()), leaves, [])]
    for _ in range(len(leaves) - 1):
        candidates = []
        for score, nodes, merges in beam:
            parents, shares = pairs_of(encoder, nodes)
            for j in sorted(range(len(parents)), key=lambda j: -shares[j].item())[:width]:
                candidates.append((score + shares[j], [*nodes[:j], parents[j], *nodes[j + 2:]], [*merges, j]))
        beam = sorted(candidates, key=lambda candidate: -candidate[0].item())[:width]
    return beam


def listed_soft_beam(encoder, leaves, width):
    "The same with OneSoft: (score, nodes), where the last is a mixture of all that was not kept."
    beam = [(leaves[0].new_zeros(()), leaves)]
    for _ in range(len(leaves) - 1):
        candidates = []
        for score, nodes in beam:
            parents, shares = pairs_of(encoder, nodes)
            candidates += [(score + shares[j], nodes, parents, j)
                           for j in sorted(range(len(parents)), key=lambda j: -shares[j].item())[:width]]
        candidates.sort(key=lambda candidate: -candidate[0].item())
        kept, rest = (candidates, []) if len(candidates) <= width else (candidates[:width - 1], candidates[width - 1:])
        beam = [(score, [*nodes[:j], parents[j], *nodes[j + 2:]]) for score, nodes, parents, j in kept]
        if rest:
            weights = torch.stack([candidate[0] for candidate in rest]).softmax(-1)
            mean = lambda values: sum(weight * value for weight, value in zip(weights, values))
            old, new = ([mean(column) for column in zip(*(candidate[part] for candidate in rest))] for part in (1, 2))
            at = [mean([float(candidate[3] == i) for candidate in rest]) for i in range(len(new))]
            upto = [sum(at[:i + 1]) for i in range(len(at))]
            row = [at[i] * new[i] + (1 - upto[i]) * old[i] + (upto[i] - at[i]) * old[i + 1] for i in range(len(new))]
            beam.append((mean([candidate[0] for candidate in rest]), row))
    return beam


def root_of(beam):
    weights = torch.stack([hypothesis[0] for hypothesis in beam]).softmax(-1)
    return sum(weight * hypothesis[1][0] for weight, hypothesis in zip(weights, beam))


@quick
@given(lengths, beams, seeds, st.sampled_from([0.0, 1.0, 4.0]), st.integers(0, 2))
@example([5, 5], 3, 0, 0.0, 1)                   # all scores are equal
def test_search_is_the_listed_one(sizes, beam, seed, factor, padding):
    "Roots, scores and trees of every hypothesis, in their order; ties go to the left."
    encoder = make(seed, factor, beam=beam)
    x, mask = batch_of(sizes, seed, padding)
    out = encoder(x, mask, trace=True)
    for b, n in enumerate(sizes):
        expected = listed_beam(encoder, leaves_of(encoder, x[b], n), beam)
        scores = torch.stack([score for score, *_ in expected])
        assert (out.root[b] - root_of(expected)).abs().max() < 1e-9
        found = out.trace["scores"][b]
        assert found.shape == (beam,) and (found[len(expected):] == -torch.inf).all()
        assert (found[:len(expected)] - scores).abs().max() < 1e-9
        for slot, (_, (root,), merges) in enumerate(expected):
            assert (out.trace["roots"][b, slot] - root).abs().max() < 1e-9
            steps = out.trace["beams"][b, slot].tolist()
            assert steps[:n] == steps_from_merges(merges, n) and not any(steps[n:])


@few
@given(lengths, beams, seeds, st.booleans())
def test_slopes_are_the_listed_ones(sizes, beam, seed, soft):
    encoder = make(seed, 2.0, beam=beam, soft=soft).train()
    x, mask = batch_of(sizes, seed)
    x.requires_grad_()
    weights = torch.randn(len(sizes), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    listed = listed_soft_beam if soft else listed_beam
    expected = torch.stack([root_of(listed(encoder, leaves_of(encoder, row, n), beam)) for row, n in zip(x, sizes)])
    root, inputs = encoder(x, mask).root, [x, *encoder.parameters()]
    assert (root - expected).abs().max() < 1e-9
    for found, wanted in zip(slopes_of((root * weights).sum(), inputs), slopes_of((expected * weights).sum(), inputs)):
        assert (found - wanted).abs().max() < 1e-8 * max(1, wanted.abs().max())


@few
@given(st.integers(2, 7), beams, seeds)
def test_scores_and_roots_follow_from_the_trees(n, beam, seed):
    "Each hypothesis retold from its merges alone."
    encoder = make(seed, 3.0, beam=beam)
    x, mask = batch_of([n], seed)
    story = encoder(x, mask, trace=True).trace
    leaves = leaves_of(encoder, x[0], n)
    slots, _ = follow_back(story["origins"])
    for slot in (story["scores"][0] > -torch.inf).nonzero().flatten().tolist():
        merges, nodes, score = story["picks"].gather(2, slots)[:, 0, slot].tolist(), leaves, 0.0
        for j in merges:
            parents, shares = pairs_of(encoder, nodes)
            nodes, score = [*nodes[:j], parents[j], *nodes[j + 2:]], score + shares[j].item()
        tree = tree_from_steps(story["beams"][0, slot].tolist())
        assert abs(story["scores"][0, slot] - score) < 1e-9
        assert (compose_tree(tree, leaves, encoder.grc) - story["roots"][0, slot]).abs().max() < 1e-9
    assert story["step_scores"][-1, 0].equal(story["scores"][0])


# ---- the two ends

@quick
@given(lengths, seeds)
def test_beam_of_one_is_greedy(sizes, seed):
    encoder = make(seed, 2.0, beam=1)
    x, mask = batch_of(sizes, seed)
    x.requires_grad_()
    expected = []
    for row, n in zip(x, sizes):
        nodes = leaves_of(encoder, row, n)
        while len(nodes) > 1:
            parents = [encoder.grc(*pair) for pair in zip(nodes[:-1], nodes[1:])]
            wanted = [encoder.scorer[0](parent).item() for parent in parents]
            best = wanted.index(max(wanted))
            nodes[best:best + 2] = [parents[best]]
        expected.append(nodes[0])
    expected, root = torch.stack(expected), encoder(x, mask).root
    assert (root - expected).abs().max() < 1e-9
    inputs = [x, *encoder.leaf.parameters(), *encoder.grc.parameters()]
    for found, wanted in zip(slopes_of((root ** 2).sum(), inputs), slopes_of((expected ** 2).sum(), inputs)):
        assert (found - wanted).abs().max() < 1e-8 * max(1, wanted.abs().max())
    assert not any(slope.any() for slope in slopes_of((encoder(x, mask).root ** 2).sum(), list(encoder.scorer.parameters())))


def expected_root(encoder, nodes):
    if len(nodes) == 1:
        return nodes[0]
    parents, shares = pairs_of(encoder, nodes)
    return sum(share.exp() * expected_root(encoder, [*nodes[:j], parents[j], *nodes[j + 2:]])
               for j, share in enumerate(shares.unbind()))


@few
@given(st.integers(1, 5), seeds, st.integers(0, 3))
def test_wide_enough_is_exhaustive(n, seed, extra):
    encoder = make(seed, 2.0, beam=math.factorial(n - 1) + extra)
    x, mask = batch_of([n, 1], seed, padding=1)
    x.requires_grad_()
    out, expected = encoder(x, mask, trace=True), expected_root(encoder, leaves_of(encoder, x[0], n))
    assert (out.root[0] - expected).abs().max() < 1e-9
    assert (out.trace["scores"] > -torch.inf).sum(1).tolist() == [math.factorial(n - 1), 1]
    assert (out.trace["scores"].exp().sum(1) - 1).abs().max() < 1e-9
    inputs = [x, *encoder.parameters()]
    for found, wanted in zip(slopes_of((out.root[0] ** 2).sum(), inputs), slopes_of((expected ** 2).sum(), inputs)):
        assert (found - wanted).abs().max() < 1e-8 * max(1, wanted.abs().max())
    if n > 1:
        trees = {tuple(tree) for tree in out.trace["beams"][0, :math.factorial(n - 1), :n].tolist()}
        assert len(trees) == math.comb(2 * n - 2, n - 1) // n            # Catalan's number


def test_the_scorer_is_reached_where_roots_differ():
    encoder = make(0, beam=2)
    x, mask = batch_of([5, 4], 0)
    assert encoder(x, mask, trace=True).trace["roots"].diff(dim=1).abs().amax() > 1e-3
    slope, _ = slopes_of((encoder(x, mask).root ** 2).sum(), list(encoder.scorer.parameters()))
    assert slope.abs().max() > 1e-6


# ---- promises

@quick
@given(lengths, beams, seeds, st.booleans(), st.sampled_from([0.0, 1.0, 30.0]))
def test_padding_and_batch_mates_do_not_matter(sizes, beam, seed, training, factor):
    "Also of the mixture in training, which draws nothing; 30 makes scores lie far apart."
    encoder = make(seed, factor, beam=beam, soft=True).train(training)
    x, mask = batch_of(sizes, seed, padding=1)
    assert batch_gap(encoder, x, mask) < 1e-9
    assert padding_gap(encoder, x, mask) < 1e-9


def test_padding_does_not_matter_in_single_precision():
    encoder = make(1, 4.0, beam=5).float()
    x, mask = batch_of([7, 3, 5], 1)
    assert padding_gap(encoder, x.float(), mask) < 1e-4 and batch_gap(encoder, x.float(), mask) < 1e-4


def test_slopes_do_not_reach_padding_and_are_finite():
    for options in ({"soft": True}, {"noise": True}, {}):
        encoder = make(0, 100.0, beam=4, **options).train()
        x, mask = batch_of([6, 1, 3], 0, padding=2)
        x.requires_grad_()
        slopes = slopes_of(encoder(x, mask, generator=torch.Generator().manual_seed(0)).root.sum(), [x, *encoder.parameters()])
        assert all(slope.isfinite().all() for slope in slopes) and not slopes[0][~mask].any()


@pytest.mark.parametrize("options", [{"beam": 2}, {"beam": 3, "soft": True}, {"beam": 1, "soft": True}])
def test_slopes_are_the_slopes(options):
    encoder = make(5, 2.0, **options).train()
    x, mask = batch_of([5, 3], 5)
    assert torch.autograd.gradcheck(lambda x: encoder(x, mask).root, x.requires_grad_())


def test_one_and_two_tokens():
    encoder = make(0, beam=3)
    x, mask = batch_of([1, 2], 0)
    out = encoder(x, mask, trace=True)
    first, second = leaves_of(encoder, x[1], 2)
    assert out.root[0].allclose(encoder.leaf_norm(encoder.leaf(x[0, 0]))) and out.root[1].allclose(encoder.grc(first, second))
    assert out.trace["scores"].tolist() == [[0, -torch.inf, -torch.inf]] * 2
    assert out.trace["beams"][:, 0].tolist() == [[0, 0], [1, 0]]
    wide = encoder(*batch_of([1, 4], 0), trace=True).trace       # what is whole stays where it is
    assert (wide["picks"][:, 0] == -1).all() and wide["origins"][:, 0].tolist() == [[0, 1, 2]] * 3
    alone = encoder(x[:1, :1], mask[:1, :1], trace=True)
    assert alone.root.allclose(out.root[:1]) and alone.trace["picks"].shape == (0, 1, 3)


def test_a_mixture_is_for_training():
    x, mask = batch_of([7, 6], 0)
    soft, hard = make(0, beam=3, soft=True), make(0, beam=3)
    assert soft(x, mask).root.equal(hard(x, mask).root)
    assert not soft.train()(x, mask).root.allclose(hard.train()(x, mask).root)


def test_noise():
    "In training, from the generator, and only there."
    encoder, plain = make(0, beam=3, noise=True), make(0, beam=3)
    x, mask = batch_of([7, 6], 0)
    assert encoder(x, mask).root.equal(plain(x, mask).root)
    encoder.train()
    drawn = [encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root for seed in (0, 0, 1, 2, 3)]
    assert drawn[0].equal(drawn[1]) and any(not drawn[0].allclose(other) for other in drawn[2:])
    state = torch.get_rng_state()
    encoder(x, mask, generator=torch.Generator().manual_seed(0))
    assert state.equal(torch.get_rng_state())


def test_dropout_is_in_the_cell():
    encoder, (x, mask) = make(0, beam=2, dropout=0.5), batch_of([6], 0)
    assert encoder(x, mask).root.equal(encoder(x, mask).root) and encoder.grc.dropout.p == 0.5
    encoder.train()
    assert not encoder(x, mask).root.allclose(encoder(x, mask).root)


def test_decisions_in_full_precision():
    encoder = make(0, beam=3).float()
    x, mask = batch_of([7, 4], 0)
    seen = []
    encoder.scorer[0].register_forward_hook(lambda layer, given, out: seen.append((given[0].dtype, out.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = encoder(x.float(), mask, trace=True)
    assert set(seen) == {(torch.float32, torch.float32)}
    assert out.root.dtype == out.trace["scores"].dtype == torch.float32 and out.root.isfinite().all()


def test_parameters_have_their_published_names():
    names = {name for name, _ in BeamTree(4).named_parameters()}
    parts = ("leaf", "leaf_norm", "grc.w1", "grc.w2", "grc.norm", "scorer.0")
    assert names == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


def test_the_cell_is_asked_for_every_pair():
    encoder, made = make(0, kind=LiteralBeamTree, beam=3), []
    encoder.grc.register_forward_hook(lambda cell, given, out: made.append(out.numel() // DIM))
    encoder(*batch_of([7], 0))
    assert made == [6, *(3 * pairs for pairs in (5, 4, 3, 2, 1))]


def test_errors():
    for beam in (0, -3):
        with pytest.raises(ValueError, match=f"beam must be a whole number from 1, got {beam}"):
            BeamTree(4, beam=beam)
    with pytest.raises(ValueError, match="unknown activation"):
        BeamTree(4, activation="tanh")
    x, mask = batch_of([3, 2], 0)
    for wrong_x, wrong_mask in ((x[..., :2], mask), (x, mask.float()), (x, ~mask), (x[0], mask)):
        with pytest.raises(ValueError):
            make()(wrong_x, wrong_mask)


# ---- the parts

def random_merges(draw, n):
    return [draw(st.integers(0, left - 2)) for left in range(n, 1, -1)]


@quick
@given(st.data(), st.integers(1, 9))
def test_steps_from_merges(data, n):
    merges, nodes = random_merges(data.draw, n), list(range(n))
    for j in merges:
        nodes[j:j + 2] = [(nodes[j], nodes[j + 1])]
    height = lambda tree: 1 + max(map(height, tree)) if isinstance(tree, tuple) else 0
    steps = steps_from_merges(merges, n)
    assert tree_from_steps(steps) == nodes[0] and max(steps) == height(nodes[0])


def test_expand_proposes_the_best_of_each():
    scores = torch.tensor([[-1.0, -2.0, -torch.inf]])
    logits = torch.tensor([[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]]).log()
    pairs = torch.ones(1, 3, dtype=torch.bool)
    candidates, picks = propose_pairs(scores, logits, pairs, 2)
    assert picks.tolist() == [[[1, 2], [2, 0], [0, 1]]] and (candidates[0, 2] == -torch.inf).all()
    assert candidates[0, :2].allclose(torch.tensor([[-1 + math.log(0.5), -1 + math.log(0.3)], [-2 + math.log(0.8), -2 + math.log(0.1)]]))
    high = logits.masked_fill(torch.tensor([False, False, True]), 1e4)              # what stands on padding
    short, picks = propose_pairs(scores, high, pairs & (torch.arange(3) < 2), 3)
    assert short[0, 0, :2].exp().sum().allclose(torch.tensor(math.exp(-1))) and short[0, 0, 2] == -torch.inf
    lucky, picks = propose_pairs(scores, logits, pairs, 1, noise=torch.tensor([9.0, 0, 0]))
    assert picks[0, :2].flatten().tolist() == [0, 0] and lucky[0, 0, 0].allclose(torch.tensor(-1 + math.log(0.2)))


def test_cut():
    candidates = torch.tensor([[[-1.0, -3.0], [-2.0, -torch.inf]], [[-1.0, -torch.inf], [-torch.inf, -torch.inf]]])
    choice, scores = prune_beam(candidates, 2)
    assert scores.tolist() == [[-1, -2], [-1, -torch.inf]] and choice.argmax(-1)[0].tolist() == [0, 2]
    assert prune_beam(candidates, 9)[1].shape == (2, 4)
    soft, scores = prune_beam(candidates, 2, one_soft)
    weights = torch.tensor([-3.0, -2.0]).softmax(-1)
    assert scores[0, 1].allclose(weights @ torch.tensor([-3.0, -2.0])) and scores[1].tolist() == [-1, -torch.inf]
    assert soft[0, 1].allclose(torch.tensor([0, weights[0], weights[1], 0]))


@quick
@given(st.integers(2, 6), seeds)
def test_one_node_less(n, seed):
    torch.manual_seed(seed)
    states, parents = torch.randn(1, 1, n, 2), torch.randn(1, 1, n - 1, 2)
    for j in range(n - 1):
        found = merge_pairs(states, parents, torch.eye(n - 1)[j][None, None])[0, 0]
        assert found.equal(torch.stack([*states[0, 0, :j], parents[0, 0, j], *states[0, 0, j + 2:]]))


def test_a_step_says_where_slots_come_from():
    torch.manual_seed(0)
    states, parents = torch.randn(1, 2, 4, 2), torch.randn(1, 2, 3, 2)
    logits = torch.tensor([[[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]]])
    after, scores, picks, origins = beam_step(states, torch.tensor([[-3.0, 0.0]]), parents, logits,
                                              torch.ones(1, 3, dtype=torch.bool), 2, choice_matrix)
    assert origins.tolist() == [[1, 0]] and picks.tolist() == [[0, 1]]
    assert after[0, 0, 0].equal(parents[0, 1, 0]) and after[0, 1, 1].equal(parents[0, 0, 1])
    assert after[0, 1, 0].equal(states[0, 0, 0]) and scores[0, 0] > scores[0, 1]


def test_sentences_leave_when_they_are_whole():
    encoder = make(0, beam=2)
    x, mask = batch_of([2, 5, 1], 0)
    leaves, seen = encoder.leaf_norm(encoder.leaf(x)), []
    step = one_step(encoder)
    def noted(states, scores, pairs):
        seen.append((len(states), states.shape[2], int(pairs.sum())))
        return step(states, scores, pairs)
    search_states(leaves, mask.sum(1), 2, noted)
    assert seen == [(2, 5, 1 + 4), (1, 4, 3), (1, 3, 2), (1, 2, 1)]


# ---- recordings

@pytest.mark.parametrize("name", ["bt_grc/equal_b5", "bt_grc_os/ragged_b3", "bt_grc_os/train_ragged_b3"])
def test_scores_of_every_step_are_the_recorded_ones(name):
    "Of the sentences that are not done in any step but the last: the longest."
    with safe_open(GOLDEN / f"{name}.safetensors", framework="pt") as file:
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
    config = json.loads(about["config"])
    encoder = golden.build(about["model"], config, about["case"])
    encoder.load_state_dict({key[6:]: value.float() for key, value in tensors.items() if key.startswith("param.")})
    encoder.train(config["mode"] != "eval")
    found = encoder(tensors["in.x"], tensors["in.mask"].bool(), trace=True).trace["step_scores"]
    longest = tensors["in.mask"].all(1)
    recorded = torch.stack([tensors[f"trace.beam_scores.{step}"] for step in range(len(found) - 1)])
    assert longest.any() and (found[:-1, longest] - recorded[:, longest]).abs().max() < 1e-5
