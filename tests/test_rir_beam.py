"Beams across chunks: all levels at once against the literal form and against lists, strings and draws, trees, sharing, refusals."
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import batch_gap, padding_gap, tree_from_steps
from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.efficient_beam import EfficientBeam
from rvnnbook.encoders.rir_beam import (ALIGNMENTS, RIRBeam, sum_scores, align, _cut_level, nested_search, string_it)
from rvnnbook.literal import literal_nested
from rvnnbook.layers.chunks import chunk_size, compose_levels_literal, level_lengths
from rvnnbook.layers.given_trees import compose_tree
from rvnnbook.layers.tree_search import PairArena, encode_with_search, find_pairs, score_rows, search_and_replay
from tests.helpers import DIM, answers, assert_same, batch_of, recorded_draws

few = settings(deadline=None, max_examples=25)
lengths = st.lists(st.integers(1, 14), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
hows, rules = st.sampled_from(ALIGNMENTS), st.sampled_from(["always", "late"])


def make(seed=0, beam=3, arity=3, how="beam", rule="always", sharper=1.0, train=False, compiled=None, **options):
    torch.manual_seed(seed)
    options = {"inference": "nested", "pre": None, "score_dim": 4, "hidden": 10, **options}
    encoder = RIRBeam(DIM, beam, arity, how, rule=rule, **options).double().train(train)
    encoder.compiled = compiled
    with torch.no_grad():
        encoder.scorer[1].weight *= sharper
    return encoder


# ---- two forms

@few
@given(lengths, st.integers(1, 7), st.integers(2, 6), hows, rules, seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 30.0, 3000.0]),
       st.booleans())
@example([14, 1, 2, 9], 5, 3, "beam", "always", 0, True, 0.0, 30.0, True)
@example([14, 1, 2, 9], 7, 2, "random", "late", 1, True, 0.3, 1.0, True)
def test_all_levels_are_the_literal_form(sizes, beam, arity, how, rule, seed, train, dropout, sharper, compiled):
    encoder, (x, mask) = make(seed, beam, arity, how, rule, sharper, train, dropout=dropout, compiled=compiled), batch_of(sizes, seed)
    literal, arena = (answers(encoder, x, mask, form, seed) for form in (literal_nested, nested_search))
    assert_same(arena, literal)


@pytest.mark.parametrize("compiled", [False, True])
def test_three_levels_in_single_precision(compiled):
    encoder, (x, mask) = make(3, 5, 3, train=True, compiled=compiled).float(), batch_of([23, 7, 28], 3)
    literal, arena = (answers(encoder, x.float(), mask, form) for form in (literal_nested, nested_search))
    assert_same(arena, literal, 1e-4)


def test_no_gradients_are_no_replay():
    encoder, (x, mask) = make(1, 4, how="string"), batch_of([11, 3, 1], 1)
    with torch.no_grad():
        plain = encoder(x, mask).root
    assert_same([plain], [encoder(x, mask).root])
    assert plain.grad_fn is None


def test_gradients_against_differences():
    encoder, (x, mask) = make(2, 3, 3, "string"), batch_of([7, 4], 2)
    assert torch.autograd.gradcheck(lambda x: encoder(x, mask).root, (x.requires_grad_(),))


# ---- against lists

def by_lists(encoder, tokens):
    "One sentence, no noise, hypotheses strung by rank: lists of (score, state), and nothing else."
    nodes = [[(torch.zeros(()).double(), leaf)] for leaf in encoder.leaf_norm(encoder.leaf(tokens))]
    while len(nodes) > 1:
        size = chunk_size(len(nodes), encoder.arity, encoder.rule)
        nodes = [search_list(encoder, nodes[at:at + size]) for at in range(0, len(nodes), size)]
    scores, states = (torch.stack(column) for column in zip(*nodes[0]))
    return scores.softmax(0) @ states


def search_list(encoder, nodes):
    held = [(sum(node[rank % len(node)][0] for node in nodes), [node[rank % len(node)][1] for node in nodes])
            for rank in range(min(encoder.beam, math.lcm(*map(len, nodes))))]
    while len(held[0][1]) > 1:
        proposals = []
        for score, row in held:
            chances = encoder.scorer(torch.stack(row[:-1]), torch.stack(row[1:])).log_softmax(0)
            proposals += [(score + chances[j], row, j) for j in chances.argsort(descending=True)[:encoder.beam].tolist()]
        proposals.sort(key=lambda proposal: -float(proposal[0]))
        held = [(score, row[:j] + [encoder.grc(row[j], row[j + 1])] + row[j + 2:]) for score, row, j in proposals[:encoder.beam]]
    return [(score, row[0]) for score, row in held]


