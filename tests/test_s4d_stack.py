"The stack of state spaces against sums over tokens: lags, norms, layers, the mean."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.encoders.s4d_stack import S4DBlock, S4DStack
from rvnnbook.layers.s4d import NORMS
from rvnnbook.registry import create_encoder
from tests.helpers import assert_equal_sentence_by_sentence, batch

some = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10**6)


def make(layers=2, seed=0, dim=3, **options):
    torch.manual_seed(seed)
    encoder = S4DStack(dim, layers, 6, **options).double().eval()
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(.2 * torch.randn_like(p))
        for name, buffer in encoder.named_buffers():
            if ".norm.running" in name:
                buffer.uniform_(.5, 2)
    return encoder


def normal(v, norm):
    return F.layer_norm(v, v.shape[-1:], norm.weight, norm.bias)


def by_hand(block, sentence):
    "One layer over one sentence: for every pair of places the kernel's number, from the matrix of powers."
    kernel, n = block.kernel, len(sentence)
    read = normal(sentence, block.norm) if block.place == "pre" else sentence
    a, dt = torch.complex(-kernel.A_real.exp(), -kernel.A_imag), kernel.inv_dt.exp()
    ratio, gain = (1 + dt * a / 2) / (1 - dt * a / 2), dt * torch.view_as_complex(kernel.B)[0] / (1 - dt * a / 2)
    c, heard = torch.view_as_complex(kernel.C), []
    for t in range(n):
        total = block.D[0] * read[t]
        for s in range(n):
            for direction, away in ((0, t - s), (1, s - t - block.lag)):
                if away >= 0:
                    total = total + 2 * (c[direction] * gain * ratio ** away).real.sum(-1) * read[s]
        heard.append(total)
    value, gate = block.glu(F.gelu(torch.stack(heard))).chunk(2, -1)
    out = sentence + value * gate.sigmoid()
    if block.place == "batch":
        norm = block.norm                                  # in evaluation: the averages of training
        return (out - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return normal(out, block.norm) if block.place == "post" else out


@some
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.sampled_from(NORMS), st.sampled_from([0, 1]), st.integers(1, 2), seeds)
def test_every_sentence_is_read_as_the_equations_say(lengths, norm, lag, layers, seed):
    encoder = make(layers, seed, norm=norm, lag=lag)
    def read(trace, b, sentence):
        for layer, block in enumerate(encoder.s4d):
            assert_close(trace["states"][layer, b, :len(sentence)], sentence)
            sentence = by_hand(block, sentence)
        assert_close(trace["states"][-1, b, :len(sentence)], sentence)
        return normal(sentence, encoder.final_norm) if norm == "pre" else sentence
    out, mask = assert_equal_sentence_by_sentence(encoder, lengths, seed, read)
    assert out.trace["states"].shape == (layers + 1, *mask.shape, 3)


@pytest.mark.parametrize("lag", [0, 1])
def test_slopes_against_differences(lag):
    encoder, (x, mask) = make(1, dim=2, lag=lag), batch([3, 1], 2)
    x = x.nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: encoder(t, mask).root, x)
    names, values = zip(*((name, p.detach().clone().requires_grad_()) for name, p in encoder.named_parameters()))
    assert torch.autograd.gradcheck(lambda *p: torch.func.functional_call(encoder, dict(zip(names, p)), (x.detach(), mask)).root, values)


def test_defaults_and_refusals():
    encoder = create_encoder("s4d", dim=4)
    assert isinstance(encoder, S4DStack) and len(encoder.s4d) == 8
    assert {(block.lag, block.place, block.kernel.A_real.shape) for block in encoder.s4d} == {(0, "post", (4, 32))}
    for options, said in (({"layers": 0}, "layers must be a whole number from 1, got 0"), ({"lag": 2}, "unknown lag 2; known: 0, 1"), ({"norm": "last"}, "'last'"), ({"state_size": 7}, "7")):
        with pytest.raises(ValueError, match=said):
            S4DStack(4, **options)


def test_nothing_of_the_norm_without_one():
    assert not [p for name, p in S4DStack(4, 1, norm="none").named_parameters() if "norm" in name]
    assert len([p for name, p in S4DStack(4, 1, norm="pre").named_parameters() if "norm" in name]) == 4
    assert isinstance(S4DBlock(4, state_size=8).norm, torch.nn.Identity)
