"The halting routers of the chapter equal the library's, sentence by sentence, in values and gradients."
import pytest
import torch
from torch.testing import assert_close

from rvnnbook.encoders.ndr_halt import AdaptiveNDR, HaltingNDR
from rvnnbook.reference.halting import HaltByExistence, HaltByProbability
from tests.helpers import batch, slopes

LENGTHS = [7, 1, 4, 2]


def shaken(library, reference):
    with torch.no_grad():
        for p in library.parameters():
            p.add_(0.2 * torch.randn_like(p))
    reference.load_state_dict(library.state_dict())
    return library, reference


def by_existence(readout, consumers, threshold):
    torch.manual_seed(1)
    library = HaltingNDR(8, 8, heads=2, readout=readout, takers=consumers, threshold=threshold, gate_bias=1.).double().eval()
    return shaken(library, HaltByExistence(8, consumers, threshold, layers=8, heads=2, readout=readout).double())


def by_probability(readout, halt_bias):
    torch.manual_seed(1)
    library = AdaptiveNDR(8, 8, heads=2, readout=readout, halt_bias=halt_bias).double().eval()
    return shaken(library, HaltByProbability(8, layers=8, heads=2, readout=readout).double())


def assert_equal(library, reference, weights):
    x, mask = batch(LENGTHS, dim=8)
    x.requires_grad_()
    out = library(x, mask, trace=True)
    vectors, found_weights, penalties, used = zip(*(reference(x[b, :n]) for b, n in enumerate(LENGTHS)))
    assert out.trace["layers"].tolist() == list(used)
    assert_close(out.root, torch.stack(vectors), rtol=0, atol=1e-9)
    assert_close(out.loss, library.penalty * torch.stack(penalties).mean(), rtol=0, atol=1e-9)
    for b, n in enumerate(LENGTHS):
        assert_close(weights(out.trace, b, used[b], n), found_weights[b].detach(), rtol=0, atol=1e-9)
    values = [torch.cat([out.root.flatten(), out.loss[None]]),
              torch.cat([torch.stack(vectors).flatten(), library.penalty * torch.stack(penalties).mean()[None]])]
    expected, found = (slopes(value, [x, *model.parameters()]) for value, model in zip(values, (library, reference)))
    by_name = dict(zip([name for name, _ in reference.named_parameters()], found[1:], strict=True))
    assert_close(*(torch.where(mask[..., None], part[0], 0) for part in (expected, found)), rtol=0, atol=1e-8)
    for (name, _), gradient in zip(library.named_parameters(), expected[1:], strict=True):
        assert_close(by_name[name], gradient, rtol=0, atol=1e-8)
    return used


@pytest.mark.parametrize("readout", ["start", "end"])
@pytest.mark.parametrize("consumers", [0, 1, 2])
@pytest.mark.parametrize("threshold", [.01, .4])
def test_halting_by_existence(readout, consumers, threshold):
    assert_equal(*by_existence(readout, consumers, threshold), lambda trace, b, used, n: trace["exists"][used - 1, b, :n + 2])


@pytest.mark.parametrize("readout", ["start", "end"])
@pytest.mark.parametrize("halt_bias", [-3., -1., 1.])
def test_halting_by_probability(readout, halt_bias):
    assert_equal(*by_probability(readout, halt_bias), lambda trace, b, used, n: trace["shares"][:used, b, :n + 2])


def test_sentences_stop_at_different_layers():
    assert len(set(assert_equal(*by_existence("start", 2, .4), lambda trace, b, used, n: trace["exists"][used - 1, b, :n + 2]))) > 1
    assert len(set(assert_equal(*by_probability("end", 0.), lambda trace, b, used, n: trace["shares"][:used, b, :n + 2]))) > 1
