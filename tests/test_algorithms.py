"Sorting and walks: every pair of walks tried, the law of the draws, parts that do not overlap, batches."
import math
from collections import Counter
from itertools import count, permutations
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.data.algorithms import (
    END,
    LEAST,
    ORDERS,
    START,
    AlgorithmError,
    collate_algorithms,
    split_parts,
    draw_tree,
    grow_number_tree,
    make_sorting,
    make_traversal,
    number_vocabulary,
    rebuild,
    sorting,
    traversal,
    unique_algorithm_draws,
    traverse,
)
from rvnnbook.data.batches import BucketLoader, shard_batch

many = settings(deadline=None, max_examples=60)
SHAPES = st.recursive(st.none(), lambda part: st.tuples(part, st.just("."), part), max_leaves=25)
PAPER = (((None, "13", None), "15", (None, "4", None)), "7", (None, "5", None))


def labelled(shape, seed=0):
    "The same shape with different numbers, as words."
    names = [str(n) for n in Random(seed).sample(range(1000), 200)]
    def name(tree):
        return tree and (name(tree[0]), names.pop(), name(tree[2]))
    return name(shape)


def said(tree, order):
    "A walk by recursion, its order spelled out."
    if tree is None:
        return []
    left, label, right = said(tree[0], order), [tree[1]], said(tree[2], order)
    return {"preorder": label + left + right, "inorder": left + label + right, "postorder": left + right + label}[order]


def levels(tree):
    return 0 if tree is None else 1 + max(levels(tree[0]), levels(tree[2]))


# ---- walks

@given(SHAPES, st.sampled_from(sorted(ORDERS)), st.integers(0, 99))
@many
def test_a_walk_is_its_recursion(shape, order, seed):
    tree = labelled(shape, seed)
    assert traverse(tree, order) == tuple(said(tree, order))


@given(SHAPES, st.integers(0, 99), st.booleans())
@many
def test_a_tree_comes_back_from_two_walks(shape, seed, as_lists):
    tree, kind = labelled(shape, seed), list if as_lists else tuple
    assert rebuild(kind(traverse(tree, "inorder")), kind(traverse(tree, "postorder"))) == tree


@pytest.mark.parametrize("nodes", range(6))
def test_every_pair_of_walks_is_a_tree_or_refused(nodes):
    "Of the n! postorders to one inorder, as many belong to trees as there are shapes."
    inorder, found = tuple(range(nodes)), []
    for postorder in permutations(inorder):
        try:
            tree = rebuild(inorder, postorder)
        except AlgorithmError:
            continue
        assert traverse(tree, "inorder") == inorder and traverse(tree, "postorder") == postorder
        found.append(tree)
    assert len(set(found)) == len(found) == math.comb(2 * nodes, nodes) // (nodes + 1)


@pytest.mark.parametrize("inorder, postorder, words", [
    ("aba", "aba", "a label occurs twice in a b a"), ("abc", "cab", "no tree has the inorder a b c and the postorder c a b"),
    ("ab", "b", "no tree has"), ("ab", "abb", "no tree has"), ("", "a", "no tree has"), ("a", "b", "no tree has"), ("a", "", "no tree has")])
def test_no_tree(inorder, postorder, words):
    with pytest.raises(AlgorithmError, match=words):
        rebuild(inorder, postorder)


def test_a_tree_may_be_deep():
    left = right = zigzag = None
    for label in range(10_000):
        left, right = (left, label, None), (None, label, right)
        zigzag = (zigzag, label, None) if label % 2 else (None, label, zigzag)
    for tree in (left, right, zigzag):
        two = traverse(tree, "inorder"), traverse(tree, "postorder")
        back = rebuild(*two)
        assert (traverse(back, "inorder"), traverse(back, "postorder")) == two and len(two[0]) == 10_000
        assert traverse(back, "preorder") == tuple(range(9_999, -1, -1))


# ---- questions

