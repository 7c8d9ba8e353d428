"The compiled search: its loops against PyTorch and lists, its decisions against the plain search, with numba and without."
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import batch_gap, pad_batch, padding_gap
from rvnnbook.layers.compiled_beam import (COMPILE_MIN_LENGTH, top_places, _choose_pairs, choose_search, compiled_search,
                                             Beams, _score_pair, select_pairs)
from rvnnbook.layers import tree_search
from rvnnbook.layers.compiled_cell import gated_sums
from rvnnbook.encoders.efficient_beam import EfficientBeam, PairScorer
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.tree_search import arena_search, choose_proposals, survivors

ROOT = Path(__file__).resolve().parents[1]
DIM = 6
few = settings(deadline=None, max_examples=40)
sizes = st.lists(st.integers(1, 14), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)


def make(seed=0, beam=3, sharper=1.0, train=False, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    encoder = EfficientBeam(DIM, beam, **{"score_dim": 4, "hidden": 10, **options}).to(dtype).train(train)
    with torch.no_grad():
        encoder.scorer[1].weight *= sharper
    return encoder


def both(encoder, leaves, lengths, seed=0):
    logs = []
    for form in (arena_search, compiled_search):
        torch.manual_seed(seed)
        logs.append(form(encoder, leaves, lengths, torch.Generator().manual_seed(seed)))
    return logs


def near_tie(encoder, leaves, lengths):
    "Whether a search without noise met two proposals so nearly equal that rounding may put either first."
    met = []
    def watched(logits, scores, *more):
        proposals = (scores[..., None] + logits.log_softmax(-1)).flatten(1).nan_to_num(-torch.inf, neginf=-torch.inf)
        top = proposals.sort(-1, descending=True).values[:, :scores.shape[1] + 1]          # those chosen, and the next
        near = top[:, :-1] - top[:, 1:] <= 1e-9 * (1 + top[:, 1:].abs())
        met.append(bool((near & (top[:, 1:] > -torch.inf)).any()))
        return choose_proposals(logits, scores, *more)
    with patch.object(tree_search, "choose_proposals", watched):
        arena_search(encoder, leaves, lengths)
    return any(met)


# ---- loops

@few
@given(st.lists(st.floats(-800, 800) | st.just(-np.inf), min_size=1, max_size=30).filter(lambda row: max(row) > -np.inf))
@example([-np.inf, 700.0])
@example([-800.0, -800.0])
def test_log_sum(values):
    *_, norms, _ = _choose_pairs(np.array([[0, *values, 0]]), len(values) + 1, np.zeros(1), np.empty((1, 0)), np.empty(0), 1)
    assert norms[0] == pytest.approx(float(torch.tensor(values, dtype=torch.float64).logsumexp(0)), rel=1e-14)


@few
@given(st.lists(st.integers(-3, 3) | st.just(-np.inf), max_size=30), st.integers(1, 8), st.booleans(), seeds)
def test_the_best_come_first_and_of_equals_the_first(values, count, noisy, seed):
    values = np.array(values, dtype=float)
    noise = np.random.default_rng(seed).integers(-2, 3, len(values) if noisy else 0).astype(float)
    shaken = values + noise if noisy else values
    expected = [place for place in np.argsort(-shaken, kind="stable") if shaken[place] > -np.inf][:count]
    found = top_places(values, noise, count).tolist()
    assert found == expected + [-1] * (count - len(expected))


@few
@given(st.integers(2, 9), st.data())
def test_a_gap_is_closed(size, data):
    pick, slack = data.draw(st.integers(0, size - 2)), data.draw(st.integers(0, 3))
    row = [0, *range(11, 11 + size), 0] + [7] * slack
    logits = [-np.inf, *(i / 8 for i in range(size - 1)), -np.inf] + [7.0] * slack
    new_row, new_logits = np.full(len(row), -5), np.full(len(logits), np.nan)
    first = np.where(np.arange(size - 1) == pick, 99.0, 0.0)                    # noise that decides
    old, new = Beams(np.array([[row]]), np.array([[logits]])), Beams(new_row[None, None], new_logits[None, None])
    around, made = np.zeros((1, 1, 4), int), np.zeros((1, 1), int)
    arena = np.zeros((100, 3)), np.full(100, -1), np.zeros(0, int)
    picks, _ = select_pairs(np.array([size]), old, new, np.zeros((1, 1)), first[None, None], np.zeros((1, 1)), arena, 99,
                            made, np.zeros((1, 1), int), np.zeros((1, 1)), around, 1)
    assert picks.tolist() == [[pick]] and around[0, 0].tolist() == row[pick:pick + 4] and made.tolist() == [[99]]
    assert new_row[:size + 1].tolist() == [*row[:pick + 1], 99, *row[pick + 3:size + 2]]
    expected = [*logits[:pick], np.nan, np.nan, *logits[pick + 3:size + 1]]
    np.testing.assert_array_equal(new_logits[:size], expected)
    assert np.isnan(new_logits[size:]).all() and (new_row[size + 1:] == -5).all()


@few
@given(st.integers(1, 9), st.integers(1, 4), seeds)
def test_cell_and_scorer_are_those_of_the_encoder(dim, rows, seed):
    torch.manual_seed(seed)
    cell, below = GRC(dim).double(), torch.randn(rows, 2 * dim).double() * 3
    scorer = PairScorer(dim).double()
    with torch.no_grad():
        cell.norm.weight.normal_(), cell.norm.bias.normal_()
        parts = cell.w2(cell.activation(cell.w1(below)))
        parts[:, :3 * dim].sigmoid_()
        mixed = torch.empty(rows, dim).double()
        gated_sums(parts.numpy(), below.numpy(), mixed.numpy())
        left, right = below.chunk(2, 1)
        assert_close(cell.norm(mixed), cell(left, right), rtol=1e-9, atol=1e-11)
        as_right, as_left = torch.nn.functional.linear(below.view(-1, dim), *scorer.split()).chunk(2, 1)
        score = _score_pair(as_left[0].numpy(), as_right[1].numpy(), scorer[1].weight[0].numpy()) + float(scorer[1].bias)
        assert score == pytest.approx(float(scorer(left[0], right[0])), rel=1e-10, abs=1e-12)


@given(st.integers(1, 80), st.sampled_from([0.1, 1.0, 6.0]), seeds)
def test_scores_in_single_precision(width, spread, seed):
    torch.manual_seed(seed)
    left, right, weight = torch.randn(3, width).numpy() * np.float32(spread)
    sums = torch.from_numpy(left + right).double()
    parts = torch.from_numpy(weight).double() * torch.nn.functional.gelu(sums)
    most = float((torch.from_numpy(weight).double() * sums).abs().sum())       # rounding grows with the terms
    assert abs(_score_pair(left, right, weight) - float(parts.sum())) < 1e-7 * most


def test_equal_pairs_are_taken_in_their_order():
    scores = np.array([0.0, -np.inf, -np.inf])
    parents, norms, picks = _choose_pairs(np.zeros((3, 7)), 6, scores, np.empty((3, 0)), np.empty(0), 3)
    assert picks.tolist() == [0, 1, 2] and parents.tolist() == [0, 0, 0]
    assert scores == pytest.approx(-np.log(5)) and norms == pytest.approx(np.log(5))


def test_hypotheses_that_do_not_exist_stay_away():
    scores = np.array([-1.0, -np.inf])
    parents, _, picks = _choose_pairs(np.array([[-np.inf, 2.0, -np.inf], [-np.inf, 9.0, -np.inf]]), 2, scores, np.empty((2, 0)), np.empty(0), 1)
    assert scores.tolist() == [-1.0, -np.inf] and parents.tolist() == [0, 0] and picks.tolist() == [0, 0]


# ---- decisions

@few
@given(sizes, st.integers(1, 7), seeds, st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 30.0, 3000.0]),
       st.sampled_from(["gelu", "gelu_tanh", "relu"]), st.integers(1, DIM))
