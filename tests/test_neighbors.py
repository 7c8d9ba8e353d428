"Neighbor weights against loops in exact arithmetic, and their gradients at ties against the published code's."
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

from rvnnbook.layers.neighbors import RETRIEVERS, stick_breaking_weights, cumulative_weights, neighbor_weights, retrieve

quarters = st.sampled_from([Fraction(0), Fraction(1), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)])
sentences = st.lists(quarters, min_size=1, max_size=12)
many = settings(deadline=None, max_examples=40)
BOTH = pytest.mark.parametrize("retriever", sorted(RETRIEVERS))
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def walk(exists, i, side, retriever):
    "Weights of one walker, who goes from i to one end and meets the others one by one."
    weights, left_over = [Fraction(0)] * len(exists), Fraction(1)
    for j in reversed(range(i)) if side == "left" else range(i + 1, len(exists)):
        weights[j] = min(exists[j], left_over) if retriever == "eq5" else exists[j] * left_over
        left_over -= weights[j]          # eq6: probability of no position so far; eq5: weight still to give
    return weights


def boxed(rows, dtype=torch.float64):
    width = max(map(len, rows))
    return torch.tensor([[float(e) for e in row] + [0.0] * (width - len(row)) for row in rows], dtype=dtype)


@BOTH
@SIDES
@many
@given(st.lists(sentences, min_size=1, max_size=3))
def test_weights_are_those_of_the_walker(side, retriever, rows):
    weights = neighbor_weights(boxed(rows), side, retriever)
    assert weights.dtype == torch.float64
    for found, row in zip(weights, rows):
        n = len(row)
        for i in range(n):                                             # quarters and their products are exact in float64
            assert [Fraction(p) for p in found[i, :n].tolist()] == walk(row, i, side, retriever)
        assert not found[:, n:].any()                                  # nobody finds a neighbor on padding


@BOTH
@SIDES
@many
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_weights_of_any_existence(side, retriever, row):
    exact = [Fraction(e) for e in row]
    weights = neighbor_weights(torch.tensor([row], dtype=torch.float64), side, retriever)[0]
    assert (weights >= 0).all() and (weights.sum(-1) <= 1 + 1e-14).all()
    expected = [[float(p) for p in walk(exact, i, side, retriever)] for i in range(len(row))]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


@BOTH
@many
@given(sentences)
def test_right_is_left_in_the_mirror(retriever, row):
    left = neighbor_weights(boxed([row]), "left", retriever)[0].tolist()
    right = neighbor_weights(boxed([row[::-1]]), "right", retriever)[0].tolist()
    assert [line[::-1] for line in right[::-1]] == left


@many
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_certain_existence_is_a_look_up(row):
    expected = torch.zeros(2, len(row), len(row))
    for i in range(len(row)):
        before, behind = [j for j in range(i) if row[j]], [j for j in range(i + 1, len(row)) if row[j]]
        if before:
            expected[0, i, before[-1]] = 1
        if behind:
            expected[1, i, behind[0]] = 1
    for retriever in RETRIEVERS:
        for number, side in enumerate(("left", "right")):
            assert torch.equal(neighbor_weights(torch.tensor([row]).float(), side, retriever)[0], expected[number])


@BOTH
@SIDES
def test_padding_changes_nothing(side, retriever):
    exists = torch.rand(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padded = neighbor_weights(F.pad(exists, (0, 4)), side, retriever)
    assert torch.equal(padded[:, :7, :7], neighbor_weights(exists, side, retriever)) and not padded[:, :, 7:].any()


@BOTH
@SIDES
def test_slopes(side, retriever):
    exists = torch.rand(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: neighbor_weights(e, side, retriever), exists)


# ---- gradients

RECORDED = Path(__file__).parent / "golden" / "ops" / "crvnn_neighbor_grad.safetensors"


def test_gradient_is_the_published_one():
    recorded = load_file(RECORDED)
    exists = (recorded["in.exist_probs"] * recorded["in.mask"]).requires_grad_()
    loss = sum((neighbor_weights(exists, side) * recorded[f"in.w_{side}"]).sum() for side in ("left", "right"))
    found, expected = torch.autograd.grad(loss, exists)[0], recorded["grad.exist_probs"]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_gradient_at_ties_by_hand():
    exists = torch.tensor([[1.0, 0.5, 0.5, 1.0]], requires_grad=True)
    last = cumulative_weights(exists)[0, 3]
    found = [torch.autograd.grad(last[j], exists, retain_graph=True)[0][0].tolist() for j in range(3)]
    assert found[2] == [0, 0, 1, 0]
    assert found[1] == [0, 1, 0, 0]              # the sum is exactly one: the first case, e_j itself
    assert found[0] == [0, -0.5, -0.5, 0]        # the remainder is exactly zero: a maximum at a tie splits evenly


# ---- the rest of the module

def test_names():
    assert RETRIEVERS == {"eq5": cumulative_weights, "eq6": stick_breaking_weights}
    exists = torch.tensor([[1.0, 0.5, 0.5, 1.0]])
    assert torch.equal(neighbor_weights(exists), cumulative_weights(exists))            # left and eq5 if nothing is said
    assert not torch.equal(neighbor_weights(exists), stick_breaking_weights(exists))
    with pytest.raises(ValueError, match="unknown side 'up'; known: left, right"):
        neighbor_weights(exists, "up")
    with pytest.raises(ValueError, match="'eq7'; known: eq5, eq6"):
        neighbor_weights(exists, retriever="eq7")


def test_retrieve():
    weights, values = torch.rand(2, 3, 3, dtype=torch.float64), torch.rand(2, 3, 4, dtype=torch.float64)
    expected = [[[sum(weights[b, i, j] * values[b, j, d] for j in range(3)) for d in range(4)] for i in range(3)] for b in range(2)]
    torch.testing.assert_close(retrieve(weights, values), torch.tensor(expected, dtype=torch.float64))