@settings(deadline=None, max_examples=12)
@given(lengths, st.integers(1, 6), st.integers(2, 5), rules, seeds)
def test_strings_are_what_lists_give(sizes, beam, arity, rule, seed):
    encoder, (x, mask) = make(seed, beam, arity, "string", rule, 3.0), batch_of(sizes, seed)
    with torch.no_grad():
        expected = torch.stack([by_lists(encoder, row[:n]) for row, n in zip(x, sizes)])
        assert_close(encoder(x, mask).root, expected)
        assert_close(encode_with_search(encoder, x, mask, literal_nested).root, expected)


# ---- special cases

@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("form", [literal_nested, nested_search])
def test_one_chunk_is_the_efficient_beam(train, form):
    encoder, (x, mask) = make(4, 5, 12, train=train, dropout=0.2), batch_of([12, 1, 5, 2], 4)
    assert_same(answers(encoder, x, mask, form), answers(encoder, x, mask, search_and_replay))


def test_flat_inference_is_the_efficient_beam():
    encoder, (x, mask) = make(15, 5, 3, inference="flat"), batch_of([12, 1, 5, 2], 15)
    plain = EfficientBeam(DIM, 5, score_dim=4, hidden=10).double().eval()
    plain.load_state_dict(encoder.state_dict())
    assert_close(encoder(x, mask).root, plain(x, mask).root)
    assert (encode_with_search(encoder, x, mask, nested_search).root - plain(x, mask).root)[0].abs().max() > 1e-3
    encoder.train()                                                    # training is always nested
    again = encode_with_search(encoder, x, mask, nested_search, torch.Generator().manual_seed(0)).root
    assert_close(encoder(x, mask, generator=torch.Generator().manual_seed(0)).root, again)


@pytest.mark.parametrize("how", ALIGNMENTS)
@pytest.mark.parametrize("beam", [1, 4])
def test_two_to_a_chunk_are_balanced(how, beam):
    encoder, (x, mask) = make(5, beam, 2, how, train=True), batch_of([11, 1, 6, 2], 5)
    balanced = BalancedTree(DIM, hidden=10).double()
    balanced.load_state_dict({name: value for name, value in encoder.state_dict().items() if not name.startswith("scorer")})
    assert_close(encoder(x, mask).root, balanced(x, mask).root)


@pytest.mark.parametrize("how", ALIGNMENTS)
def test_one_hypothesis_is_greedy_in_every_chunk(how):
    encoder, (x, mask) = make(6, 1, 4, how, "late", 5.0), batch_of([19], 6)
    def greedy(row):
        while len(row) > 1:
            best = int(encoder.scorer(torch.stack(row[:-1]), torch.stack(row[1:])).argmax())
            row = row[:best] + [encoder.grc(row[best], row[best + 1])] + row[best + 2:]
        return row[0]
    leaves = list(encoder.leaf_norm(encoder.leaf(x[0])))
    assert_close(encoder(x, mask).root[0], compose_levels_literal(leaves, 4, greedy, "late"))


# ---- batches

@few
@given(lengths, st.integers(1, 5), st.integers(2, 5), rules, seeds, st.booleans())
def test_company_and_padding_do_not_matter(sizes, beam, arity, rule, seed, compiled):
    encoder, (x, mask) = make(seed, beam, arity, "string", rule, compiled=compiled), batch_of(sizes, seed)
    assert batch_gap(encoder, x, mask) <= 1e-9
    assert padding_gap(encoder, x, mask) <= 1e-9


@pytest.mark.parametrize("form", [literal_nested, nested_search])
def test_draws_of_a_sentence_are_its_own(form):
    "A sentence alone with its share of the draws has the hypotheses that it has among others."
    encoder, sizes = make(7, 4, 3), torch.tensor([23, 14, 9, 3])
    leaves = torch.randn(4, 23, DIM, dtype=torch.float64)
    counts, widths = [], sizes
    while int(widths.max()) > 1:
        widths = _cut_level(widths, 3)[1]
        counts.append(widths)
    draws = [torch.randint(0, 2, (int(count.sum()), 3)) for count in counts[:-1]]
    with recorded_draws(draws):
        states, scores, _ = form(encoder, leaves, sizes)
    for row, n in enumerate(sizes.tolist()):
        own = [part[int(count[:row].sum()):int(count[:row + 1].sum())] for part, count in zip(draws, counts)]
        with recorded_draws(own):
            alone = form(encoder, leaves[row:row + 1, :n], sizes[row:row + 1])
        assert_close(alone[1][0], scores[row])
        real = scores[row] > -torch.inf
        assert_close(alone[0][0, real], states[row, real])
    with recorded_draws([1 - part for part in draws]):
        other = form(encoder, leaves, sizes)[1]
    assert not torch.equal(other, scores)


