"What the tests of all encoders do not reach of the LSTM: stacks of layers, the fused routine, what is refused."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rvnnbook.core import batch_gap, length_mask, padding_gap
from rvnnbook.encoders.recurrent import LSTM
from rvnnbook.layers.masking import reverse_tokens

SHAPES = [(layers, directions) for layers in (1, 2, 3) for directions in (1, 2)]
shapes = pytest.mark.parametrize("layers, directions", SHAPES)
few = settings(deadline=None, max_examples=15)


def make(layers=1, directions=1, dim=6, seed=0, **options):
    torch.manual_seed(seed)
    return LSTM(dim, layers, directions, **options).eval()


def batch(lengths, dim=6, seed=0, dtype=torch.float64):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan).to(dtype), mask


def read(tokens, reader):
    "One sentence through one reader, as the equations say: states, (n, W)."
    h = c = torch.zeros(reader.hidden_size, dtype=tokens.dtype)
    states = []
    for token in tokens:
        z = reader.weight_ih_l0 @ token + reader.bias_ih_l0 + reader.weight_hh_l0 @ h + reader.bias_hh_l0
        write, keep, new, show = z.chunk(4)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        h = torch.sigmoid(show) * torch.tanh(c)
        states.append(h)
    return torch.stack(states)


def by_hand(encoder, tokens):
    "States and root of one sentence without padding."
    for readers in encoder.layers:
        sides = [read(tokens, readers[0])] + [read(tokens.flip(0), reader).flip(0) for reader in readers[1:]]
        tokens = torch.cat(sides, -1)
    return tokens, torch.cat([sides[0][-1], *(side[0] for side in sides[1:])])


@shapes
@few
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_every_sentence_is_read_as_the_equations_say(layers, directions, lengths, seed):
    encoder, (x, mask) = make(layers, directions, seed=seed).double(), batch(lengths, seed=seed)
    out = encoder(x, mask)
    assert out.states.shape == x.shape and not out.states[~mask].any()
    for b, n in enumerate(lengths):
        states, root = by_hand(encoder, x[b, :n])
        torch.testing.assert_close(out.states[b, :n], states)
        torch.testing.assert_close(out.root[b], root)
    assert batch_gap(encoder, x, mask) <= 1e-9 and padding_gap(encoder, x, mask) <= 1e-9


@shapes
def test_single_precision_and_its_gradients(layers, directions):
    "In single precision the library takes another routine, written for speed; that is the one which trains."
    encoder, (x, mask) = make(layers, directions, dim=32), batch([40, 1, 17, 23], dim=32, dtype=torch.float32)
    exact = make(layers, directions, dim=32).double()
    exact.load_state_dict(encoder.state_dict())
    found = []
    for module, tokens in ((encoder.train(), x), (exact, x.double())):
        tokens = tokens.requires_grad_()
        root = module(tokens, mask).root
        root.square().sum().backward()
        assert not tokens.grad[~mask].any()
        found.append([root, tokens.grad, *(p.grad for p in module.parameters())])
    for single, double in zip(*found, strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-5)


@shapes
def test_states_keep_the_precision_of_the_input(layers, directions):
    encoder, (x, mask) = make(layers, directions), batch([4, 2], dtype=torch.float32)
    plain = encoder(x, mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = encoder(x, mask)
    for rough, exact in ((mixed.root, plain.root), (mixed.states, plain.states)):
        assert rough.dtype == torch.float32 and 0 < (rough - exact).abs().max() < 0.05


def test_one_direction_never_looks_ahead():
    encoder, (x, mask) = make(layers=2).double(), batch([6])
    changed = x.clone()
    changed[:, 4] += 1
    before, after = encoder(x, mask).states, encoder(changed, mask).states
    assert torch.equal(before[:, :4], after[:, :4]) and ((before - after)[:, 4:].abs().amax(-1) > 1e-4).all()
    encoder = make(layers=1, directions=2).double()
    before, after = encoder(x, mask).states, encoder(changed, mask).states
    assert torch.equal(before[:, :4, :3], after[:, :4, :3]) and torch.equal(before[:, 5:, 3:], after[:, 5:, 3:])
    assert ((before - after)[:, :5, 3:].abs().amax(-1) > 1e-6).all()


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 3))
def test_turning_round(lengths, extra):
    mask = length_mask(torch.tensor(lengths), max(lengths) + extra)
    x = torch.arange(mask.numel()).reshape(*mask.shape, 1)
    turned = reverse_tokens(x, mask)
    assert torch.equal(reverse_tokens(turned, mask), x) and torch.equal(turned[~mask], x[~mask])
    for row, back, n in zip(x, turned, lengths):
        assert torch.equal(back[:n], row[:n].flip(0))


def test_dropout_acts_between_layers_only():
    encoder, (x, mask) = make(layers=2, dropout=0.5).double(), batch([5, 3])
    first = []
    encoder.layers[1][0].register_forward_pre_hook(lambda module, args: first.append(args[0]))
    encoder.train()
    torch.manual_seed(0)
    encoder(x, mask)
    share = float((first[0][mask] == 0).double().mean())
    encoder.eval()(x, mask)
    assert 0.2 < share < 0.8 and not (first[1][mask] == 0).any()
    kept = first[0][mask] != 0
    torch.testing.assert_close(first[0][mask][kept], 2 * first[1][mask][kept])      # what was read below is not dropped


@pytest.mark.parametrize("directions", [1, 2])
def test_forget_gates_start_open(directions):
    for bias in (1.0, 3.0):
        encoder = make(2, directions, dim=8, forget_bias=bias)
        for reader in (reader for layer in encoder.layers for reader in layer):
            both = (reader.bias_ih_l0 + reader.bias_hh_l0).chunk(4)
            assert (both[1] == bias).all() and all((other != bias).all() and other.any() for other in both[::2])
    assert LSTM(4).layers[0][0].bias_ih_l0[4:8].eq(1).all()


@pytest.mark.parametrize("options, said", [
    (dict(dim=7, directions=2), "dim=7"), (dict(dim=8, directions=3), "directions=3"), (dict(dim=8, directions=0), "directions=0"),
    (dict(dim=8, layers=0), "layers must be a whole number from 1, got 0"), (dict(dim=8, dropout=0.1), "dropout=0.1")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        LSTM(**options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_width_is_shared_by_directions():
    one, two = make(directions=1, dim=8), make(directions=2, dim=8)
    assert [reader.hidden_size for reader in (*one.layers[0], *two.layers[0])] == [8, 4, 4]
    assert all(isinstance(reader, nn.LSTM) for reader in two.layers[0])
