"Predicting the next set: the number of nats, its averages, cheap models that cannot be better, and the future."
import io
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from rvnnbook.core import EncoderOutput
from rvnnbook.data.batches import BucketLoader, shard_batch
from rvnnbook.data.music import PUBLISHED, MusicBatch, collate_music, make_music, parse_music
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.tasks.sequence import KeyByKey, NextSet, evaluate_sequences, fit_key_by_key, future_gap, sequence_loss, sequence_nll

SHARED = Path(__file__).parents[2] / "shared" / "data" / "polymusic"
few = settings(deadline=None, max_examples=30)
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def made(lengths, keys=5, seed=0, silent=.3):
    "Pieces of these lengths with some silent steps, a batch of them, and scores; NaN on the padding of the scores."
    gen = torch.Generator().manual_seed(seed)
    pieces = [(torch.rand(n, keys, generator=gen) < .4) * (torch.rand(n, 1, generator=gen) > silent) * 1. for n in lengths]
    rolls = nn.utils.rnn.pad_sequence([piece.double() for piece in pieces], batch_first=True)
    mask = torch.arange(rolls.shape[1]) < torch.tensor(lengths)[:, None]
    scores = torch.where(mask[..., None], 3 * torch.randn(rolls.shape, generator=gen, dtype=torch.float64), math.nan)
    return pieces, MusicBatch(rolls, mask), scores


def literal(scores, piece):
    "A double loop over steps and keys, with probabilities."
    nats = []
    for t in range(1, len(piece)):
        right = 1.
        for k in range(piece.shape[1]):
            p = 1 / (1 + math.exp(-float(scores[t - 1, k])))
            right *= p if piece[t, k] == 1 else 1 - p
        nats.append(-math.log(right))
    return nats


class Given(nn.Module):
    "Scores that were given."
    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, rolls, mask):
        self.saw_gradients = torch.is_grad_enabled()
        return EncoderOutput(root=rolls.sum(1), states=self.scores[:len(rolls), :rolls.shape[1]])


def lstm(dim=6, keys=5, seed=0, **options):
    torch.manual_seed(seed)
    return NextSet(create_encoder("lstm", dim=dim, **options), keys).double().eval()


# ---- the number

@given(LENGTHS, st.integers(1, 6), st.integers(0, 99))
@few
def test_nll_is_a_double_loop(lengths, keys, seed):
    pieces, batch, scores = made(lengths, keys, seed)
    found = sequence_nll(scores, *batch)
    assert found.shape == (len(lengths), max(lengths) - 1)
    for row, own, piece in zip(found, scores, pieces, strict=True):
        assert_close(row[:len(piece) - 1], torch.tensor(literal(own, piece), dtype=torch.float64))
        assert not row[len(piece) - 1:].any()


def test_nll_of_impossible_keys_is_finite():
    rolls, mask = torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    assert_close(sequence_nll(torch.full((1, 2, 3), -200.), rolls, mask), torch.tensor([[600.]]))
    assert sequence_nll(torch.full((1, 2, 3), 200.), rolls, mask).item() == 0


@given(LENGTHS, st.integers(0, 99), st.integers(0, 3))
@few
def test_padding_adds_nothing(lengths, seed, extra):
    pieces, batch, scores = made(lengths, seed=seed)
    wide = [nn.functional.pad(part, (0, 0, 0, extra), value=value) for part, value in ((scores, math.nan), (batch.rolls, 7.))]
    wide = [part.requires_grad_(place == 0) for place, part in enumerate(wide)]
    mask = nn.functional.pad(batch.mask, (0, extra))
    nats = sequence_nll(*wide, mask)
    assert_close(nats.sum(1), sequence_nll(scores, *batch).sum(1))
    assert torch.isfinite(nats).all() and nats.shape[1] == mask.shape[1] - 1


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 5), (2, 3)), ((2, 4, 4), (2, 3, 4), (2, 3)), ((2, 3, 4), (2, 3, 4), (2, 4)), ((3, 4), (3, 4), (3,))])
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match=r"scores and rolls have one shape \(B, T, K\)"):
        sequence_nll(torch.zeros(shapes[0]), torch.zeros(shapes[1]), torch.ones(shapes[2]) > 0)


# ---- the averages

@given(LENGTHS.filter(lambda lengths: max(lengths) > 1), st.integers(0, 99))
@few
def test_averages(lengths, seed):
    "Over all steps, as the published code; and over pieces. Pieces of one step count in neither."
    pieces, batch, scores = made(lengths, seed=seed)
    nats = [literal(own, piece) for own, piece in zip(scores, pieces)]
    found = evaluate_sequences(model := Given(scores), [batch])
    assert not model.saw_gradients and found["nll"] == pytest.approx(sum(map(sum, nats)) / sum(map(len, nats)))
    assert found["nll_by_piece"] == pytest.approx(np.mean([np.mean(own) for own in nats if own]))


