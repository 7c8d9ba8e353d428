"Reading and writing: one pass against loops, searches against lists and against all answers, scores, company."
import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import length_mask
from rvnnbook.data.algorithms import END, START, collate_algorithms, make_sorting, make_traversal, number_vocabulary, sorting
from rvnnbook.data.batches import BucketLoader, shard_batch
from rvnnbook.encoders.self_iru import IRU
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.seq2seq import (
    Decoder,
    Memory,
    Seq2Seq,
    answer,
    _attention_weights,
    search_answers,
    evaluate_seq2seq,
    exact,
    seq2seq_loss,
    _take_rows,
    token_nll,
)

few = settings(deadline=None, max_examples=25)
DIM, WORDS = 8, number_vocabulary(5)
UNITS = {"lstm": lambda: None, "two_lstms": lambda: nn.LSTM(DIM, DIM, 2, batch_first=True),
         "gru": lambda: nn.GRU(DIM, DIM, batch_first=True), "linear": lambda: IRU(DIM, 2), "self_iru": lambda: IRU(DIM, 1, "lstm")}
units = pytest.mark.parametrize("unit", UNITS)
deck = partial(collate_algorithms, vocabulary=WORDS)
LISTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=4)


def model_of(unit="lstm", encoder="bilstm", seed=0, scale=1.0, **options):
    torch.manual_seed(seed)
    model = Seq2Seq(create_encoder(encoder, dim=DIM), len(WORDS), UNITS[unit](), **options).double().eval()
    with torch.no_grad():
        model.decoder.out.weight.mul_(scale)     # firmer opinions, so that a search has something to find
    return model


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- attention and cross-entropy

@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 99))
@few
def test_attention_is_a_softmax_over_tokens(steps, lengths, seed):
    mask = length_mask(torch.tensor(lengths))
    queries, keys = random(len(lengths), steps, 4, seed=seed), random(*mask.shape, 4, seed=seed + 1)
    weights = _attention_weights(queries, keys, mask)
    for b, n in enumerate(lengths):
        for m in range(steps):
            likes = [math.exp(float(queries[b, m] @ keys[b, j]) / 2) for j in range(n)]
            assert_close(weights[b, m, :n], torch.tensor(likes, dtype=torch.float64) / sum(likes))
        assert not weights[b, :, n:].any()
    fused = F.scaled_dot_product_attention(queries, keys, keys, attn_mask=mask[:, None])
    assert_close(weights @ keys, fused, rtol=0, atol=1e-12)


def test_slopes_of_attention_and_cross_entropy():
    mask = length_mask(torch.tensor([3, 1]))
    queries, keys = random(2, 2, 3).requires_grad_(), random(2, 3, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: _attention_weights(q, k, mask), (queries, keys))
    assert torch.autograd.gradcheck(lambda s: token_nll(s, torch.tensor([[2, 0, 1], [1, 1, 1]]), mask), keys)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
@few
def test_cross_entropy_word_by_word(lengths, seed):
    mask = length_mask(torch.tensor(lengths))
    scores = random(*mask.shape, 5, seed=seed)
    targets = torch.randint(5, mask.shape, generator=torch.Generator().manual_seed(seed))
    nats = token_nll(scores, targets, mask)
    for b, m in product(range(len(lengths)), range(mask.shape[1])):
        norm = math.log(sum(math.exp(score) for score in scores[b, m].tolist()))
        assert_close(float(nats[b, m]), norm - float(scores[b, m, targets[b, m]]) if mask[b, m] else 0.0)

@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4), (2, 4)), ((2, 3, 4), (2, 3), (2, 4)), ((2, 3, 4), (3, 3), (3, 3))])
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match="do not fit"):
        token_nll(torch.zeros(shapes[0]), torch.zeros(shapes[1]).long(), torch.ones(shapes[2]) > 0)


# ---- one pass

def by_the_word(model, ids, words):
    "Log-probabilities of the words of one answer: the decoder called word by word, its attention written out."
    writer, state, logs = model.decoder, None, []
    found = model.encoder(model.embedding(ids)[None], torch.ones(1, len(ids)) > 0)
    for before, word in zip([START, *words[:-1]], words):
        x = writer.embedding(torch.tensor([[before]]))
        if before == START:
            x = x + writer.begin(found.root)
        s, state = writer.unit(x, state)
        looks = torch.stack([writer.query(s[0, 0]) @ h / math.sqrt(DIM) for h in found.states[0]]).exp()
        seen = (looks / looks.sum()) @ found.states[0]
        logs.append(writer.out(writer.join(torch.cat([seen, s[0, 0]])).tanh()).log_softmax(0)[word])
    return torch.stack(logs)


