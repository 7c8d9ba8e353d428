"Trees beside a reader's: sisters against nested pairs, baselines against their definition, and the weights that come with words."
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.core import steps_from_tree, tree_from_steps
from rvnnbook.data.batches import Vocabulary
from rvnnbook.data.text import UNKNOWN
from rvnnbook.lab.records import read_records
from rvnnbook.registry import read_weights
from rvnnbook.show.sentences import DEGREES, NEGATIONS, likeness, random_tree, sisters, stop_apart
from rvnnbook.show.trees import bracket_string, inner_spans
from rvnnbook.tasks.classify import load_pretrained

quick = settings(deadline=None, max_examples=60)
WORDS = (*NEGATIONS, *DEGREES, "film", "good", ".")


def leaves(tree):
    return leaves(tree[0]) + leaves(tree[1]) if isinstance(tree, tuple) else [tree]


def sisters_of_pairs(tree):
    "Sisters by walking down nested pairs."
    if not isinstance(tree, tuple):
        return {}
    told = sisters_of_pairs(tree[0]) | sisters_of_pairs(tree[1])
    for one, other in (tree, tree[::-1]):
        if not isinstance(one, tuple):
            told[one] = leaves(other)[0], leaves(other)[-1]
    return told


@quick
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_sisters_are_those_of_nested_pairs(n, seed):
    steps = random_tree(n, random.Random(seed))
    told = sisters_of_pairs(tree_from_steps(steps))
    assert sisters(steps) == [told.get(at) for at in range(n)]


@quick
@given(st.integers(2, 12))
def test_the_last_token_is_set_apart(n):
    pairs = n - 2
    for at in range(n - 3, -1, -1):
        pairs = at, pairs
    assert inner_spans(stop_apart(n)) == inner_spans(steps_from_tree((pairs, n - 1)))
    assert sisters(stop_apart(n))[-1] == (0, n - 2)


@quick
@given(st.lists(st.tuples(st.lists(st.sampled_from(WORDS), min_size=3, max_size=9), st.integers(0, 99)), min_size=1, max_size=4))
def test_likeness_counts_what_is_the_same(rows):
    sentences = [tokens for tokens, _ in rows]
    found = [random_tree(len(tokens), random.Random(seed)) for tokens, seed in rows]
    gold = [random_tree(len(tokens), random.Random(-seed - 1)) for tokens, seed in rows]
    told, itself = likeness(found, gold, sentences), likeness(gold, gold, sentences)
    assert told["count"] == len(rows) and {value for name, value in itself.items() if name != "count"} == {1.0}
    counts = Counter()
    for one, other, tokens in zip(found, gold, sentences):
        pairs = {span for span in inner_spans(one) if span[1] == span[0] + 1}
        counts += Counter(pairs=len(pairs & inner_spans(other)), all_pairs=len(pairs))
        first, second = (sisters_of_pairs(tree_from_steps(tree)) for tree in (one, other))
        for name, kind in (("negations", NEGATIONS), ("degrees", DEGREES)):
            places = [at for at, token in enumerate(tokens) if token in kind]
            counts += Counter({name: sum(first[at] == second[at] for at in places), f"all_{name}": len(places)})
    for name in ("pairs", "negations", "degrees"):
        assert (name in told) == (counts[f"all_{name}"] > 0)
        assert name not in told or told[name] == pytest.approx(counts[name] / counts[f"all_{name}"])


def test_every_order_of_joining_is_as_likely():
    chance, seen = random.Random(0), Counter()
    for _ in range(6000):
        seen[bracket_string(random_tree(4, chance), range(4))] += 1
    shares = {tree: count / 6000 for tree, count in seen.items()}
    assert len(shares) == 5 and shares.pop("((0 1) (2 3))") == pytest.approx(2 / 6, abs=.03)
    assert all(share == pytest.approx(1 / 6, abs=.03) for share in shares.values())


@pytest.mark.parametrize("encoder, model", [("crvnn", "CRvNN"), ("ebt_grc", "EBT-GRC")])
def test_the_weights_come_with_their_words_and_from_a_record(encoder, model):
    _, about = read_weights(encoder, "sst5")
    words = Vocabulary(json.loads(about["vocabulary"]), UNKNOWN)
    assert len(words) == len(load_pretrained(encoder, "sst5").embedding.weight) and words.unknown == words.tokens[0]
    record, = (record for record in read_records("sentiment") if record["id"] == about["run"])
    assert record["parameters"]["model"] == model and record["finished"]
