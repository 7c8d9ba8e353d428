"Distinct states: against lists of all rows of trees, two forms and four rules, what the scorer hears, invariances, errors."
import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook import create_encoder
from rvnnbook.core import batch_gap, padding_gap, tree_from_steps
from rvnnbook.layers import tree_search
from rvnnbook.layers.compiled_beam import COMPILE_MIN_LENGTH, choose_search
from rvnnbook.encoders.distinct_beam import beam_states, beam_use, _common_steps, count_distinct, find_duplicates
from rvnnbook.encoders.efficient_beam import EfficientBeam
from rvnnbook.literal import literal_search, next_states
from rvnnbook.layers.tree_search import (
    arena_search, choose_proposals, encode_with_search, hash_pair, leaf_keys, mark_repeated, noise_ahead, search_and_replay, states_after,
    survivors)
from tests.helpers import DIM, answers, assert_same, batch_of, on_page

_, by_orders, by_best, by_sums, in_post_order, rule_search = on_page(
    "implementations/distinct_beam", "split_codes", "by_orders", "by_best", "by_sums", "in_post_order", "rule_search")
RULES = [by_orders, by_best, by_sums, in_post_order]
few = settings(deadline=None, max_examples=25)
quick = settings(deadline=None)
lengths = st.lists(st.integers(1, 10), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def make(seed=0, beam=3, sharper=1.0, train=False, distinct=True, **options):
    torch.manual_seed(seed)
    encoder = EfficientBeam(DIM, beam, distinct=distinct, **{"score_dim": 4, "hidden": 10, **options}).double().train(train)
    with torch.no_grad():
        encoder.scorer[1].weight *= sharper
    return encoder


def merged(row, j):
    return (*row[:j], (row[j], row[j + 1]), *row[j + 2:])


def all_rows(n, steps):
    "Every row of trees that some merges of n leaves lead to, with repetitions: one for each order."
    rows = [tuple(range(n))]
    for _ in range(steps):
        rows = [merged(row, j) for row in rows for j in range(len(row) - 1)]
    return rows


def rows_in(log, n):
    "What every slot of a search of one sentence held, step by step, read off the log by following places: None for nonsense."
    beam, story = log.parents.shape[2], []
    rows, trees = [list(range(1, n + 1))] * beam, {place: place - 1 for place in range(1, n + 1)}
    for step, (parents, around) in enumerate(zip(log.parents[:, 0].tolist(), log.around[:, 0].tolist())):
        after = []
        for slot, (parent, (_, left, right, _)) in enumerate(zip(parents, around)):
            row, place = list(rows[parent]), 1 + n + beam * step + slot
            at = row.index(left)
            assert row[at + 1] == right
            trees[place] = (trees[left], trees[right])
            after.append([*row[:at], place, *row[at + 2:]])
        rows = after
        story.append([tuple(trees[place] for place in row) for row in rows])
    return story


class Recorder:
    "Stands where `choose` stands and writes down the scores that it gives."
    def __init__(self, monkeypatch):
        self.scores = []
        monkeypatch.setattr(tree_search, "choose_proposals", self)

    def __call__(self, *given):
        answer = choose_proposals(*given)
        self.scores.append(answer[1].detach())
        return answer


# ---- keys

def test_every_row_of_trees_has_its_own_key():
    "All rows of trees over up to seven leaves; every order gives the row its one key."
    def key(tree):
        return hash_pair(*map(key, tree)) if isinstance(tree, tuple) else leaf_keys(7)[tree]
    for n in range(1, 8):
        every = set().union(*(all_rows(n, steps) for steps in range(n)))
        keys = {int(sum(key(tree) for tree in row)) for row in every}
        assert len(keys) == len(every) == sum(m * math.comb(2 * n - m, n) // (2 * n - m) for m in range(1, n + 1))


@quick
@given(st.integers(2, 8), st.data())
def test_keys_follow_the_merges(n, data):
    keys = leaf_keys(n).expand(2, 2, n)
    row = keys[0, 0].tolist()
    for width in range(n, 1, -1):
        pick = data.draw(st.integers(0, width - 2))
        promised = states_after(keys, torch.full((2, 2, 1), pick))
        keys = next_states(hash_pair, keys[..., None], torch.tensor([[1, 0], [0, 0]]), torch.full((2, 2), pick))[..., 0]
        row[pick:pick + 2] = [int(hash_pair(torch.tensor(row[pick]), torch.tensor(row[pick + 1])))]
        assert keys[0, 0].tolist() == row
        assert torch.equal(keys.sum(-1), promised[..., 0])


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_repeated(proposals):
    ranks, states = (torch.tensor([part]) for part in zip(*proposals))
    order = sorted(range(len(proposals)), key=lambda i: (-proposals[i][0], i))
    expected, seen = [None] * len(proposals), set()
    for i in order:
        expected[i] = proposals[i][1] in seen
        seen.add(proposals[i][1])
    assert mark_repeated(ranks.double(), states)[0].tolist() == expected


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7))
def test_twins(slots):
    states, filled = (torch.tensor(part) for part in zip(*slots))
    expected = [any(full and state == slots[i][0] for state, full in slots[:i]) for i in range(len(slots))]
    assert find_duplicates(states, filled).tolist() == expected
    assert find_duplicates(states.expand(2, 3, -1), filled.expand(2, 3, -1)).tolist() == [[expected] * 3] * 2


