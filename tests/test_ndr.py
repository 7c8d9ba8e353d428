"NDR against a sentence-by-sentence form and its literal layer: values, slopes, waiting, numbers of layers, what is drawn."
import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap
from rvnnbook.encoders.ndr import NDR, READOUTS, RoutingLayer, directional_bias
from tests.golden import build_ndr
from tests.helpers import on_page, shake

ndr_layer_literal, = on_page("implementations/ndr", "ndr_layer_literal")
some = settings(deadline=None, max_examples=25)
GOLDEN = sorted((Path(__file__).parent / "golden" / "ndr").glob("*.safetensors"))
lengths_of = st.lists(st.integers(1, 7), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
layouts = st.fixed_dictionaries({"heads": st.sampled_from([1, 2, 3, 6]), "scalar_gate": st.booleans(), "normalize": st.booleans(),
                                 "gate_bias": st.sampled_from([-3.0, 0.0, 2.0]), "hidden": st.sampled_from([None, 5])})


def make(layers=3, seed=0, dim=6, kind=NDR, shaken=True, normalize=False, checkpoint=False, **options):
    torch.manual_seed(seed)
    module = kind(dim, **({"layers": layers, "heads": 2} if kind is NDR else {"heads": 2}) | options).double().eval()
    module.attn.normalize, module.checkpoint = normalize, checkpoint
    return shake(module, seed, 0.3) if shaken else module


def batch(lengths, dim=6, seed=0, dtype=torch.float64):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan).to(dtype), mask


def slopes(root, inputs, seed=0):
    push = torch.randn(root.shape, generator=torch.Generator().manual_seed(seed), dtype=root.dtype)
    return torch.autograd.grad((root * push).sum(), inputs)


def walk(i, n):
    for away in range(1, n):
        yield from (j for j in (i + away, i - away) if 0 <= j < n)


