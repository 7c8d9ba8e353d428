"Recursion in Recursion as the chapter writes it against the library's encoders, sentence by sentence."
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rvnnbook.encoders.rir import RIR as BatchedRIR
from rvnnbook.encoders.rir_beam import RIRBeam
from rvnnbook.reference.rir import RIR, FoldInner
from tests.helpers import batch, on_page

GreedyInner, = on_page("rir", "GreedyInner")

DIM, LENGTHS = 5, [1, 2, 3, 4, 5, 8, 9, 11, 17]


class Before(nn.Module):
    "A layer of the library on one sentence."
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[None], torch.ones(1, len(x), dtype=torch.bool))[0]


def pairs(arity, start, pre):
    torch.manual_seed(arity)
    if start == "greedy":
        encoder = RIRBeam(DIM, 1, arity, inference="nested", pre=pre).double().eval()
        inner = GreedyInner(DIM)
    else:
        encoder = BatchedRIR(DIM, arity=arity, pre=pre, options={"start": start}).double().eval()
        inner = FoldInner(DIM, start)
    return encoder, RIR(DIM, inner, arity, Before(encoder.s4d) if pre else None).double()


def key(name, model):
    "The name of the encoder's parameter in the chapter's model."
    if name.startswith("s4d."):
        return name.replace("s4d.", "pre.layer.", 1)
    return name if name in model.state_dict() else f"inner.{name}"


@pytest.mark.parametrize("pre", [None, "s4d"])
@pytest.mark.parametrize("start", ["first", "zero", "greedy"])
@pytest.mark.parametrize("arity", [2, 3, 4, 30])
def test_reference_equals_encoder(arity, start, pre):
    encoder, model = pairs(arity, start, pre)
    model.load_state_dict({key(name, model): tensor for name, tensor in encoder.state_dict().items()})
    x, mask = batch(LENGTHS, dim=DIM, seed=arity)
    x = x.nan_to_num().requires_grad_()
    push = torch.randn(len(LENGTHS), DIM, dtype=x.dtype)
    names = [name for name, _ in encoder.named_parameters()]
    for nested in (True, False) if start != "zero" else (True,):
        encoder.inference = "nested" if nested else "flat"
        fast = encoder(x, mask).root
        plain = torch.stack([model(row[:n], nested=nested) for row, n in zip(x, LENGTHS)])
        assert_close(plain, fast, rtol=0, atol=1e-9)
        found = torch.autograd.grad((plain * push).sum(), [x, *(model.get_parameter(key(name, model)) for name in names)],
                                    materialize_grads=True)
        expected = torch.autograd.grad((fast * push).sum(), [x, *map(encoder.get_parameter, names)], materialize_grads=True)
        assert_close(found, expected, rtol=0, atol=1e-8)
