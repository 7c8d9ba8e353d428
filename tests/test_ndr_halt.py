"Routers that stop, against sums and products position by position: existence, shares, layers taken, who leaves the batch, what is drawn."

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.core import batch_gap, padding_gap
from rvnnbook.encoders.ndr import NDR, READOUTS
from rvnnbook.encoders.ndr_halt import AdaptiveNDR, HaltingNDR, _halt_act, _halt_by_existence, remaining_existence
from rvnnbook.layers.attention import geometric_attention, geometric_literal, scale_by_existence
from rvnnbook.registry import create_encoder
from tests.helpers import batch, slopes

few = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 10**6)
lengths_of = st.lists(st.integers(1, 7), min_size=1, max_size=4)
DIM = 6
WAYS = {"taken": {"gate_bias": 1.0, "threshold": 0.2, "takers": 2}, "act": {"halt_bias": -1.0}}
KINDS = {"taken": HaltingNDR, "act": AdaptiveNDR}
every = pytest.mark.parametrize("halt", WAYS)


def make(halt, layers=6, seed=0, **options):
    torch.manual_seed(seed)
    attributes = {name: options.pop(name) for name in ("test_layers", "checkpoint") if name in options}
    encoder = KINDS[halt](DIM, layers, **{"heads": 2} | WAYS[halt] | options).double().eval()
    vars(encoder).update(attributes)
    with torch.no_grad():                    # parameters that start at zero or one must not hide
        for p in encoder.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return encoder


def tensors(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# ---- what is left

@few
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), seeds)
def test_existence_is_a_product_over_receivers_and_heads(size, n, heads, width, seed):
    exists, gate, attention, keep = tensors(seed, (size, n), (size, n, width), (size, heads, n, n), (size, n))
    keeps = keep > 0.7
    found = remaining_existence(exists, gate, attention, keeps)
    for b in range(size):
        for j in range(n):
            left = float(exists[b, j])
            for h in range(heads) if not keeps[b, j] else ():
                for i in range(n):
                    left *= 1 - float(exists[b, i]) * float(gate[b, i].mean()) * float(attention[b, h, i, j])
            assert float(found[b, j]) == pytest.approx(left, abs=1e-14)
    assert (found <= exists).all() and (found >= 0).all() and torch.equal(found[keeps], exists[keeps])


@few
@given(st.integers(1, 6), st.sampled_from([0.1, 1.0, 10.0, 100.0]), seeds)
def test_faded_scores_have_the_probability_times_existence(n, scale, seed):
    uniform, exists = tensors(seed, (2, 2, n, n), (2, n))
    logits = scale * (2 * uniform - 1)
    exists[:, 0] = 1.0
    assert_close(scale_by_existence(logits, exists).sigmoid(), logits.sigmoid() * exists[:, None, None, :], rtol=1e-12, atol=1e-14)
    few_of_them = scale_by_existence(logits.clamp(max=40), torch.ones_like(exists))
    assert torch.equal(few_of_them, logits.clamp(max=40))
    literal = geometric_literal(logits.sigmoid() * exists[:, None, None, :])
    assert_close(geometric_attention(scale_by_existence(logits, exists)), literal, rtol=0, atol=1e-13)


def test_slopes_of_faded_attention():
    uniform, exists = tensors(1, (1, 2, 5, 5), (1, 5))
    for at in (exists * 0.9 + 0.05, torch.ones_like(exists)):          # inside, and where nothing has been taken
        inputs = [(12 * uniform - 6).requires_grad_(), at.requires_grad_()]
        found = slopes(geometric_attention(scale_by_existence(*inputs)), inputs)
        literal = slopes(geometric_literal(inputs[0].sigmoid() * at[:, None, None, :]), inputs)
        assert all(torch.isfinite(slope).all() for slope in found)
        assert_close(found, literal, rtol=1e-9, atol=1e-12)
    gone = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True)  # taken to the last bit: still a number
    attention = geometric_attention(scale_by_existence(inputs[0], gone))
    assert attention.max() < 1e-29 and all(slope.isfinite().all() for slope in slopes(attention, [inputs[0], gone]))