def norm(v, layer):
    return (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt() * layer.weight + layer.bias


def network(v, layers):
    return layers[1].weight @ (layers[0].weight @ v + layers[0].bias).clamp(min=0) + layers[1].bias


def by_hand(encoder, sentence):
    "One layer over one sentence: heads, queries and keys one after the other. New states, gates and weights."
    attn, n, width = encoder.attn, len(sentence), encoder.dim // encoder.attn.heads
    new, gates, weights = [], [], torch.zeros(attn.heads, n, n, dtype=sentence.dtype)
    for i in range(n):
        fetched = []
        for h in range(attn.heads):
            rows = slice(h * width, (h + 1) * width)
            query = attn.q.weight[rows] @ sentence[i] + attn.content_bias[h]
            back, front = attn.direction.weight[2 * h:2 * h + 2] @ sentence[i] + attn.direction.bias[2 * h:2 * h + 2]
            left_over, sum_of, kv = 1, 0 * sentence[i, :width], attn.kv.weight[2 * h * width:2 * (h + 1) * width]
            for j in walk(i, n):
                key, value = (kv @ sentence[j]).chunk(2)
                score = attn.content_scale * (query @ key) + attn.direction_scale * (front if j > i else back) + attn.logit_bias
                match = 1 / (1 + (-score).exp())
                weights[h, i, j] = (left_over * match)[0].detach()
                sum_of, left_over = sum_of + left_over * match * value, left_over * (1 - match)
            if attn.normalize and n > 1:
                sum_of, weights[h, i] = sum_of / (1 - left_over), weights[h, i] / (1 - left_over.detach())
            fetched.append(sum_of)
        together = norm(sentence[i] + attn.out.weight @ torch.cat(fetched), encoder.norm1)
        gates.append(1 / (1 + (-network(together, encoder.ffn_gate)).exp()))
        new.append((1 - gates[-1]) * sentence[i] + gates[-1] * norm(network(together, encoder.ffn_data), encoder.norm2))
    return torch.stack(new), torch.stack(gates), weights


# ---- the equations

@some
@given(lengths_of, layouts, seeds, st.sampled_from(READOUTS), st.integers(1, 3))
def test_every_sentence_is_routed_as_the_equations_say(lengths, layout, seed, readout, layers):
    encoder, (x, mask) = make(layers, seed, readout=readout, **layout), batch(lengths, seed=seed)
    out = encoder(x, mask, trace=True)
    framed = readout in ("start", "end")
    assert out.states.shape == x.shape and not out.states[~mask].any()
    for b, n in enumerate(lengths):
        sentence = x[b, :n]
        if framed:
            sentence = torch.stack([encoder.start, *sentence, encoder.end])
        for t in range(layers):
            sentence, gates, weights = by_hand(encoder, sentence)
            m = len(sentence)
            assert_close(out.trace["gates"][t, b, :m], gates)
            assert_close(out.trace["attention"][t, b, :, :m, :m], weights)
        assert_close(out.root[b], sentence[0 if readout in ("start", "first") else -1])
        assert_close(out.states[b, :n], sentence[1:-1] if framed else sentence)


@some
@given(st.integers(1, 3), st.integers(1, 6), layouts, seeds, st.data())
def test_layer_and_literal_layer(size, n, layout, seed, data):
    "Values and slopes in the states and in every parameter; keys may be missing anywhere."
    layer = make(kind=RoutingLayer, seed=seed, readout="first", **layout | {"normalize": False})
    states = batch([n] * size, seed=seed)[0].requires_grad_()
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=size, max_size=size)))
    ours, literal = layer.layer(states, mask)[0], ndr_layer_literal(layer, states, mask)
    assert_close(ours, literal, rtol=0, atol=1e-12)
    inputs = (states, *layer.parameters())
    for mine, theirs in zip(slopes(ours, inputs), slopes(literal, inputs), strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("readout, normalize", [("start", False), ("last", True)])
def test_slopes_against_differences(readout, normalize):
    encoder, (x, mask) = make(2, dim=4, readout=readout, normalize=normalize), batch([3, 1], dim=4)
    x = x.nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: encoder(t, mask).root, x)
    names, values = zip(*((name, p.detach().clone().requires_grad_()) for name, p in encoder.named_parameters()))
    assert torch.autograd.gradcheck(
        lambda *p: torch.func.functional_call(encoder, dict(zip(names, p)), (x.detach(), mask)).root, values)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_recorded_attention(path):
    with safe_open(path, framework="pt") as file:
        tensors, config = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()["config"]
    encoder = build_ndr(json.loads(config)).eval()
    encoder.load_state_dict({key[6:]: value.float() for key, value in tensors.items() if key.startswith("param.")})
    mask = tensors["in.mask"].bool()
    attention = encoder(tensors["in.x"], mask, trace=True).trace["attention"]
    assert attention.shape == (encoder.layers, *tensors["trace.attention_layer1"].shape)
    rows = mask[:, None, :, None].expand_as(attention[0])
    assert_close(attention[0][rows], tensors["trace.attention_layer1"][rows], rtol=0, atol=1e-5)


def test_recordings_are_there():
    assert {path.stem for path in GOLDEN} == {"ragged_unnormalized", "scalar_gate"}


# ---- what nothing may depend on

@some
@given(lengths_of, layouts, seeds, st.sampled_from(READOUTS))
def test_padding_and_batch_mates(lengths, layout, seed, readout):
    encoder, (x, mask) = make(4, seed, readout=readout, **layout), batch(lengths, seed=seed)
    assert batch_gap(encoder, x, mask) <= 1e-12 and padding_gap(encoder, x, mask) <= 1e-12
    states = encoder(x, mask).states
    wide = encoder(F.pad(x, (0, 0, 0, 2), value=math.inf), F.pad(mask, (0, 2))).states
    assert_close(wide[:, :-2], states, rtol=0, atol=1e-12)
    assert not wide[:, -2:].any()


