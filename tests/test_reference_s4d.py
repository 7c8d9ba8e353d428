"The S4D stack of the chapter against the library's encoder."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.reference.s4d import S4DStack, StateSpaces, run_states
from rvnnbook.layers.s4d import S4DKernel, convolve
from rvnnbook.registry import create_encoder

from .helpers import assert_equal_batch_gradients, batch_of, on_page

state_kernel, = on_page("state_spaces", "state_kernel")
LENGTHS, DIM = (9, 1, 4, 2), 6


@pytest.mark.parametrize("layers, state_size", [(1, 2), (2, 8), (3, 4)])
def test_values_and_gradients_equal_the_encoder(layers, state_size):
    torch.manual_seed(layers)
    encoder = create_encoder("s4d", dim=DIM, layers=layers, state_size=state_size).double()
    model = S4DStack(DIM, layers, state_size).double()
    model.load_state_dict(encoder.state_dict())
    x, mask = batch_of(LENGTHS, layers)
    x.requires_grad_()
    leaves = [x[row, :n].detach().clone().requires_grad_() for row, n in enumerate(LENGTHS)]
    out, found = encoder(x, mask), [model(leaf) for leaf in leaves]
    root = torch.stack([vector for vector, _ in found])
    assert_close(out.root, root, rtol=0, atol=1e-9)
    for row, (_, states) in enumerate(found):
        assert_close(out.states[row, :len(states)], states, rtol=0, atol=1e-9)
    assert_equal_batch_gradients(model, encoder, root, out.root, leaves, x)


def test_kernels_of_both_directions_equal_the_layer():
    torch.manual_seed(0)
    layer, spaces = S4DKernel(DIM, 8, directions=2).double(), StateSpaces(DIM, 8).double()
    spaces.load_state_dict(layer.state_dict())
    past, future = layer(12)
    weights, ratios = spaces.discretize()
    assert_close(state_kernel(weights[0], ratios, 12), past)
    assert_close(state_kernel(weights[1], ratios, 12), future)
    x = torch.randn(12, DIM).double()
    assert_close(spaces(x), convolve(x[None], past, future)[0])
    assert_close(run_states(x, weights[0], ratios), convolve(x[None], past)[0])