def test_huge_scores_in_single_precision():
    logits = torch.tensor([[-200.0, 200.0], [1e4, -1e4]])[None, None].requires_grad_()
    exists = torch.tensor([[0.25, 0.5]], requires_grad=True)
    made = scale_by_existence(logits, exists)
    assert_close(made.sigmoid()[0, 0], torch.tensor([[0.0, 0.5], [0.25, 0.0]]))
    made.sigmoid().sum().backward()
    assert logits.grad.isfinite().all() and exists.grad.isfinite().all()
    assert_close(exists.grad, torch.tensor([[1.0, 1.0]]))


# ---- shares and price

def by_hand(chances, threshold):
    "Graves, one position: the share of every layer, and layers plus remainder."
    total, shares = 0.0, []
    for number, chance in enumerate(chances, 1):
        if total + chance >= 1 - threshold or number == len(chances):
            rest = [0.0] * (len(chances) - number)
            return [*shares, 1 - total, *rest], number + 1 - total
        shares.append(chance)
        total += chance


@few
@given(lengths_of, st.integers(1, 6), seeds)
def test_the_loop_of_clocks_gives_those_shares(lengths, limit, seed):
    _, there = batch(lengths)
    size, n = there.shape
    chances, start = tensors(seed, (limit, size, n), (size, n))
    calls = []
    begin = torch.stack([start, torch.zeros_like(start), torch.arange(size)[:, None].expand(size, n)], -1)     # number, layer, row

    def step(states, exists, rows, waits):
        calls.append(rows.tolist())
        assert torch.equal(states[:, 0, 2], rows.double()) and torch.equal(exists, there[rows])
        made = states + torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)
        return torch.where(waits, states, made), torch.ones_like(states), states[:, None]

    def sure(states):
        return chances[(states[..., 1].long() - 1).clamp(min=0), states[..., 2].long(), torch.arange(n)]

    mean, cost, used = _halt_act(step, sure, begin, there, limit, 0.01)
    for b, length in enumerate(lengths):
        stops = []
        for i in range(length):
            shares, price = by_hand(chances[:, b, i].tolist(), 0.01)
            stops.append(sum(share > 0 for share in shares))
            expected = float(start[b, i]) + sum(share * 0.5 * (t + 1) for t, share in enumerate(shares))
            assert float(mean[b, i, 0]) == pytest.approx(expected, abs=1e-12) and float(cost[b, i]) == pytest.approx(price, abs=1e-12)
        assert int(used[b]) == max(stops)
        assert sum(b in rows for rows in calls) == max(stops)          # and not asked for afterwards
    assert not mean[~there].any() and not cost[~there].any()


# ---- the encoder

@every
@few
@given(lengths=lengths_of, seed=seeds)
def test_batch_and_padding(halt, lengths, seed):
    encoder, (x, mask) = make(halt, seed=seed % 7, readout=READOUTS[seed % 4]), batch(lengths, DIM, seed)
    assert batch_gap(encoder, x, mask) <= 1e-12 and padding_gap(encoder, x, mask) <= 1e-12
    layers = encoder(x, mask, trace=True).trace["layers"].tolist()
    losses = []
    for b, n in enumerate(lengths):
        alone = encoder(x[b:b + 1, :n], mask[b:b + 1, :n], trace=True)
        assert alone.trace["layers"].tolist() == [layers[b]]
        losses.append(float(alone.loss.detach()))
    assert float(encoder(x, mask).loss.detach()) == pytest.approx(sum(losses) / len(losses), abs=1e-12)


@every
def test_sentences_leave_and_what_is_told(halt):
    encoder, (x, mask) = make(halt, 9, readout="last"), batch([7, 1, 4, 2], DIM)
    seen = []
    encoder.attn.register_forward_hook(lambda layer, given, found: seen.append(len(given[0])))
    out = encoder(x, mask, trace=True)
    layers, name = out.trace["layers"], "exists" if halt == "taken" else "shares"
    assert len(set(layers.tolist())) > 1 and seen == [int((layers > t).sum()) for t in range(int(layers.max()))]
    assert out.trace[name].shape == (len(seen), 4, 7) and out.trace["gates"].shape == (len(seen), 4, 7, DIM)
    assert out.trace["attention"].shape == (len(seen), 4, 2, 7, 7)
    for b, count in enumerate(layers.tolist()):                        # nothing is told of those who are done
        assert out.trace["gates"][:count, b].any() and not out.trace["gates"][count:, b].any() and not out.trace[name][count:, b].any()
    if halt == "taken":
        others = torch.where(torch.arange(7) == mask.sum(1, keepdim=True) - 1, 0, out.trace["exists"]).amax(-1)
        for b, count in enumerate(layers.tolist()):
            assert (others[:count - 1, b] > 0.2).all() and (others[count - 1, b] <= 0.2 or count == 9)
    else:
        assert_close(out.trace["shares"].sum(0), mask.double())
    assert encoder(x, mask).trace is None and not any(part.requires_grad for part in out.trace.values())