@example([9, 7, 2, 1], 5, 0, True, 0.3, 300.0, "gelu", 4)
@example([1], 3, 0, True, 0.0, 1.0, "gelu", 4)
def test_the_same_search(lengths, beam, seed, train, dropout, sharper, activation, score_dim):
    encoder = make(seed, beam, sharper, train, dropout=dropout, activation=activation, score_dim=score_dim)
    lengths = torch.tensor(sorted(lengths, reverse=True))
    leaves = torch.randn(len(lengths), int(lengths[0]), DIM, dtype=torch.float64)
    assume(train or not near_tie(encoder, leaves, lengths))
    one, other = both(encoder, leaves, lengths, seed)
    alive = one.scores > -torch.inf
    assert alive.equal(other.scores > -torch.inf)
    assert_close(other.scores[alive], one.scores[alive], rtol=1e-11, atol=1e-11)
    lines = [survivors([log])[0] for log in (other, one)]
    if other.arena.shared:                                     # places are others, nodes are not
        for mine, theirs in zip(*(line[:2] for line in lines), strict=True):
            assert (mine[alive] > 0).equal(theirs[alive] > 0)
            assert_close(other.arena.nodes[mine[alive]], one.arena.nodes[theirs[alive]], rtol=1e-9, atol=1e-9)
    else:
        assert other.roots[alive].equal(one.roots[alive])
        assert all(mine[alive].equal(theirs[alive]) for mine, theirs in zip(*(line[:2] for line in lines), strict=True))
    assert all(mine[alive].equal(theirs[alive]) for mine, theirs in zip(*(line[2:] for line in lines), strict=True))
    norms = [log.norms.movedim(0, 2).gather(1, own.slots)[lines[1].made > 0] for log, own in zip((other, one), lines)]
    assert_close(*norms, rtol=1e-11, atol=1e-11)
    assert_close(other.arena.nodes[other.roots[alive]], one.arena.nodes[one.roots[alive]], rtol=1e-9, atol=1e-9)
    if one.arena.kept is None:
        assert other.arena.kept is None
    else:
        assert other.arena.kept.equal(one.arena.kept)


