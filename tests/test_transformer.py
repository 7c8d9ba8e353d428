"The Transformer against a form written sentence by sentence, number by number; the schema against recursive networks."
import cmath
import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap
from rvnnbook.encoders.transformer import (POSITIONS, Transformer, multi_head_attention, _check_transformer, _multiply_pairs,
                                           _place_pairs, _place_powers, flip_odd_heads)
from rvnnbook.layers.given_trees import compose_by_height
from rvnnbook.layers.neighbors import neighbor_weights
from tests.helpers import on_page
from tests.test_core import boxed, random_steps

recur, = on_page("implementations/transformer", "recur")

few = settings(deadline=None, max_examples=15)
positions = pytest.mark.parametrize("position", POSITIONS)
batches = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def attention_literal(queries, keys, values, seen=None):
    "Every query takes a mean of the values (Vaswani et al. 2017, Eq. 1)."
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(dim=8, seed=0, **options):
    torch.manual_seed(seed)
    encoder = Transformer(dim, **{"layers": 2, "heads": 2, **options}).double().eval()
    with torch.no_grad():
        for p in encoder.parameters():                       # norms and biases that are not one and zero
            p.add_(0.2 * torch.randn_like(p))
    return encoder


def batch(lengths, dim=8, seed=0, dtype=torch.float64):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    return torch.where(mask[..., None], drawn(*mask.shape, dim, seed=seed), torch.nan).to(dtype), mask


# ---- the literal form, of one sentence without padding

def factor(r, pairs, distance, position):
    "By what the product of pair r is multiplied at a distance i - j."
    if position == "none":
        return 1
    size = ((r / pairs + 0.4) / 1.4) ** (distance / 512) if position == "xpos" else 1
    return size * cmath.exp(1j * distance * 10000 ** (-r / pairs))


@cache
def factors(pairs, distance, position):
    return torch.tensor([factor(r, pairs, distance, position) for r in range(pairs)], dtype=torch.complex128)


def attend_alone(q, k, v, heads, position):
    "Each head, each query and each key by itself; q, k, v (n, D)."
    n, width = len(q), q.shape[1] // heads
    rows = []
    for i in range(n):
        parts = []
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            seen = range(n) if position != "xpos" else range(i, n) if h % 2 else range(i + 1)
            scores = []
            for j in seen:
                distance = abs(i - j) if position == "xpos" else i - j
                if position == "none":
                    score = (q[i, own] * k[j, own]).sum()
                else:
                    half = width // 2
                    a, b = (torch.complex(x[own][:half], x[own][half:]) for x in (q[i], k[j]))
                    score = (a * b.conj() * factors(half, distance, position)).real.sum()
                scores.append(score / math.sqrt(width))
            shares = torch.stack(scores).softmax(0)
            parts.append(sum(share * v[j, own] for share, j in zip(shares, seen)))
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def layer_alone(layer, states, activation):
    fetch, work = layer.retrieve, layer.compose
    x = F.layer_norm(states, states.shape[-1:], fetch.norm.weight, fetch.norm.bias)
    q, k, v = (x @ part.weight.T for part in (fetch.queries, fetch.keys, fetch.values))
    states = states + attend_alone(q, k, v, fetch.heads, fetch.position) @ fetch.out.weight.T
    x = F.layer_norm(states, states.shape[-1:], work.norm.weight, work.norm.bias)
    return states + activation(x @ work.w1.weight.T + work.w1.bias) @ work.w2.weight.T + work.w2.bias


def encode_alone(encoder, tokens, steps, activation=F.gelu):
    states = torch.cat([encoder.start[None], tokens])
    for t in range(steps):
        states = layer_alone(encoder.layers[t if len(encoder.layers) > 1 else 0], states, activation)
    return F.layer_norm(states, states.shape[-1:], encoder.norm.weight, encoder.norm.bias)


@positions
@few
@given(lengths=batches, heads=st.sampled_from([2, 4]), seed=st.integers(0, 10**6))
def test_attend(position, lengths, heads, seed):
    mask = length_mask(torch.tensor(lengths))
    tensors = drawn(3, *mask.shape, 8, seed=seed).requires_grad_()
    found = multi_head_attention(*tensors, mask, heads, position)
    assert found.shape == tensors.shape[1:] and found.isfinite().all()
    for b, n in enumerate(lengths):
        alone = attend_alone(*tensors[:, b, :n], heads, position)
        assert_close(found[b, :n], alone)
        push = drawn(n, 8, seed=seed + 1)
        ours, theirs = (torch.autograd.grad((x * push).sum(), tensors, retain_graph=True)[0] for x in (found[b, :n], alone))
        assert_close(ours, theirs)


