"The Beam Tree of the chapter equals the library's encoders, sentence by sentence, in values and gradients."
import ast
from pathlib import Path

import pytest
import torch

from rvnnbook.encoders.beam_tree import BeamTree as Encoder
from rvnnbook.encoders.parent_beam import ParentBeam
from rvnnbook.layers.cells import GRC as LibraryGRC
from rvnnbook.layers.tree_search import steps_from_merges
from rvnnbook.reference import beam_tree
from rvnnbook.reference.beam_tree import GRC, BeamTree, Hypothesis, Proposal, merge, soft_merge
from tests.helpers import batch, slopes

DIM = 6
LENGTHS = [1, 2, 3, 4, 6, 9]


def pair(library=Encoder, beam=3, soft=False, seed=0):
    torch.manual_seed(seed)
    encoder = library(DIM, beam=beam, soft=soft).double().train(soft)      # the encoder mixes in training only
    reference = BeamTree(DIM, beam, soft).double()
    reference.load_state_dict(encoder.state_dict())
    return encoder, reference


def close(found, expected, tolerance):
    assert found.shape == expected.shape and found.isfinite().all()
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
@pytest.mark.parametrize("library", [Encoder, ParentBeam])
def test_values_and_gradients_equal_those_of_the_encoder_in_a_padded_batch(library, beam, soft):
    encoder, reference = pair(library, beam, soft)
    x, mask = batch(LENGTHS, DIM)
    inputs = [row[:n].clone().requires_grad_() for row, n in zip(x, LENGTHS)]
    padded = torch.stack([torch.cat([row, torch.full((9 - len(row), DIM), torch.nan, dtype=row.dtype)]) for row in inputs])
    expected = encoder(padded, mask).root
    found = torch.stack([reference(row)[0] for row in inputs])
    close(found, expected, 1e-9)
    names = sorted(name for name, _ in reference.named_parameters())
    mine, theirs = (dict(module.named_parameters()) for module in (reference, encoder))
    assert names == sorted(theirs)
    ours = slopes(found, [*inputs, *(mine[name] for name in names)])
    wanted = slopes(expected, [*inputs, *(theirs[name] for name in names)])
    for one, other in zip(ours, wanted, strict=True):
        close(one, other, 1e-8)


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


def test_cell_equals_the_library_cell():
    torch.manual_seed(0)
    cell, other = GRC(DIM).double(), LibraryGRC(DIM).double()
    cell.load_state_dict(other.state_dict())
    left, right = torch.randn(2, 7, DIM, dtype=torch.float64)
    close(cell(left, right), other(left, right), 1e-12)


def test_only_torch_is_imported():
    tree = ast.parse(Path(beam_tree.__file__).read_text())
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
             for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {name.split(".")[0] for name in names} <= {"torch", "typing", "__future__"}
