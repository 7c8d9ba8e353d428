"""Fused kernels: Triton's interpreter runs them on the CPU, alone and inside encoders; Triton compiles them for two GPUs.

No GPU is needed. tests/conftest.py sets TRITON_INTERPRET before Triton is imported."""
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rvnnbook.layers import kernels
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.kernels import compose_gradients, compose_step, step_activation
from rvnnbook.layers.neighbors_linear import CumulativeNeighbors, _neighbor_kernels
from rvnnbook.registry import create_encoder
from tests.launches import expressions, run_encoder
from tests.pretend_device import PretendDevice

if sys.platform != "linux":
    pytest.importorskip("triton")
neighbor_matrices, neighbor_gradients = _neighbor_kernels()
ALL = {"neighbor_matrices": (neighbor_matrices, [(1,), (16,), (64,)]), "neighbor_gradients": (neighbor_gradients, [(1,), (16,), (64,)]),
       "compose_step": (compose_step, [(20, "gelu", False), (16, "relu", True)]), "compose_gradients": (compose_gradients, [(20,), (64,)])}
CLOSE = {torch.float64: dict(rtol=1e-11, atol=1e-12), torch.float32: dict(rtol=1e-4, atol=1e-4)}
seeds = st.integers(0, 10**6)
few = settings(deadline=None, max_examples=15)


def check_neighbors(batch, length, kind, how, seed):
    torch.manual_seed(seed)
    exists = torch.rand(batch, length, dtype=kind)
    exists = {"any": exists, "halves": (2 * exists).round() / 2, "zero": exists * (exists > .7)}[how]
    grad = torch.randn(batch, 2, length, length, dtype=kind)
    assert_close(neighbor_matrices.launch(exists), neighbor_matrices.plain(exists), **CLOSE[kind])
    found, expected = (neighbor_gradients.finish(form(exists, grad)) for form in (neighbor_gradients.launch, neighbor_gradients.plain))
    assert found.shape == exists.shape
    assert_close(found, expected, **CLOSE[kind])


@few
@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from(["any", "halves", "zero"]), seeds)
def test_neighbor_kernels_give_the_plain_results(batch, length, how, seed):
    check_neighbors(batch, length, torch.float64, how, seed)


@pytest.mark.parametrize("how", ["any", "halves", "zero"])
def test_neighbor_kernels_in_single_precision(how):
    "Fixed draws: a sum that rounds to 1 in one order of addition only would decide between the cases."
    check_neighbors(2, 33, torch.float32, how, 0)


def step_arguments(depth, rows, dim, hidden, kind, dropped, name):
    def draw(*shape):
        return torch.randn(*shape, dtype=kind)
    keep = torch.randint(0, 2, (depth * rows, hidden)).to(kind) * 2 if dropped else None
    share = torch.rand(depth * rows, 1, dtype=kind).round(decimals=1)                          # zeros and ones, too
    return (draw(rows, dim), draw(depth, rows, dim), draw(depth * rows, hidden), keep, share, draw(hidden, 2 * dim)[:, :dim] / dim ** .5,
            draw(4 * dim, hidden) / hidden ** .5, draw(4 * dim), draw(dim), draw(dim), 1e-5, name)


def check_step(depth, rows, dim, hidden, kind, dropped, name, seed):
    torch.manual_seed(seed)
    given_ = step_arguments(depth, rows, dim, hidden, kind, dropped, name)
    expected = compose_step.plain(*given_)
    assert_close(compose_step.launch(*given_), expected, **CLOSE[kind])
    _, boxes, before, mixed, _, means, rates = expected
    _, slots, _, _, share, first, second, _, scale, *_ = given_
    back = slots, share, boxes, mixed, means, rates, scale, torch.randn_like(before), first, second
    assert_close(compose_gradients.launch(*back), compose_gradients.plain(*back), **CLOSE[kind])


@few
@given(st.integers(1, 4), st.integers(1, 35), st.integers(8, 33), st.integers(1, 70), st.booleans(), st.sampled_from(["relu", "gelu"]), seeds)
def test_step_kernels_give_the_plain_results(depth, rows, dim, hidden, dropped, name, seed):
    check_step(depth, rows, dim, hidden, torch.float64, dropped, name, seed)