def test_equal_generators_give_equal_roots():
    encoder, (x, mask) = make(8, 5, 4, train=True), batch_of([19, 7], 8)
    first, second, other = (encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    encoder.eval()
    def different(seeds):
        with torch.no_grad():
            return len({float(encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root[0, 0]) for seed in seeds})
    assert different([1, 1]) == 1 < different(range(10))               # nested, an evaluation draws too
    encoder.inference = "flat"
    assert different(range(10)) == 1


def test_the_layer_in_front_is_heard():
    encoder, (x, mask) = make(9, how="string", pre="s4d"), batch_of([9, 2], 9)
    root = encoder(x, mask).root
    heard = encoder.s4d(x, mask)
    encoder.s4d = None
    assert torch.equal(encoder(heard, mask).root, root) and (encoder(x, mask).root - root).abs().max() > 1e-3


# ---- levels, strings, draws

@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(2, 9), rules)
@few
def test_levels_are_cut_sentence_by_sentence(widths, arity, rule):
    (sizes, counts), expected = _cut_level(torch.tensor(widths), arity, rule), []
    for width in widths:
        size = chunk_size(width, arity, rule)
        expected += [min(size, width - at) for at in range(0, width, size)]
    assert sizes.tolist() == expected
    assert counts.tolist() == [level_lengths(width, arity, rule)[1] if width > 1 else 1 for width in widths]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(2, 4), seeds)
@few
def test_strings_hold_different_combinations(found, arity, seed):
    beam, found = 6, torch.tensor(found)
    scores = torch.randn(len(found), beam, generator=torch.Generator().manual_seed(seed)).double()
    scores = scores.masked_fill(torch.arange(beam) >= found[:, None], -torch.inf).log_softmax(-1)
    slots, counted = align(scores, "string", torch.zeros(len(found), dtype=torch.bool))
    assert torch.equal(counted, found)
    sizes, _ = _cut_level(torch.tensor([len(found)]), arity)
    below, there = string_it(sizes, slots, counted)
    total = sum_scores(scores, below, sizes)
    for start, size, taken, alive, sums in zip((sizes.cumsum(0) - sizes).tolist(), sizes.tolist(), below, there, total):
        parts = found[start:start + size]
        count = min(beam, math.lcm(*parts.tolist()))
        assert int(alive.sum()) == count and alive[:count].all()
        nodes, ranks = taken[:, :size] // beam, taken[:, :size] % beam
        assert (nodes == torch.arange(start, start + size)).all() and (ranks < parts).all()
        kept = list(map(tuple, ranks[alive].tolist()))
        assert len(set(kept)) == len(kept)
        chances = torch.stack([scores[start + node, ranks[:, node]] for node in range(size)]).sum(0)
        assert_close(sums, chances)


@given(st.integers(1, 5), st.sampled_from(["beam", "random"]), seeds)
@few
def test_draws_are_of_what_is_there(found, how, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, 5, generator=generator).masked_fill(torch.arange(5) >= found, -torch.inf)
    alone = torch.arange(8) < 3
    slots, counted = align(scores, how, alone, generator)
    assert (slots < found).all() and slots.shape == (8, 5)
    if found > 1:
        assert counted.tolist() == [found] * 3 + [5] * 5
        assert torch.equal(slots[3:, 0], scores[3:].argmax(1))
    else:
        assert counted.tolist() == [1] * 8
    assert torch.equal(slots[:3], torch.arange(5).remainder(found).expand(3, 5))


@pytest.mark.parametrize("how", ["beam", "random"])
def test_draws_have_the_right_shares(how):
    "Chi-square with two degrees of freedom."
    scores = torch.tensor([[.5, .3, .2, 0]]).log().expand(5000, 4)
    slots, _ = align(scores, how, torch.zeros(5000, dtype=torch.bool), torch.Generator().manual_seed(0))
    expected = 5000 * (torch.tensor([.5, .3, .2]) if how == "beam" else torch.full((3,), 1 / 3))
    for place in (1, 2, 3):
        count = slots[:, place].bincount(minlength=4)
        assert count[3] == 0 and float(((count[:3] - expected) ** 2 / expected).sum()) < 13.8       # p = 0.001
    assert slots[:, 0].eq(0).all() and not torch.equal(slots[:, 1], slots[:, 2])


