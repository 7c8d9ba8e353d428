"The choice of the best few against plain Python, and draws against the probabilities that they should have."
import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.layers.topk import EPSILON, best_first, choice_matrix, gumbel_noise, masked_softmax, one_soft
from tests.helpers import on_page

stochastic_topk, = on_page("topk", "stochastic_topk")

quick = settings(deadline=None, max_examples=60)


@st.composite
def rows(draw, fewest=1):
    "A row of scores with ties, and which of its places count."
    n = draw(st.integers(fewest, 8))
    scores = draw(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=n, max_size=n))
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(mask)


def ranked(scores, mask):
    "All places, those that count first, the best of them first, the leftmost of equals first."
    return sorted(range(len(scores)), key=lambda i: (not mask[i], -scores[i] if mask[i] else 0, i))


def shares_among(scores, places):
    powers = [math.exp(scores[i]) for i in places]
    return [power / sum(powers) for power in powers]


# ---- masked softmax

@quick
@given(rows())
def test_masked_softmax(row):
    scores, mask = row
    found, valid = masked_softmax(scores, mask), [i for i, there in enumerate(mask.tolist()) if there]
    assert abs(found.sum() - 1) < 1e-12
    expected = dict.fromkeys(range(len(scores)), 0.0) | dict(zip(valid, shares_among(scores.tolist(), valid)))
    if not valid:
        expected = dict.fromkeys(expected, 1 / len(scores))
    assert (found - torch.tensor(list(expected.values()), dtype=torch.float64)).abs().max() < 1e-12


def test_masked_softmax_as_published():
    "Softmax over all, times the mask, plus 1e-20, divided by the sum: to the last place of double precision."
    torch.manual_seed(0)
    scores, mask = 5 * torch.randn(50, 7).double(), torch.rand(50, 7) < 0.6
    for row, there, found in zip(scores.tolist(), mask.tolist(), masked_softmax(scores, mask).tolist()):
        counted = [share * keep + 1e-20 for share, keep in zip(shares_among(row, range(7)), there)]
        assert all(math.isclose(a / sum(counted), b, rel_tol=1e-12) for a, b in zip(counted, found))


def test_masked_softmax_is_finite_far_out():
    for value in (1e30, -1e30, torch.finfo(torch.float32).min):
        for mask in ([True, True, False], [False, False, False]):
            scores = torch.tensor([0.0, value, 0.0], requires_grad=True)
            shares = masked_softmax(scores, torch.tensor(mask))
            slope, = torch.autograd.grad((shares + EPSILON).log().sum(), scores)
            assert shares.isfinite().all() and slope.isfinite().all() and abs(shares.sum() - 1) < 1e-6


def test_slopes_of_shares():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert torch.autograd.gradcheck(lambda logits: masked_softmax(logits, mask), torch.randn(3, 4).double().requires_grad_())


# ---- the choice

@quick
@given(rows(), st.data())
def test_picks(row, data):
    scores, mask = row
    k = data.draw(st.integers(1, len(scores)))
    shares, picks = stochastic_topk(scores, mask, k)
    assert picks.dtype == torch.int64 and picks.tolist() == ranked(scores.tolist(), mask.tolist())[:k]
    assert shares.equal(masked_softmax(scores, mask))
    assert best_first(scores, mask).tolist() == ranked(scores.tolist(), mask.tolist())


def test_many_equals_stay_in_order():
    scores = torch.tensor([1.0, 0.0]).repeat(500)
    order = best_first(scores, torch.ones(1000, dtype=torch.bool))
    assert order.tolist() == [*range(0, 1000, 2), *range(1, 1000, 2)]


@quick
@given(rows(), st.integers(0, 10**6))
def test_noise_is_for_the_choice_only(row, seed):
    scores, mask = row
    noise = gumbel_noise(scores, torch.Generator().manual_seed(seed))
    shares, picks = stochastic_topk(scores, mask, len(scores), noise)
    assert picks.tolist() == ranked((scores + noise).tolist(), mask.tolist())
    assert shares.equal(masked_softmax(scores, mask))


def test_the_choice_passes_no_slope():
    logits, noise = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    shares, picks = stochastic_topk(logits, torch.ones(3, 5, dtype=torch.bool), 2, noise)
    assert not picks.requires_grad and not choice_matrix(logits, torch.ones(3, 5, dtype=torch.bool), 2).requires_grad
    slope, lucky = torch.autograd.grad(shares.gather(1, picks).log().sum(), [logits, noise], allow_unused=True)
    assert slope.abs().sum() > 0 and lucky is None


def test_rows_are_independent_and_masks_broadcast():
    torch.manual_seed(0)
    logits, mask = torch.randn(2, 3, 6), torch.rand(2, 1, 6) < 0.7
    shares, picks = stochastic_topk(logits, mask, 4)
    soft = one_soft(logits, mask, 3)
    for b in range(2):
        for k in range(3):
            alone = stochastic_topk(logits[b, k], mask[b, 0], 4)
            assert alone[0].allclose(shares[b, k]) and alone[1].equal(picks[b, k])
            assert one_soft(logits[b, k], mask[b, 0], 3).allclose(soft[b, k])


