"Self-IRU against a recursion that knows nothing of levels and scans; pieces, padding, bounds, and the networks it contains."
import math
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap
from rvnnbook.encoders.self_iru import (BASES, IRU, LinearBase, LSTMBase, PositionwiseIRU, SelfIRU, _by_level, depth_gates,
                                        _level_gates, _self_iru_scans)
from rvnnbook.literal import self_iru_literal
from rvnnbook.registry import create_encoder

many = settings(deadline=None, max_examples=25)
depths, bases, shares = st.integers(0, 3), st.sampled_from(sorted(BASES)), st.sampled_from(["depth", "node"])
EVERY = [dict(depth=depth, base=base, share=share) for depth, base, share in product((0, 1, 3), BASES, ("depth", "node"))]
some = pytest.mark.parametrize("options", EVERY, ids=lambda o: f"{o['depth']}-{o['base']}-{o['share']}")


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_of(dim, seed=0, kind=IRU, **options):
    torch.manual_seed(seed)
    return kind(dim, **options).double()


def flat_by_path(unit, level, place, x):
    "F_f, F_o, F_z of a node for all tokens, from the weights; an LSTM step by step."
    base, shared = unit.bases[level], len(unit.bases) - 1 > level and count_of(unit.bases[level]) == 1
    place, dim = 0 if shared else place, x.shape[-1]
    if isinstance(base, LinearBase):
        rows = slice(place * dim, (place + 1) * dim)
        return [F.linear(x, part.weight[rows], part.bias[rows]) for part in base.parts]
    found = []
    for part in base.parts[3 * place:3 * place + 3]:
        h = c = torch.zeros_like(x[:, 0])
        states = []
        for x_t in x.unbind(1):
            i, f, g, o = (F.linear(x_t, part.weight_ih_l0, part.bias_ih_l0) + F.linear(h, part.weight_hh_l0, part.bias_hh_l0)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        found.append(torch.stack(states, 1))
    return found


def count_of(base):
    return base.nodes if isinstance(base, LinearBase) else len(base.parts) // 3


def plain(unit, x, level=None, node=1, still=False):
    "A node over all tokens by the equations of the paper, its children by the same function."
    level = len(unit.bases) - 1 if level is None else level
    f, o, z = flat_by_path(unit, level, node - 2 ** (len(unit.bases) - 1 - level), x)
    if level:
        for_f, for_o = 2 * node, 2 * node + 1
        alpha, beta = (torch.sigmoid(x @ unit.extent.weight[child - 2] + unit.extent.bias[child - 2])[..., None] for child in (for_f, for_o))
        f = alpha * plain(unit, x, level - 1, for_f, still) + (1 - alpha) * f
        o = beta * plain(unit, x, level - 1, for_o, still) + (1 - beta) * o
    f, o, z = 1 / (1 + (-f).exp()), 1 / (1 + (-o).exp()), z.tanh()
    if still:
        return f * x + o * z + x
    c, states = torch.zeros_like(x[:, 0]), []
    for f_t, o_t, z_t, x_t in zip(*(part.unbind(1) for part in (f, o, z, x)), strict=True):
        c = f_t * c + (1 - f_t) * z_t
        states.append(o_t * c + x_t)
    return torch.stack(states, 1)


def with_slopes(form, wanted, seed=7):
    h = form()
    push = draw(*h.shape, seed=seed)
    return h.detach(), *torch.autograd.grad((h * push).sum(), wanted, allow_unused=True, materialize_grads=True)


def assert_same(found, expected, tolerance=1e-12):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.detach().abs().max()) if theirs.numel() else 1.0))


def hoisted(depth, share, batch=2, length=5, dim=3, seed=0, scale=1.0):
    counts = [1 if share == "depth" else 2 ** (depth - level) for level in range(depth + 1)]
    flats = [tuple(draw(batch, length, count, dim, seed=seed + 10 * level + part, scale=scale) for part in range(3))
             for level, count in enumerate(counts)]
    return draw(batch, length, dim, seed=seed + 100, scale=scale), flats, draw(batch, length, 2 ** (depth + 1) - 2, seed=seed + 101).sigmoid()


# ---- the theorem