def test_averages_do_not_depend_on_batches():
    music, model = make_music((11, 1, 1), longest=12, shortest=1).train, lstm(keys=88).float()
    whole = evaluate_sequences(model, BucketLoader(music, 11, collate_music))
    for size in (1, 3):
        assert evaluate_sequences(model, BucketLoader(music, size, collate_music, seed=0, length=len)) == pytest.approx(whole, rel=1e-5)
    assert abs(whole["nll"] - whole["nll_by_piece"]) > 1e-4


def test_nothing_to_predict():
    for dealt in ([], [made([1, 1])[1]]):
        with pytest.raises(ValueError, match="nothing to predict"):
            evaluate_sequences(Given(made([1, 1])[2]), dealt)


@pytest.mark.parametrize("place", ["dropout_in", "dropout_out"])
def test_evaluation_is_without_dropout_and_gradient(place):
    torch.manual_seed(0)
    model = NextSet(create_encoder("lstm", dim=6), 5, **{place: .5}).double().train()
    batch = made([4, 6])[1]
    assert len({sequence_loss(model, batch).item() for _ in range(4)}) == 4        # it is there while training
    assert evaluate_sequences(model, [batch]) == evaluate_sequences(model.train(), [batch])
    assert not model.training and all(tensor.grad is None for tensor in model.parameters())


# ---- models that take keys one by one

@pytest.mark.parametrize("by_last", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_odds_are_counted(by_last, by_key):
    pieces = [piece.numpy() for piece in made([6, 1, 9, 4])[0]]
    odds = fit_key_by_key(pieces, by_last, by_key).odds
    for now in (0, 1):
        for k in range(5):
            later = [piece[t + 1, key] for piece in pieces for t in range(len(piece) - 1) for key in range(5)
                     if (piece[t, key] == now or not by_last) and (key == k or not by_key)]
            p = (sum(later) + .5) / (len(later) + 1)
            assert float(odds[now, k].sigmoid()) == pytest.approx(p, rel=1e-5)


def test_no_other_table_has_a_smaller_nll():
    music = make_music((100, 1, 1), longest=20).train
    dealt = list(BucketLoader(music, 100, collate_music))
    scores = {}
    for flags in ((False, False), (False, True), (True, False), (True, True)):
        model = fit_key_by_key(music, *flags)
        assert torch.equal(model.odds[0], model.odds[1]) == (not flags[0]) and (model.odds == model.odds[:, :1]).all() == (not flags[1])
        scores[flags] = evaluate_sequences(model, dealt)["nll"]
        for shift in (-.3, .3):
            assert evaluate_sequences(KeyByKey(model.odds + shift), dealt)["nll"] > scores[flags]
    assert scores[True, True] < min(scores[True, False], scores[False, True]) <= max(scores[True, False], scores[False, True]) < scores[False, False]


@given(LENGTHS, st.integers(0, 99))
@few
def test_key_by_key_looks_at_the_last_step_only(lengths, seed):
    batch, odds = made(lengths, seed=seed)[1], torch.randn(2, 5).double()
    out = KeyByKey(odds)(*batch)
    assert all(out.states[b, t, k] == odds[int(batch.rolls[b, t, k]), k] for b in range(len(lengths)) for t in range(max(lengths)) for k in range(5))
    assert torch.equal(out.root, batch.rolls.sum(1))


# ---- the future

@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"layers": 3, "dropout": .5}])
def test_causality_by_gradients(options):
    model, batch = lstm(**options), made([5, 3], silent=0)[1]
    rolls = batch.rolls.clone().requires_grad_()
    nats = sequence_nll(model(rolls, batch.mask).states, rolls, batch.mask)
    for b, t in batch.mask[:, 1:].nonzero().tolist():
        grad, = torch.autograd.grad(nats[b, t], rolls, retain_graph=True)
        assert not grad[1 - b].any() and not grad[b, t + 2:].any()                # no other piece, nothing later
        assert all(grad[b, s].any() for s in range(t + 2))                         # the whole past, and the step itself


@given(LENGTHS, st.integers(0, 99))
@few
def test_batch_mates_and_padding_change_nothing(lengths, seed):
    model, (pieces, batch, _) = lstm(), made(lengths, seed=seed)
    rolls = torch.where(batch.mask[..., None], batch.rolls, math.nan)
    scores = model(rolls, batch.mask).states
    for row, piece in zip(scores, pieces):
        alone = model(piece.double()[None], torch.ones(1, len(piece), dtype=torch.bool)).states[0]
        assert_close(row[:len(piece)], alone)


