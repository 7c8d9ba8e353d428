"State spaces against loops over tokens and sums over powers: kernels, convolutions, both directions, the layer before the chunks."
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import length_mask
from rvnnbook.encoders.s4d_stack import S4DBlock
from rvnnbook.layers.s4d import (NORMS, S4DKernel, S4DLayer, TokenBatchNorm, _as_real, bilinear, convolve, _evaluate_polynomials, inverse_frequencies, power_sums,
                                 powers, _transform_length)

many = settings(deadline=None, max_examples=40)
seeds, lengths = st.integers(0, 10**6), st.integers(1, 40)


def state_space_literal(x, weights, ratios):
    "Run the states of every channel token by token (Gu et al. 2022, section 3)."
    state, seen = torch.zeros_like(weights), []
    for token in x.unbind(1):
        state = ratios * state + token[..., None]
        seen.append((weights * state).sum(-1).real)
    return torch.stack(seen, 1)


def power_sums_literal(weights, ratios, length):
    "The kernel by all powers of all ratios (Gu et al. 2022, section 3)."
    places = torch.arange(length, device=ratios.device)
    return (weights[..., None] * (ratios.log()[..., None] * places).exp()).sum(-2).real


def draw(dim, pairs, seed=0, kind=torch.complex128, directions=()):
    "Weights of any size, ratios within the unit circle; real ones of both signs."
    gen = torch.Generator().manual_seed(seed)
    size, spin = torch.rand(dim, pairs, generator=gen, dtype=torch.float64), torch.randn(dim, pairs, generator=gen, dtype=torch.float64)
    weights = torch.randn(*directions, dim, pairs, generator=gen, dtype=torch.complex128)
    ratios = torch.polar(size, 3 * spin)
    if not kind.is_complex:
        weights, ratios = weights.real, ratios.real
    return weights.to(kind).requires_grad_(), ratios.to(kind).requires_grad_()


def slopes(found, inputs, seed=0):
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(found.dtype)
    return torch.autograd.grad((found * push).sum(), inputs, retain_graph=True, materialize_grads=True)


def assert_same(found, expected, tolerance=1e-11):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.detach().abs().max())))


def one_by_one(weights, ratios, length):
    "Powers by multiplying once more each time."
    power, found = torch.ones_like(ratios), []
    for _ in range(length):
        found.append((weights * power).sum(-1).real)
        power = power * ratios
    return torch.stack(found, -1)


# ---- kernels

@pytest.mark.parametrize("directions", [(), (1,), (2,)])
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
@settings(deadline=None, max_examples=15)
@given(lengths, st.integers(1, 3), st.integers(1, 5), seeds)
def test_sums_of_powers(kind, directions, length, dim, pairs, seed):
    given = draw(dim, pairs, seed, kind, directions)
    ours, slow = power_sums(*given, length), one_by_one(*given, length)
    assert ours.shape == (*directions, dim, length) and ours.dtype == torch.float64
    assert_same([ours, *slopes(ours, given)], [slow, *slopes(slow, given)])


@many
@given(lengths, st.integers(1, 3), st.integers(1, 5), seeds)
def test_the_literal_sum(length, dim, pairs, seed):
    given = draw(dim, pairs, seed)
    literal, slow = power_sums_literal(*given, length), one_by_one(*given, length)
    assert_same([literal, *slopes(literal, given)], [slow, *slopes(slow, given)], 1e-9)


@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_slopes_of_sums_against_differences(kind, length):
    given = draw(2, 3, 1, kind, (2,))
    assert torch.autograd.gradcheck(lambda w, z: power_sums(w, z, length), given)


def test_ratio_zero_and_ratio_one():
    weights, ratios = torch.tensor([[2.0, 3.0]]), torch.tensor([[0.0, 1.0]], requires_grad=True)
    kernel = power_sums(weights, ratios, 6)
    assert kernel.tolist() == [[5, 3, 3, 3, 3, 3]]
    kernel.sum().backward()
    assert ratios.grad.tolist() == [[2, 3 * 15]]
    assert_close(power_sums(weights.double(), ratios.to(torch.complex64), 6), kernel.double())         # types meet