@few
@given(sizes, st.integers(1, 7), seeds, st.booleans())
def test_equal_pairs_are_composed_once(lengths, beam, seed, train):
    encoder, lengths = make(seed, beam, train=train), torch.tensor(sorted(lengths, reverse=True))
    leaves = torch.randn(len(lengths), int(lengths[0]), DIM, dtype=torch.float64)
    log = compiled_search(encoder, leaves, lengths, torch.Generator().manual_seed(seed))
    made, children = log.made[log.made > 0], log.around[log.made > 0][:, 1:3]
    pairs = {(place, *pair) for place, pair in zip(made.tolist(), map(tuple, children.tolist()))}
    assert len(pairs) == log.arena.used - 1 - int(lengths.sum())       # each new place is of one pair
    known = [pair for _, *pair in sorted(pairs)]
    spare = len(known) - len(set(map(tuple, known)))                   # two pairs may have one entry of the table
    assert spare <= len(known) // 8
    for place, left, right in pairs:
        assert_close(log.arena.states[place], encoder.eval().grc(*log.arena.states[[left, right]]), rtol=1e-9, atol=1e-9)
    dropped = compiled_search(make(seed, beam, train=True, dropout=.3), leaves, lengths, torch.Generator().manual_seed(seed))
    assert not dropped.arena.shared and dropped.arena.used == 1 + int(lengths.sum()) + beam * int((lengths - 1).sum())


def test_ties_are_told_from_choices():
    encoder = make(0, 3)
    assert not near_tie(encoder, torch.randn(1, 11, DIM, dtype=torch.float64), torch.tensor([11]))
    assert near_tie(encoder, torch.ones(1, 5, DIM).double(), torch.tensor([5]))            # all pairs are alike
    with torch.no_grad():
        encoder.scorer[1].weight.zero_()
    assert near_tie(encoder, torch.randn(1, 5, DIM).double(), torch.tensor([5]))           # and so are all scores


