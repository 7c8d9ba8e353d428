"The Beam Tree of the chapter equals the library's encoders, sentence by sentence, in values and gradients."
import pytest
import torch

from rvnnbook.encoders.beam_tree import BeamTree as Encoder
from rvnnbook.literal import LiteralBeamTree
from rvnnbook.layers.tree_search import steps_from_merges
from rvnnbook.reference import beam_tree
from rvnnbook.reference.beam_tree import BeamTree, Hypothesis, Proposal, merge, soft_merge
from tests.helpers import assert_equal_in_a_padded_batch, batch, close, imported_packages

DIM = 6
LENGTHS = [1, 2, 3, 4, 6, 9]


def pair(library=Encoder, beam=3, soft=False, seed=0):
    torch.manual_seed(seed)
    encoder = library(DIM, beam=beam, soft=soft).double().train(soft)      # the encoder mixes in training only
    reference = BeamTree(DIM, beam, soft).double()
    reference.load_state_dict(encoder.state_dict())
    return encoder, reference


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
@pytest.mark.parametrize("library", [LiteralBeamTree, Encoder])
def test_values_and_gradients_equal_those_of_the_encoder_in_a_padded_batch(library, beam, soft):
    encoder, reference = pair(library, beam, soft)
    assert_equal_in_a_padded_batch(reference, encoder, LENGTHS, DIM)


@pytest.mark.parametrize("beam", [1, 3, 30])
def test_scores_and_trees_equal_those_of_the_encoder(beam):
    encoder, reference = pair(beam=beam)
    x, mask = batch(LENGTHS, DIM)
    trace = encoder(x, mask, trace=True).trace
    for b, n in enumerate(LENGTHS):
        _, hypotheses = reference(x[b, :n])
        real = trace["scores"][b] > -torch.inf
        close(torch.stack([one.score for one in hypotheses]).detach(), trace["scores"][b, real], 1e-9)
        assert [steps_from_merges(list(one.merges), n) for one in hypotheses] == trace["beams"][b, real, :n].tolist()


def test_a_mixture_of_one_proposal_is_that_proposal():
    torch.manual_seed(0)
    nodes, parents = torch.randn(5, DIM), torch.randn(4, DIM)
    for place in range(4):
        proposal = Proposal(Hypothesis(nodes, torch.tensor(0.0)), parents, place, torch.tensor(-1.0))
        one, other = merge(proposal), soft_merge([proposal])
        close(one.nodes, other.nodes, 1e-6)
        assert one.merges == other.merges == (place,) and one.score == other.score


def test_only_torch_and_the_reference_are_imported():
    assert imported_packages(beam_tree) == {"torch", "typing", "crvnn", "gumbel_tree"}
