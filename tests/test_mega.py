"MEGA against loops over memories, places and keys: averages, the head, gates, norms, refusals."
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask
from rvnnbook.encoders.mega import MEGA, MegaLayer, MovingAverage, average_kernel, _distance_table, _gated_head, _rewrite
from rvnnbook.registry import create_encoder
from tests.helpers import assert_equal_sentence_by_sentence, batch, shake

some = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10**6)


def make(layers=2, seed=0, dim=3, **options):
    torch.manual_seed(seed)
    options = {"key_dim": 4, "memories": 2, "reach": 4} | options
    return shake(MEGA(dim, layers, **options).double().eval(), seed)


def silu(v):
    return v / (1 + (-v).exp())


def norm(v, layer):
    return (v - v.mean(-1, keepdim=True)) / (v.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def averages_by_hand(ema, sentence):
    "Memories one after the other, from either end."
    dim, (n, _) = ema.omega.shape[0], sentence.shape
    take, damping = 1 / (1 + (-ema.delta).exp()), 1 / (1 + (-ema.alpha).exp())
    total = ema.omega * sentence
    for half, order in ((slice(dim), range(n)), (slice(dim, None), range(n - 1, -1, -1))):
        state, seen = torch.zeros_like(take[half, :, 0]), {}
        for t in order:
            state = (1 - take * damping)[half, :, 0] * state + (take * ema.beta)[half, :, 0] * sentence[t][:, None]
            seen[t] = (ema.gamma[half] * state).sum(-1) / take.shape[1] ** .5
        total = total + torch.stack([seen[t] for t in range(n)])
    return total


def by_hand(layer, sentence):
    "One layer over one sentence. New states and attention."
    n, reach, (dim, z, *_) = len(sentence), (len(layer.rel_pos_bias) + 1) // 2, layer.parts
    read = norm(sentence, layer.norm1) if layer.place == "pre" else sentence
    parts = silu(averages_by_hand(layer.ema, read)) @ layer.mx.weight.T + layer.mx.bias
    gate, shared, reset, direct = parts[:, :dim], silu(parts[:, dim:dim + z]), silu(parts[:, dim + z:-dim]), parts[:, -dim:]
    values, rows, weights = silu(read @ layer.v.weight.T + layer.v.bias), [], []
    for i in range(n):
        scores = []
        for j in range(n):
            query, key = (shared[place] * layer.qk_scale[k] + layer.qk_shift[k] for k, place in enumerate((i, j)))
            far = max(-(reach - 1), min(reach - 1, j - i))
            scores.append(query @ key / math.sqrt(z) + layer.rel_pos_bias[reach - 1 + far])
        shares = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
        new = silu(direct[i] + layer.h.weight @ (reset[i] * (shares @ values)) + layer.h.bias)
        opened = 1 / (1 + (-gate[i]).exp())
        rows.append((1 - opened) * sentence[i] + opened * new)
        weights.append(shares)
    y = torch.stack(rows)
    y = norm(y, layer.norm1) if layer.place == "post" else y
    read = norm(y, layer.norm2) if layer.place == "pre" else y
    y = y + silu(read @ layer.ffn[0].weight.T + layer.ffn[0].bias) @ layer.ffn[1].weight.T + layer.ffn[1].bias
    return (norm(y, layer.norm2) if layer.place == "post" else y), torch.stack(weights)


@some
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from(["pre", "post"]), st.integers(1, 2), st.sampled_from([1, 2, 4, 9]), seeds)
def test_every_sentence_is_read_as_the_equations_say(lengths, place, layers, reach, seed):
    "Also where the longest distance is shorter than the sentence."
    encoder = make(layers, seed, norm=place, reach=reach)
    def read(trace, b, sentence):
        n = len(sentence)
        for depth, layer in enumerate(encoder.layer):
            sentence, weights = by_hand(layer, sentence)
            assert_close(trace["attention"][depth, b, :n, :n], weights.float())
        return norm(sentence, encoder.final_norm) if place == "pre" else sentence
    out, mask = assert_equal_sentence_by_sentence(encoder, lengths, seed, read)
    assert not out.trace["attention"][~mask[None, :, None].expand_as(out.trace["attention"])].any()


