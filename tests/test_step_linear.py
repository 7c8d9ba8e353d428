"Linear maps in a loop: values and gradients of nn.Linear, however the loop is cut."
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from rvnnbook.encoders.self_iru import IRU, BASES
from rvnnbook.layers.step_linear import BLOCK, StepLinear


def maps_of(count=1, wide=4, out=3):
    torch.manual_seed(count)
    return nn.ModuleList([nn.Linear(wide, out) for _ in range(count)]).double()


def step_of(maps, join=torch.cat):
    return StepLinear(join, [part.weight for part in maps], [part.bias for part in maps])


def loop(step, x, y):
    "Each input contains the last output."
    found = []
    for x_t in x:
        y = step(torch.cat([x_t, y], -1)).tanh()
        found.append(y)
    return torch.stack(found)


def detached(state):
    return (state.detach() if isinstance(state, torch.Tensor) else
            state if state is None else type(state)(map(detached, state)))


@given(st.integers(1, 3 * BLOCK + 2), st.integers(1, 4), st.booleans())
def test_values_and_gradients_are_those_of_linear(steps, rows, learns):
    linear, = maps = maps_of()
    x = torch.randn(steps, rows, 1, dtype=torch.float64, requires_grad=True)
    begin = torch.randn(rows, 3, dtype=torch.float64)
    linear.weight.requires_grad_(learns)
    wanted = [part for part in (x, linear.weight, linear.bias) if part.requires_grad]
    results = []
    for step in (linear, step_of(maps)):
        y = loop(step, x, begin)
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("join, shape", [(torch.cat, (2, 4)), (torch.stack, (3, 2, 4))])
def test_gradcheck_of_joined_maps(join, shape):
    maps = maps_of(3)
    parts = [part.weight for part in maps] + [part.bias for part in maps]

    def found(x, *parts):
        step = StepLinear(join, parts[:3], parts[3:])
        return torch.stack([step(x_t).sin() for x_t in x])
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(found, (x, *parts))
    plain = [torch.stack([part(x_t if join is torch.cat else x_t[at]) for at, part in enumerate(maps)]) for x_t in x]
    ours = found(x, *parts)
    assert_close(ours.unflatten(-1, (3, 3)).movedim(-2, 1) if join is torch.cat else ours, torch.stack(plain).sin())


def test_weights_that_change_between_steps_are_read_anew():
    linear, = maps = maps_of()
    step, x = step_of(maps), torch.randn(2, 4).double()
    optimizer = torch.optim.SGD(linear.parameters(), .5)
    for _ in range(3):
        optimizer.zero_grad()
        assert_close(step(x), linear(x))
        step(x).square().sum().backward()
        again = copy.deepcopy(linear)
        again.zero_grad()
        again(x).square().sum().backward()
        assert_close(linear.weight.grad, again.weight.grad)
        optimizer.step()
    linear.load_state_dict(maps_of(2)[1].state_dict())
    assert_close(step(x), linear(x))


def test_gradients_may_be_switched_on_and_the_batch_may_change():
    linear, = maps = maps_of()
    step = step_of(maps)
    with torch.no_grad():
        assert not step(torch.randn(2, 4).double()).requires_grad
    for rows in (2, 5):
        x = torch.randn(rows, 4).double()
        ours, = torch.autograd.grad(step(x).square().sum(), [linear.weight])
        plain, = torch.autograd.grad(linear(x).square().sum(), [linear.weight])
        assert_close(ours, plain)


def test_a_second_backward_pass_counts_no_step_twice():
    linear, = maps = maps_of()
    x = torch.randn(5, 2, 1, dtype=torch.float64, requires_grad=True)
    y = loop(step_of(maps), x, torch.zeros(2, 3).double())
    torch.autograd.grad(y[3].sum(), [x], retain_graph=True)                  # of the inputs alone
    plain = loop(linear, x, torch.zeros(2, 3).double())
    for part in (slice(0, 2), slice(0, 5), slice(4, 5)):
        ours, = torch.autograd.grad(y[part].sum(), [linear.weight], retain_graph=True)
        theirs, = torch.autograd.grad(plain[part].sum(), [linear.weight], retain_graph=True)
        assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("base", BASES)