@units
@given(lists=LISTS, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=6)
def test_one_pass_is_the_loop(unit, lists, seed):
    model, batch = model_of(unit, seed=seed), deck([sorting(numbers) for numbers in lists])
    weights = list(model.parameters())
    nats = token_nll(model(*batch[:3]).states, batch.targets, batch.target_mask)
    loops = [-by_the_word(model, ids[mask], words[has].tolist()) for ids, mask, words, has in zip(*batch)]
    for row, loop in zip(nats, loops):
        assert_close(row[:len(loop)], loop, rtol=0, atol=1e-12)
        assert not row[len(loop):].any()
    for fast, slow in zip(*(torch.autograd.grad(total, weights, materialize_grads=True)
                            for total in (nats.sum(), sum(loop.sum() for loop in loops)))):
        assert_close(fast, slow, rtol=0, atol=1e-12)
    assert_close(seq2seq_loss(model, batch), sum(loop.sum() for loop in loops) / len(loops))


@pytest.mark.parametrize("encoder", ["bilstm", "self_iru", "transformer", "ndr", "mega", "s4d", "crvnn"])
def test_padding_and_company_change_nothing(encoder):
    model = model_of(encoder=encoder, seed=1)
    batch = deck([sorting(numbers) for numbers in ([3, 1, 2, 5, 4], [2], [5, 5, 1])])
    scores = model(*batch[:3]).states
    torch.manual_seed(0)
    wide = [F.pad(part, (0, 3)) for part in batch]
    wide[0] = torch.where(wide[1], wide[0], torch.randint(len(WORDS), wide[0].shape))
    wide[2] = torch.where(wide[3], wide[2], torch.randint(len(WORDS), wide[2].shape))
    more = model(*wide[:3]).states[:, :scores.shape[1]]
    assert_close(token_nll(more, batch.targets, batch.target_mask), token_nll(scores, batch.targets, batch.target_mask),
                 rtol=0, atol=1e-9)
    for row, (ids, mask, words, has) in enumerate(zip(*batch)):
        alone = model(ids[mask][None], mask[mask][None], words[has][None]).states[0]
        assert_close(alone, scores[row, :len(alone)], rtol=0, atol=1e-9)


def test_a_word_depends_on_those_before_it_and_on_the_question():
    model, batch = model_of(), deck([sorting([4, 1, 3])])
    scores = model(*batch[:3]).states
    for place in range(batch.targets.shape[1] - 1):
        other = batch.targets.clone()
        other[0, place] = WORDS.ids["5"]
        moved = (model(batch.ids, batch.mask, other).states - scores)[0].abs().amax(1)
        assert not moved[:place + 1].any() and (moved[place + 1:] > 0).all()
    for place in range(3):
        other = batch.ids.clone()
        other[0, place] = WORDS.ids["5"]
        assert ((model(other, batch.mask, batch.targets).states - scores).abs().amax(2) > 0).all()


def test_the_decoder_begins_with_the_root():
    torch.manual_seed(0)
    decoder, mask = Decoder(DIM, 9).double(), torch.ones(1, 3) > 0
    inputs = [random(1, 3, DIM).requires_grad_(), random(1, DIM, seed=1).requires_grad_()]
    words = torch.tensor([[START, 4]])
    assert torch.autograd.gradcheck(lambda states, root: decoder(Memory(states, mask, root), words).scores, inputs)
    state = decoder(Memory(inputs[0], mask, inputs[1]), words[:, :1]).state
    later = [decoder(Memory(inputs[0], mask, root), words[:, 1:], state).scores for root in (inputs[1], -inputs[1])]
    assert_close(*later)                                             # the root speaks once, at START
    first = [decoder(Memory(inputs[0], mask, root), words[:, :1]).scores for root in (inputs[1], -inputs[1])]
    assert (first[0] - first[1]).abs().max() > 1e-3


def test_an_encoder_without_states_is_refused():
    encoder = create_encoder("bbt_grc", dim=DIM)
    with pytest.raises(ValueError, match="gives no states"):
        Seq2Seq(encoder, len(WORDS))(*deck([sorting([1, 2])])[:3])


@units
def test_rows_of_a_state(unit):
    decoder = Decoder(DIM, 9, UNITS[unit]()).double()
    x, rows = random(4, 3, DIM), torch.tensor([3, 3, 0])
    state = _take_rows(decoder.unit(x)[1], rows)
    assert_close(decoder.unit(x[rows], state)[0], decoder.unit(x[rows], decoder.unit(x[rows])[1])[0])
    assert _take_rows(None, rows) is None


# ---- search