@pytest.mark.parametrize("readout", READOUTS)
def test_the_position_that_is_read_is_never_taken(readout):
    encoder, (x, mask) = make("taken", 12, readout=readout), batch([5, 3], DIM)
    out = encoder(x, mask, trace=True)
    framed = readout in ("start", "end")
    for b, n in enumerate((5, 3)):
        last, count = out.trace["exists"][int(out.trace["layers"][b]) - 1, b], n + 2 * framed
        keep = 0 if readout in ("start", "first") else count - 1
        assert last[keep] == 1 and not last[count:].any() and last[[i for i in range(count) if i != keep]].max() < 0.9
    sums = [out.trace["exists"][int(out.trace["layers"][b]) - 1, b].sum().log() for b in range(2)]
    assert_close(out.loss, 0.01 * sum(sums) / 2)


@every
def test_float64_gradcheck(halt):
    encoder, (x, mask) = make(halt, 3), batch([3, 1], DIM)
    x = x.nan_to_num(0.0).requires_grad_()
    weights = [p.detach().clone().requires_grad_() for p in encoder.parameters()]
    names = [name for name, _ in encoder.named_parameters()]

    def run(x, *weights):
        out = torch.func.functional_call(encoder, dict(zip(names, weights)), (x, mask))
        return out.root, out.loss

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


def test_nothing_taken_is_the_router():
    x, mask = batch([6, 1, 4], DIM)
    x = x.nan_to_num(0.0).requires_grad_()
    torch.manual_seed(0)
    router = NDR(DIM, 5, heads=2, test_layers=7).double().eval()
    free = make("taken", 5, takers=0, test_layers=7)
    free.load_state_dict(router.state_dict())
    assert_close(free(x, mask).root, router(x, mask).root, rtol=0, atol=1e-13)
    assert_close(slopes(free(x, mask).root, (x, *free.parameters())), slopes(router(x, mask).root, (x, *router.parameters())))
    late = make("act", 5, halt_bias=-80.0, test_layers=7)
    late.load_state_dict({**late.state_dict(), **router.state_dict()})
    assert_close(late(x, mask).root, router(x, mask).root, rtol=0, atol=1e-13)
    assert float(late(x, mask).loss.detach()) == pytest.approx(0.01 * 8)          # seven layers and a remainder of one
    at_once = make("act", 5, halt_bias=80.0)
    assert at_once(x, mask, trace=True).trace["layers"].tolist() == [1, 1, 1]


@every
def test_limits_of_training_and_of_evaluation(halt):
    late = {} if halt == "taken" else {"halt_bias": -6.0}
    encoder, (x, mask) = make(halt, 2, test_layers=4, gate_bias=-6.0, gate_dropout=0.0, **late), batch([5, 3], DIM)
    assert encoder(x, mask, trace=True).trace["layers"].tolist() == [4, 4]
    assert encoder.train()(x, mask, trace=True).trace["layers"].tolist() == [2, 2]


@every
def test_who_sits_out_does_not_depend_on_who_has_stopped(halt):
    "The long sentence draws the same, whether its mate stops early or goes on."
    encoder, (x, mask) = make(halt, 16, gate_dropout=0.3, threshold=0.3, readout="last").train(), batch([6, 6], DIM)
    def run(values):
        return encoder(values, mask, generator=torch.Generator().manual_seed(3), trace=True)
    first, other = run(x), None
    for seed in range(1, 40):
        changed = x.clone()
        changed[1] = 3 * batch([6], DIM, seed)[0][0]
        other = run(changed)
        if other.trace["layers"][1] != first.trace["layers"][1]:
            break
    assert other.trace["layers"][1] != first.trace["layers"][1]
    assert_close(other.root[0], first.root[0], rtol=0, atol=1e-12)
    shut = first.trace["gates"][0] == 0
    assert torch.equal(shut.any(-1), shut.all(-1)) and shut.any() and not shut.all()
    assert torch.equal(run(x).root, first.root)