def test_a_short_last_chunk_takes_nothing_away():
    encoder, kept = make(10, 7, 5, "string"), {}
    for n in (11, 12, 13, 15):
        states, scores, _ = nested_search(encoder, torch.randn(1, n, DIM).double(), torch.tensor([n]))
        kept[n] = int((scores > -torch.inf).sum())
        assert states.shape == (1, 7, DIM)
    assert kept == dict.fromkeys(kept, 7)


# ---- the arena

def test_a_table_that_forgets_changes_nothing():
    encoder, (x, _) = make(11, 5, 4), batch_of([17], 11)
    leaves = encoder.leaf_norm(encoder.leaf(x[0])).detach()
    arena, small = (PairArena(encoder, leaves, 16, shared=True) for _ in range(2))
    small.table = small.table[:1]
    children = torch.tensor([[1, 2], [2, 3], [1, 2], [4, 5], [2, 3], [1, 2]])
    with torch.no_grad():
        for _ in range(3):
            one, other = (find_pairs(box, children) for box in (arena, small))
            assert_close(arena.states[one], encoder.grc(*leaves[children - 1].unbind(1)))
            assert torch.equal(small.states[other], arena.states[one]) and torch.equal(small.notes[other], arena.notes[one])
        assert arena.used == 18 + 3 < small.used                       # three different pairs; the small one has met some again
        pairs = score_rows(arena, torch.tensor([[one[0], 5, 3]]))
        assert_close(pairs[0], encoder.scorer(torch.stack([arena.states[one[0]], leaves[4]]), leaves[[4, 2]]))


def test_dropout_shares_nothing():
    encoder = make(12, 3, 4, train=True, dropout=0.5)
    arena = PairArena(encoder, torch.randn(4, DIM).double(), 3, shared=True)
    with torch.no_grad():
        places = arena.places[find_pairs(arena, torch.tensor([[1, 2]] * 3))]
    assert len(set(places.tolist())) == 3 and (arena.states[places[0]] != arena.states[places[1]]).any()
    share = float(arena.kept[5:8].double().mean())
    assert 0.2 < share < 0.8 and not arena.kept[8:].any()


def test_what_is_kept_grows_with_the_length():
    def size(form, n, encoder=make(13, 5, 10, train=True)):
        kept, (x, mask) = {}, batch_of([n], 13)
        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            root = encode_with_search(encoder, x.requires_grad_(), mask, form).root
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) + 0 * float(root.detach().sum())
    literal, arena = size(literal_nested, 90), size(nested_search, 90)
    assert arena < literal / 4 and size(nested_search, 180) < 3 * arena


# ---- trees

@few
@given(lengths, st.integers(1, 5), st.integers(2, 6), hows, seeds)
def test_trees_are_those_of_the_states(sizes, beam, arity, how, seed):
    encoder, (x, mask) = make(seed, beam, arity, how), batch_of(sizes, seed)
    with torch.no_grad():
        out = encoder(x, mask, trace=True, generator=torch.Generator().manual_seed(seed))
        leaves = encoder.leaf_norm(encoder.leaf(x))
        for row, n in enumerate(sizes):
            assert not out.trace["beams"][row, :, n:].any()
            for steps, state, weight in zip(out.trace["beams"][row], out.trace["roots"][row], out.trace["weights"][row]):
                if weight > 0:
                    assert_close(compose_tree(tree_from_steps(steps[:n].tolist()), list(leaves[row, :n]), encoder.grc), state)
                    whole = [steps[at:at + arity].tolist() for at in range(0, n - arity, arity)]
                    assert all(max(span[:-1]) < span[-1] for span in whole)        # a chunk is done before it meets the next
                    assert len(whole) == level_lengths(n, arity)[1] - 1 if n > 1 else not whole


def test_roots_are_the_mean_of_the_hypotheses():
    encoder, (x, mask) = make(14, 6, 3, "string"), batch_of([10, 4, 1], 14)
    out = encoder(x, mask, trace=True)
    scores, weights, roots = (out.trace[key] for key in ("scores", "weights", "roots"))
    assert_close(out.root, (weights[..., None] * roots).sum(1))
    assert_close(weights, scores.softmax(-1))
    assert weights[2].tolist() == [1, 0, 0, 0, 0, 0]
    assert math.isclose(float(weights.sum()), 3)


# ---- refusals

@pytest.mark.parametrize("options, said", [
    ({"align": "best"}, "best"), ({"inference": "deep"}, "deep"), ({"rule": "never"}, "never"), ({"arity": 1}, "arity=1"), ({"pre": "lstm"}, "lstm"),
    ({"beam": 0}, "0")])
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        RIRBeam(DIM, **options)


def test_alignments_are_named():
    with pytest.raises(ValueError, match="none"):
        align(torch.zeros(1, 2), "none", torch.tensor([False]))
