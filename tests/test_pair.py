"Pairs of sentences: what the head is shown, and that one batch is as good as two."
import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from rvnnbook.core import length_mask, simple_tree
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.classify import Classifier, cross_entropy, predict_labels
from rvnnbook.tasks.pair import PairClassifier, pair_features, pair_up

DIM, VOCABULARY, CLASSES = 6, 11, 7
few = settings(deadline=None, max_examples=25)
encoders = pytest.mark.parametrize("name", ["rvnn", "tree_lstm", "lstm", "bilstm"])


def make(name="bilstm", seed=0, classes=CLASSES, **options):
    torch.manual_seed(seed)
    return PairClassifier(create_encoder(name, dim=DIM), VOCABULARY, classes, **options).double().eval()


def sentences(lengths, seed=0):
    "Ids, mask and balanced trees of one side; what stands on padding are ids too, and should not matter."
    mask = length_mask(torch.tensor(lengths))
    ids = torch.randint(VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(seed))
    trees = torch.tensor([simple_tree("balanced", n) + [0] * (max(lengths) - n) for n in lengths])
    return ids, mask, trees


def score(model, first, second):
    ids, mask, trees = map(pair_up, first, second)
    return model(ids, mask, trees=trees).logits


FIRST, SECOND = sentences([3, 1, 5, 2], seed=1), sentences([2, 4, 1, 7], seed=2)
some_lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


# ---- features

@few
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(["paper", "code"]))
def test_blocks(seed, width, order):
    torch.manual_seed(seed)
    first, second = torch.randn(2, 3, width).double()
    there, back = (pair_features(*pair, order).unflatten(-1, (4, width)) for pair in ((first, second), (second, first)))
    distance, both = (2, 3) if order == "paper" else (3, 2)
    assert torch.equal(there[:, 0], first) and torch.equal(there[:, 1], second)
    for row, one, other in zip(there, first.tolist(), second.tolist()):
        assert row[distance].tolist() == [abs(a - b) for a, b in zip(one, other)]
        assert row[both].tolist() == [a * b for a, b in zip(one, other)]
    assert torch.equal(back, there[:, [1, 0, 2, 3]])                   # exchanging the sentences
    interleaved = torch.stack([first, second], 1).flatten(0, 1)
    assert torch.equal(make(features=order).head_input(interleaved), there.flatten(1))


def test_the_orders_differ_by_a_permutation_of_weights():
    paper, code = make(features="paper"), make(features="code", seed=1)
    weights = paper.state_dict()
    blocks = weights["head.0.weight"].unflatten(1, (4, DIM))
    code.load_state_dict(weights)
    assert (score(code, FIRST, SECOND) - score(paper, FIRST, SECOND)).abs().max() > 1e-3
    code.load_state_dict(weights | {"head.0.weight": blocks[:, [0, 1, 3, 2]].flatten(1)})
    torch.testing.assert_close(score(code, FIRST, SECOND), score(paper, FIRST, SECOND))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_pair_up(left, right, size):
    first, second = torch.arange(1, 1 + size * left).reshape(size, left), -torch.arange(1, 1 + size * right).reshape(size, right)
    both = pair_up(first, second)
    assert both.shape == (size, 2, max(left, right)) and both.dtype == first.dtype
    assert torch.equal(both[:, 0, :left], first) and torch.equal(both[:, 1, :right], second)
    assert not both[:, 0, left:].any() and not both[:, 1, right:].any()
    assert pair_up(first > 0, second < 0).dtype == torch.bool


# ---- one batch is two

@encoders
@few
@given(some_lengths, st.integers(0, 10**6), st.sampled_from([(1, F.gelu), (2, F.gelu), (2, F.elu)]))
def test_one_batch_is_two(name, lengths, seed, head):
    layers, activation = head
    model = make(name, seed, layers=layers)
    model.activation = activation
    sides = [sentences([pair[side] for pair in lengths], seed + side) for side in (0, 1)]
    roots = [model.encoder(model.in_proj(model.embedding(ids)), mask, trees=trees).root for ids, mask, trees in sides]
    expected = torch.cat([*roots, (roots[0] - roots[1]).abs(), roots[0] * roots[1]], -1)
    if layers == 2:
        expected = activation(model.head[0](expected))
    expected, found = model.head[-1](expected), score(model, *sides)
    torch.testing.assert_close(found, expected)
    weights, parameters = torch.randn_like(found), list(model.parameters())
    grads = [torch.autograd.grad((scores * weights).sum(), parameters, materialize_grads=True) for scores in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):                      # a tree of one leaf does not use the cell
        torch.testing.assert_close(ours, theirs)