@positions
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@settings(deadline=None, max_examples=4)
@given(lengths=batches, seed=st.integers(0, 10**6))
def test_encoder(position, shared, activation, lengths, seed):
    encoder = make(position=position, shared=shared, activation=activation, layers=3, seed=seed)
    (x, mask), weights = batch(lengths, seed=seed), tuple(encoder.parameters())
    out = encoder(x, mask)
    assert not out.states[~mask].any()
    found = [encode_alone(encoder, x[b, :n], 3, getattr(F, activation)) for b, n in enumerate(lengths)]
    for b, (alone, n) in enumerate(zip(found, lengths)):
        assert_close(out.root[b], alone[0])
        assert_close(out.states[b, :n], alone[1:])
    push = drawn(8, seed=seed + 1)
    for ours, theirs in zip(torch.autograd.grad((out.root @ push).sum(), weights),
                            torch.autograd.grad(sum(alone[0] @ push for alone in found), weights), strict=True):
        assert_close(ours, theirs)


@positions
@pytest.mark.parametrize("shared", [False, True])
@few
@given(lengths=batches, seed=st.integers(0, 10**6))
def test_batch_mates_and_padding(position, shared, lengths, seed):
    encoder, (x, mask) = make(position=position, shared=shared), batch(lengths, seed=seed)
    assert batch_gap(encoder, x, mask) <= 1e-9 and padding_gap(encoder, x, mask) <= 1e-9


@positions
def test_slopes(position):
    encoder, (x, mask) = make(dim=4, position=position, hidden=3, shared=True), batch([3, 1], dim=4)
    x = torch.where(mask[..., None], x, 0).requires_grad_()
    names, weights = zip(*encoder.named_parameters())
    def outputs(x, *weights):
        out = torch.func.functional_call(encoder, dict(zip(names, weights)), (x, mask))
        return out.root, out.states
    assert torch.autograd.gradcheck(outputs, (x, *weights))


# ---- attention and places

@few
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_literal_attention(n, width, seed):
    q, k, v = drawn(3, 2, n, width, seed=seed)
    seen = (drawn(2, n, n, seed=seed + 1) > 0) | torch.eye(n, dtype=torch.bool)
    for mask in (None, seen):
        found = attention_literal(q, k, v, mask)
        assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        for b in range(2):
            for i in range(n):
                powers = [math.exp(float(q[b, i] @ k[b, j]) / math.sqrt(width)) * (mask is None or bool(seen[b, i, j])) for j in range(n)]
                assert_close(found[b, i], sum(power * v[b, j] for j, power in enumerate(powers)) / sum(powers))


@pytest.mark.parametrize("fading", [False, True])
@few
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 10**6))
def test_scores_know_the_distance_only(fading, n, longer, pairs, seed):
    q, k = drawn(2, 2 * pairs, seed=seed)
    tables = []
    for length in (n, n + longer):
        placed = _place_pairs(q.expand(length, -1), k.expand(length, -1), fading)
        tables.append(placed[0] @ placed[1].T)
    assert_close(tables[1][-n:, -n:], tables[0], rtol=1e-9, atol=1e-9)               # moved to the right by `longer` places
    a, b = (torch.complex(*x.chunk(2)) for x in (q, k))
    for i, j in ((0, 0), (n - 1, 0), (0, n - 1)):
        by_hand = sum(complex(a[r] * b[r].conj()) * factor(r, pairs, i - j, "xpos" if fading else "rotary") for r in range(pairs)).real
        assert float(tables[0][i, j]) == pytest.approx(by_hand, abs=1e-9)


def test_constants_of_xpos():
    "zeta and theta of a head of width 8, written out."
    z = _place_powers(3, 4, True)[2]
    assert_close(z.abs(), torch.tensor([2 / 7, 13 / 28, 9 / 14, 23 / 28], dtype=torch.float64) ** (1 / 512))
    assert_close(z.angle(), torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64))
    assert_close(_place_powers(3, 4, False)[2].abs(), torch.ones(4, dtype=torch.float64))
    assert _place_powers(3, 4, True) is _place_powers(3, 4, True) and not _place_powers(6, 1, True)[3].imag.any()
    with torch.inference_mode():
        kept = _place_powers(7, 3, True)
    assert not kept.is_inference()


def test_pairs_are_halves():
    found = _multiply_pairs(torch.tensor([[1.0, 0, 0, 2]]), torch.tensor([[1j, 1j]]))
    assert found.tolist() == [[0, -2, 1, 0]]                                          # 1 -> i and 2i -> -2


@pytest.mark.parametrize("length", [2000, 5000])
def test_long_sentences_in_single_precision(length):
    "Nothing overflows, and scores have the digits of single precision."
    q, k = drawn(2, length, 64, dtype=torch.float32)
    (a, b), (c, d) = _place_pairs(q, k, True), _place_pairs(q.double(), k.double(), True)
    assert a.isfinite().all() and b.isfinite().all() and a.dtype == torch.float32
    rough, exact = (a[::50] @ b.T), (c[::50] @ d.T)
    left = torch.arange(length) <= torch.arange(length)[::50, None]
    assert float((rough - exact)[left].abs().max()) < 2e-5 * math.sqrt(64)