def test_the_examples_of_the_paper():
    assert traversal(PAPER) == (tuple("13 15 4 7 5 X 13 4 15 5 7".split()), tuple("7 15 13 4 5".split()))
    assert sorting([9, 1, 10, 5, 3]) == (tuple("9 1 10 5 3".split()), tuple("1 3 5 9 10".split()))


@given(SHAPES.filter(bool), st.integers(0, 99))
@many
def test_the_answer_follows_from_the_question(shape, seed):
    tree = labelled(shape, seed)
    for asked, other in (("preorder", "postorder"), ("postorder", "preorder")):
        tokens, target = traversal(tree, asked)
        middle = tokens.index("X")
        assert len(tokens) == 2 * len(target) + 1 == 2 * middle + 1
        assert list(tokens[:middle]) == said(tree, "inorder") and list(tokens[middle + 1:]) == said(tree, other)
        assert list(target) == said(tree, asked)


def test_target_order_is_preorder_or_postorder():
    with pytest.raises(AlgorithmError, match="got 'inorder'"):
        traversal(PAPER, "inorder")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
@many
def test_numbers_are_sorted_as_numbers(numbers):
    tokens, target = sorting(numbers)
    assert [int(word) for word in tokens] == numbers and Counter(tokens) == Counter(target)
    assert all(int(a) <= int(b) for a, b in zip(target, target[1:]))


# ---- draws

@pytest.mark.parametrize("child", [0.3, 0.6])
def test_places_are_filled_with_the_probability(child):
    "Two levels: one, two or three nodes, with the probabilities of two throws."
    random, draws = Random(0), 6000
    trees = [grow_number_tree(random, 2, child, count()) for _ in range(draws)]
    sizes = Counter(len(traverse(tree, "inorder")) for tree in trees)
    for size, chance in ((1, (1 - child) ** 2), (2, 2 * child * (1 - child)), (3, child ** 2)):
        assert abs(sizes[size] / draws - chance) < 4 * math.sqrt(chance * (1 - chance) / draws)
    left = sum(tree[0] is not None for tree in trees)
    assert abs(left / draws - child) < 4 * math.sqrt(child * (1 - child) / draws)
    assert {tree[1] for tree in trees} == {0}


@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 99))
@many
def test_drawn_trees_keep_their_bounds(depth, least, seed):
    least = min(least, 2 ** depth - 1)
    tree = draw_tree(Random(seed), depth, 40, least, child=0.7)
    labels = traverse(tree, "inorder")
    assert least <= len(labels) <= 40 and levels(tree) <= depth
    assert len(set(labels)) == len(labels) and all(1 <= int(label) <= 40 for label in labels)


@pytest.mark.parametrize("depth, largest, least", [(0, 9, 1), (31, 9, 1), (3, 64, 8), (5, 9, 10), (3, 9, 0)])
def test_trees_that_cannot_be_drawn(depth, largest, least):
    with pytest.raises(AlgorithmError, match="no tree of"):
        draw_tree(Random(0), depth, largest, least)


def test_all_labels_are_drawn_alike():
    random = Random(0)
    roots = Counter(draw_tree(random, 3, 8)[1] for _ in range(4000))
    assert set(roots) == set("12345678") and max(abs(n / 4000 - 1 / 8) for n in roots.values()) < .025


# ---- collections

def test_everything_there_is_can_be_drawn_and_no_more():
    random = Random(0)
    propose = lambda: sorting([random.randint(1, 4) for _ in range(3)])
    assert len({example.tokens for example in unique_algorithm_draws(64, random, propose)}) == 64
    with pytest.raises(AlgorithmError, match="64 of 65 examples found"):
        unique_algorithm_draws(65, random, propose, patience=3000)
    assert unique_algorithm_draws(0, random, propose) == []


