"The reference networks of the chapter on balanced trees against the library's encoders, sentence by sentence."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.recurrent_grc import RecurrentGRC
from rvnnbook.reference.balanced import BBTGRC, RNNGRC
from tests.helpers import batch

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17]
PAIRS = {"bbt": (BBTGRC, BalancedTree, {}), "rnn, zero": (RNNGRC, RecurrentGRC, {"start": "zero"}),
         "rnn, first": (RNNGRC, RecurrentGRC, {"start": "first"})}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(2))
def test_reference_equals_encoder(name, seed):
    make_reference, make_encoder, options = PAIRS[name]
    torch.manual_seed(seed)
    encoder, reference = make_encoder(5, **options).double(), make_reference(5, **options).double()
    reference.load_state_dict(encoder.state_dict())
    x, mask = batch(LENGTHS, dim=5, seed=seed)
    x = x.nan_to_num().requires_grad_()
    push = torch.randn(len(LENGTHS), 5, dtype=x.dtype)
    fast = encoder(x, mask).root
    plain = torch.stack([reference(row[:n]) for row, n in zip(x, LENGTHS)])
    assert_close(plain, fast, rtol=0, atol=1e-9)
    names = [name for name, _ in encoder.named_parameters()]
    gradients = [torch.autograd.grad((root * push).sum(), [x, *map(model.get_parameter, names)])
                 for model, root in ((encoder, fast), (reference, plain))]
    assert_close(*gradients, rtol=0, atol=1e-8)