def test_heads_have_no_order():
    encoder, (x, mask) = make(heads=3), batch([5, 2])
    root, order = encoder(x, mask).root, torch.tensor([2, 0, 1])
    def among_heads(weight, part):
        return weight.unflatten(0, (3, part))[order].flatten(0, 1)
    attn = encoder.attn
    with torch.no_grad():
        attn.q.weight.copy_(among_heads(attn.q.weight, 2))
        attn.kv.weight.copy_(among_heads(attn.kv.weight, 4))
        attn.direction.weight.copy_(among_heads(attn.direction.weight, 2))
        attn.direction.bias.copy_(among_heads(attn.direction.bias, 2))
        attn.content_bias.copy_(attn.content_bias[order])
        assert (encoder(x, mask).root - root).abs().max() > 1e-6
        attn.out.weight.copy_(among_heads(attn.out.weight.T, 2).T)
    assert_close(encoder(x, mask).root, root)


@pytest.mark.parametrize("side", [0, 1])
def test_in_the_mirror(side):
    "Heads that look to one side only, over a sentence turned over, are heads that look to the other."
    encoder, (x, mask) = make(readout="last"), batch([6])
    attn = encoder.attn
    with torch.no_grad():
        attn.direction.bias.view(-1, 2)[:, side] = -1e4
        states, trace = encoder(x, mask, trace=True).states, encoder(x, mask, trace=True).trace["attention"]
        looked = trace.tril(-1) if side == 1 else trace.triu(1)
        assert torch.equal(trace, looked) and looked.any()
        for tensor in (attn.direction.weight, attn.direction.bias):
            tensor.copy_(tensor.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))
    assert_close(encoder(x.flip(1), mask).states.flip(1), states)
    assert (encoder(x, mask).states - states).abs().max() > 1e-3


def test_lean():
    sides = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    found = directional_bias(sides)
    for i, j in product(range(3), range(3)):
        assert i == j or found[i, j] == sides[i, int(j > i)]
    assert directional_bias(torch.zeros(2, 4, 1, 2)).shape == (2, 4, 1, 1)


def test_inputs_are_left_as_they_were():
    encoder, (x, mask) = make(gate_dropout=0.5, dropout=0.5).train(), batch([4, 2])
    kept = x.clone(), mask.clone(), {key: value.clone() for key, value in encoder.state_dict().items()}
    encoder(x, mask, trace=True).root.sum().backward()
    assert torch.equal(x.nan_to_num(7.0), kept[0].nan_to_num(7.0)) and torch.equal(mask, kept[1])
    assert all(torch.equal(value, kept[2][key]) for key, value in encoder.state_dict().items())


# ---- waiting

@settings(deadline=None, max_examples=10)
@given(lengths_of, st.booleans(), seeds)
def test_a_shut_gate_keeps_every_bit_and_an_open_one_none(lengths, scalar, seed):
    x, mask = batch(lengths, seed=seed)
    options = {"scalar_gate": scalar, "readout": "last", "seed": seed, "shaken": False}
    out = make(20, gate_bias=-800.0, **options)(x, mask)
    assert torch.equal(out.states, x.nan_to_num(0.0)) and torch.equal(out.root, x[torch.arange(len(x)), mask.sum(1) - 1])
    encoder, written = make(1, gate_bias=800.0, **options), []
    encoder.norm2.register_forward_hook(lambda module, args, out: written.append(out))
    assert torch.equal(encoder(x, mask).states[mask], written[0][mask])


def test_the_gate_starts_closed():
    for bias, scalar in product((-3.0, -1.0), (False, True)):
        torch.manual_seed(0)
        encoder = NDR(64, 2, gate_bias=bias, scalar_gate=scalar, heads=4)
        gates = encoder(torch.randn(4, 9, 64), torch.ones(4, 9, dtype=torch.bool), trace=True).trace["gates"]
        assert (encoder.ffn_gate[1].bias == bias).all() and gates.shape == (2, 4, 11, 1 if scalar else 64)
        assert abs(float(gates.mean().logit()) - bias) < 0.3
    assert (NDR(8).ffn_gate[1].bias == -3).all()