def test_long_kernels_keep_their_digits():
    "Against double precision, over four thousand lags of a slow wave."
    weights, ratios = torch.ones(1, 1, dtype=torch.complex128), torch.exp(torch.tensor([[-5e-4 + .3j]], dtype=torch.complex128))
    exact = power_sums(weights, ratios, 4096)
    rounded = ratios.to(torch.complex64)
    found = power_sums(weights.to(torch.complex64), rounded, 4096)
    assert (found - exact).abs().max() < 1e-3
    assert (found - power_sums(weights, rounded.to(torch.complex128), 4096)).abs().max() < 1e-4


@many
@given(st.integers(1, 20), st.integers(1, 4), seeds)
def test_powers_and_polynomials(count, pairs, seed):
    _, ratios = draw(2, pairs, seed)
    table = powers(ratios, count)
    assert_close(table, ratios[..., None, :] ** torch.arange(count)[:, None])
    gen = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(3, 2, count, generator=gen, dtype=torch.float64)
    width = max(1, count // 2)
    coarse = powers(ratios ** width, -(-count // width))
    found = _evaluate_polynomials(coefficients, coarse, powers(ratios, width))
    assert_close(found, (coefficients[..., None] * table).sum(-2))
    assert _as_real(ratios).shape == (2, 2 * pairs) and torch.equal(torch.view_as_complex(_as_real(ratios).detach().unflatten(-1, (-1, 2))), ratios.detach())
    assert torch.equal(_as_real(ratios.detach().real), ratios.detach().real)


def test_what_is_refused():
    weights, ratios = draw(2, 3)
    for call, said in ((lambda: power_sums(weights, ratios, 0), "length >= 1"), (lambda: power_sums(weights[:1], ratios, 4), "(1, 3)"),
                       (lambda: convolve(torch.ones(1, 2, 3)), "neither"), (lambda: S4DKernel(3, 5), "5"), (lambda: S4DKernel(3, 0), "0"),
                       (lambda: S4DLayer(3, norm="both"), "'both'")):
        with pytest.raises(ValueError) as error:
            call()
        assert said in str(error.value)


# ---- steps

@many
@given(seeds, st.floats(1e-4, 2.0))
def test_trapezoid_rule(seed, step):
    "The two numbers make the step that the rule asks for, and never one that grows."
    gen = torch.Generator().manual_seed(seed)
    a, b, before = (torch.randn(50, generator=gen, dtype=torch.complex128) for _ in range(3))
    a = torch.complex(-a.real.abs(), 30 * a.imag)
    ratio, gain = bilinear(a, b, torch.tensor(step))
    after = ratio * before + gain * .7
    assert_close(after - before, step * a * (before + after) / 2 + step * b * .7)
    assert (ratio.abs() <= 1 + 1e-12).all()


def test_frequencies():
    assert_close(inverse_frequencies(2), torch.tensor([2 / math.pi]))
    assert_close(inverse_frequencies(4), torch.tensor([12 / math.pi, 4 / math.pi * (4 / 3 - 1)]))
    assert (inverse_frequencies(64).diff() < 0).all() and (inverse_frequencies(64) > 0).all()


@pytest.mark.parametrize("directions", [1, 2])
def test_kernel_module(directions):
    torch.manual_seed(0)
    made = S4DKernel(300, 8, directions)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == {
        "A_real": (300, 4), "A_imag": (300, 4), "B": (1, 300, 4, 2), "C": (directions, 300, 4, 2), "inv_dt": (300, 1)}
    steps = made.inv_dt.exp()
    assert steps.min() >= .001 and steps.max() <= .1 and steps.log10().std() > .5 and .95 < made.C.pow(2).sum(-1).mean() < 1.15
    assert (made.A_real.exp() == .5).all() and torch.equal(made.A_imag[7], inverse_frequencies(8)) and made.B[0, 7].tolist() == [[1, 0]] * 4
    made = made.double()
    with torch.no_grad():
        made.A_real += .3 * torch.randn(300, 4)
        made.B += .3 * torch.randn(1, 300, 4, 2)
    kernel = made(12)
    assert kernel.shape == (directions, 300, 12)
    a, dt = torch.complex(-made.A_real.exp(), -made.A_imag), made.inv_dt.exp()
    for direction in range(directions):
        for lag in (0, 1, 11):
            pair = torch.view_as_complex(made.C)[direction] * dt * torch.view_as_complex(made.B)[0] / (1 - dt * a / 2)
            assert_close(kernel[direction, :, lag], 2 * (pair * ((1 + dt * a / 2) / (1 - dt * a / 2)) ** lag).real.sum(-1))
    assert_close(made(40)[..., :12], kernel)                            # a longer sentence has the same kernel, longer


# ---- convolutions

@many
@example(2, 1, 1, 0)
@given(st.integers(1, 3), lengths, st.integers(1, 3), seeds)
def test_recurrence_is_convolution(size, length, dim, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(size, length, dim, generator=gen, dtype=torch.float64).requires_grad_()
    w, z = draw(dim, 3, seed)
    ours, slow = convolve(x, power_sums(w, z, length)), state_space_literal(x, w, z)
    assert_same([ours, *slopes(ours, (x, w, z))], [slow, *slopes(slow, (x, w, z))])


@many
@given(lengths, seeds, st.sampled_from(["past", "future", "both"]), st.booleans())
def test_convolution_by_the_sum(length, seed, which, with_direct):
    gen = torch.Generator().manual_seed(seed)
    x, past, future = (torch.randn(*shape, length, generator=gen, dtype=torch.float64).requires_grad_()
                       for shape in ((2, 3), (3,), (3,)))
    direct = torch.randn(3, generator=gen, dtype=torch.float64).requires_grad_()
    kernels = {"past": past, "future": future} if which == "both" else {which: past if which == "past" else future}
    away = torch.arange(length)[:, None] - torch.arange(length)                 # i - j
    table = torch.zeros(3, length, length, dtype=torch.float64)
    if "past" in kernels:
        table += torch.where(away >= 0, past[:, away.clamp(min=0)], 0)
    if "future" in kernels:
        table += torch.where(away <= 0, future[:, (-away).clamp(min=0)], 0)
    found, expected = convolve(x.mT, **kernels), torch.einsum("dij,bdj->bid", table, x)
    if with_direct:
        found, expected, kernels = convolve(x.mT, **kernels, direct=direct), expected + direct * x.mT, {**kernels, "direct": direct}
    inputs = x, *kernels.values()
    assert_same([found, *slopes(found, inputs)], [expected, *slopes(expected, inputs)])
    for one in inputs:                               # gradients of one input alone
        assert_same(slopes(found, (one,)), slopes(expected, (one,)))


def test_a_convolution_has_no_second_derivative():
    x = torch.randn(1, 4, 2).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(convolve(x, torch.randn(2, 4)).square().sum(), x, create_graph=True)


def test_room_for_a_convolution():
    assert [_transform_length(length) for length in (1, 2, 3, 4, 5, 9, 32, 33, 1000, 1024, 1025)] == [2, 4, 6, 8, 10, 20, 64, 80, 2048, 2048, 2560]


def test_precision_of_a_convolution():
    torch.manual_seed(0)
    x, kernel = torch.randn(2, 9, 3), torch.randn(3, 9)
    exact = convolve(x.double(), kernel.double())
    assert exact.dtype == torch.float64 and convolve(x, kernel).dtype == torch.float32
    rough = convolve(x.bfloat16(), kernel)
    assert rough.dtype == torch.float32 and 0 < (rough - exact).abs().max() < .1
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(convolve(x, kernel).double(), exact, rtol=0, atol=1e-5)
        w, z = draw(2, 3, kind=torch.complex64)
        kernel = power_sums(w, z, 9)
        slope = slopes(kernel, (w, z))
    assert_same([kernel, *slope], [power_sums(w, z, 9), *slopes(power_sums(w, z, 9), (w, z))], 1e-6)


# ---- the layer

def make(dim=3, seed=0, **options):
    torch.manual_seed(seed)
    layer = S4DLayer(dim, **{"state_size": 6} | options).double().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(.3 * torch.randn_like(p))
        for name, buffer in layer.named_buffers():
            if name.startswith("norm.running"):
                buffer.uniform_(.5, 2)
    return layer


def batch(lengths, dim=3, seed=0):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan), mask


def normal(v, norm):
    return F.layer_norm(v, v.shape[-1:], norm.weight, norm.bias)


def by_hand(layer, sentence):
    "One sentence, token by token, the second half of the channels from its end."
    kernel, dim = layer.kernel, layer.dim
    read = normal(sentence, layer.norm) if layer.place == "pre" else sentence
    a, dt = torch.complex(-kernel.A_real.exp(), -kernel.A_imag), kernel.inv_dt.exp()
    b, c = (torch.view_as_complex(part)[0] for part in (kernel.B, kernel.C))
    halves = []
    for half, order in ((slice(dim), 1), (slice(dim, None), -1)):
        state, seen = torch.zeros_like(b[half]), []
        for token in read.unbind(0)[::order]:
            state = ((1 + dt * a / 2) / (1 - dt * a / 2))[half] * state + (dt * b / (1 - dt * a / 2))[half] * token[:, None]
            seen.append(F.gelu(2 * (c[half] * state).real.sum(-1) + layer.D[0, half] * token))
        halves.append(torch.stack(seen[::order]))
    value, gate = layer.glu(torch.cat(halves, -1)).chunk(2, -1)
    out = sentence + value * gate.sigmoid()
    if layer.place == "batch":                          # in evaluation: the averages of training
        norm = layer.norm
        return (out - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return normal(out, layer.norm) if layer.place == "post" else out


@many
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), seeds, st.sampled_from([0.1, None]))
def test_batch_norm_is_that_of_the_tokens(lengths, seed, momentum):
    "A momentum of None is the mean over all batches, as for averaged weights."
    (x, mask), other = batch(lengths, seed=seed), batch(lengths, seed=seed + 1)[0]
    torch.manual_seed(seed)
    ours, theirs = TokenBatchNorm(x.shape[2]).double(), torch.nn.BatchNorm1d(x.shape[2]).double()
    ours.momentum = theirs.momentum = momentum
    with torch.no_grad():
        for one, same in zip(ours.parameters(), theirs.parameters()):
            one.normal_()
            same.copy_(one)
    for read in (x.nan_to_num(0.0).requires_grad_(), other.nan_to_num(7.0).requires_grad_()):      # whatever is on padding
        found, expected = ours(read, mask)[mask], theirs(read[mask])
        assert_same([found, *slopes(found, (read, *ours.parameters()))], [expected, *slopes(expected, (read, *theirs.parameters()))], 1e-9)
    for one, same in zip(ours.buffers(), theirs.buffers()):
        assert_close(one, same)
    assert_close(ours.eval()(read, mask)[mask], theirs.eval()(read[mask]))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_layer_with_batch_norm_collects_averages_in_training_only():
    layer, (x, mask) = make(norm="batch"), batch([5, 2])
    before = layer(x, mask)
    assert torch.equal(layer(x, mask), before) and layer.norm.num_batches_tracked == 0
    trained = layer.train()(x, mask)
    assert not torch.allclose(trained[mask], before[mask]) and layer.norm.num_batches_tracked == 1
    assert_close(trained[mask].mean(0), layer.norm.bias, rtol=0, atol=1e-12)
    assert not torch.equal(layer.eval()(x, mask)[mask], before[mask])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.sampled_from(NORMS), seeds)
def test_every_sentence_is_read_as_the_equations_say(lengths, norm, seed):
    layer, (x, mask) = make(seed=seed, norm=norm), batch(lengths, seed=seed)
    x.requires_grad_()
    out = layer(x, mask)
    assert out.shape == x.shape and not out[~mask].any()
    alone = torch.cat([by_hand(layer, x[b, :n]) for b, n in enumerate(lengths)])
    inputs = (x, *layer.parameters())
    assert_same([out[mask], *slopes(out[mask], inputs)], [alone, *slopes(alone, inputs)], 1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_slopes_of_the_layer_against_differences(norm):
    layer, (x, mask) = make(2, state_size=2, norm=norm), batch([3, 1], 2)
    x = x.nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: layer(t, mask), x)
    names, values = zip(*((name, p.detach().clone().requires_grad_()) for name, p in layer.named_parameters()))
    assert torch.autograd.gradcheck(lambda *p: torch.func.functional_call(layer, dict(zip(names, p)), (x.detach(), mask)), values)


def test_a_frozen_backward_reading():
    "The values are the same; what comes from the right brings no gradient."
    layer, (x, mask) = make(), batch([5, 2])
    x.requires_grad_()
    free = layer(x, mask)
    layer.freeze_backward = True
    frozen = layer(x, mask)
    assert torch.equal(free, frozen)
    inputs = (x, layer.D, layer.kernel.C, layer.kernel.A_real, layer.kernel.A_imag, layer.kernel.B, layer.kernel.inv_dt)
    for grad, axis in zip(slopes(frozen, inputs)[1:], (1, 1, 0, 0, 1, 0)):
        ahead, back = grad.chunk(2, axis)
        assert ahead.any() and not back.any()
    def first(t, frozen):
        layer.freeze_backward = frozen
        return torch.autograd.grad(layer(t, mask)[0, 0].sum(), t)[0][0]
    assert first(x, False)[1:].abs().max() > 1e-3 > 1e-12 > first(x, True)[1:].abs().max()


@pytest.mark.parametrize("kind", [S4DLayer, S4DBlock])
def test_whole_channels_are_dropped_around_the_activation(kind):
    "A channel of a sentence is dropped at all of its tokens, with one draw before GELU and one after it."
    torch.manual_seed(0)
    layer, (x, mask), seen = kind(16, state_size=6, channel_dropout=.5).double().eval(), batch([9, 9, 9], dim=16), []
    plain = layer.mix(x, mask)
    layer.glu.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    assert not torch.equal(layer.train().mix(x, mask), plain) and torch.equal(layer.eval().mix(x, mask), plain)
    there = seen[0].abs().amax(1) > 0                                                              # (B, 2 D)
    assert torch.equal((seen[0] != 0).all(1), there) and .1 < there.double().mean() < .45 and len({tuple(row) for row in there.tolist()}) == 3
    signals = layer.context(x).detach()
    assert_close(seen[0], torch.where(there[:, None], F.gelu(signals / .5) / .5, 0))
    assert_close(seen[1], F.gelu(signals))


@pytest.mark.parametrize("norm", NORMS)
def test_mirror(norm):
    "With its two halves exchanged the layer reads the sentence turned round as before it read the sentence."
    layer, (x, mask) = make(norm=norm), batch([6])
    out = layer(x, mask)
    with torch.no_grad():
        for p, axis in ((layer.D, 1), (layer.kernel.A_real, 0), (layer.kernel.A_imag, 0), (layer.kernel.B, 1), (layer.kernel.C, 1),
                        (layer.kernel.inv_dt, 0), (layer.glu.weight, 1)):
            p.copy_(p.roll(3, axis))
    assert_close(layer(x.flip(1), mask).flip(1), out)


def test_padding_batch_mates_and_dropout():
    layer, (x, mask) = make(), batch([6, 1, 4])
    out = layer(x, mask)
    assert_close(layer(F.pad(x, (0, 0, 0, 5), value=torch.inf), F.pad(mask, (0, 5)))[:, :6], out, rtol=0, atol=1e-12)
    assert_close(layer(x[2:, :4], mask[2:, :4])[0], out[2, :4], rtol=0, atol=1e-12)
    dropping = make(dropout=.5)
    assert torch.equal(dropping(x, mask), out)
    assert not torch.equal(dropping.train()(x, mask)[mask], out[mask])


def test_the_layer_in_half_precision():
    layer, (x, mask) = make().float(), batch([6, 1, 4])
    x = x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x, mask)
    assert 0 < (rough - layer(x, mask)).abs().max() < .1
    rough.float().sum().backward()
    assert x.grad.isfinite().all() and not x.grad[~mask].any() and all(p.grad.isfinite().all() for p in layer.parameters())
