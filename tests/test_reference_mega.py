"The MEGA of the chapter against the library's encoder."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.reference.mega import MEGA
from rvnnbook.registry import create_encoder

from .helpers import assert_equal_batch_gradients, batch_of

LENGTHS, DIM = (9, 1, 4, 2), 6


@pytest.mark.parametrize("layers, key_dim, memories, reach", [(1, 4, 1, 16), (2, 3, 4, 3), (3, 4, 2, 1)])
def test_values_attention_and_gradients_equal_the_encoder(layers, key_dim, memories, reach):
    torch.manual_seed(layers)
    options = {"layers": layers, "key_dim": key_dim, "memories": memories, "reach": reach}
    encoder, model = create_encoder("mega", dim=DIM, **options).double(), MEGA(DIM, **options).double()
    for layer in encoder.layer:
        torch.nn.init.normal_(layer.qk_scale)
        torch.nn.init.normal_(layer.qk_shift)
    model.load_state_dict(encoder.state_dict())
    x, mask = batch_of(LENGTHS, layers)
    x.requires_grad_()
    leaves = [x[row, :n].detach().clone().requires_grad_() for row, n in enumerate(LENGTHS)]
    out, found = encoder(x, mask, trace=True), [model(leaf) for leaf in leaves]
    root = torch.stack([vector for vector, _ in found])
    assert_close(out.root, root, rtol=0, atol=1e-9)
    for row, (_, states) in enumerate(found):
        assert_close(out.states[row, :len(states)], states, rtol=0, atol=1e-9)
        attention = model.layer[0].attention(leaves[row])[0]
        seen = out.trace["attention"][0, row, :len(states), :len(states)]
        assert_close(seen, attention.detach().float(), rtol=0, atol=1e-6)     # traced in float32
    assert_equal_batch_gradients(model, encoder, root, out.root, leaves, x)