def test_weights_at_the_start():
    torch.manual_seed(0)
    encoder = NDR(512)
    attn, width = encoder.attn, 32
    assert attn.heads == 16 and attn.content_bias.shape == (16, width) and not attn.content_bias.any()
    assert attn.content_scale.tolist() == pytest.approx([width ** -0.5]) and attn.direction_scale.tolist() == [1] and attn.logit_bias.tolist() == [0]
    bound = math.sqrt(6 / (512 + width))
    for weight in (attn.q.weight.detach(), attn.kv.weight.detach()):
        assert 0.99 * bound < weight.abs().max() <= bound and abs(float(weight.std()) * math.sqrt(3) / bound - 1) < 0.01
    assert attn.out.weight.abs().max() <= 512 ** -0.5
    assert [NDR(dim).attn.heads for dim in (8, 32, 63, 64, 128)] == [1, 1, 1, 2, 4]
    assert encoder.ffn_data[0].out_features == 1024 and encoder.ffn_gate[0].out_features == 512
    assert (encoder.layers, encoder.test_layers, encoder.gate_dropout, encoder.readout) == (20, 20, 0.05, "start")


# ---- how many layers

def with_layers(encoder, layers):
    "The encoder with another number of layers in evaluation."
    encoder.test_layers = layers
    return encoder


@some
@given(lengths_of, st.integers(1, 4), st.integers(1, 4), seeds)
def test_layers_can_be_continued(lengths, first, more, seed):
    encoder, (x, mask) = make(first + more, seed, readout="last"), batch(lengths, seed=seed)
    whole = encoder(x, mask).states
    half = with_layers(encoder, first)(x, mask).states
    assert_close(with_layers(encoder, more)(half, mask).states, whole)
    assert (half - whole)[mask].abs().max() > 1e-6


def test_layers_in_training_and_in_evaluation():
    x, mask = batch([4, 2])
    encoder = make(3, test_layers=7, gate_dropout=0.0)
    count = lambda: len(encoder(x, mask, trace=True).trace["gates"])
    assert count() == 7 and (encoder.train(), count())[1] == 3 and (encoder.eval(), count())[1] == 7
    assert torch.equal(encoder(x, mask).root, with_layers(make(3, gate_dropout=0.0), 7)(x, mask).root)
    assert torch.equal(encoder.train()(x, mask).root, with_layers(make(3, gate_dropout=0.0), 3)(x, mask).root)
    deeper = make(5, seed=1)                                           # the weights do not know how often they are used
    deeper.load_state_dict(encoder.state_dict())
    assert torch.equal(deeper(x, mask).root, with_layers(encoder.eval(), 5)(x, mask).root)
    assert make(4).test_layers == 4


def test_readouts():
    x, mask = batch([4, 1])
    for readout in READOUTS:
        encoder = make(readout=readout)
        framed = readout in ("start", "end")
        assert {"start", "end"} & set(encoder.state_dict()) == ({"start", "end"} if framed else set())
        out = encoder(x, mask, trace=True)
        assert out.trace["attention"].shape == (3, 2, 2, 4 + 2 * framed, 4 + 2 * framed)
        if not framed:
            assert torch.equal(out.root, out.states[:, 0] if readout == "first" else torch.stack([out.states[0, 3], out.states[1, 0]]))
    start, end = (make(readout=readout) for readout in ("start", "end"))
    end.load_state_dict(start.state_dict())
    a, b = start(x, mask), end(x, mask)
    assert torch.equal(a.states, b.states) and (a.root - b.root).abs().min(-1).values.max() > 1e-3
    with torch.no_grad():
        start.end.add_(1)
    assert ((start(x, mask).root - a.root).abs().max(-1).values > 1e-6).all()        # END is read too


