"Unlabelled F1, against sets of leaves read off nested pairs; the module itself never sees a pair."
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.show.trees import inner_spans, span_f1

quick = settings(deadline=None, max_examples=100)


def random_pairs(draw, n):
    "A binary tree over n tokens by random merges, as nested pairs of positions."
    parts = list(range(n))
    while len(parts) > 1:
        i = draw(st.integers(0, len(parts) - 2))
        parts[i:i + 2] = [(parts[i], parts[i + 1])]
    return parts[0]


def leaves(tree):
    return leaves(tree[0]) + leaves(tree[1]) if isinstance(tree, tuple) else (tree,)


def subtrees(tree):
    "The token sets of all nodes, tokens and the whole included."
    inside = subtrees(tree[0]) | subtrees(tree[1]) if isinstance(tree, tuple) else set()
    return inside | {frozenset(leaves(tree))}


def steps_of(tree):
    "The height of the node that sends away the last token of its left child."
    steps = [0] * len(leaves(tree))

    def height(node):
        if not isinstance(node, tuple):
            return 0
        steps[leaves(node[0])[-1]] = 1 + max(height(node[0]), height(node[1]))
        return steps[leaves(node[0])[-1]]
    height(tree)
    return steps


def brute(found, gold):
    "Precision, recall and their harmonic mean by sentence and for all, from sets of tokens."
    def nontrivial(tree):
        return {node for node in subtrees(tree) if 1 < len(node) < len(leaves(tree))}

    def harmonic(common, one, other):
        precision, recall = common / one, common / other
        return 2 * precision * recall / (precision + recall) if common else 0.0
    rows = [(nontrivial(tree), nontrivial(other)) for tree, other in zip(found, gold)]
    each = [harmonic(len(a & b), len(a), len(b)) if a else None for a, b in rows]
    told = [share for share in each if share is not None]
    heap = [sum(map(len, column)) for column in zip(*((a & b, a, b) for a, b in rows))]
    return (harmonic(*heap), sum(told) / len(told), each) if told else (None, None, each)


@st.composite
def pairs_of_trees(draw, most=6, longest=9):
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return [[random_pairs(draw, n) for n in lengths] for _ in range(2)]


def same(number, expected):
    return math.isnan(number) if expected is None else number == pytest.approx(expected, abs=1e-12)


@quick
@given(pairs_of_trees(), st.integers(0, 3))
def test_f1_equals_brute_force_over_pairs(sets, padding):
    found, gold = sets
    corpus, sentence, each = brute(found, gold)
    score = span_f1([steps_of(tree) + [0] * padding for tree in found], [steps_of(tree) for tree in gold])
    assert same(score.corpus, corpus) and same(score.sentence, sentence)
    assert len(score.each) == len(each) and all(map(same, score.each, each))


@quick
@given(pairs_of_trees())
def test_f1_is_symmetric_between_0_and_1_and_1_with_itself(sets):
    found, gold = ([steps_of(tree) for tree in trees] for trees in sets)
    there, back, own = span_f1(found, gold), span_f1(gold, found), span_f1(gold, gold)
    assert str(there) == str(back)                                      # nan beside nan
    if max(map(len, gold)) > 2:
        assert 0 <= there.corpus <= 1 and 0 <= there.sentence <= 1
        assert own.corpus == own.sentence == 1
        different = [tree != other for tree, other in zip(*sets)]
        assert (there.corpus < 1) == (there.sentence < 1) == any(different)
    else:
        assert math.isnan(own.corpus) and math.isnan(own.sentence)


@quick
@given(pairs_of_trees(most=1))
def test_inner_spans_are_the_nodes_between_token_and_sentence(sets):
    tree = sets[0][0]
    n = len(leaves(tree))
    nodes = {(min(node), max(node)) for node in subtrees(tree) if 1 < len(node) < n}
    assert inner_spans(steps_of(tree)) == nodes and len(nodes) == max(n - 2, 0)


def test_long_sentences_weigh_more_in_the_heap_only():
    left, right = [*range(1, 9), 0], [*range(8, 0, -1), 0]
    score = span_f1([left, [1, 2, 0]], [right, [1, 2, 0]])
    assert score.each == [0, 1] and score.sentence == 1 / 2 and score.corpus == 1 / 8


@pytest.mark.parametrize("found, gold, words", [
    ([[1, 2, 0]], [[1, 2, 3, 0]], "sentence 0"),
    ([[1, 0], [3, 2, 1, 0]], [[1, 0], [2, 1, 0]], "sentence 1"),
    ([[1, 2, 0]], [], "shorter"),
    ([[1, 1, 0]], [[1, 2, 0]], "both have step 1"),
    ([[0, 1, 0]], [[1, 2, 0]], "only padding"),
    ([[1, 2]], [[1, 0]], "the last"),
])
def test_what_cannot_be_compared_is_refused(found, gold, words):
    with pytest.raises(ValueError, match=words):
        span_f1(found, gold)


def test_no_sentences_no_number():
    score = span_f1([], [])
    assert math.isnan(score.corpus) and math.isnan(score.sentence) and score.each == []