@pytest.mark.parametrize("k", [0, -1, 4])
def test_a_wrong_k_is_refused(k):
    scores, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for choose in (stochastic_topk, choice_matrix, one_soft):
        with pytest.raises(ValueError, match=f"between 1 and 3 .*got {k}"):
            choose(scores, mask, k)


# ---- luck

def test_noise_has_the_gumbel_distribution():
    "Largest distance of the empirical from the exact distribution function, exp(-exp(-g))."
    noise = gumbel_noise(torch.zeros(40_000, dtype=torch.float64), torch.Generator().manual_seed(0)).sort().values
    exact = (-(-noise).exp()).exp()
    empirical = torch.arange(1, len(noise) + 1).double() / len(noise)
    assert (exact - empirical).abs().max() < 1.95 / math.sqrt(len(noise))      # exceeded once in a thousand


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_noise_is_finite_and_repeatable(dtype):
    like = torch.zeros(300, 100, dtype=dtype)
    one, same, other = (gumbel_noise(like, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one.dtype == dtype and one.shape == like.shape and one.isfinite().all()
    assert one.equal(same) and not one.equal(other)


def test_noise_where_the_uniform_number_is_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    assert gumbel_noise(torch.zeros(3)).isfinite().all()


def test_two_places_are_drawn_without_putting_back():
    scores, races = torch.tensor([1.0, -0.5, 0.3]), 30_000
    noise = gumbel_noise(scores.expand(races, 3), torch.Generator().manual_seed(3))
    mask = torch.ones(3, dtype=torch.bool)
    _, picks = stochastic_topk(scores.expand(races, 3), mask, 2, noise)
    q = scores.double().softmax(-1).tolist()
    for first, second in permutations(range(3), 2):
        chance = q[first] * q[second] / (1 - q[first])
        met = (picks == torch.tensor([first, second])).all(1).double().mean().item()
        assert abs(met - chance) < 4.5 * math.sqrt(chance * (1 - chance) / races)


# ---- matrices

@quick
@given(rows(), st.data())
def test_matrices(row, data):
    scores, mask = row
    k = data.draw(st.integers(1, len(scores)))
    order = ranked(scores.tolist(), mask.tolist())
    hard, soft = choice_matrix(scores, mask, k), one_soft(scores, mask, k)
    assert hard.shape == soft.shape == (k, len(scores)) and hard.dtype == scores.dtype
    for slot in range(k):
        one = [float(i == order[slot]) for i in range(len(scores))]
        assert hard[slot].tolist() == one
        if slot < k - 1:
            assert soft[slot].tolist() == one
    rest = [i for i in order[k - 1:] if mask[i]]
    expected = dict.fromkeys(range(len(scores)), 0.0) | dict(zip(rest, shares_among(scores.tolist(), rest)))
    if rest:
        assert (soft[-1] - torch.tensor(list(expected.values()), dtype=torch.float64)).abs().max() < 1e-12
    taken = (soft * mask).sum(-1)
    assert all((share > 1 - 1e-9) == (slot < int(mask.sum())) for slot, share in enumerate(taken.tolist()))
    assert ((taken < 1e-9) | (taken > 1 - 1e-9)).all()


def test_all_in_one_mixture():
    torch.manual_seed(0)
    scores, mask = torch.randn(4, 6).double(), torch.ones(4, 6, dtype=torch.bool)
    assert one_soft(scores, mask, 1)[:, 0].allclose(scores.softmax(-1), atol=1e-12)
    assert one_soft(scores, mask, 6).allclose(choice_matrix(scores, mask, 6), atol=1e-12)


def test_slopes_of_the_mixture():
    scores = torch.tensor([[0.3, -1.0, 2.0, 1.1, 0.0], [1.0, 0.2, -0.4, 2.0, 0.6]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]).bool()
    assert torch.autograd.gradcheck(lambda s: one_soft(s, mask, 2), scores)
    slope, = torch.autograd.grad(one_soft(scores, mask, 2)[:, -1, 0].sum(), scores)
    assert slope[0, 2] == slope[1, 3] == 0 and slope[0, 1] != 0           # the kept one does not compete in the last place


def test_empty_candidates_of_minus_infinity():
    "As the beam marks them: no slope becomes nan."
    scores = torch.tensor([1.0, -torch.inf, 0.0, -torch.inf], requires_grad=True)
    for k in (1, 2, 3):
        soft = one_soft(scores, scores > -torch.inf, k)
        slope, = torch.autograd.grad(soft[-1, 2], scores)
        assert soft.isfinite().all() and slope.isfinite().all()