def test_trace():
    encoder, (x, mask) = make(4), batch([5, 1, 3])
    trace = encoder(x, mask, trace=True).trace
    there = F.pad(mask, (2, 0), value=True)                            # with START and END each sentence is two longer
    attention, gates = trace["attention"], trace["gates"]
    assert set(trace) == {"attention", "gates"} and not attention.requires_grad and not gates.requires_grad
    assert not attention.diagonal(dim1=-2, dim2=-1).any() and attention.sum(-1).max() <= 1 + 1e-12 and attention.min() >= 0
    assert not attention[:, ~there[:, None, None, :].expand_as(attention[0])].any()
    assert attention[:, there[:, None, None, :].expand_as(attention[0]) & ~torch.eye(7, dtype=torch.bool)].all()
    assert ((gates > 0) & (gates < 1)).all() and encoder(x, mask).trace is None


# ---- what is drawn in training

@pytest.mark.parametrize("scalar", [False, True])
def test_gates_are_held_shut_in_training_only(scalar):
    encoder, (x, mask) = make(6, gate_dropout=0.4, scalar_gate=scalar, readout="last"), batch([7, 7, 3])
    plain = make(6, gate_dropout=0.0, scalar_gate=scalar, readout="last")
    state = torch.get_rng_state()
    assert torch.equal(encoder(x, mask).root, plain(x, mask).root) and torch.equal(plain.train()(x, mask).root, plain.eval()(x, mask).root)
    assert torch.equal(torch.get_rng_state(), state)                   # nothing was drawn
    encoder.train()
    gates = encoder(x, mask, trace=True, generator=torch.Generator().manual_seed(0)).trace["gates"]
    shut = gates == 0
    assert torch.equal(shut.any(-1), shut.all(-1)) and 0.25 < shut.double().mean() < 0.55      # whole positions
    assert len({tuple(row.flatten().tolist()) for row in shut}) == 6                           # drawn anew for every layer
    assert torch.equal(torch.get_rng_state(), state)                   # from the generator alone
    roots = [encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root for seed in (0, 0, 1)]
    assert torch.equal(roots[0], roots[1]) and not torch.equal(roots[0], roots[2])
    torch.manual_seed(3)
    first, second = encoder(x, mask).root, encoder(x, mask).root
    torch.manual_seed(3)
    assert torch.equal(encoder(x, mask).root, first) and not torch.equal(first, second)


def test_who_sits_out_keeps_his_state_and_is_seen():
    layer, (states, mask) = make(kind=RoutingLayer), batch([5, 5])
    stays = torch.zeros(2, 5, 1, dtype=torch.bool)
    stays[0, 2] = stays[1, 4] = True
    plain, all_gates, weights = layer.layer(states, mask)
    after, gates, seen = layer.layer(states, mask, stays)
    assert torch.equal(after, torch.where(stays, states, plain)) and torch.equal(seen, weights)
    assert torch.equal(gates, torch.where(stays, 0, all_gates))
    assert torch.equal(layer.layer(states, mask, ~stays | stays)[0], states)


def test_dropout_is_on_what_is_fetched_and_in_the_networks():
    layer, (states, mask) = make(kind=RoutingLayer, dropout=0.5), batch([5, 5])
    exact = layer.layer(states, mask)
    assert torch.equal(make(kind=RoutingLayer, dropout=0.0).train().layer(states, mask)[0], exact[0])
    inside = {}
    def note(module, name):
        module.register_forward_pre_hook(lambda module, args: inside.update({name: args[0]}))
    for module, name in ((layer.norm1, "sum"), (layer.ffn_data, "data in"), (layer.ffn_gate, "gate in"), (layer.ffn_data[1], "data"),
                         (layer.ffn_gate[1], "gate")):
        note(module, name)
    layer.layer(states, mask)
    fetched = inside["sum"] - states
    torch.manual_seed(0)
    _, gates, weights = layer.train().layer(states, mask)
    assert torch.equal(weights, exact[2]) and (gates > 0).all()        # neither the weights nor the gates themselves
    before = {"sum": fetched, "data": layer.ffn_data[0](inside["data in"]).relu(), "gate": layer.ffn_gate[0](inside["gate in"]).relu()}
    after = {"sum": inside["sum"] - states, "data": inside["data"], "gate": inside["gate"]}
    for part, value in after.items():
        alive = before[part].abs() > 1e-9
        ratio = value[alive] / before[part][alive]
        dropped = ratio.abs() < 1e-6
        assert_close(ratio[~dropped], torch.full_like(ratio[~dropped], 2.0))
        assert 0.25 < dropped.double().mean() < 0.75, part