@few
@given(sizes, st.integers(1, 4), seeds)
def test_a_sentence_does_not_depend_on_its_mates(lengths, beam, seed):
    encoder = make(seed, beam, compiled=True)
    x, mask = pad_batch([torch.randn(n, DIM).double() for n in lengths])
    assert batch_gap(encoder, x, mask) < 1e-10 and padding_gap(encoder, x, mask) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_all_alike_make_the_first_pair_first(dtype):
    encoder, leaves = make(beam=1, dtype=dtype), torch.ones(1, 5, DIM, dtype=dtype)
    with torch.no_grad():
        encoder.scorer[0].weight.zero_()           # or a product may round one row of equal ones in another way
    log = compiled_search(encoder, leaves, torch.tensor([5]))
    assert log.around[0, 0, 0].tolist() == [0, 1, 2, 3]


def test_single_precision_is_near_double():
    for seed in range(20):
        encoder, leaves = make(seed, 3), torch.randn(1, 8, DIM, generator=torch.Generator().manual_seed(seed)).double()
        exact = compiled_search(encoder, leaves, torch.tensor([8]))
        rough = compiled_search(encoder.float(), leaves.float(), torch.tensor([8]))
        assert_close(rough.scores, exact.scores.float(), rtol=1e-4, atol=1e-4)
        assert rough.arena.nodes.dtype == torch.float32


# ---- which of the two

def test_the_choice():
    x, short = torch.zeros(1, COMPILE_MIN_LENGTH, DIM), torch.zeros(9, COMPILE_MIN_LENGTH - 1, DIM)
    assert choose_search(make(), x) is compiled_search and choose_search(make(), short) is arena_search
    assert choose_search(make(compiled=True), x) is choose_search(make(compiled=True), short) is compiled_search
    assert choose_search(make(compiled=False), x) is choose_search(make(compiled=False), short) is arena_search
    for odd in (x.bfloat16(), x.to("meta")):
        assert choose_search(make(), odd) is arena_search
        with pytest.raises(RuntimeError, match="needs numba.*numba is installed"):
            choose_search(make(compiled=True), odd)


SCRIPT = """
import torch
{before}
from rvnnbook.encoders import efficient_beam
from rvnnbook.layers import compiled_beam
torch.manual_seed(0)
encoder, leaves = efficient_beam.EfficientBeam(6, 3).double(), torch.randn(2, 7, 6).double()
log = compiled_beam.compiled_search(encoder, leaves, torch.tensor([7, 4]), torch.Generator().manual_seed(1))
encoder.compiled = True
try:
    name = compiled_beam.choose_search(encoder, leaves).__name__
except RuntimeError as error:
    name = "refused" if "numba is missing" in str(error) else str(error)
encoder.compiled = None
print(name, compiled_beam.choose_search(encoder, torch.zeros(1, 99, 6)).__name__, hasattr(compiled_beam.top_places, "py_func"),
      *log.parents.flatten().tolist(), *log.around.flatten().tolist())
"""


def run_script(before="", **variables):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    name, chosen, compiled, *decisions = done.stdout.split()
    return name, chosen, compiled, decisions


def test_the_loops_are_python_and_numba_may_be_missing():
    name, chosen, compiled, decisions = run_script()
    assert (name, chosen, compiled) == ("compiled_search", "compiled_search", "True")
    assert run_script(NUMBA_DISABLE_JIT="1") == ("compiled_search", "compiled_search", "False", decisions)
    assert run_script("import sys; sys.modules['numba'] = None") == ("refused", "arena_search", "False", decisions)


def test_what_cannot_be_kept_is_compiled_all_the_same(tmp_path):
    "A package in a folder that cannot be written, and no folder of its user's either."
    before = """
import numba.core.caching as caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda cls, *args: None)
"""
    assert run_script(before)[:3] == ("compiled_search", "compiled_search", "True")
