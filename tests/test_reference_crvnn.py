"The CRvNN of the chapter equals the library's encoder, sentence by sentence, in values and gradients."
import pytest
import torch

from rvnnbook.encoders.crvnn import CRvNN as Encoder
from rvnnbook.encoders.crvnn import PositionScorer
from rvnnbook.layers.cells import GRC as BatchedGRC
from rvnnbook.layers.neighbors import neighbor_weights
from rvnnbook.reference import crvnn
from rvnnbook.reference.crvnn import GRC, CRvNN, left_weights, right_weights
from tests.helpers import assert_equal_gradients, batch, close, imported_packages, padded_sentences

DIM = 6


def renamed(state):
    "The encoder's names for the reference."
    return {"decision." + name if name.startswith(("scorer", "transition")) else name: value for name, value in state.items()}


def pair(root="last", seed=0, sharpness=1.0, **options):
    torch.manual_seed(seed)
    window = options.pop("window", 2)
    encoder = Encoder(DIM, root=root, **options)
    encoder.scorer = PositionScorer(DIM, window, options.get("transition_dim", 64))
    encoder = encoder.double().eval()
    with torch.no_grad():
        encoder.scorer[1].weight *= sharpness
    reference = CRvNN(DIM, window, options.get("transition_dim", 64), options.get("threshold", 0.01)).double()
    reference.load_state_dict(renamed(encoder.state_dict()))
    return encoder, reference


CASES = [dict(), dict(root="first"), dict(window=1, transition_dim=5), dict(threshold=0.3), dict(sharpness=30.0), dict(sharpness=30.0, root="first")]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_values_and_gradients_equal_those_of_the_encoder_in_a_padded_batch(options):
    encoder, reference = pair(**options)
    lengths = [1, 2, 3, 5, 8, 13]
    x, mask = batch(lengths, DIM)
    inputs, padded = padded_sentences(x, lengths)
    out = encoder(padded, mask, trace=True)
    turn = (lambda row: row.flip(0)) if options.get("root") == "first" else (lambda row: row)
    found = [reference(turn(row)) for row in inputs]
    roots, penalties = torch.stack([root for root, *_ in found]), torch.stack([penalty for *_, penalty in found])
    close(roots, out.root, 1e-9)
    close(0.01 * penalties.mean(), out.loss, 1e-9)
    close(penalties.detach(), out.trace["penalty"], 1e-9)
    for row, (_, exists, _), n in zip(out.trace["existence"][-1], found, lengths):
        close(turn(exists.detach()), row[:n], 1e-9)
    assert [len(list(reference.rounds(turn(row)))) - 1 for row in inputs] == out.trace["rounds"].tolist()

    values = [torch.cat([root.flatten(), penalty[None]]) for root, penalty in ((roots, penalties.mean()), (out.root, out.loss / 0.01))]
    assert_equal_gradients(*values, inputs, reference.named_parameters(), renamed(dict(encoder.named_parameters())).items())


def test_neighbors_equal_those_of_the_library():
    exists = torch.rand(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for side, rule in (("left", left_weights), ("right", right_weights)):
        close(torch.stack([rule(row) for row in exists]), neighbor_weights(exists, side), 1e-12)


def test_cell_equals_the_library_cell():
    torch.manual_seed(0)
    cell, other = GRC(DIM).double(), BatchedGRC(DIM).double()
    cell.load_state_dict(other.state_dict())
    left, right = torch.randn(2, 7, DIM, dtype=torch.float64)
    close(cell(left, right), other(left, right), 1e-12)


def test_only_torch_and_the_standard_library_are_imported():
    assert imported_packages(crvnn) == {"collections", "torch"}