# ---- the choice

def choose_before(logits, scores, noise=None):
    "As it was before there was an option."
    def best(values, count):
        values = values.detach()
        values = values if noise is None else values + next(noise)
        return values.topk(count).indices
    beam, all_scores = scores.shape[1], (scores[:, None] + logits.mT.log_softmax(1)).mT
    picks = best(all_scores, min(beam, logits.shape[-1]))
    proposals = all_scores.gather(-1, picks).flatten(1)
    kept = best(proposals, beam)
    return kept // picks.shape[-1] + beam * picks.flatten(1).gather(1, kept), proposals.gather(1, kept)


@quick
@given(st.integers(1, 5), st.integers(1, 9), seeds, st.booleans())
def test_without_keys_it_is_as_before_bit_for_bit(beam, pairs, seed, noisy):
    draw = torch.Generator().manual_seed(seed)
    logits, scores = torch.randn(2, beam, pairs, generator=draw), torch.randn(2, beam, generator=draw)
    scores[:, 2:] = -torch.inf
    noise = (noise_ahead([2] * pairs + [0], beam, logits, torch.Generator().manual_seed(1)) if noisy else None for _ in range(2))
    now, before = (form(logits, scores, next(noise)) for form in (choose_proposals, choose_before))
    real = now[1] > -torch.inf                                 # what an empty slot continues is of no meaning
    assert torch.equal(now[1], before[1]) and torch.equal(now[0][real], before[0][real])


@pytest.mark.parametrize("train", [False, True])
def test_a_search_without_the_option_is_as_before_bit_for_bit(train, monkeypatch):
    encoder, (x, mask) = make(1, 5, train=train, distinct=False, dropout=.2), batch_of([9, 4, 1], 1)
    for form in (literal_search, search_and_replay):
        now = answers(encoder, x, mask, form)
        with monkeypatch.context() as patch:
            patch.setattr(tree_search, "choose_proposals", lambda logits, scores, noise, keys=None: choose_before(logits, scores, noise))
            before = answers(encoder, x, mask, form)
        assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))


@few
@given(st.integers(3, 7), st.integers(1, 6), st.integers(0, 3), seeds)
def test_the_best_states_of_all_continuations(n, beam, steps, seed):
    "Rows of trees by chance, scores by chance: the choice against a list of every continuation, not only of the proposed ones."
    draw = torch.Generator().manual_seed(seed)
    every = sorted(set(all_rows(n, min(steps, n - 2))), key=str)
    count = min(beam, len(every))
    rows = [every[i] for i in torch.randperm(len(every), generator=draw)[:count]]
    logits = torch.randn(1, count, len(rows[0]) - 1, generator=draw, dtype=torch.float64)
    scores = torch.randn(1, count, generator=draw, dtype=torch.float64)
    def key(tree):
        return hash_pair(*map(key, tree)) if isinstance(tree, tuple) else leaf_keys(n)[tree]
    keys = torch.tensor([[[int(key(tree)) for tree in row] for row in rows]])
    codes, kept = choose_proposals(logits, scores, None, keys)
    best = defaultdict(lambda: -math.inf)
    for row, score, chances in zip(rows, scores[0].tolist(), logits[0].log_softmax(-1).tolist()):
        for j, chance in enumerate(chances):
            best[merged(row, j)] = max(best[merged(row, j)], score + chance)
    expected = sorted(best.values(), reverse=True)[:count]
    full = kept[0] > -torch.inf
    assert kept[0][full].tolist() == pytest.approx(expected) and int(full.sum()) == len(expected)
    taken = [merged(rows[b], j) for j, b in (divmod(code, count) for code in codes[0][full].tolist())]
    assert len(set(taken)) == len(taken) and [best[row] for row in taken] == pytest.approx(expected)