def test_encoder_on_two_thousand_tokens():
    encoder, (x, mask) = make(layers=2), batch([2000, 1500])
    exact = encoder(x, mask).root
    rough = encoder.float()(x.float(), mask).root
    assert rough.isfinite().all() and (rough.double() - exact).abs().max() < 1e-4


def test_no_table_is_kept():
    "Of 600 x 600 weights nothing is saved for the way back."
    encoder, (x, mask) = make(dim=16, heads=4).float(), batch([600, 500], dim=16, dtype=torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor):
        encoder(x, mask).root.sum().backward()
    assert 0 < max(sizes) < 600 * 600


@few
@given(batches, st.sampled_from([2, 4, 6]), st.integers(1, 3))
def test_every_second_head_is_turned(lengths, heads, width):
    mask = length_mask(torch.tensor(lengths))
    x = torch.arange(mask.numel() * heads * width).view(*mask.shape, -1)
    turned = flip_odd_heads(x, mask, heads)
    assert torch.equal(flip_odd_heads(turned, mask, heads), x) and torch.equal(turned[~mask], x[~mask])
    for row, back, n in zip(x.unflatten(-1, (heads, -1)), turned.unflatten(-1, (heads, -1)), lengths):
        assert torch.equal(back[:n, ::2], row[:n, ::2]) and torch.equal(back[:n, 1::2], row[:n, 1::2].flip(0))


# ---- who sees whom

@few
@given(st.permutations(range(6)), st.booleans(), st.integers(0, 10**6))
def test_without_positions_order_is_not_seen(order, shared, seed):
    (x, mask), order = batch([6], seed=seed), list(order)
    encoder = make(position="none", shared=shared)
    out, moved = encoder(x, mask), encoder(x[:, order], mask)
    assert_close(moved.root, out.root)
    assert_close(moved.states, out.states[:, order])


@pytest.mark.parametrize("position", ["xpos", "rotary"])
def test_with_positions_it_is(position):
    encoder, (x, mask) = make(position=position), batch([6])
    out, moved = encoder(x, mask), encoder(x[:, [1, 0, 2, 3, 4, 5]], mask)
    assert (moved.root - out.root).abs().max() > 1e-3 and (moved.states[:, 2:] - out.states[:, 2:]).abs().max() > 1e-3


def test_heads_look_to_one_side():
    q, k, v = drawn(3, 1, 6, 8)
    mask, changed = torch.ones(1, 6, dtype=torch.bool), v.clone()
    changed[:, 3] += 1
    moved = (multi_head_attention(q, k, changed, mask, 2, "xpos") - multi_head_attention(q, k, v, mask, 2, "xpos")).abs()[0].unflatten(-1, (2, 4)).amax(-1)
    assert (moved[:, 0] > 1e-6).tolist() == [False] * 3 + [True] * 3
    assert (moved[:, 1] > 1e-6).tolist() == [True] * 4 + [False] * 2


# ---- the schema

@few
@given(st.lists(random_steps(8), min_size=1, max_size=4), st.integers(0, 10**6))
def test_gold_trees_fill_the_schema(rows, seed):
    trees, mask = boxed(rows)
    x, w = drawn(*mask.shape, 3, seed=seed).requires_grad_(), drawn(3, 3, seed=1)
    def cell(left, right):
        return torch.tanh(left @ w - right)
    def retrieve(states, exists):
        due = trees.masked_fill((exists == 0) | (trees == 0), 99)
        goes = ((due == due.amin(1, keepdim=True)) & (due < 99)).double()
        left = neighbor_weights(exists)
        return left @ states, left @ goes[..., None], goes
    def compose(found, states, exists):
        left, arrives, goes = found
        return arrives * cell(left, states) + (1 - arrives) * states, exists * (1 - goes)
    states, exists = recur(retrieve, compose, x, mask.double(), int(trees.max()))
    last = mask.sum(1) - 1
    assert torch.equal(exists, F.one_hot(last, mask.shape[1]).double())
    root, wanted = states[torch.arange(len(x)), last], compose_by_height(x, trees, mask, cell)
    assert_close(root, wanted)
    assert_close(*(torch.autograd.grad(r.square().sum(), x, retain_graph=True)[0] for r in (root, wanted)))


def test_recur_counts_and_hands_on():
    seen = []
    def retrieve(states, exists):
        seen.append((states, exists))
        return states + exists
    found = recur(retrieve, lambda found, states, exists: (found * states, exists + 1), 2, 1, 3)
    assert seen == [(2, 1), (6, 2), (48, 3)] and found == (48 * 51, 4)
    assert recur(retrieve, None, 2, 1, 0) == (2, 1)


