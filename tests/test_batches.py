"Batches: every example once an epoch, an order that follows from the seed, positions to come back to."
from collections import Counter, namedtuple
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.data.batches import BucketLoader, Vocabulary, bucket_batches, padding_share, to_device, shard_batch, build_vocabulary
from rvnnbook.data.listops import TOKEN_IDS, VOCABULARY, Example, collate_listops, evaluate, tokenize, unique_draws

EXAMPLES = list(unique_draws(60, seed=0))
seeds = st.one_of(st.none(), st.integers(0, 10**6))
sizes = st.integers(1, 9)


def strings(count, seed=0):
    "Examples that are known apart: strings of random lengths."
    random = Random(seed)
    return [f"{number:03}" + "x" * random.randrange(40) for number in range(count)]


def made(count, size, seed, stretch=5):
    return BucketLoader(strings(count), size, list, seed=seed, length=len, stretch=stretch)


# ---- Batches

@given(st.integers(1, 50), sizes, seeds, st.integers(1, 4))
def test_every_example_is_dealt_once_an_epoch(count, size, seed, stretch):
    batches = made(count, size, seed, stretch)
    for epoch in range(3):
        dealt = list(batches)
        assert Counter(e for batch in dealt for e in batch) == Counter(strings(count))
        assert len(dealt) == len(batches) and sorted(map(len, dealt))[1:] == [size] * (len(dealt) - 1)
        assert (batches.epoch, batches.index) == (epoch + 1, 0)


@given(st.integers(1, 30), sizes, seeds, st.integers(0, 40), st.integers(0, 40))
def test_to_come_back_to_a_position_is_to_have_stayed(count, size, seed, before, after):
    stayed = made(count, size, seed)
    for _ in range(before):
        stayed.next()
    state = stayed.state_dict()
    future = [stayed.next() for _ in range(after)]
    fresh = made(count, size, seed)
    fresh.next()                                      # whatever was dealt before is forgotten
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state and [fresh.next() for _ in range(after)] == future
    assert fresh.state_dict() == stayed.state_dict()
    stayed.load_state_dict(state)
    assert [stayed.next() for _ in range(after)] == future


def test_the_order_follows_from_the_seed_and_the_epoch():
    first, again, other = (list(made(40, 4, seed)) for seed in (1, 1, 2))
    assert first == again != other
    batches = made(40, 4, 1)
    epochs = [list(batches) for _ in range(3)]
    assert epochs[0] == first and epochs[0] != epochs[1] != epochs[2]
    torch.manual_seed(5)
    assert list(made(40, 4, 1)) == first
    assert list(made(40, 4, None)) == [strings(40)[start:start + 4] for start in range(0, 40, 4)]


@given(st.integers(1, 60), sizes, st.integers(0, 99), st.integers(1, 4))
def test_batches_of_a_stretch_do_not_overlap_in_length(count, size, seed, stretch):
    batches = bucket_batches(strings(count), size, str(seed), len, stretch)
    assert all(list(map(len, batch)) == sorted(map(len, batch)) for batch in batches)
    order = strings(count)
    Random(str(seed)).shuffle(order)
    for start in range(0, count, size * stretch):
        members = set(order[start:start + size * stretch])
        mine = sorted((b for b in batches if b[0] in members), key=lambda b: (len(b[0]), len(b[-1])))
        assert set(e for batch in mine for e in batch) == members
        assert all(len(a[-1]) <= len(b[0]) for a, b in zip(mine, mine[1:]))


def test_short_batches_do_not_come_first():
    "Sorted inside a stretch, but dealt in random order."
    starts = [len(batch[0]) for batch in bucket_batches(strings(100), 5, "0", len, 20)]
    assert starts != sorted(starts) and len(set(starts)) > 10


def test_sorting_saves_padding():
    examples = list(unique_draws(800, seed=0))
    mean = [sum(map(padding_share, batches)) / len(batches) for batches in
            (list(BucketLoader(examples, 16, collate_listops, seed=seed)) for seed in (None, 3))]
    assert mean[1] < mean[0] - .1


@pytest.mark.parametrize("count, size, stretch", [(0, 1, 1), (3, 0, 1), (3, 1, 0), (3, -1, 1)])
def test_impossible_batches_are_refused(count, size, stretch):
    with pytest.raises(ValueError, match="sizes of at least 1, got .*'size': " + str(size)):
        BucketLoader(strings(count), size, list, stretch=stretch)


@pytest.mark.parametrize("state", [{"epoch": 0, "index": 3}, {"epoch": 0, "index": -1}, {"epoch": -1, "index": 0}])
def test_positions_that_do_not_exist_are_refused(state):
    batches = made(10, 4, 0)
    with pytest.raises(ValueError, match="no position"):
        batches.load_state_dict(state)
    assert batches.state_dict() == {"epoch": 0, "index": 0}