@many
@example(3, "lstm", "node", 2, 4, 2, 0)
@example(2, "linear", "depth", 1, 130, 2, 0)                           # long and narrow: the scan in blocks
@given(depths, bases, shares, st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_the_unit_is_its_tree(depth, base, share, batch, length, dim, seed):
    "Values and gradients, in the tokens and in every weight."
    unit = unit_of(dim, seed, depth=depth, base=base, share=share)
    x = draw(batch, length, dim, seed=seed).requires_grad_()
    wanted = [x, *unit.parameters()]
    assert_same(with_slopes(lambda: unit(x)[0], wanted), with_slopes(lambda: plain(unit, x), wanted))


@many
@given(depths, shares, st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99), st.sampled_from([0.1, 1.0, 30.0]))
def test_scans_are_the_loop(depth, share, batch, length, dim, seed, scale):
    x, flats, gates = hoisted(depth, share, batch, length, dim, seed, scale)
    wanted = [part.requires_grad_() for part in (x, gates, *sum(flats, ()))]
    assert_same(with_slopes(lambda: _self_iru_scans(x, flats, gates)[0], wanted), with_slopes(lambda: self_iru_literal(x, flats, gates), wanted))


@pytest.mark.parametrize("depth, share", list(product(range(3), ("depth", "node"))))
def test_gradcheck(depth, share):
    x, flats, gates = hoisted(depth, share, 1, 3, 2)
    c0 = [draw(1, (2 ** (depth - level) if level or share == "node" else 1) * 2, seed=level).tanh() for level in range(depth + 1)]
    given = [part.requires_grad_() for part in (x, gates, *c0, *sum(flats, ()))]

    def form(x, gates, *rest):
        memories, parts = rest[:depth + 1], rest[depth + 1:]
        h, kept = _self_iru_scans(x, [tuple(parts[at:at + 3]) for at in range(0, len(parts), 3)], gates, memories)
        return h, *kept
    assert torch.autograd.gradcheck(form, given)


