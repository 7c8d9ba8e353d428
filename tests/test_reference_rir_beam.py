"RIR-EBT-GRC as the chapter writes it against the library's encoder, sentence by sentence."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.rir_beam import RIRBeam
from rvnnbook.reference.rir_beam import RIREBTGRC, Hypotheses, align, encode_nested, string_it
from tests.helpers import batch

DIM, LENGTHS = 5, [1, 2, 3, 4, 5, 7, 9, 10, 14]


def pair(beam, arity, how, seed, inference="nested"):
    torch.manual_seed(seed)
    encoder = RIRBeam(DIM, beam, arity, how, inference, pre=None, score_dim=4).double().eval()
    with torch.no_grad():
        encoder.scorer[1].weight *= 5
    model = RIREBTGRC(DIM, beam, arity, how, score_dim=4).double()
    model.load_state_dict(encoder.state_dict())
    return encoder, model


def gradients(model, names, x, root, push):
    return torch.autograd.grad((root * push).sum(), [x, *map(model.get_parameter, names)], materialize_grads=True)


@pytest.mark.parametrize("beam", [1, 3, 7])
@pytest.mark.parametrize("arity,inference", [(2, "nested"), (3, "nested"), (4, "nested"), (4, "flat"), (30, "nested")])
def test_strings_in_a_padded_batch(beam, arity, inference):
    encoder, model = pair(beam, arity, "string", beam, inference)
    x, mask = batch(LENGTHS, dim=DIM, seed=beam)
    x = x.nan_to_num().requires_grad_()
    fast = encoder(x, mask).root
    plain = torch.stack([encode_nested(model, row[:n], inference == "nested")[0] for row, n in zip(x, LENGTHS)])
    assert_close(plain, fast, rtol=0, atol=1e-9)
    push, names = torch.randn_like(fast), [name for name, _ in encoder.named_parameters()]
    assert_close(gradients(model, names, x, plain, push), gradients(encoder, names, x, fast, push), rtol=0, atol=1e-8)


@pytest.mark.parametrize("how", ["beam", "random"])
@pytest.mark.parametrize("beam,arity", [(1, 3), (3, 3), (3, 4), (7, 3), (5, 5)])
def test_alignment_with_the_same_draws(how, beam, arity):
    for seed, n in enumerate(LENGTHS):
        encoder, model = pair(beam, arity, how, seed)
        x, mask = batch([n], dim=DIM, seed=seed)
        x.requires_grad_()
        fast = encoder(x, mask, generator=torch.Generator().manual_seed(seed)).root[0]
        plain, _ = encode_nested(model, x[0], generator=torch.Generator().manual_seed(seed))
        assert_close(plain, fast, rtol=0, atol=1e-9)
        push, names = torch.randn_like(fast), [name for name, _ in encoder.named_parameters()]
        assert_close(gradients(model, names, x, plain, push), gradients(encoder, names, x, fast, push), rtol=0, atol=1e-8)


def test_alignment_keeps_the_best_and_single_hypotheses():
    nodes = [Hypotheses(torch.arange(3.)[:, None], torch.tensor([-2., -.5, -1.5])), Hypotheses(torch.zeros(1, 1), torch.zeros(1))]
    several, one = align(nodes, 4, generator=torch.Generator().manual_seed(0))
    assert len(several.scores) == 4 and several.states[0].item() == 1 and len(one.scores) == 1
    assert len(string_it([several, one], 4)) == 4
    assert align(nodes, 4, "string") is nodes
