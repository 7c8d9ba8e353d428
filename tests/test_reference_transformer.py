"The Transformer of the chapter equals the library's, sentence by sentence, in values and gradients."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.transformer import POSITIONS
from rvnnbook.encoders.transformer import Transformer as Library
from rvnnbook.reference.transformer import Transformer
from tests.helpers import batch, slopes

LENGTHS = [7, 1, 4, 2]


def pair_of(position, shared, heads=2, layers=3):
    torch.manual_seed(0)
    library = Library(8, layers=layers, heads=heads, position=position, shared=shared).double().eval()
    with torch.no_grad():
        for p in library.parameters():
            p.add_(0.3 * torch.randn_like(p))
    reference = Transformer(8, layers=layers, heads=heads, position=position, shared=shared).double()
    reference.load_state_dict(library.state_dict())
    return library, reference


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_reference_equals_library(position, shared, heads):
    library, reference = pair_of(position, shared, heads)
    x, mask = batch(LENGTHS, dim=8)
    x.requires_grad_()
    out = library(x, mask, trace=True)
    vectors, histories = zip(*(reference(x[b, :n]) for b, n in enumerate(LENGTHS)))
    assert_close(out.root, torch.stack(vectors), rtol=0, atol=1e-9)
    for b, (n, history) in enumerate(zip(LENGTHS, histories)):
        assert_close(out.trace["states"][:, b, :n + 1], history, rtol=0, atol=1e-9)
        assert_close(out.states[b, :n], reference.norm(history[-1])[1:], rtol=0, atol=1e-9)
    expected = slopes(out.root, [x, *library.parameters()])
    found = slopes(torch.stack(vectors), [x, *reference.parameters()])
    by_name = dict(zip([name for name, _ in reference.named_parameters()], found[1:]))
    assert_close(torch.where(mask[..., None], expected[0], 0), torch.where(mask[..., None], found[0], 0), rtol=0, atol=1e-8)
    for (name, _), gradient in zip(library.named_parameters(), expected[1:]):
        assert_close(by_name[name], gradient, rtol=0, atol=1e-8)


@pytest.mark.parametrize("steps", [1, 5])
def test_number_of_steps(steps):
    library, reference = pair_of("xpos", True)
    library.test_layers = steps
    x, mask = batch([5], dim=8)
    assert_close(library(x, mask).root[0], reference(x[0], steps=steps)[0], rtol=0, atol=1e-9)