# ---- against lists of everything

@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_a_wide_beam_holds_every_row_of_trees(n, monkeypatch):
    sizes, leaves = torch.tensor([n]), torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    width = max(len(set(all_rows(n, steps))) for steps in range(n))
    for distinct in (True, False):
        recorder = Recorder(monkeypatch)
        log = arena_search(make(n, width, distinct=distinct), leaves, sizes)
        found, story = beam_states(log, sizes, distinct), rows_in(log, n)
        for step, (rows, scores) in enumerate(zip(story, recorder.scores)):
            full = scores[0] > -torch.inf
            kept = [row for row, there in zip(rows, full.tolist()) if there]
            every = all_rows(n, step + 1)
            assert torch.equal(found.filled[step, 0], full)
            assert len(set(kept)) == int(count_distinct(found)[step, 0])
            if distinct:
                assert len(kept) == len(set(kept)) and set(kept) == set(every)
            else:
                assert len(kept) == min(len(every), width)
        assert distinct or n < 5 or len(set(kept)) < len(kept)


def every_order(encoder, leaves):
    "log chance of every merge order, with its tree."
    def go(states, trees, score):
        if len(states) == 1:
            return [(score, trees[0])]
        chances = encoder.scorer(torch.stack(states[:-1]), torch.stack(states[1:])).log_softmax(0).tolist()
        return [found for j, chance in enumerate(chances) for found in go(
            [*states[:j], encoder.grc(states[j], states[j + 1]), *states[j + 2:]], merged(trees, j), score + chance)]
    return go(list(leaves), tuple(range(len(leaves))), 0.0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_scores_of_a_wide_beam(n):
    "The best order of every tree with the option; the sum of its orders with by_sums; a distribution in post-order."
    encoder, (x, mask) = make(n + 10, 42, sharper=3.0), batch_of([n], n)
    with torch.no_grad():
        leaves, sizes = encoder.leaf_norm(encoder.leaf(x)), torch.tensor([n])
        orders = defaultdict(list)
        for score, tree in every_order(encoder, leaves[0]):
            orders[str(tree)].append(math.exp(score))
        out = encoder(x, mask, trace=True)
        real = out.trace["weights"][0] > 0
        trees = [str(tree_from_steps(steps)) for steps in out.trace["beams"][0][real].tolist()]
        assert len(trees) == len(set(trees)) == len(orders)
        found = dict(zip(trees, out.trace["scores"][0][real].exp().tolist()))
        assert found == pytest.approx({tree: max(chances) for tree, chances in orders.items()})
        states, scores, _ = rule_search(encoder, leaves, sizes, rule=by_sums)
        sums = sorted(sum(chances) for chances in orders.values())
        assert sorted(scores.exp()[scores > -torch.inf].tolist()) == pytest.approx(sums) and sum(sums) == pytest.approx(1)
        states, scores, _ = rule_search(encoder, leaves, sizes, rule=in_post_order)
        assert float(scores.exp().sum()) == pytest.approx(1)
        assert len(states[scores > -torch.inf].unique(dim=0)) == int((scores > -torch.inf).sum()) == len(orders)


@pytest.mark.parametrize("n", [4, 5])
def test_all_states_added_are_the_expectation(n):
    x, mask = batch_of([n, 2, 1], n)
    orders, states, best = make(n, 24, distinct=False), make(n, 14), make(n, 14)
    expected = answers(orders, x, mask, literal_search)
    assert_same(answers(states, x, mask, partial(rule_search, rule=by_sums)), expected)
    assert (answers(best, x, mask, search_and_replay)[0] - expected[0]).abs().max() > 1e-4


def test_post_order_takes_each_tree_once():
    "Chances of trees in post-order by walking through all allowed orders."
    n, encoder = 5, make(3, 14, sharper=3.0)
    leaves = torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    def go(states, last, score):
        if len(states) == 1:
            return [(score, states[0])]
        first = max(last - 1, 0)
        chances = encoder.scorer(torch.stack(states[:-1]), torch.stack(states[1:]))[first:].log_softmax(0).tolist()
        return [found for j, chance in enumerate(chances, first) for found in go(
            [*states[:j], encoder.grc(states[j], states[j + 1]), *states[j + 2:]], j, score + chance)]
    with torch.no_grad():
        expected = sorted(go(list(leaves[0]), 0, 0.0), key=lambda pair: -pair[0])
        states, scores, _ = rule_search(encoder, leaves, torch.tensor([n]), rule=in_post_order)
    assert len(expected) == 14
    assert scores[0].tolist() == pytest.approx([score for score, _ in expected])
    assert_close(states[0], torch.stack([state for _, state in expected]))


# ---- forms

@few
@given(lengths, st.integers(1, 7), seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 30.0]), st.integers(0, 2))
@example([9, 1, 2, 7], 5, 0, True, 0.3, 30.0, 2)
def test_arena_is_literal_form(sizes, beam, seed, train, dropout, sharper, padding):
    encoder, (x, mask) = make(seed, beam, sharper, train, dropout=dropout), batch_of(sizes, seed)
    x, mask = F.pad(x, (0, 0, 0, padding)), F.pad(mask, (0, padding))
    assert_same(*(answers(encoder, x, mask, form, seed) for form in (search_and_replay, literal_search)))