@pytest.mark.parametrize("make, rules", [
    (make_sorting, {"length": 5}), (make_sorting, {"length": 10, "largest": 20}), (make_traversal, {}),
    (make_traversal, {"levels": 4, "target_order": "postorder"}), (make_traversal, {"levels": 10})],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_parts_do_not_overlap_and_follow_from_the_seed(make, rules):
    parts = make((120, 30, 40), **rules)
    assert [len(part) for part in parts] == [120, 30, 40]
    assert len({example.tokens for part in parts for example in part}) == 190
    assert parts == make((120, 30, 40), **rules, seed=0) != make((120, 30, 40), **rules, seed=1)


def test_the_order_of_the_draws_decides_nothing():
    "Small trees are met early; after the shuffle they stand in all parts alike."
    parts = make_traversal((400, 0, 400), levels=2, largest=12)
    train, test = (sum(len(example.tokens) for example in part) / len(part) for part in (parts.train, parts.test))
    assert abs(train - test) < .35
    coming = iter([sorting([n]) for n in range(40)])
    dealt = split_parts((20, 0, 20), 0, lambda random: next(coming))
    assert max(int(example.tokens[0]) for example in dealt.train) > 30


@pytest.mark.parametrize("depth", [3, 5, 8, 10])
def test_the_papers_least_sizes(depth):
    sizes = [len(example.target) for example in make_traversal((150, 0, 0), levels=depth).train]
    assert LEAST == {5: 10, 8: 10, 10: 15} and min(sizes) >= LEAST.get(depth, 1) and max(sizes) <= 64
    assert depth > 3 or min(sizes) == 1
    assert min(len(e.target) for e in make_traversal((150, 0, 0), levels=depth, least=2, child=.4).train) == 2


def test_lists_use_all_numbers_and_repeat_some():
    lists = make_sorting((500, 0, 0), length=6, largest=16).train
    assert {word for example in lists for word in example.tokens} == {str(n) for n in range(1, 17)}
    assert any(len(set(example.tokens)) < 6 for example in lists) and all(len(example.tokens) == 6 for example in lists)
    for rules in ({"length": 0}, {"largest": 0}):
        with pytest.raises(AlgorithmError, match="no list of"):
            make_sorting((1, 0, 0), **rules)


# ---- batches

def test_words_have_their_numbers():
    words = number_vocabulary(5)
    assert words.tokens == ("START", "END", "X", "1", "2", "3", "4", "5")
    assert words.ids["START"] == START and words.ids["END"] == END


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5))
@many
def test_a_batch_holds_its_examples(lists):
    words, examples = number_vocabulary(9), [sorting(numbers) for numbers in lists]
    batch = collate_algorithms(examples, words)
    assert all(part.dtype == torch.long for part in (batch.ids, batch.targets))
    for row, (tokens, target) in enumerate(examples):
        assert [words.tokens[i] for i in batch.ids[row][batch.mask[row]]] == list(tokens)
        assert [words.tokens[i] for i in batch.targets[row][batch.target_mask[row]]] == [*target, "END"]
        assert not batch.ids[row][~batch.mask[row]].any() and (batch.targets[row][~batch.target_mask[row]] == END).all()
        for mask in (batch.mask[row], batch.target_mask[row]):
            assert mask[0] and not (mask[1:] & ~mask[:-1]).any()
    assert batch.ids.shape[1] == max(map(len, lists)) == batch.targets.shape[1] - 1


def test_what_a_batch_refuses():
    with pytest.raises(AlgorithmError, match="at least one"):
        collate_algorithms([], number_vocabulary(9))
    with pytest.raises(ValueError, match="token 1 is '10'"):
        collate_algorithms([sorting([1, 10])], number_vocabulary(9))


def test_batches_deal_every_example_once():
    examples, words = make_traversal((70, 0, 0), levels=3, largest=9).train, number_vocabulary(9)
    dealt = BucketLoader(examples, 16, lambda rows: collate_algorithms(rows, words), seed=0)
    seen = [tuple(row[mask].tolist()) for batch in dealt for row, mask in zip(batch.ids, batch.mask)]
    assert sorted(seen) == sorted(tuple(words.encode(example.tokens)) for example in examples)
    batch = dealt.next()
    assert sum(len(shard_batch(batch, rank, 3).ids) for rank in range(3)) == len(batch.ids)