@encoders
def test_other_pairs_and_padding_do_not_matter(name):
    model, together = make(name), score(make(name), FIRST, SECOND)
    for b, (n1, n2) in enumerate(zip(*(side[1].sum(1).tolist() for side in (FIRST, SECOND)))):
        alone = score(model, [t[b:b + 1, :n1] for t in FIRST], [t[b:b + 1, :n2] for t in SECOND])
        torch.testing.assert_close(alone[0], together[b])
    ids, mask, trees = map(pair_up, FIRST, SECOND)
    assert not torch.equal(ids, other := torch.where(mask, ids, (ids + 3) % VOCABULARY))
    assert torch.equal(model(other, mask, trees=trees).logits, together)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(ids[order], mask[order], trees=trees[order]).logits, together[order])


def test_the_order_of_a_pair_matters_unless_the_weights_forbid_it():
    model = make()
    assert (score(model, FIRST, SECOND) - score(model, SECOND, FIRST)).abs().amax(1).min() > 1e-3
    with torch.no_grad():
        model.head[0].weight[:, DIM:2 * DIM] = model.head[0].weight[:, :DIM]
    torch.testing.assert_close(score(model, FIRST, SECOND), score(model, SECOND, FIRST))


# ---- the model

def test_names_and_shapes():
    single = Classifier(create_encoder("lstm", dim=DIM), VOCABULARY, CLASSES, 5, layers=2)
    pair = PairClassifier(create_encoder("lstm", dim=DIM), VOCABULARY, CLASSES, embedding_dim=5)
    shapes = {key: tuple(value.shape) for key, value in single.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in pair.state_dict().items()} == shapes | {"head.0.weight": (DIM, 4 * DIM)}
    for classes, layers in product((2, 3), (1, 2)):
        model = make(classes=classes, layers=layers)
        assert score(model, FIRST, SECOND).shape == (4, 1 if classes == 2 else 3) and len(model.head) == layers
        assert model.head[0].in_features == 4 * DIM


def test_every_parameter_gets_a_gradient():
    model = make("rvnn", embedding_dim=5)
    scores = score(model, FIRST, SECOND)
    (scores * torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).double()).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    used = torch.cat([ids[mask] for ids, mask, _ in (FIRST, SECOND)]).unique()
    touched = model.embedding.weight.grad.any(1).nonzero()[:, 0]
    assert touched.tolist() == used.tolist()


def test_a_sentence_and_itself():
    "At the kink of the distance the gradient is still a number."
    model = make()
    score(model, FIRST, FIRST).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    features = model.head_input(torch.ones(2, DIM).double())
    assert not features[:, 2 * DIM:3 * DIM].any()


def test_dropout_and_copies():
    model = make(dropout_in=0.5, dropout_out=0.5)
    expected = score(model, FIRST, SECOND)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(score(twin, FIRST, SECOND), expected)
    model.train()
    rolls = [score(model, FIRST, SECOND) for _ in range(2)]
    assert not torch.equal(*rolls)


def test_it_learns_what_adding_opinions_cannot():
    "Equal or not: four pairs that no sum of two opinions can tell apart."
    ids = torch.tensor([[[1], [1]], [[2], [2]], [[1], [2]], [[2], [1]]])
    mask, labels = torch.ones(4, 2, 1, dtype=torch.bool), torch.tensor([1, 1, 0, 0])
    model = make("lstm", classes=2, layers=1).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(80):
        loss = cross_entropy(model(ids, mask).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert predict_labels(model(ids, mask).logits).tolist() == labels.tolist() and loss < 0.1
    with torch.no_grad():
        model.head[0].weight[:, 2 * DIM:] = 0                          # opinions only
    a, b, c, d = model(ids, mask).logits[:, 0]
    torch.testing.assert_close(a + b, c + d)


# ---- what is refused

@pytest.mark.parametrize("options, said", [
    (dict(features="book"), "book"), (dict(layers=3), "unknown number of layers 3; known: 1, 2"),
    (dict(classes=1), "classes must be a whole number from 2, got 1")])
def test_bad_options(options, said):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, said", [
    (lambda ids, mask: (ids[:, 0], mask[:, 0]), "(4, 7)"), (lambda ids, mask: (ids[:, :1], mask[:, :1]), "(4, 1, 7)"),
    (lambda ids, mask: (ids, mask[..., :-1]), "(4, 2, 6)"), (lambda ids, mask: (ids, mask[:, 0]), "(4, 7)")])
def test_bad_shapes(change, said):
    model, (ids, mask) = make(), list(map(pair_up, FIRST, SECOND))[:2]
    model(ids, mask)                                                   # the call itself is sound
    with pytest.raises(ValueError) as error:
        model(*change(ids, mask))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_empty_sentence_is_refused():
    ids, mask, _ = map(pair_up, FIRST, SECOND)
    mask[1, 0] = False
    with pytest.raises(ValueError, match="row 2"):
        make()(ids, mask)
