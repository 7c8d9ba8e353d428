"The Self-IRU of the chapter against the library's encoder."
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rvnnbook.reference.self_iru import SelfIRU
from rvnnbook.registry import create_encoder

from .helpers import batch_of, slopes

LENGTHS, DIM = (7, 1, 4, 2), 6


def encoder_of(depth, base, directions):
    torch.manual_seed(3)
    return create_encoder("self_iru", dim=DIM, depth=depth, base=base, directions=directions).double()


def load(encoder, prefix, dim, depth, base):
    "The reference with the weights of one direction, and the names of its parameters in the encoder."
    unit = SelfIRU(dim, depth, base).double()
    names = {name: f"{prefix}{name}" for name in unit.state_dict()}
    unit.load_state_dict({name: encoder.state_dict()[theirs] for name, theirs in names.items()})
    return unit, names


def assert_equal(encoder, roots, states, x, leaves, named):
    "Values of a padded batch, and gradients in tokens and parameters."
    batch, mask = x
    out = encoder(batch, mask)
    assert_close(out.root, torch.stack(roots), rtol=0, atol=1e-9)
    for row, h in enumerate(states):
        assert_close(out.states[row, :len(h)], h, rtol=0, atol=1e-9)
    parameters = dict(encoder.named_parameters())
    theirs = slopes(out.root, [batch, *(parameters[name] for name in named)])
    ours = slopes(torch.stack(roots), [*leaves, *named.values()])
    for row, leaf in enumerate(ours[:len(leaves)]):
        assert_close(theirs[0][row, :len(leaf)], leaf, rtol=0, atol=1e-8)
    for mine, other in zip(ours[len(leaves):], theirs[1:], strict=True):
        assert_close(mine, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("base", ["linear", "lstm"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_left_to_right_equals_the_encoder(depth, base):
    encoder = encoder_of(depth, base, 1)
    unit, names = load(encoder, "readers.0.", DIM, depth, base)
    x, mask = batch_of(LENGTHS, 0)
    leaves = [x[row, :n].clone().requires_grad_() for row, n in enumerate(LENGTHS)]
    states = [unit(leaf) for leaf in leaves]
    named = {names[name]: weight for name, weight in unit.named_parameters()}
    assert set(named) == set(dict(encoder.named_parameters()))
    assert_equal(encoder, [h[-1] for h in states], states, (x.requires_grad_(), mask), leaves, named)


@pytest.mark.parametrize("base", ["linear", "lstm"])
def test_both_directions_are_two_units_behind_linear_maps(base):
    encoder = encoder_of(2, base, 2)
    x, mask = batch_of(LENGTHS, 1)
    leaves = [x[row, :n].clone().requires_grad_() for row, n in enumerate(LENGTHS)]
    named, halves = {}, []
    for direction in range(2):
        unit, names = load(encoder, f"readers.{direction}.1.", DIM // 2, 2, base)
        entry = nn.Linear(DIM, DIM // 2).double()
        entry.load_state_dict(encoder.readers[direction][0].state_dict())
        named |= {names[name]: weight for name, weight in unit.named_parameters()}
        named |= {f"readers.{direction}.0.{name}": weight for name, weight in entry.named_parameters()}
        halves.append([unit(entry(leaf)) if direction == 0 else unit(entry(leaf.flip(0))).flip(0)
                       for leaf in leaves])
    assert set(named) == set(dict(encoder.named_parameters()))
    states = [torch.cat(pair, -1) for pair in zip(*halves)]
    roots = [torch.cat([forth[-1], back[0]]) for forth, back in zip(*halves)]
    assert_equal(encoder, roots, states, (x.requires_grad_(), mask), leaves, named)


def test_outputs_are_bounded_by_their_tokens():
    torch.manual_seed(0)
    for depth in range(4):
        unit = SelfIRU(DIM, depth).double()
        for weight in unit.parameters():
            weight.data.mul_(100)
        x = torch.randn(30, DIM).double()
        assert (unit(x) - x).abs().max() <= 1 + 1e-12