class Language:
    "What may follow a beginning: drawn anew for each beginning and each row, and always the same."
    def __init__(self, seed, words=4, impossible=False):
        self.seed, self.words, self.impossible = seed, words, impossible

    def logs(self, row, before):
        gen = torch.Generator().manual_seed(hash((self.seed, row, *before)) % 2**31)
        scores = 2 * torch.randn(self.words, generator=gen, dtype=torch.float64)
        scores[START] = -math.inf
        if self.impossible:
            scores[2] = -math.inf
        return scores.log_softmax(0)

    def step(self, words, state):
        "The state is the row's number, and all words up to now."
        state = self.begin if state is None else state
        state = torch.cat([state, words[:, None]], 1)
        return torch.stack([self.logs(row, before) for row, *before in state.tolist()]), state

    def search(self, rows, beam, longest, penalty=0.0):
        self.begin = torch.arange(rows).repeat_interleave(beam)[:, None]
        return search_answers(self.step, rows, beam, longest, penalty)

    def score(self, row, words):
        return sum(float(self.logs(row, [START, *words[:i]])[word]) for i, word in enumerate(words))


def until_end(words):
    return words[:words.index(END) + 1] if END in words else words


def all_answers(words, longest):
    for length in range(1, longest + 1):
        for found in product(range(1, words), repeat=length):
            if END not in found[:-1] and (found[-1] == END or length == longest):
                yield list(found)


def by_lists(language, row, beam, longest, penalty):
    "A beam search with Python lists."
    kept = [(0.0, [])]
    for _ in range(longest):
        grown = []
        for log, words in kept:
            if END in words:
                grown.append((log, words))
                continue
            follow = language.logs(row, [START, *words]).tolist()
            grown += [(log + more, [*words, word]) for word, more in enumerate(follow)]
        kept = sorted((hypothesis for hypothesis in grown if hypothesis[0] > -math.inf),
                      key=lambda h: h[0] / len(h[1]) ** penalty, reverse=True)[:beam]
    return kept


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.6, 1.0]), st.booleans())
@example(0, 1, 5, 0.0, False)
@few
def test_a_search_is_one_with_lists(seed, beam, longest, penalty, impossible):
    language, rows = Language(seed, impossible=impossible), 2
    found = language.search(rows, beam, longest, penalty)
    for row in range(rows):
        expected = by_lists(language, row, beam, longest, penalty)
        assert [until_end(words) for words in found.words[row].tolist()][:len(expected)] == [words for _, words in expected]
        assert_close(found.logs[row, :len(expected)], torch.tensor([log for log, _ in expected], dtype=torch.float64))
        assert found.logs[row, len(expected):].isneginf().all()
        assert found.words.shape[2] <= longest


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
@few
def test_a_beam_of_everything_finds_the_best(seed, longest, penalty):
    language, there = Language(seed), list(all_answers(4, longest))
    found = language.search(1, len(there), longest, penalty)
    ranked = sorted(there, key=lambda words: language.score(0, words) / len(words) ** penalty, reverse=True)
    assert [until_end(words) for words in found.words[0].tolist()] == ranked
    assert_close(found.logs[0], torch.tensor([language.score(0, words) for words in ranked], dtype=torch.float64))
    assert_close(float(found.logs.exp().sum()), 1.0)


@given(st.integers(0, 999), st.integers(1, 6))
@few
def test_a_beam_of_one_is_greedy(seed, longest):
    language = Language(seed)
    found = language.search(3, 1, longest)
    for row in range(3):
        words = []
        while len(words) < longest and END not in words:
            words.append(int(language.logs(row, [START, *words]).argmax()))
        assert until_end(found.words[row, 0].tolist()) == words
        assert_close(float(found.logs[row, 0]), language.score(row, words))


def test_what_has_ended_says_end_forever():
    found = Language(3).search(6, 4, 6)
    for words in found.words.flatten(0, 1).tolist():
        if END in words:
            assert set(words[words.index(END):]) == {END}


@pytest.mark.parametrize("wrong", [dict(beam=0), dict(longest=0), dict(penalty=-1.0)])
def test_a_search_that_cannot_be_meant(wrong):
    with pytest.raises(ValueError, match=f"{[*wrong][0]} must be .*, got {[*wrong.values()][0]}"):
        Language(0).search(1, **{"beam": 2, "longest": 3, **wrong})


@units
@pytest.mark.parametrize("beam", [1, 3])
def test_what_a_model_answers(unit, beam):
    "Scores are those of one pass; a beam of one is greedy; other questions and padding change nothing."
    model = model_of(unit, seed=2, scale=6.0)
    batch = deck([sorting(numbers) for numbers in ([3, 1, 2, 5, 4], [2], [5, 5, 1])])
    found = answer(model, batch.ids, batch.mask, longest=6, beam=beam)
    for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask)):
        for words, log in zip(found.words[row].tolist(), found.logs[row]):
            assert_close(by_the_word(model, ids[mask], until_end(words)).sum(), log, rtol=0, atol=1e-12)
        alone = answer(model, ids[mask][None], mask[mask][None], longest=6, beam=beam)
        assert_close(alone.logs[0], found.logs[row], rtol=0, atol=1e-12)
        assert [until_end(w) for w in alone.words[0].tolist()] == [until_end(w) for w in found.words[row].tolist()]
        if beam == 1:
            words = until_end(found.words[row, 0].tolist())
            scores = model(ids[mask][None], mask[mask][None], torch.tensor([words])).states[0]
            assert scores.argmax(1).tolist() == words