def test_a_unit_that_reads_token_by_token_learns_from_step_to_step(base):
    "The state is detached and the weights change between the tokens, as in truncated backpropagation."
    torch.manual_seed(0)
    unit = IRU(3, 2, base).double()
    twin, x = copy.deepcopy(unit), torch.randn(6, 2, 1, 3).double()

    states = {unit: None, twin: None}
    optimizers = {model: torch.optim.SGD(model.parameters(), .1) for model in states}
    for x_t in x:
        found = []
        for model, state in states.items():
            optimizers[model].zero_grad()
            h, state = model(x_t, state)
            h.square().sum().backward()
            optimizers[model].step()
            states[model] = detached(state)
            found.append(h)
        for level in twin.bases:
            level.maps = None                                                # made anew for each token
        assert_close(*found, rtol=0, atol=1e-12)


def test_an_input_that_is_changed_in_place_is_refused():
    step = step_of(maps_of())
    x = torch.randn(2, 4).double()
    y = step(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("wanted", ["inputs", "weights"])
def test_second_derivatives_are_refused(wanted):
    linear, = maps = maps_of()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(step_of(maps)(x).sin().sum(), [x if wanted == "inputs" else linear.weight], create_graph=True)


def lstm_unit():
    torch.manual_seed(0)
    return IRU(3, 1, "lstm").double(), torch.randn(2, 1, 3).double()


def whole(unit, x):
    "Two tokens at once, without the maps for single ones."
    return unit(torch.cat([x, x], 1))[0][:, :1]


def test_copied_and_changed_units_use_their_own_weights():
    unit, x = lstm_unit()
    _, state = unit(x)
    other = copy.deepcopy(unit)
    with torch.no_grad():
        for part in other.parameters():
            part.add_(1)
    assert_close(other(x)[0], whole(other, x))
    assert_close(other(x, copy.deepcopy(detached(state)))[0], other(torch.cat([x, x], 1), detached(state))[0][:, :1])
    other.load_state_dict({name: part + 1 for name, part in other.state_dict().items()}, assign=True)
    assert_close(other(x)[0], whole(other, x))
    for part in unit.parameters():
        part.data = part.data + 1
    assert_close(unit(x)[0], whole(unit, x))
    assert unit.float()(x.float())[0].dtype == torch.float32
    for part in other.parameters():
        part.requires_grad_(False)
    assert not other(x)[0].requires_grad
    for part in other.parameters():
        part.requires_grad_(True)
    other(x)[0].sum().backward()
    assert all(part.grad is not None for part in other.bases.parameters() if part.ndim > 1 and part.shape[0] > 3)


def test_pieces_of_one_token_and_more_continue_each_other():
    unit, x = lstm_unit()
    x = torch.cat([x, 2 * x, -x], 1)
    state, found, given_states = None, [], []
    hook = unit.bases[0].parts[0].register_forward_pre_hook(lambda _, args: given_states.extend(*args[1:]))
    for piece in x.split([1, 2], 1):
        h, state = unit(piece, state)
        found.append(h)
    hook.remove()
    assert len(given_states) == 2 and all(kept.is_contiguous() for kept in given_states), "as cuDNN demands"
    state = [([part.bfloat16() for part in kept], c) for kept, c in state]        # as nn.LSTM gives them under autocast on a GPU
    assert unit(x[:, :1], state)[0].isfinite().all()
    assert_close(torch.cat(found, 1), unit(x)[0])
    with torch.inference_mode():
        assert_close(lstm_unit()[0](x[:, :1].clone())[0], unit(x)[0][:, :1])
