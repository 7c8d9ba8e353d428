"The LSTM of the chapter is the library's encoder, sentence by sentence."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.recurrent import LSTM as Encoder
from rvnnbook.reference.lstm import LSTM, LSTMLayer
from tests.helpers import assert_same, batch, slopes

LENGTHS = [5, 1, 8, 2]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_values_and_gradients_of_the_encoder(layers, directions):
    torch.manual_seed(0)
    encoder = Encoder(6, layers, directions).double().eval()
    reference = LSTM(6, layers, directions).double()
    reference.load_state_dict(encoder.state_dict())
    x, mask = batch(LENGTHS, dim=6)
    x.requires_grad_()
    fast = encoder(x, mask)
    plain = [reference(row[:n]) for row, n in zip(x, LENGTHS)]
    roots, states = torch.stack([root for root, _ in plain]), torch.cat([states for _, states in plain])
    assert_close(roots, fast.root, rtol=0, atol=1e-9)
    assert_close(states, fast.states[mask], rtol=0, atol=1e-9)
    ours, theirs = torch.cat([roots, states]), torch.cat([fast.root, fast.states[mask]])
    assert_same(slopes(ours, [x, *reference.parameters()]), slopes(theirs, [x, *encoder.parameters()]), 1e-8)


def test_initialization_agrees_with_the_encoder():
    torch.manual_seed(0)
    ours, theirs = LSTM(256).state_dict(), Encoder(256).state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].shape == theirs[name].shape
        assert_close(ours[name].std(), theirs[name].std(), rtol=.1, atol=0)
    layer = LSTMLayer(4, 3, forget_bias=2.0)
    assert (layer.bias_ih_l0 + layer.bias_hh_l0)[3:6].tolist() == [2, 2, 2]
