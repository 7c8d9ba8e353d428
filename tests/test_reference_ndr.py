"The router of the chapter equals the library's, sentence by sentence, in values and gradients."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.ndr import NDR as Library
from rvnnbook.reference.ndr import NDR
from tests.helpers import batch, slopes

LENGTHS = [7, 1, 4, 2]


def pair_of(**options):
    torch.manual_seed(0)
    library = Library(8, **options).double().eval()
    with torch.no_grad():
        for p in library.parameters():
            p.add_(0.3 * torch.randn_like(p))
    reference = NDR(8, **options).double()
    reference.load_state_dict(library.state_dict())
    return library, reference


@pytest.mark.parametrize("readout", ["start", "end"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("widths", [{}, {"hidden": 5, "gate_bias": 0.}])
def test_reference_equals_library(readout, heads, widths):
    library, reference = pair_of(layers=3, heads=heads, readout=readout, **widths)
    x, mask = batch(LENGTHS, dim=8)
    x.requires_grad_()
    out = library(x, mask, trace=True)
    vectors = []
    for b, n in enumerate(LENGTHS):
        vector, gates, attention = reference(x[b, :n])
        vectors.append(vector)
        assert_close(out.trace["gates"][:, b, :n + 2], gates, rtol=0, atol=1e-9)
        assert_close(out.trace["attention"][:, b, :, :n + 2, :n + 2], attention, rtol=0, atol=1e-9)
    assert_close(out.root, torch.stack(vectors), rtol=0, atol=1e-9)
    expected = slopes(out.root, [x, *library.parameters()])
    found = slopes(torch.stack(vectors), [x, *reference.parameters()])
    by_name = dict(zip([name for name, _ in reference.named_parameters()], found[1:], strict=True))
    assert_close(*(torch.where(mask[..., None], part[0], 0) for part in (expected, found)), rtol=0, atol=1e-8)
    for (name, _), gradient in zip(library.named_parameters(), expected[1:], strict=True):
        assert_close(by_name[name], gradient, rtol=0, atol=1e-8)


@pytest.mark.parametrize("steps", [1, 6])
def test_number_of_steps(steps):
    library, reference = pair_of(layers=3, heads=2)
    library.test_layers = steps
    x, mask = batch([5], dim=8)
    assert_close(library(x, mask).root[0], reference(x[0], steps=steps)[0], rtol=0, atol=1e-9)