# ---- memory and precision

def kept_bytes(encoder, x, mask):
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(x, mask).root.sum()
    return sum(storages.values())


def test_checkpointed_layers_are_the_same_layers():
    "With everything drawn that there is to draw."
    x, mask = batch([6, 1, 4])
    x = x.nan_to_num(0.0).requires_grad_()
    found = []
    for again in (False, True):
        encoder = make(5, dropout=0.4, gate_dropout=0.4, checkpoint=again).train()
        torch.manual_seed(1)
        root = encoder(x, mask, generator=torch.Generator().manual_seed(2)).root
        found.append([root, *slopes(root, (x, *encoder.parameters()))])
    for plain, again in zip(*found, strict=True):
        assert_close(again, plain, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(make(5, checkpoint=True)(x, mask).root, make(5)(x, mask).root)


def test_tables_kept():
    "Two tables a head and layer without checkpoints; none with them."
    x, mask = batch([96], dtype=torch.float32)
    table, bytes_of = 4 * 2 * 96 * 96, {}
    for again, layers in product((False, True), (3, 6)):
        bytes_of[again, layers] = kept_bytes(make(layers, checkpoint=again, readout="last").float(), x, mask)
    a_layer = (bytes_of[False, 6] - bytes_of[False, 3]) / 3
    assert 2 * table < a_layer < 3.5 * table
    assert (bytes_of[True, 6] - bytes_of[True, 3]) / 3 <= 2 * x.numel() * 4


@pytest.mark.parametrize("again", [False, True])
def test_states_keep_the_precision_of_the_input(again):
    encoder = make(6, checkpoint=again).float()
    x, mask = batch([5, 2], dtype=torch.float32)
    plain = encoder(x, mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = encoder(x, mask, trace=True)
        mixed.root.sum().backward()
    assert mixed.root.dtype == mixed.states.dtype == mixed.trace["gates"].dtype == mixed.trace["attention"].dtype == torch.float32
    assert 0 < (mixed.states - plain.states).abs().max() < 0.1
    assert all(p.grad.isfinite().all() and p.grad.any() for p in encoder.parameters())


def test_a_network_all_in_half_precision():
    encoder, (x, mask) = make(4), batch([5, 2])
    exact = encoder(x, mask).root
    rough = encoder.bfloat16()(x.bfloat16(), mask, trace=True)
    assert rough.root.dtype == rough.states.dtype == torch.bfloat16 and rough.trace["attention"].dtype == torch.float32
    assert 0 < (rough.root.double() - exact).abs().max() < 0.1


# ---- what is refused

@pytest.mark.parametrize("options, said", [
    ({"layers": 0}, "layers must be a whole number from 1, got 0"), ({"heads": 4}, "4 heads for dim=6"),
    ({"layers": 3, "test_layers": 0}, "test_layers must be a whole number from 1, got 0"), ({"hidden": 0}, "hidden must be"),
    ({"heads": 0}, "heads must be a whole number from 1, got 0"), ({"readout": "middle"}, "unknown readout 'middle'; known: start, end, first, last"),
    ({"gate_dropout": 1.0}, "got 1.0"), ({"gate_dropout": -0.1}, "got -0.1"), ({"dropout": 1.5}, "1.5")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        NDR(6, **options)
    assert said in str(error.value) and "\n" not in str(error.value)
