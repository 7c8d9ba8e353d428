"The Ordered Memory of the chapter against the library's encoder."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.reference.ordered_memory import OrderedMemory
from rvnnbook.registry import create_encoder

from .helpers import batch_of, slopes

LENGTHS, DIM = (9, 1, 4, 2), 6


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_values_choices_and_gradients_equal_the_encoder(slots):
    torch.manual_seed(slots)
    encoder = create_encoder("ordered_memory", dim=DIM, slots=slots).double()
    model = OrderedMemory(DIM, slots).double()
    model.load_state_dict(encoder.state_dict())
    x, mask = batch_of(LENGTHS, slots)
    x.requires_grad_()
    leaves = [x[row, :n].detach().clone().requires_grad_() for row, n in enumerate(LENGTHS)]
    out = encoder(x, mask, trace=True)
    found = [model(leaf) for leaf in leaves]
    root = torch.stack([states[-1] for states, _ in found])
    assert_close(out.root, root, rtol=0, atol=1e-9)
    for row, (states, p) in enumerate(found):
        assert_close(out.states[row, :len(states)], states, rtol=0, atol=1e-9)
        assert_close(out.trace["slots"][row, :len(p)], p.detach(), rtol=0, atol=1e-9)
    named = dict(model.named_parameters())
    assert named.keys() == dict(encoder.named_parameters()).keys()
    ours = slopes(root, [*leaves, *named.values()])
    theirs = slopes(out.root, [x, *(dict(encoder.named_parameters())[name] for name in named)])
    for row, gradient in enumerate(ours[:len(leaves)]):
        assert_close(theirs[0][row, :len(gradient)], gradient, rtol=0, atol=1e-8)
    for mine, other in zip(ours[len(leaves):], theirs[1:], strict=True):
        assert_close(mine, other, rtol=0, atol=1e-8)
