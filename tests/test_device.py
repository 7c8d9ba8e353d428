"""Every encoder on a device that is not the CPU: equal values and gradients, and limits on launches and waits.

tests/pretend_device.py stands in for a GPU. There, small models pay for launches and waits before they pay for arithmetic."""
import inspect

import pytest
import torch
from torch.testing import assert_close

from rvnnbook.data.listops import collate_listops, unique_draws
from rvnnbook.registry import create_encoder, list_encoders
from rvnnbook.tasks.classify import Classifier
from tests.pretend_device import PretendDevice
from tests.test_encoders import FOR_DROPOUT, OPTIONS

NAMES = list_encoders()
every = pytest.mark.parametrize("name", NAMES)
NO_GOAL = None, None
FEW_SLOTS = {"ordered_memory": {"slots": 5}, "rir_om": {"options": {"slots": 5}}}     # launches grow with the number of slots
LIMITS = {        # by name: most launches and waits of a forward and a backward pass, 2 % above those counted; goals for both
    "bbt_grc": ((437, 4), NO_GOAL),
    "bilstm": ((6989, 1), NO_GOAL),
    "bt_grc": ((4068, 4), (4000, 4)),
    "bt_grc_os": ((4068, 4), (4000, 4)),
    "crvnn": ((3916, 13), (1500, 4)),
    "ebt_grc": ((3457, 3), (2500, 4)),
    "gumbel_tree": ((3230, 4), (2500, 4)),
    "lstm": ((3498, 1), NO_GOAL),
    "mega": ((1133, 1), NO_GOAL),
    "ndr": ((2864, 2), NO_GOAL),
    "ndr_act": ((4034, 42), NO_GOAL),
    "ndr_halt": ((4647, 22), NO_GOAL),
    "ordered_memory": ((8146, 4), (8000, 4)),
    "recurrent_grc": ((4345, 1), NO_GOAL),
    "rir_crvnn": ((3726, 14), NO_GOAL),
    "rir_ebt_grc": ((3612, 4), (2500, 4)),
    "rir_grc": ((1732, 4), NO_GOAL),
    "rir_om": ((8347, 4), (8000, 4)),
    "rvnn": ((701, 4), (600, 4)),
    "s4d": ((1200, 1), NO_GOAL),
    "self_iru": ((265, 1), NO_GOAL),
    "transformer": ((895, 1), NO_GOAL),
    "tree_lstm": ((1948, 4), (600, 4)),
    "universal_transformer": ((941, 1), NO_GOAL),
}


def expressions(least, most, count):
    drawn = [one for one in unique_draws(3000, seed=0) if least <= len(one.tokens) <= most]
    return collate_listops(drawn[:count])


SHORT, LONG = expressions(1, 14, 5), expressions(41, 100, 8)


def run_classifier(model, batch, move):
    "Loss, logits and gradients of all parameters, with the same draws in each call."
    torch.manual_seed(0)
    out = model(move(batch.ids), move(batch.mask), trees=move(batch.trees), labels=move(batch.labels),
                generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(out.loss, list(model.parameters()), materialize_grads=True)
    return [out.loss, out.logits, *found]


def run_encoder(encoder, x, batch, move):
    "Root and gradient in the token vectors."
    x = move(x).requires_grad_()
    root = encoder(x, move(batch.mask), trees=move(batch.trees), generator=torch.Generator().manual_seed(0)).root
    root.sum().backward()
    return [root, x.grad]


def assert_equal_results(found, expected):
    assert len(found) == len(expected) and any(one.any() for one in expected[2:] or expected)
    for mine, theirs in zip(found, expected):
        assert_close(PretendDevice.download(mine), theirs.detach(), rtol=1e-9, atol=1e-9)


@every
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_classifier_on_another_device(name, training):
    "Loss, logits and gradients of the classifier equal those on the CPU, in both modes, with dropout in training."
    options = {**OPTIONS.get(name, {}), **FOR_DROPOUT.get(name, {})}
    taken = inspect.signature(type(create_encoder(name, dim=8, **options))).parameters
    torch.manual_seed(0)
    encoder = create_encoder(name, dim=8, **options, **({"dropout": 0.2} if "dropout" in taken else {}))
    model = Classifier(encoder, 20, 10, dropout_in=0.2, dropout_out=0.2).double().train(training)
    expected = run_classifier(model, SHORT, lambda tensor: tensor)
    with PretendDevice() as device:
        assert_equal_results(run_classifier(device.upload(model), SHORT, device.upload), expected)
    if torch.cuda.is_available() and not training:          # a GPU draws other numbers for dropout
        found = run_classifier(model.cuda(), SHORT, lambda tensor: tensor.cuda())
        assert_equal_results([tensor.cpu() for tensor in found], expected)


@every
def test_launches_and_waits(name):
    "Eight expressions of 41 to 100 tokens, dim 64, forward and backward: results as on the CPU, counts within the limits."
    torch.manual_seed(0)
    encoder, x = create_encoder(name, dim=64, **FEW_SLOTS.get(name, {})).double().eval(), torch.randn(*LONG.mask.shape, 64, dtype=torch.float64)
    expected = run_encoder(encoder, x, LONG, lambda tensor: tensor.clone())
    with PretendDevice() as device:
        found = run_encoder(device.upload(encoder), x, LONG, device.upload)
        counts = device.launches, device.waits
        assert_equal_results(found, expected)
    (launches, waits), _ = LIMITS[name]
    assert counts[0] <= launches and counts[1] <= waits, f"{name}: {counts[0]} launches, {counts[1]} waits"


def test_device_raises_where_a_gpu_would():
    with PretendDevice() as device:
        x, mask = device.upload(torch.ones(3, 2)), torch.tensor([True, False, True])
        for wrong in (lambda: x + torch.ones(2), lambda: torch.where(mask[:, None], x, x), lambda: torch.ones(2) @ x.T,
                      lambda: x.index_put((torch.tensor([0]),), torch.ones(1, 2))):
            with pytest.raises(RuntimeError, match="expected all tensors on one device"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert device.download(x[torch.tensor([0])] * torch.tensor(2.0)).tolist() == [[2, 2]]      # indices and scalars of the CPU
    with pytest.raises(RuntimeError, match="has been left"):
        x + x


@pytest.mark.parametrize("what, waits, launches", [
    (lambda x: x.T[0].view(3, 1).expand(3, 2), 0, 0), (lambda x: x.add_(1), 0, 1), (lambda x: x.new_empty(2), 0, 0),
    (lambda x: torch.zeros(2, device=x.device) + x, 0, 2), (lambda x: x.new_tensor([1, 2]), 0, 1), (lambda x: x.tolist(), 1, 0),
    (lambda x: float(x[0, 0]), 1, 0), (lambda x: bool((x > 0).all()), 1, 2), (lambda x: x.cpu(), 1, 0), (lambda x: x.nonzero(), 1, 0),
    (lambda x: x[x > 0], 1, 1), (lambda x: x[x[:, 0] > 0], 1, 1), (lambda x: x[torch.tensor([0, 2])], 0, 1), (lambda x: x.unique(), 1, 0),
    (lambda x: x.masked_fill(x > 0, 2), 0, 2), (lambda x: x.T.sort(), 0, 1)])
def test_launches_and_waits_of_operations(what, waits, launches):
    with PretendDevice() as device:
        what(device.upload(torch.ones(3, 2)))
    assert (device.waits, device.launches) == (waits, launches)