@every
def test_checkpointed_layers_are_the_same_layers(halt):
    x, mask = batch([6, 1, 4], DIM)
    x = x.nan_to_num(0.0).requires_grad_()
    found = []
    for again in (False, True):
        encoder = make(halt, 5, dropout=0.4, gate_dropout=0.4, checkpoint=again).train()
        torch.manual_seed(1)
        out = encoder(x, mask, generator=torch.Generator().manual_seed(2))
        found.append([out.root, out.loss, *slopes(out.root, (x, *encoder.parameters()))])
    for plain, again in zip(*found, strict=True):
        assert_close(again, plain, rtol=0, atol=1e-12)


@every
def test_all_in_half_precision(halt):
    encoder, (x, mask) = make(halt, 4), batch([5, 2], DIM)
    exact = encoder(x, mask).root
    rough = encoder.bfloat16()(x.bfloat16(), mask, trace=True)
    assert rough.root.dtype == rough.states.dtype == torch.bfloat16 and rough.root.isfinite().all()
    assert (rough.root.double() - exact).abs().max() < 0.3


def test_names_and_refusals():
    for name, halt in (("ndr_halt", "taken"), ("ndr_act", "act")):
        encoder = create_encoder(name, dim=8, heads=2)
        assert type(encoder) is KINDS[halt]
        assert hasattr(encoder, "sure") == (halt == "act")
    for options, said in (({"takers": 3}, "number of heads, 2; got 3"),
                          ({"takers": -1}, "got -1"), ({"threshold": 1.0}, "threshold must be in [0, 1), got 1.0"), ({"threshold": -0.1}, "got -0.1"),
                          ({"layers": 0}, "layers must be a whole number from 1, got 0"), ({"penalty": -0.1}, "penalty must be in [0, inf), got -0.1"), ({"readout": "middle"}, "unknown readout 'middle'")):
        with pytest.raises(ValueError) as error:
            HaltingNDR(8, **{"heads": 2} | options)
        assert said in str(error.value)
        if "takers" not in options:
            with pytest.raises(ValueError) as error:
                AdaptiveNDR(8, **{"heads": 2} | options)
            assert said in str(error.value)


def test_only_the_first_heads_take():
    attention = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    attention[0, :, 1, 0] = torch.tensor([0.1, 0.2, 0.3])
    one, keeps = torch.ones(1, 2, 1, dtype=torch.float64), torch.tensor([[False, True]])
    for takers, left in ((0, 1.0), (1, 0.9), (2, 0.72), (3, 0.504), (None, 0.504)):
        step = lambda states, exists, rows, stays: (states, one, attention)
        _, exists, used = _halt_by_existence(step, one, one[..., 0], keeps, 1, 0.01, takers)
        assert float(exists[0, 0]) == pytest.approx(left) and used.tolist() == [1]


@pytest.mark.parametrize("rule", ["taken", "act"])
def test_sentences_that_leave_later_have_the_same_results(rule):
    torch.manual_seed(3)
    options = {} if rule == "taken" else {"halt_bias": -0.5}
    encoder = KINDS[rule](8, layers=7, heads=2, threshold=0.3, **options).double().eval()
    x, there = torch.randn(4, 6, 8, dtype=torch.float64), torch.arange(6) < torch.tensor([[6], [3], [2], [5]])
    step = encoder.make_step(there, None)
    if rule == "taken":                                    # open gates take quickly
        encoder.ffn_gate[-1].bias.data.fill_(3.0)
    found = [encoder.halt(step, x, there, 7, history, every) for every in (1, 2, 3, 7) for history in ([],)]
    layers = found[0][2]["layers"].tolist()
    assert len(set(layers)) > 1 and min(layers) < 7, layers
    for states, penalty, traced in found[1:]:
        assert_close(states, found[0][0])
        assert_close(penalty, found[0][1])
        assert traced["layers"].tolist() == layers


def test_a_sentence_stops_at_the_threshold_and_not_before():
    half = torch.zeros(1, 1, 2, 2)
    half[0, 0, 1, 0] = 0.5
    step = lambda states, exists, rows, stays: (states, torch.ones(1, 2, 1), half)
    for threshold, layers in ((0.5, 1), (0.49, 2), (0.125, 3), (0.0, 7)):
        ends = torch.tensor([[False, True]])
        assert _halt_by_existence(step, torch.ones(1, 2, 1), torch.ones(1, 2), ends, 7, threshold)[2].tolist() == [layers]