@pytest.mark.parametrize("place", ["pre", "post"])
def test_slopes_against_differences(place):
    encoder, (x, mask) = make(1, dim=2, key_dim=2, memories=1, reach=2, norm=place), batch([3, 1], 2)
    x = x.nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: encoder(t, mask).root, x)
    names, values = zip(*((name, p.detach().clone().requires_grad_()) for name, p in encoder.named_parameters()))
    assert torch.autograd.gradcheck(lambda *p: torch.func.functional_call(encoder, dict(zip(names, p)), (x.detach(), mask)).root, values)


# ---- averages

@some
@given(st.integers(1, 30), st.integers(1, 4), seeds)
def test_kernels(length, memories, seed):
    gen = torch.Generator().manual_seed(seed)
    take, damping = (torch.rand(2, memories, generator=gen, dtype=torch.float64) for _ in range(2))
    enter, read = (torch.randn(2, memories, generator=gen, dtype=torch.float64) for _ in range(2))
    kernel = average_kernel(take, damping, enter, read, length)
    assert kernel.shape == (2, length)
    for lag in {0, 1, length - 1} & set(range(length)):
        assert_close(kernel[:, lag], (take * enter * read * (1 - take * damping) ** lag).sum(-1) / memories ** .5)


@some
@given(st.integers(1, 12), st.integers(1, 3), seeds)
def test_moving_average(length, memories, seed):
    torch.manual_seed(seed)
    ema = shake(MovingAverage(3, memories).double(), seed)
    x = torch.randn(2, length, 3).double()
    assert_close(ema(x), torch.stack([averages_by_hand(ema, sentence) for sentence in x]))


# ---- the head

def test_distances():
    bias = torch.arange(7.)                                            # -3, ..., 3
    table = _distance_table(bias, 6)
    for i in range(6):
        for j in range(6):
            assert table[i, j] == min(6, max(0, j - i + 3))
    assert _distance_table(bias, 1).tolist() == [[3]] and _distance_table(torch.tensor([5.]), 2).tolist() == [[5, 5], [5, 5]]


@some
@given(st.integers(1, 6), seeds)
def test_head_is_attention(length, seed):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, width, generator=gen, dtype=torch.float64) for width in (4, 4, 3))
    bias, mask = torch.randn(length, length, generator=gen, dtype=torch.float64), length_mask(torch.tensor([length, 1]))
    fetched, weights = _gated_head(q, k, v, bias, mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~mask[:, None], -torch.inf))
    assert_close(fetched, expected)
    assert_close(weights @ v, expected)
    assert not weights[1, :, 1:].any()


def test_gate():
    "Shut, it copies; what is written otherwise does not depend on the state but through averages and values."
    torch.manual_seed(0)
    layer, (x, mask) = shake(MegaLayer(3, 4, 2, 4, "post", 0.).double()), batch([5, 2])
    x = x.nan_to_num(0.0)
    with torch.no_grad():
        layer.mx.weight[:3], layer.mx.bias[:3] = 0, -200.
        assert_close(_rewrite(layer, x, mask)[0], x, rtol=0, atol=1e-30)
        layer.mx.bias[:3] = 0.                                          # half of each
        half = _rewrite(layer, x, mask)[0]
        layer.mx.bias[:3] = 200.
        assert_close((x + _rewrite(layer, x, mask)[0]) / 2, half)


def test_longer_than_the_longest_distance():
    encoder, (x, mask) = make(reach=2), batch([30, 4])
    assert encoder(x, mask).root.isfinite().all() and batch_gap(encoder, x, mask) < 1e-12


def test_defaults_and_refusals():
    encoder = create_encoder("mega", dim=4)
    assert len(encoder.layer) == 6 and encoder.layer[0].v.out_features == 8 and encoder.layer[0].ffn[0].out_features == 8
    assert encoder.layer[0].rel_pos_bias.shape == (2047,) and encoder.layer[0].ema.delta.shape == (8, 16, 1)
    assert not [name for name, _ in encoder.named_parameters() if "final" in name]
    for options, said in (({"layers": 0}, "layers must"), ({"key_dim": 0}, "key_dim must"), ({"memories": 0}, "memories must"),
                          ({"reach": 0}, "reach must be a whole number from 1, got 0"), ({"norm": "none"}, "'none'")):
        with pytest.raises(ValueError, match=said):
            MEGA(4, **options)
    MEGA(4, layers=1, key_dim=1, memories=1, reach=1, norm="pre")