@pytest.mark.parametrize("name, said", [("bilstm", "looks ahead"), ("crvnn", "looks ahead"), ("gumbel_tree", "gives no states"),
                                        ("bt_grc", "gives no states"), ("rvnn", "given its trees")])
def test_encoders_that_will_not_do(name, said):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=said):
        NextSet(create_encoder(name, dim=8))


def test_trying_an_encoder_out_leaves_no_trace():
    torch.manual_seed(0)
    encoder = create_encoder("lstm", dim=4, layers=2, dropout=.5).train()
    encoder.dropout.eval()
    state, modes = torch.get_rng_state(), [part.training for part in encoder.modules()]
    assert future_gap(encoder) == 0 == future_gap(encoder, 2) and torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in encoder.modules()] == modes
    assert future_gap(create_encoder("bilstm", dim=4).double()) > 0


def test_a_little_of_the_future_is_noticed():
    class Peek(nn.Module):
        def __init__(self, dim, share):
            super().__init__()
            self.dim, self.share = dim, share

        def forward(self, x, mask, **_):
            return EncoderOutput(root=x[:, 0], states=x + self.share * x.roll(-1, 1))
    with pytest.raises(ValueError, match="Peek looks ahead"):
        NextSet(Peek(4, 1e-3))
    assert NextSet(Peek(4, 0)).in_proj.weight.shape == (4, 88)


# ---- training

class Noted(nn.Module):
    "An encoder with a loss of its own, which notes what it was given."
    dim = 6

    def forward(self, x, mask, *, trees=None, generator=None, trace=False):
        self.generator = generator
        return EncoderOutput(root=x[:, 0], states=x, loss=torch.tensor(3.))


def test_what_the_encoder_adds_and_is_given():
    model, batch, gen = NextSet(Noted(), 5).double(), made([4, 3])[1], torch.Generator()
    nats = sequence_nll(model(*batch, generator=gen).states, *batch)
    assert model.encoder.generator is gen
    assert_close(sequence_loss(model, batch), nats.sum(1).mean() + 3)


def test_the_loss_of_shares_is_the_loss_of_the_whole():
    model, batch = lstm(), made([7, 2, 1, 5, 4])[1]
    parts = [shard_batch(batch, rank, 3) for rank in range(3)]
    weighted = sum(sequence_loss(model, part) * len(part.rolls) for part in parts) / 5
    assert_close(weighted, sequence_loss(model, batch))
    nats = sequence_nll(model(*batch).states, *batch)
    assert_close(sequence_loss(model, batch), nats.sum() / 5)


def test_the_training_loop_takes_it():
    music = make_music((64, 16, 1), longest=12)
    torch.manual_seed(0)
    model = NextSet(create_encoder("lstm", dim=16))
    def judge(model): return evaluate_sequences(model, BucketLoader(music.validation, 16, collate_music))
    before = judge(model)["nll"]
    out = train(model, BucketLoader(music.train, 16, collate_music, seed=0, length=len), judge, loss=sequence_loss, steps=20,
                optimizer="adamw", learning_rate=2e-2)
    assert judge(model)["nll"] == pytest.approx(min(row["nll"] for row in out.history)) and judge(model)["nll"] < before / 3


# ---- published music

def test_key_frequencies_on_the_chorales():
    "By the frequencies that the music chapter stores: nothing but entropies; and by fitting, on the test part."
    if not SHARED.is_dir():
        pytest.skip("the folder shared/data/polymusic with the published files is not beside the checkout")
    music = parse_music(lzma.decompress((SHARED / "JSB_Chorales.mat.xz").read_bytes()))
    model = fit_key_by_key(music.train, by_last=False)
    q = np.array(PUBLISHED["jsb"].keys) / PUBLISHED["jsb"].steps
    entropy = -sum(p * math.log(p) + (1 - p) * math.log(1 - p) for p in q if p > 0)
    on_train = evaluate_sequences(model, BucketLoader(music.train, 32, collate_music, length=len))["nll"]
    assert on_train == pytest.approx(entropy, rel=.01)                   # all but the first steps
    with np.load(io.BytesIO(lzma.decompress((SHARED / "JSB_Chorales.npz.xz").read_bytes())), allow_pickle=False) as bits:
        frames, offsets = np.unpackbits(bits["testdata_packed"], axis=1).astype(float), bits["testdata_offsets"]
    p, later = model.odds[0].sigmoid().double().numpy(), np.delete(frames, offsets[:-1], axis=0)
    nats = -(later * np.log(p) + (1 - later) * np.log1p(-p)).sum(1)
    found = evaluate_sequences(model, BucketLoader(music.test, 16, collate_music, length=len))["nll"]
    assert found == pytest.approx(nats.mean(), rel=1e-4) and 10 < found < 12
