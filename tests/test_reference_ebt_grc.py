"The Efficient Beam Tree of the chapter equals the library's encoders, sentence by sentence, in values and gradients."
import pytest
import torch

from rvnnbook.encoders.efficient_beam import EfficientBeam
from rvnnbook.layers.tree_search import steps_from_merges
from rvnnbook.reference import ebt_grc
from rvnnbook.reference.ebt_grc import EBTGRC, best_of
from rvnnbook.registry import create_encoder
from tests.helpers import assert_equal_in_a_padded_batch, batch, close, imported_packages

DIM = 6
LENGTHS = [1, 2, 3, 4, 7, 11]


def pair(compiled=False, beam=3, score_dim=4, sharpness=1.0):
    torch.manual_seed(0)
    encoder = EfficientBeam(DIM, beam, score_dim, compiled=compiled).double().eval()
    with torch.no_grad():
        encoder.scorer[1].weight *= sharpness
    reference = EBTGRC(DIM, beam, score_dim).double().eval()
    reference.load_state_dict(encoder.state_dict())
    return encoder, reference


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"beam": 1}, {"beam": 5, "score_dim": 64}, {"beam": 2, "sharpness": 30.0}], ids=str)
def test_values_and_gradients_equal_those_of_the_encoder_in_a_padded_batch(compiled, options):
    encoder, reference = pair(compiled, **options)
    assert_equal_in_a_padded_batch(reference, encoder, LENGTHS, DIM)


@pytest.mark.parametrize("beam", [1, 3, 30])
def test_scores_and_trees_equal_those_of_the_encoder(beam):
    encoder, reference = pair(beam=beam)
    x, mask = batch(LENGTHS, DIM)
    with torch.no_grad():
        trace = encoder(x, mask, trace=True).trace
        for b, n in enumerate(LENGTHS):
            _, hypotheses = reference(x[b, :n])
            held = sorted((one.score.item(), steps_from_merges(list(one.merges), n)) for one in hypotheses)
            real = (trace["scores"][b] > -torch.inf).nonzero()[:, 0].tolist()
            wanted = sorted((trace["scores"][b, k].item(), trace["beams"][b, k, :n].tolist()) for k in real)
            assert [score for score, _ in held] == pytest.approx([score for score, _ in wanted], abs=1e-9)
            assert [tree for _, tree in held] == [tree for _, tree in wanted]


def test_committed_weights_fit():
    encoder = create_encoder("ebt_grc", weights="listops").double().eval()
    reference = EBTGRC(128).double().eval()
    reference.load_state_dict(encoder.state_dict())
    x, mask = batch([5, 9], 128)
    with torch.no_grad():
        found = torch.stack([reference(row[:n])[0] for row, n in zip(x, (5, 9))])
        close(found, encoder(x, mask).root, 1e-9)


def test_noise_is_for_training_only_and_scores_stay_free_of_it():
    torch.manual_seed(0)
    reference, x = EBTGRC(DIM, beam=30).double(), torch.randn(4, DIM).double()
    for noise in (True, False):                                  # all orders are held: noise only permutes them
        reference.train(noise)
        _, hypotheses = reference(x)
        assert len({one.merges for one in hypotheses}) == 6
        assert sum(one.score.exp().item() for one in hypotheses) == pytest.approx(1)


def test_noisy_choice_draws_from_the_softmax():
    torch.manual_seed(0)
    scores = torch.tensor([1.0, 0.0, -1.0])
    first = torch.tensor([best_of(scores, 2, True)[0] for _ in range(4000)]).bincount(minlength=3) / 4000
    assert (first - scores.softmax(0)).abs().max() < 0.035


def test_only_torch_and_the_reference_are_imported():
    assert imported_packages(ebt_grc) == {"torch", "beam_tree", "crvnn"}