@few
@given(lengths, st.integers(1, 5), seeds, st.booleans(), st.sampled_from([0.0, 0.3]))
def test_rules_are_the_literal_form(sizes, beam, seed, train, dropout):
    x, mask = batch_of(sizes, seed)
    for distinct, rule in ((False, by_orders), (True, by_best)):
        encoder = make(seed, beam, train=train, distinct=distinct, dropout=dropout)
        assert_same(answers(encoder, x, mask, partial(rule_search, rule=rule), seed), answers(encoder, x, mask, literal_search, seed))


@few
@given(lengths, st.integers(1, 5), seeds, st.booleans(), st.sampled_from(RULES))
@example([10, 2, 5, 3, 1], 5, 0, False, in_post_order)
@example([10, 2, 5, 3, 1], 5, 0, True, by_sums)
def test_rules_with_company_and_alone(sizes, beam, seed, train, rule):
    "Ragged batches: finite everywhere and, without noise, the same as each sentence alone."
    encoder, (x, mask) = make(seed, beam, train=train), batch_of(sizes, seed)
    form = partial(rule_search, rule=rule)
    together = answers(encoder, x, mask, form, seed)
    assert all(part.isfinite().all() for part in together)
    if not train:
        for row, n in enumerate(sizes):
            assert_close(encode_with_search(encoder, x[row:row + 1, :n], mask[row:row + 1, :n], form).root[0], together[0][row])


def test_the_next_row():
    states = torch.randn(2, 3, 5, DIM)
    parent, pick = torch.tensor([[0, 2, 2], [1, 1, 0]]), torch.tensor([[0, 3, 1], [2, 0, 3]])
    after = next_states(torch.minimum, states, parent, pick)
    for row, slot in itertools.product(range(2), range(3)):
        old, j = states[row, parent[row, slot]], int(pick[row, slot])
        assert torch.equal(after[row, slot], torch.cat([old[:j], torch.minimum(old[j], old[j + 1])[None], old[j + 2:]]))


@pytest.mark.parametrize("train", [False, True])
def test_one_hypothesis_is_as_it_was(train):
    x, mask = batch_of([8, 3, 1], 2)
    for form in (literal_search, search_and_replay):
        with_option, without = (answers(make(2, 1, train=train, distinct=distinct), x, mask, form) for distinct in (True, False))
        assert all(torch.equal(one, other) for one, other in zip(with_option, without, strict=True))


def test_noise_is_drawn_as_it_was():
    "The same number of draws, whether or not states must differ, so that everything after it draws the same."
    left_over = []
    for distinct in (False, True):
        generator, (x, mask) = torch.Generator().manual_seed(3), batch_of([7, 5, 2], 0)
        make(0, 4, train=True, distinct=distinct)(x, mask, generator=generator)
        left_over.append(torch.rand(4, generator=generator))
    assert torch.equal(*left_over)


@pytest.mark.parametrize("beam", [2, 5])
def test_batch_mates_and_padding(beam):
    encoder, (x, mask) = make(4, beam), batch_of([9, 2, 6, 1, 3], 4)
    assert batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9