# ---- shares

@given(st.integers(1, 12), st.integers(1, 5))
def test_the_shares_are_the_batch(count, world):
    batch = collate_listops(EXAMPLES[:count])
    shares = [shard_batch(batch, rank, world) for rank in range(world)]
    assert all(type(mine) is type(batch) for mine in shares)
    assert max(len(mine.labels) for mine in shares) - min(len(mine.labels) for mine in shares) <= 1
    for rank, mine in enumerate(shares):
        for row, number in enumerate(range(rank, count, world)):
            assert all(torch.equal(field[row], whole[number]) for field, whole in zip(mine, batch))
    assert sum(len(mine.labels) for mine in shares) == count


def test_place_keeps_the_kind_of_batch():
    batch = namedtuple("Pair", "left right")(torch.ones(2), torch.zeros(2))
    moved = to_device(batch, "meta")
    assert type(moved) is type(batch) and moved.right.device.type == "meta"


def test_padding_is_what_the_mask_leaves_out():
    rows = ["[MAX 2 9 ]", "7"]
    assert padding_share(collate_listops([Example(evaluate(w), w) for w in map(tokenize, rows)])) == 3 / 8


# ---- vocabularies

words = st.lists(st.text("abc", min_size=1, max_size=3), max_size=20)


@settings(max_examples=50)
@given(st.lists(words, max_size=5), st.integers(1, 3))
def test_a_vocabulary_of_a_text(sentences, least):
    vocabulary = build_vocabulary(sentences, least, special=("<pad>", "<unk>"), unknown="<unk>")
    counts = Counter(word for sentence in sentences for word in sentence)
    assert vocabulary.tokens[:2] == ("<pad>", "<unk>")
    assert set(vocabulary.tokens[2:]) == {word for word, count in counts.items() if count >= least}
    ranks = [(-counts[word], word) for word in vocabulary.tokens[2:]]
    assert ranks == sorted(ranks)
    for sentence in sentences:
        back = [vocabulary.tokens[number] for number in vocabulary.encode(sentence)]
        assert back == [word if counts[word] >= least else "<unk>" for word in sentence]


def test_a_strict_vocabulary_names_what_it_does_not_know():
    vocabulary = Vocabulary(VOCABULARY)
    assert vocabulary.ids == TOKEN_IDS and len(vocabulary) == 15
    assert vocabulary.encode(("[MAX", "2", "]")) == [TOKEN_IDS[token] for token in ("[MAX", "2", "]")]
    with pytest.raises(ValueError, match=r"token 1 is '\[MAZ', which is not .*; the nearest is '\[MAX'"):
        vocabulary.encode(("2", "[MAZ"))
    with pytest.raises(ValueError, match="token 0 is 'a', which is not in the vocabulary$"):
        Vocabulary([]).encode("a")


def test_impossible_vocabularies_are_refused():
    with pytest.raises(ValueError, match="'b' occurs twice"):
        Vocabulary(["a", "b", "c", "b"])
    with pytest.raises(ValueError, match="unknown token '<unk>' is not in"):
        Vocabulary(["a", "b"], unknown="<unk>")
    for wrong, shown in (("a b", "'a b'"), ([1, 2], r"\[1, 2\]"), (["a", b"b"], r"\['a', b'b'\]"), (None, "None"), (3.5, "3.5"), ({"a"}, "{'a'}"),
                         (frozenset("a"), r"frozenset\({'a'}\)")):
        with pytest.raises(TypeError, match=rf"^tokens must be a list of strings \(a set has no fixed order\), got {shown}$"):
            Vocabulary(wrong)
    assert Vocabulary({"a": 1, "b": 2}.keys()).tokens == ("a", "b")
    with pytest.raises(TypeError, match="split them first"):
        build_vocabulary(["the cat", "a dog"])


def test_a_text_is_split_before_it_is_encoded():
    assert Vocabulary(VOCABULARY).encode("[MAX 2  ]") == [TOKEN_IDS[token] for token in ("[MAX", "2", "]")]
    assert Vocabulary(["a", "b"], split=list).encode("bab") == [1, 0, 1] and Vocabulary(["a"]).encode("") == []
    with pytest.raises(ValueError, match="token 1 is 'cat', which is not in the vocabulary; the nearest is 'a'"):
        Vocabulary(["a", "b"]).encode("b cat")


def test_a_vocabulary_shows_its_size_and_first_tokens():
    assert repr(Vocabulary(["a", "b"])) == "Vocabulary(2 tokens: ('a', 'b'))"
    assert repr(Vocabulary(VOCABULARY)) == "Vocabulary(15 tokens: ('[MIN', '[MAX', '[MED', '[SM', '0', '1', ...))"