def test_one_leaf_is_enough():
    "Nodes with weights of their own that happen to be equal are those that share."
    for base in BASES:
        shared, apart = (unit_of(3, depth=3, base=base, share=share) for share in ("depth", "node"))
        weights = {"extent.weight": shared.extent.weight, "extent.bias": shared.extent.bias}
        for name, tensor in apart.state_dict().items():
            if name.startswith("bases"):
                _, level, _, part, *rest = name.split(".")
                source = shared.state_dict()[".".join(["bases", level, "parts", str(int(part) % 3), *rest])]
                weights[name] = source.repeat(len(tensor) // len(source), *[1] * (source.ndim - 1))
        apart.load_state_dict(weights)
        x = draw(2, 6, 3)
        assert_close(apart(x)[0], shared(x)[0], rtol=0, atol=1e-13)
        kept = [len(c[0]) // 3 for _, c in shared(x)[1]]
        assert kept == [1, 4, 2, 1] and [len(c[0]) // 3 for _, c in apart(x)[1]] == [8, 4, 2, 1]


def test_as_many_scans_as_levels(monkeypatch):
    import rvnnbook.encoders.self_iru as module
    widths, scan = [], module.linear_scan

    def counted(f, b, c0=None):
        widths.append(f.shape)
        return scan(f, b, c0)
    monkeypatch.setattr(module, "linear_scan", counted)
    for share, leaves in (("depth", 1), ("node", 8)):
        widths.clear()
        unit_of(2, depth=3, share=share)(draw(3, 40, 2))
        assert widths == [(3, 40, 2 * nodes) for nodes in (leaves, 4, 2, 1)]


# ---- parts

def test_a_step_by_hand():
    "The first token sets the memory; the leaves have none, so that their states are the token."
    one, three = torch.ones(1, 1), math.log(3)
    flat = [torch.tensor([[three]]), torch.tensor([[0.]]), torch.tensor([[math.atanh(.5)]])]
    sets = torch.tensor([[-40.]]), torch.tensor([[0.]]), torch.tensor([[40.]])
    top = tuple(torch.stack(parts, 1)[:, :, None] for parts in zip(sets, flat))                 # (1, 2, 1, 1)
    x = torch.tensor([[[5.], [-3 * three]]])
    alone = self_iru_literal(x, [top], torch.zeros(1, 2, 0))
    assert_close(alone, x + .5 * torch.tensor([[[1.], [.75 * 1 + .25 * .5]]]))
    gates = torch.tensor([[[0., 0.], [.5, .25]]])                                              # f: sigma(-ln 3), o: sigma(-3/4 ln 3)
    child = tuple(torch.zeros(1, 2, 1, 1) for _ in range(3))
    h = self_iru_literal(x, [child, top], gates)
    assert_close(h[0, 1, 0], torch.tensor(1 / (1 + 3 ** .75) * (.25 * 1 + .75 * .5) - 3 * three))
    gates, children = [.5 * one, .25 * one], [-3 * three * one, 4 * three * one]                # f: sigma(-ln 3), o: sigma(ln 3)
    f, o, z = _level_gates([part[None] for part in flat], torch.tensor([[.5, .25]]), torch.cat(children)[None])
    assert_close(torch.cat([f, o, z]).flatten(), torch.tensor([.25, .75, .5]))
    leaf = [part.view(1, 1, 1, 1) for part in (f.logit(), o.logit(), z.atanh())]
    h, (c,) = _self_iru_scans(7 * one[None], [leaf], torch.zeros(1, 1, 0), [2 * one])
    assert_close(h.flatten(), torch.tensor([.75 * .875 + 7]))
    assert_close(c, torch.tensor([[.875]]))


def test_who_is_whose_child():
    "The gate of node n is column n - 2; what a leaf says arrives at the top through its own gates only."
    for depth in (1, 2, 3):
        cut = _by_level(torch.arange(2, 2 ** (depth + 1)), depth)
        assert cut[0] is None and torch.cat(cut[:0:-1]).tolist() == list(range(2, 2 ** (depth + 1)))
        assert [len(row) for row in cut[1:]] == [2 ** (depth - level + 1) for level in range(1, depth + 1)]
    assert _by_level(torch.zeros(4, 0), 0) == [None]
    x, flats, gates = hoisted(3, "node", 1, 4, 2)
    for form in (self_iru_literal, lambda *given: _self_iru_scans(*given)[0]):
        for leaf in range(8, 16):
            path = {leaf >> up for up in range(3)}                     # 15: 15, 7, 3
            opened = torch.stack([gates[..., node - 2] * (node in path) for node in range(2, 16)], -1)
            parts = flats[0][0].clone().requires_grad_()
            slope, = torch.autograd.grad(form(x, [(parts, *flats[0][1:]), *flats[1:]], opened).sum(), parts)
            assert slope.abs().amax((0, 1, 3)).nonzero().flatten().tolist() == [leaf - 8]


@pytest.mark.parametrize("make", [LinearBase, LSTMBase])
def test_bases(make):
    torch.manual_seed(0)
    base, x = make(4, 3).double(), draw(2, 5, 4)
    whole, _ = base(x)
    assert all(part.shape == (2, 5, 3, 4) for part in whole)
    assert len({round(part[0, 0, node, 0].item(), 9) for part in whole for node in range(3)}) == 9       # nine maps
    state, found = None, []
    for piece in x.split([1, 3, 1], 1):
        flat, state = base(piece, state)
        found.append(flat)
    assert_same([torch.cat(parts, 1) for parts in zip(*found, strict=True)], whole)


# ---- use

@some
@pytest.mark.parametrize("cuts", [[1] * 7, [3, 4], [6, 1], [7]])
def test_pieces(options, cuts):
    unit, x = unit_of(3, **options), draw(2, 7, 3).requires_grad_()

    def in_pieces():
        states, state = [], None
        for piece in x.split(cuts, 1):
            h, state = unit(piece, state)
            states.append(h)
        return torch.cat(states, 1)
    wanted = [x, *unit.parameters()]
    assert_same(with_slopes(in_pieces, wanted), with_slopes(lambda: unit(x)[0], wanted))


@some
@pytest.mark.parametrize("directions", [1, 2])
def test_padding_and_batch_mates(options, directions):
    torch.manual_seed(0)
    encoder, mask = SelfIRU(4, directions=directions, **options).double(), length_mask(torch.tensor([6, 1, 4, 2]))
    x = draw(4, 6, 4).masked_fill(~mask[..., None], math.nan).requires_grad_()
    out = encoder(x, mask, trace=True)
    (out.root * draw(4, 4, seed=1)).sum().backward()
    assert not out.states[~mask].any() and (x.grad[~mask] == 0).all() and x.grad[mask].any(-1).all()
    assert out.trace["states"] is out.states and encoder(x, mask).trace is None
    assert batch_gap(encoder, x.detach(), mask) < 1e-12 and padding_gap(encoder, x.detach(), mask) < 1e-12


@some
def test_two_directions(options):
    "Each half is one unit, over its own map of the tokens, from its own end."
    torch.manual_seed(0)
    encoder, x = SelfIRU(6, directions=2, **options).double(), draw(1, 5, 6)
    out = encoder(x, torch.ones(1, 5, dtype=torch.bool), trace=True)
    (enter, forth), (enter_back, back) = encoder.readers
    there, again = plain(forth, enter(x)), plain(back, enter_back(x.flip(1))).flip(1)
    assert_close(out.states, torch.cat([there, again], -1), rtol=0, atol=1e-12)
    assert_close(out.root, torch.cat([there[:, -1], again[:, 0]], -1), rtol=0, atol=1e-12)
    assert_close(out.trace["gates"], torch.stack([forth.gates(enter(x)), back.gates(enter_back(x))], -2))


def test_depth_gates():
    torch.manual_seed(0)
    encoder, x = SelfIRU(4, depth=2), torch.randn(2, 3, 4)
    out = encoder(x, torch.ones(2, 3, dtype=torch.bool), trace=True)
    unit = encoder.readers[0]
    assert out.trace["gates"].shape == (2, 3, 1, 6) and depth_gates(encoder.readers, x[0, 0]).shape == (1, 6)
    assert_close(out.trace["gates"][..., 0, :], torch.sigmoid(x @ unit.extent.weight.T + unit.extent.bias))
    assert SelfIRU(4, depth=0).readers[0].extent is None and SelfIRU(4, depth=0).readers[0].gates(x).shape == (2, 3, 0)


@some
@pytest.mark.parametrize("directions", [1, 2])
def test_half_precision(options, directions):
    "Under autocast states stay in single precision and come near; a unit in half precision carries memories in single."
    torch.manual_seed(0)
    encoder, x, mask = SelfIRU(8, directions=directions, **options), torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        rough = encoder(x, mask, trace=True)
    assert rough.root.dtype == rough.trace["gates"].dtype == torch.float32
    assert 0 < (rough.root - encoder(x, mask).root).abs().max() < 0.05
    unit = IRU(8, **options).bfloat16()
    h, state = unit(x.bfloat16())
    assert h.dtype == torch.bfloat16 and all(c.dtype == torch.float32 for _, c in state)
    assert unit(x.bfloat16(), state)[0].isfinite().all()


# ---- what it can and cannot do

@many
@given(depths, shares, st.sampled_from([1.0, 100.0, 1e4]), st.integers(0, 99))
def test_bounds(depth, share, scale, seed):
    x, flats, gates = hoisted(depth, share, 2, 9, 3, seed, scale)
    h, memories = _self_iru_scans(x, flats, gates)
    # o c + x is rounded to the digits of x
    assert ((h - x).abs() <= 1 + 1e-15 * x.abs()).all() and all(c.abs().max() <= 1 for c in memories)


@many
@given(st.integers(1, 3), shares, st.integers(0, 99))
def test_shut_and_open(depth, share, seed):
    x, flats, gates = hoisted(depth, share, seed=seed)
    alone, _ = _self_iru_scans(x, flats[-1:], gates[..., :0])
    assert torch.equal(_self_iru_scans(x, flats, torch.zeros_like(gates))[0], alone)
    moved = [(-3 * f, f + o, z) if level else (f, o, z) for level, (f, o, z) in enumerate(flats)]
    opened = torch.ones_like(gates)
    assert_close(_self_iru_scans(x, moved, opened)[0], _self_iru_scans(x, flats, opened)[0], rtol=0, atol=1e-13)
    assert (_self_iru_scans(x, moved, gates)[0] - _self_iru_scans(x, flats, gates)[0]).abs().max() > 1e-3


def one_layer(x, f, o, z):
    c, shown = torch.zeros_like(x[:, 0]), []
    for f_t, o_t, z_t in zip(f.unbind(1), o.unbind(1), z.unbind(1), strict=True):
        c = torch.sigmoid(f_t) * c + torch.sigmoid(-f_t) * torch.tanh(z_t)
        shown.append(torch.sigmoid(o_t) * c)
    return torch.stack(shown, 1)


def test_networks_it_contains():
    "At depth 0: SRU, RCRN, and, with a base of one's own, QRNN. What they show is the state less the token."
    x = draw(2, 8, 4)
    unit = unit_of(4, depth=0)
    assert_close(unit(x)[0] - x, one_layer(x, *(part(x) for part in unit.bases[0].parts)), rtol=0, atol=1e-13)
    unit = unit_of(4, depth=0, base="lstm")
    assert_close(unit(x)[0] - x, one_layer(x, *(part(x)[0] for part in unit.bases[0].parts)), rtol=0, atol=1e-13)

    class Convolution(nn.Module):
        def __init__(self, dim, nodes):
            super().__init__()
            self.nodes, self.parts = nodes, nn.ModuleList([nn.Conv1d(dim, nodes * dim, 3) for _ in range(3)])

        def forward(self, x, state=None):
            x = torch.cat([x.new_zeros(len(x), 2, x.shape[2]) if state is None else state, x], 1)
            return tuple(part(x.mT).mT.unflatten(-1, (self.nodes, -1)) for part in self.parts), x[:, -2:]
    unit = unit_of(4, depth=0, base=Convolution)
    window = torch.stack([F.pad(x, (0, 0, 2 - late, 0))[:, :8] for late in range(3)], -1)              # x_(t-2), x_(t-1), x_t
    parts = (torch.einsum("btik, oik -> bto", window, part.weight) + part.bias for part in unit.bases[0].parts)
    assert_close(unit(x)[0] - x, one_layer(x, *parts), rtol=0, atol=1e-13)
    deep, state = unit_of(4, depth=2, base=Convolution, share="node"), None
    for piece in x.split(1, 1):
        h, state = deep(piece, state)
    assert_close(h[:, 0], deep(x)[0][:, -1], rtol=0, atol=1e-13)


@many
@given(depths, shares, st.integers(1, 4), st.integers(0, 99))
def test_without_time(depth, share, dim, seed):
    unit = unit_of(dim, seed, PositionwiseIRU, depth=depth, share=share)
    x = draw(2, 3, dim, seed=seed).requires_grad_()
    wanted = [x, *unit.parameters()]
    assert_same(with_slopes(lambda: unit(x), wanted), with_slopes(lambda: plain(unit, x, still=True), wanted))
    assert_close(unit(x[0, 0]), unit(x)[0, 0], rtol=0, atol=1e-13)
    assert_close(unit(x[None]), unit(x)[None], rtol=0, atol=1e-13)


# ---- options

def test_parameters_and_defaults():
    layer = 3 * (5 * 5 + 5)
    for depth, (share, layers) in product(range(4), (("depth", lambda d: d + 1), ("node", lambda d: 2 ** (d + 1) - 1))):
        found = sum(p.numel() for p in IRU(5, depth, share=share).parameters())
        assert found == layers(depth) * layer + (2 ** (depth + 1) - 2) * 6
        assert [count_of(base) for base in IRU(5, depth, "lstm", share).bases] == (
            [1] * (depth + 1) if share == "depth" else [2 ** (depth - level) for level in range(depth + 1)])
    encoder = create_encoder("self_iru", dim=5)
    unit, = encoder.readers
    assert encoder.directions == 1 and [type(base) for base in unit.bases] == [LinearBase] * 2 and unit.bases[0].nodes == 1
    for base, kind in BASES.items():
        assert {type(part) for part in IRU(3, 1, base, "node").bases} == {kind}
    assert [type(reader) for reader in SelfIRU(4, directions=2).readers] == [nn.Sequential] * 2


@pytest.mark.parametrize("options, said", [
    ({"depth": -1}, "depth must be a whole number from 0, got -1"), ({"depth": 1.0}, "got 1.0"), ({"depth": True}, "got True"),
    ({"base": "gru"}, "unknown base 'gru'; known: linear, lstm"),
    ({"share": "all"}, "unknown share 'all'; known: depth, node"),
    ({"directions": 3}, "got directions=3, dim=5"), ({"directions": 0}, "got directions=0, dim=5"), ({"directions": 2}, "got directions=2, dim=5")])
def test_refused(options, said):
    with pytest.raises(ValueError) as error:
        SelfIRU(5, **options)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_weights_that_were_replaced_are_used(name):
    "Also for single tokens, whose steps are computed one by one."
    encoder, other = (create_encoder("self_iru", dim=4, base="lstm").double().eval() for _ in range(2))
    other.load_state_dict(encoder.state_dict())
    x, mask = torch.randn(3, 1, 4, dtype=torch.float64), torch.ones(3, 1).bool()
    assert torch.equal(encoder(x, mask).root, other(x, mask).root)
    for model in (encoder, other):
        for part in model.modules():
            if isinstance(part, nn.LSTM):
                weight = getattr(part, name).detach() + 1
                if model is encoder:
                    setattr(part, name, nn.Parameter(weight))
                else:
                    getattr(part, name).data.copy_(weight)
    fresh = create_encoder("self_iru", dim=4, base="lstm").double().eval()
    fresh.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder(x, mask).root, fresh(x, mask).root) and torch.equal(other(x, mask).root, fresh(x, mask).root)