@pytest.mark.parametrize("form", [literal_search, search_and_replay, partial(rule_search, rule=by_sums), partial(rule_search, rule=in_post_order)])
def test_slopes(form):
    encoder, (x, mask) = make(7, 4), batch_of([6, 3], 7)
    assert torch.autograd.gradcheck(lambda x: encode_with_search(encoder, x, mask, form).root, x.requires_grad_())
    weights = list(encoder.scorer.parameters())
    assert torch.autograd.gradcheck(lambda *given: encode_with_search(encoder, x.detach(), mask, form).root, weights)


# ---- what is held and heard

@few
@given(lengths, st.integers(1, 6), seeds, st.booleans(), st.booleans())
def test_what_a_beam_holds(sizes, beam, seed, train, distinct):
    sizes = torch.tensor(sorted(sizes, reverse=True))
    leaves = torch.randn(len(sizes), int(sizes[0]), DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = Recorder(monkeypatch)
        log = arena_search(make(seed, beam, train=train, distinct=distinct), leaves, sizes, torch.Generator().manual_seed(seed))
    found = beam_states(log, sizes, distinct)
    assert found.states.shape == found.filled.shape == log.parents.shape
    for step, scores in enumerate(recorder.scores):
        assert torch.equal(found.filled[step, :len(scores)], scores > -torch.inf)
        if step:
            over = sizes <= step + 1
            assert torch.equal(found.states[step][over], found.states[step - 1][over])
            assert torch.equal(found.filled[step][over], found.filled[step - 1][over])
    assert not distinct or torch.equal(count_distinct(found), found.filled.sum(-1))
    for row, n in enumerate(sizes.tolist()):
        alone = arena_search(make(seed, beam, distinct=distinct), leaves[row:row + 1, :n], sizes[row:row + 1])
        if not train:
            assert torch.equal(count_distinct(beam_states(alone, sizes[row:row + 1], distinct))[:, 0], count_distinct(found)[:n - 1, row])
        if n > 1:
            kept = rows_in(alone, n)
            full = beam_states(alone, sizes[row:row + 1], distinct).filled[:, 0].tolist()
            numbers = [len({slot for slot, there in zip(rows, filled) if there}) for rows, filled in zip(kept, full)]
            assert numbers == count_distinct(beam_states(alone, sizes[row:row + 1], distinct))[:, 0].tolist()


@few
@given(st.lists(st.integers(2, 12), min_size=1, max_size=3), st.integers(1, 5), seeds, st.booleans(), st.booleans())
def test_common_steps(sizes, beam, seed, train, distinct):
    "Against lineages followed one by one."
    sizes = torch.tensor(sorted(sizes, reverse=True))
    leaves = torch.randn(len(sizes), int(sizes[0]), DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log = arena_search(make(seed, beam, train=train, distinct=distinct), leaves, sizes, torch.Generator().manual_seed(seed))
    slots = _common_steps(survivors([log])[0], sizes)
    for row, n in enumerate(sizes.tolist()):
        ways = []
        for slot in (log.scores[row] > -torch.inf).nonzero()[:, 0].tolist():
            way = []
            for step in range(len(log.parents) - 1, -1, -1):
                way.append(slot)
                slot = int(log.parents[step, row, slot])
            ways.append(way[::-1][:n - 1])
        together = [len({way[step] for way in ways}) == 1 for step in range(n - 1)]
        assert int(slots[row]) == (together + [False]).index(False)


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_silence_before_the_common_ancestor(seed, distinct):
    "No gradient in the steps in common, none at all if all is one tree, some in the next step otherwise."
    n, heard = 14, []
    encoder = make(seed, 3, distinct=distinct)
    def listen(scorer, given, scores):
        scores.retain_grad()
        heard.append(scores)
    ear = encoder.scorer.register_forward_hook(listen)
    x, mask = batch_of([n], seed)
    root = encode_with_search(encoder, x, mask, literal_search).root
    (root @ torch.randn(DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).sum().backward()
    ear.remove()
    with torch.no_grad():
        log = arena_search(encoder, encoder.leaf_norm(encoder.leaf(x)), torch.tensor([n]))
    common = int(_common_steps(survivors([log])[0], torch.tensor([n])))
    trees = int(count_distinct(beam_states(log, torch.tensor([n]), distinct))[-1])
    loudest = torch.stack([scores.grad.abs().max() for scores in heard[:-1]])
    assert (loudest[:common] < 1e-14).all()
    if trees == 1:
        assert not distinct and (loudest < 1e-14).all()
    else:
        assert loudest[common] > 1e-9
    assert not distinct or trees == 3
    assert float(beam_use(encoder, x, mask)["unheard"]) == pytest.approx(1 if trees == 1 else common / (n - 2))


def test_short_sentences_beside_a_long_one_repeat_nothing():
    "Three tokens have two trees; the compiled search, which long sentences choose, fills empty slots."
    encoder = make(0, 5)
    encoder.compiled = None
    x, mask = batch_of([34, 4, 3], 0)
    use, alone = beam_use(encoder, x, mask), beam_use(encoder, x[2:, :3], mask[2:, :3])
    assert float(use["repeats"][-1]) == float(alone["repeats"]) == 0 and float(use["trees"][-1]) == 2


@few
@given(lengths, st.integers(1, 6), seeds, st.booleans())
@example([1, 1], 2, 0, False)
@example([12, 2, 9, 1], 3, 1, False)
def test_what_a_beam_is_used_for(sizes, beam, seed, distinct):
    "Against rows of trees and lineages, sentence by sentence."
    encoder, (x, mask) = make(seed, beam, distinct=distinct), batch_of(sizes, seed)
    use = beam_use(encoder, x, mask)
    assert all(numbers.shape == (len(sizes),) for numbers in use.values())
    for row, index in enumerate(sorted(range(len(sizes)), key=lambda i: -sizes[i])):
        n, only = sizes[index], torch.tensor([sizes[index]])
        with torch.no_grad():
            log = arena_search(encoder, encoder.leaf_norm(encoder.leaf(x[index:index + 1, :n])), only)
        filled = beam_states(log, only, distinct).filled[:, 0].tolist()
        rows = [[row for row, there in zip(*step) if there] for step in zip(rows_in(log, n), filled)]
        repeats = [1 - len(set(step)) / len(step) for step in rows]
        trees = len(set(rows[-1])) if rows else 1
        common = int(_common_steps(survivors([log])[0], only))
        assert float(use["repeats"][row]) == pytest.approx(sum(repeats) / max(1, n - 1), abs=1e-6)
        assert int(use["trees"][row]) == trees
        unheard = 1 if trees == 1 or common >= n - 2 else common / (n - 2)
        assert float(use["unheard"][row]) == pytest.approx(unheard)


def test_silent_plain_beams_exist():
    "The test above would be empty if no beam ended with one tree."
    ended = []
    for seed in range(6):
        x, mask = batch_of([14], seed)
        ended.append(len(set(map(tuple, make(seed, 3, distinct=False)(x, mask, trace=True).trace["beams"][0].tolist()))))
    assert 1 in ended and max(ended) > 1


# ---- the door

def test_the_compiled_search_leaves_it_alone():
    "It does not know the option, so an encoder with it searches plainly at any length, and may not insist."
    x = torch.zeros(1, COMPILE_MIN_LENGTH + 1, DIM, dtype=torch.float64)
    assert choose_search(EfficientBeam(DIM, distinct=True), x) is arena_search
    with pytest.raises(RuntimeError, match="distinct=True"):
        choose_search(EfficientBeam(DIM, distinct=True, compiled=True), x)
    encoder, (x, mask) = make(1, 4), batch_of([COMPILE_MIN_LENGTH + 2, 3], 1)
    with torch.no_grad():
        assert_same([encoder(x, mask).root], [encode_with_search(encoder, x, mask, literal_search).root])


def test_the_option_arrives():
    assert not create_encoder("ebt_grc", dim=4).distinct and create_encoder("ebt_grc", dim=4, distinct=True).distinct
    assert create_encoder("ebt_grc", weights="listops", distinct=True).distinct
    with pytest.raises(ValueError, match="Did you mean 'distinct'"):
        create_encoder("ebt_grc", dim=4, distinkt=True)
    with pytest.raises(ValueError, match="beam must be a whole number from 1, got 0"):
        EfficientBeam(4, beam=0, distinct=True)


def test_malformed_batches_are_refused_as_ever():
    encoder, (x, mask) = make(), batch_of([3, 2], 0)
    with pytest.raises(ValueError, match="made for dim=6"):
        encoder(x[..., :5], mask)
    with pytest.raises(ValueError, match="must start with a token"):
        encoder(x, ~mask)