# ---- layers and steps

def test_layers_and_test_layers():
    encoder, (x, mask) = make(layers=2, shared=True, test_layers=5), batch([4, 2])
    def steps():
        return len(encoder(x, mask, trace=True).trace["states"]) - 1
    assert steps() == 5 and (encoder.train(), steps())[1] == 2 and encoder.eval() is encoder
    five = make(layers=5, shared=True)
    five.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder(x, mask).root, five(x, mask).root)
    encoder.test_layers = None
    assert steps() == 2 and not torch.equal(encoder(x, mask).root, five(x, mask).root)
    encoder.test_layers = 1
    assert steps() == 1
    assert len(make(layers=4).layers) == 4 and len(make(layers=4, shared=True).layers) == 1


@positions
def test_sharing_is_copying(position):
    one, own = make(layers=3, shared=True, position=position), make(layers=3, position=position)
    own.load_state_dict(one.state_dict(), strict=False)
    for layer in own.layers:
        layer.load_state_dict(one.layers[0].state_dict())
    (x, mask), push = batch([5, 1, 3]), drawn(3, 8)
    assert_close(one(x, mask).states, own(x, mask).states)
    for encoder in (one, own):
        (encoder(x, mask).root * push).sum().backward()
    for name, shared in one.layers[0].named_parameters():
        copies = [layer.get_parameter(name).grad for layer in own.layers]
        assert_close(shared.grad, sum(copies))
        assert max(float((copy - shared.grad).abs().max()) for copy in copies) > 1e-6


def test_trace_and_start():
    encoder, (x, mask) = make(layers=3), batch([4, 2])
    states = encoder(x, mask, trace=True).trace["states"]
    assert states.shape == (4, 2, 5, 8) and states.isfinite().all()
    assert torch.equal(states[0, :, 0], encoder.start.expand(2, -1)) and torch.equal(states[0, 0, 1:], x[0])
    with_start = length_mask(torch.tensor([5, 3]))
    for layer, before, after in zip(encoder.layers, states[:-1], states[1:], strict=True):
        assert torch.equal(recur(layer.retrieve, layer.compose, before, with_start, 1)[0], after)
    assert_close(encoder(x, mask).root, encoder.norm(states[-1, :, 0]))


def test_dropout_acts_on_what_is_added():
    "What passes along the sums is never dropped; what is added is, in both halves."
    torch.manual_seed(0)
    layer, mask = Transformer(8, 1, 2, 32, dropout=0.5).double().train().layers[0], torch.ones(1, 50, dtype=torch.bool)
    x = drawn(1, 50, 8)
    for added in (layer.retrieve(x, mask) - x, layer.compose(x, None, mask)[0] - x):
        assert 0.4 < float((added == 0).double().mean()) < 0.6
    layer.eval()
    for added in (layer.retrieve(x, mask) - x, layer.compose(x, None, mask)[0] - x):
        assert (added != 0).all()


@positions
def test_half_precision(position):
    encoder, (x, mask) = make(position=position).bfloat16(), batch([5, 3], dtype=torch.bfloat16)
    out = encoder(x, mask)
    assert out.root.dtype == out.states.dtype == torch.bfloat16
    exact = encoder.double()(x.double(), mask)
    assert 0 < (out.root.double() - exact.root).abs().max() < 0.1


def test_hidden_width():
    for options, width in (({}, 32), ({"hidden": 5}, 5)):
        work = make(**options).layers[1].compose
        assert work.w1.out_features == work.w2.in_features == width


@pytest.mark.parametrize("options, said", [
    (dict(heads=3), "heads=3"), (dict(heads=0), "heads=0"), (dict(heads=8), "even width"), (dict(dim=6, heads=1), "half of the heads"),
    (dict(dim=18, heads=3), "must be even"), (dict(position="sines"), "'sines'"), (dict(activation="tanh"), "'tanh'"),
    (dict(layers=0), "layers must be a whole number from 1, got 0"), (dict(test_layers=4), "shared=True"),
    (dict(shared=True, test_layers=0), "test_layers must be a whole number from 1, got 0"), (dict(hidden=0), "hidden must be"),
    (dict(position="none", heads=3), "dim=8")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("options", [dict(dim=6, heads=1, position="rotary"), dict(dim=18, heads=3, position="rotary"),
                                     dict(dim=5, heads=5, position="none"), dict(dim=12, heads=6)])
def test_odd_shapes_that_are_allowed(options):
    encoder, (x, mask) = make(**options), batch([3, 1], dim=options["dim"])
    assert encoder(x, mask).root.isfinite().all()


def test_check_transformer_passes():
    assert _check_transformer(8, 2, "xpos", "relu", True, 1) is None