@pytest.mark.parametrize("dim, dropped, name", [(16, False, "relu"), (20, True, "gelu"), (33, True, "relu")])
def test_step_kernels_in_single_precision(dim, dropped, name):
    check_step(3, 18, dim, 40, torch.float32, dropped, name, 0)


def spoil(found):
    "Results that are wrong in one number."
    if isinstance(found, tuple):
        return *found[:-1], spoil(found[-1])
    wrong = found.clone()
    wrong.view(-1)[-1] += .1
    return wrong


def fail(_):
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_that_differs_is_not_used(name, monkeypatch):
    (fused, options), like = ALL[name], torch.zeros(1)
    for how in options:
        assert fused.agrees(like, *how) and fused.agrees(like.double(), *how)
    for change in (spoil, fail):
        monkeypatch.setattr(fused, "once", lambda *inputs: change(fused.plain(*inputs)))
        with pytest.warns(UserWarning, match=f"{name.split('_')[0]}.*is not used on cpu"):
            assert not fused.agrees(like, *options[-1])


def test_no_part_of_a_result_is_left_out_of_the_comparison(monkeypatch):
    "A kernel that leaves out the gradients of one gate, or one slot, is noticed."
    for name, (fused, options) in ALL.items():
        with monkeypatch.context() as patch:
            found = fused.plain(*fused.example(lambda *shape: torch.randn(shape).double(), *options[-1]))
            for which in range(len(found) if isinstance(found, tuple) else 1):
                for column in range(6):
                    def lacking(*inputs):
                        results = fused.plain(*inputs)
                        made = [one.clone() for one in (results if isinstance(results, tuple) else (results,))]
                        width = made[which].shape[-1]
                        made[which][..., column * width // 6:(column + 1) * width // 6 or 1] = 0
                        return tuple(made) if isinstance(results, tuple) else made[0]
                    patch.setattr(fused, "once", lacking)
                    with pytest.warns(UserWarning, match="is not used"):
                        assert not fused.agrees(torch.zeros(1), *options[-1]), (name, which, column)


def test_where_kernels_run():
    meta = torch.zeros(2, 7, device="meta")
    weights, saved = CumulativeNeighbors.matrices(meta)
    assert weights.shape == (2, 2, 7, 7) and len(saved) == 1, "the kernel needs nothing but existence"
    assert CumulativeNeighbors.gradients(saved, weights).shape == (2, 7)
    assert len(CumulativeNeighbors.matrices(meta.bfloat16())[1]) == 2 and len(CumulativeNeighbors.matrices(torch.zeros(2, 7))[1]) == 2
    wide = torch.zeros(2, kernels.WIDEST // 4, device="meta")
    for activation, name in (("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", None)):
        assert step_activation(GRC(256, activation=activation), wide) == name
    cell = GRC(256)
    assert step_activation(cell, wide.double()) is None and step_activation(cell, torch.zeros(2, 257, device="meta")) is None
    assert step_activation(cell, torch.zeros(2, 256)) is None
    assert compose_step.agreed == {}, "without a GPU nothing is compared"


def test_options_and_devices_are_compared_once(monkeypatch):
    "A stand-in for a tensor on a GPU: the comparison runs once for each data type, precision and options."
    asked = []
    monkeypatch.setattr(compose_step, "agrees", lambda like, *how: asked.append(how) or how[0] < 100)
    monkeypatch.setattr(compose_step, "agreed", {})

    class Placed:
        device, dtype = torch.device("cuda"), torch.float32
    for how, runs in (((64, "relu", False), True), ((64, "relu", False), True), ((128, "relu", False), False), ((64, "relu", True), True)):
        assert compose_step.runs_on(Placed, *how) == runs
    assert asked == [(64, "relu", False), (128, "relu", False), (64, "relu", True)]
    monkeypatch.setattr(kernels, "triton", None)
    assert not compose_step.runs_on(Placed, 64, "relu", False)


def test_inputs_that_are_not_contiguous():
    torch.manual_seed(0)
    def mixed(one):
        return one.mT.contiguous().mT if isinstance(one, torch.Tensor) and one.ndim > 1 else one
    given_ = step_arguments(2, 18, 12, 20, torch.float64, True, "gelu")
    expected = compose_step.plain(*given_)
    assert_close(compose_step.launch(*map(mixed, given_)), expected, **CLOSE[torch.float64])
    _, boxes, before, mixed_, _, means, rates = expected
    back = given_[1], given_[4], boxes, mixed_, means, rates, given_[8], torch.randn_like(before), given_[5], given_[6]
    assert_close(compose_gradients.launch(*map(mixed, back)), compose_gradients.plain(*back), **CLOSE[torch.float64])
    wide = torch.randn(12, 2).double()[:, 0]
    assert not wide.is_contiguous()
    assert_close(compose_step.launch(*given_[:8], wide, wide, *given_[10:]), compose_step.plain(*given_[:8], wide, wide, *given_[10:]),
                 **CLOSE[torch.float64])


@pytest.mark.parametrize("name, options, training", [
    ("ordered_memory", {"slots": 4}, False), ("ordered_memory", {"slots": 3, "activation": "gelu", "dropout": .3}, True), ("crvnn", {}, False),
    ("ordered_memory", {"slots": 1}, False)])
def test_encoders_with_interpreted_kernels(name, options, training, monkeypatch):
    "The kernels themselves run within whole encoders: the pretend device calls them."
    for one, _ in ALL.values():
        monkeypatch.setattr(one, "once", torch.library.custom_op(f"tests::{one.plain.__name__[1:]}", one.launch, mutates_args=()))
    torch.manual_seed(0)
    batch, encoder = expressions(5, 11, 3), create_encoder(name, dim=6, **options).double().train(training)
    x, results = torch.randn(*batch.mask.shape, 6, dtype=torch.float64), []
    for device in (None, PretendDevice()):
        torch.manual_seed(1)
        encoder.zero_grad()
        if device is None:
            results.append([*run_encoder(encoder, x, batch, torch.clone), *(one.grad.clone() for one in encoder.parameters())])
            continue
        with device:
            found = run_encoder(device.upload(encoder), x, batch, device.upload)
            results.append([device.download(one) for one in (*found, *(part.grad for part in encoder.parameters()))])
    assert len(results[0]) > 10
    if training:                        # the order in which factors are drawn differs
        assert all(one.isfinite().all() for one in results[1])
    else:
        assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


COMPILE = '''
import json, re, sys
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rvnnbook.layers import kernels
INTEGERS = {"length", "count", "rows", "depth", "dim", "hidden", "stride"}

def compiled(kernel, target, kind, options=None, **constants):
    options = options or {}
    constants |= {one: options.pop(one) for one in ("ROWS", "DIM", "UNITS", "EXACT") if one in options}
    signature = {one.name: "constexpr" if one.is_constexpr else "i32" if one.name in INTEGERS else "*" + kind for one in kernel.params}
    done = compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", target, 32), options=options)
    return {"kernel": kernel.__name__, "target": target, "kind": kind, "shared": done.metadata.shared, "cubin": len(done.asm["cubin"])}

found = []
for target, kind, dim, precision in ((80, "fp32", 256, "highest"), (90, "fp64", 128, "highest"), (90, "fp32", 64, "high")):
    torch.set_float32_matmul_precision(precision)
    like = torch.empty(1, dim, dtype=torch.float64 if kind == "fp64" else torch.float32)
    found.append(compiled(kernels._neighbor_matrices_kernel, target, kind, SIZE=128))
    found.append(compiled(kernels._neighbor_gradients_kernel, target, kind, SIZE=1024))
    found.append(compiled(kernels._compose_kernel, target, kind, kernels._block_sizes(like), EPS=1e-5, NAME="gelu", KEEP=kind == "fp64"))
    sizes = kernels._block_sizes(like)
    found.append(compiled(kernels._compose_back_kernel, target, kind, sizes))
print(json.dumps(found))
'''


def test_kernels_compile_for_gpus(tmp_path):
    "For NVIDIA A100 and H100; in single precision within the 99 KB of the smaller cards, too."
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True, check=False,
                          env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 12 and all(one["cubin"] > 1000 for one in found)
    assert max(one["shared"] for one in found if one["kind"] == "fp32") <= 99 * 1024
    assert max(one["shared"] for one in found) <= 160 * 1024