def test_a_wide_search_of_a_model_finds_its_best_answer():
    model, ids = model_of(seed=3, scale=6.0), torch.tensor([[4, 6, 3]])
    mask, there = ids > 0, [[START], *([w] for w in range(1, len(WORDS)))]
    there = [[a, b] for a in range(len(WORDS)) if a != END for b in range(len(WORDS))] + [[END]]
    with torch.no_grad():
        logs = {tuple(words): float(by_the_word(model, ids[0], words).sum()) for words in there}
    found = answer(model, ids, mask, longest=2, beam=len(there))
    best = max(logs, key=logs.get)
    assert tuple(until_end(found.words[0, 0].tolist())) == best
    assert_close(float(found.logs[0, 0]), logs[best])
    assert_close(sum(map(math.exp, logs.values())), 1.0)


# ---- right or wrong

ANSWERS = st.lists(st.integers(2, 4), max_size=3)


@given(st.lists(st.tuples(ANSWERS, ANSWERS, st.booleans()), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 2))
@few
def test_exact_is_the_same_list(pairs, more, still):
    "Also where one side is wider; an answer that did not end is wrong."
    wide = 4 + more
    words = torch.tensor([w + [END if ends else 5] * (wide - len(w)) for w, _, ends in pairs])
    targets = torch.tensor([t + [END] * (4 + still - len(t)) for _, t, _ in pairs])
    assert exact(words, targets).tolist() == [w == t and ends for w, t, ends in pairs]
    assert not exact(targets[:, :1].clamp(min=2), targets).any()


def test_evaluation_is_what_it_says():
    model, examples = model_of(scale=4.0).train(), make_sorting((9, 0, 0), length=2, largest=3).train
    examples += make_traversal((14, 0, 0), levels=3, largest=5).train
    found = evaluate_seq2seq(model, BucketLoader(examples, 23, deck), longest=7)
    assert not model.training and all(weight.grad is None for weight in model.parameters())
    nats, words, right = 0.0, 0, []
    for one in examples:
        ids, target = torch.tensor(WORDS.encode(one.tokens)), [*WORDS.encode(one.target), END]
        nats, words = nats - float(by_the_word(model, ids, target).detach().sum()), words + len(target)
        right.append(until_end(answer(model, ids[None], ids[None] > -1, 7).words[0, 0].tolist()) == target)
    assert found["nll"] == pytest.approx(nats / words) and found["perplexity"] == pytest.approx(math.exp(nats / words))
    assert found["exact_match"] == sum(right) / len(right)
    for size in (1, 4):
        assert evaluate_seq2seq(model, BucketLoader(examples, size, deck, seed=0), 7) == pytest.approx(found)


def test_dropout_is_there_in_training_alone():
    batch = deck([sorting([4, 2, 1])])
    for place in ("dropout_in", "dropout_out"):
        model = model_of(**{place: .5})
        assert len({seq2seq_loss(model.train(), batch).item() for _ in range(4)}) == 4
        assert len({evaluate_seq2seq(model.train(), [batch], 5)["nll"] for _ in range(3)}) == 1


def test_processes_share_a_loss():
    model, batch = model_of(), deck([sorting(numbers) for numbers in ([3, 1], [2, 4, 5], [1], [5, 1, 1, 2], [4, 3])])
    shares = [shard_batch(batch, rank, 2) for rank in range(2)]
    parts = sum(seq2seq_loss(model, part) * len(part.ids) / 5 for part in shares)
    assert_close(parts, seq2seq_loss(model, batch))


def test_it_learns_to_sort():
    torch.manual_seed(0)
    parts, words = make_sorting((450, 80, 80), length=3, largest=9), number_vocabulary(9)
    rows = partial(collate_algorithms, vocabulary=words)
    model = Seq2Seq(create_encoder("bilstm", dim=32), len(words))
    judge = partial(evaluate_seq2seq, dealt=BucketLoader(parts.validation, 80, rows), longest=4)
    outcome = train(model, BucketLoader(parts.train, 32, rows, seed=0), judge, loss=seq2seq_loss, learning_rate=2e-2,
                    steps=190, check_every=95, patience=None)
    assert outcome.best["exact_match"] > .5 and outcome.best["nll"] < .5
    assert evaluate_seq2seq(model, BucketLoader(parts.test, 80, rows), 4)["exact_match"] > .4
