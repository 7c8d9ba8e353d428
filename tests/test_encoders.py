"The promises of every encoder in the registry. Whoever is entered there is tested here."
import copy
import inspect
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import prune

from rvnnbook.core import EncoderOutput, batch_gap, padding_gap, simple_tree
from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import Example, collate_listops
from rvnnbook.lab.train import train
from rvnnbook.layers.cells import GRC
from rvnnbook.registry import create_encoder, list_encoders
from rvnnbook.tasks.classify import Classifier, accuracy, cross_entropy, predict_labels
from tests.test_core import boxed, random_steps

DIM = 8
OPTIONS: dict[str, dict] = {           # by name: options of the encoder as it is tested here, besides dim
    "ndr": {"layers": 5, "heads": 2}, "ndr_halt": {"layers": 5, "heads": 2, "takers": 2, "gate_bias": 0.0, "threshold": 0.5},
    "ndr_act": {"layers": 5, "heads": 2, "halt_bias": -1.0}, "s4d": {"layers": 2, "state_size": 16}, "rir_grc": {"arity": 3},
    "rir_crvnn": {"arity": 3, "inference": "nested"}, "rir_om": {"arity": 3, "inference": "nested", "options": {"slots": 4}},
    "rir_ebt_grc": {"arity": 3, "align": "string", "inference": "nested"}, "ordered_memory": {"slots": 5},
    "mega": {"layers": 2, "key_dim": 8, "memories": 4, "reach": 16}}
FOR_DROPOUT: dict[str, dict] = {"lstm": {"layers": 2}, "bilstm": {"layers": 2}}    # by name: what dropout needs to have a place
GIVEN_TREES = {"rvnn", "tree_lstm"}          # these require trees; to the others they are passed and mean nothing
NO_TREES = {"lstm", "bilstm", "transformer", "universal_transformer", "ndr", "ndr_halt", "ndr_act", "self_iru", "s4d",
            "mega", "recurrent_grc", "ordered_memory", "bbt_grc", "rir_grc", "rir_om"}      # these take no tree, and decide on none
NO_GRADIENT: dict[str, set[str]] = {         # by name: parameters that no root depends on
    "gumbel_tree": {"scorer.0.weight", "scorer.0.bias"}, "bt_grc": {"scorer.0.bias"}, "bt_grc_os": {"scorer.0.bias"},
    "ebt_grc": {"scorer.1.bias"}, "rir_ebt_grc": {"scorer.1.bias"}, "ordered_memory": {"beta.bias"},
    "rir_om": {"inner.beta.bias"}}
NAMES = list_encoders()
every = pytest.mark.parametrize("name", NAMES)
few = settings(deadline=None, max_examples=15)


def make(name, seed=0, **options):
    torch.manual_seed(seed)
    return create_encoder(name, **{"dim": DIM, **OPTIONS.get(name, {}), **options}).eval()


def options_of(name):
    return inspect.signature(type(make(name))).parameters


def encode(encoder, x, mask, trees, seed=0, **kwargs):
    return encoder(x, mask, trees=trees, generator=torch.Generator().manual_seed(seed), **kwargs)


def states(mask, seed, scale=1.0, dtype=torch.float64):
    "Token vectors, NaN on padding."
    x = scale * torch.randn(*mask.shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan).to(dtype)


@st.composite
def some_batches(draw, dtype=torch.float64, scales=(0.1, 1.0, 10.0)):
    trees, mask = boxed(draw(st.lists(random_steps(9), min_size=1, max_size=4)))
    extra = draw(st.integers(0, 2))
    trees, mask = (torch.nn.functional.pad(tensor, (0, extra)) for tensor in (trees, mask))
    return states(mask, draw(st.integers(0, 10**6)), draw(st.sampled_from(scales)), dtype), mask, trees


TREES, MASK = boxed([[2, 1, 3, 2, 1, 0], [0], [1, 2, 3, 0], [1, 0], simple_tree("balanced", 7)])


# ---- results

@every
@few
@given(some_batches())
def test_result(name, batch):
    x, mask, trees = batch
    encoder, kept = make(name).double(), (x.clone(), mask.clone(), trees.clone())
    out = encode(encoder, x, mask, trees)
    assert isinstance(out, EncoderOutput) and encoder.dim == DIM
    assert out.root.shape == (len(x), DIM) and out.root.dtype == torch.float64 and out.root.isfinite().all()
    assert out.states is None or out.states.shape == (*mask.shape, DIM) and out.states[mask].isfinite().all()
    loss = torch.as_tensor(out.loss).detach()
    assert loss.ndim == 0 and loss.isfinite()
    assert out.trace is None
    traced = encode(encoder, x, mask, trees, trace=True)
    assert isinstance(traced.trace, dict) and traced.trace and torch.equal(traced.root, out.root)
    for now, before in zip((x, mask, trees), kept):                    # the arguments are left alone
        assert torch.equal(now.nan_to_num(7.0), before.nan_to_num(7.0))


@every
def test_roots_tell_sentences_apart(name):
    "Roots depend on the tokens and on their order, so that the promises below are not those of a constant."
    encoder, x = make(name).double(), states(MASK, 1)
    root = encode(encoder, x, MASK, TREES).root
    assert (root[:, None] - root).abs().amax(-1)[~torch.eye(len(root), dtype=torch.bool)].min() > 1e-3
    swapped = x.clone()
    swapped[:, [0, 1]] = x[:, [1, 0]]
    moved = (encode(encoder, swapped[[0, 2, 3, 4]], MASK[[0, 2, 3, 4]], TREES[[0, 2, 3, 4]]).root - root[[0, 2, 3, 4]]).abs().amax(-1)
    assert (moved > 1e-4).all()


@every
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 10**6))
@few
def test_length_one(name, size, extra, seed):
    mask = torch.tensor([[True] + [False] * extra] * size)
    x = states(mask, seed).requires_grad_()
    encoder = make(name).double()
    root = encode(encoder, x, mask, torch.zeros(mask.shape, dtype=torch.int64)).root
    (root * torch.randn_like(root)).sum().backward()
    assert root.isfinite().all() and x.grad[:, 0].isfinite().all() and x.grad[:, 0].any() and not x.grad[:, 1:].any()


# ---- padding and batch mates

@every
@few
@given(some_batches())
def test_batch_and_padding_in_double(name, batch):
    encoder = make(name).double()
    assert batch_gap(encoder, *batch) <= 1e-9
    assert padding_gap(encoder, *batch) <= 1e-9


@every
@few
@given(some_batches(torch.float32))
def test_batch_and_padding_in_single(name, batch):
    encoder = make(name)
    assert batch_gap(encoder, *batch) <= 1e-4
    assert padding_gap(encoder, *batch) <= 1e-4


@every
@pytest.mark.parametrize("padding", [0.0, 1e30, -torch.inf, torch.inf])
def test_any_padding(name, padding):
    encoder, x = make(name).double(), states(MASK, 2)
    assert torch.equal(encode(encoder, torch.where(MASK[..., None], x, padding), MASK, TREES).root, encode(encoder, x, MASK, TREES).root)


# ---- determinism

@every
@few
@given(some_batches(), st.integers(0, 10**6))
def test_eval_is_deterministic(name, batch, seed):
    encoder = make(name).double()
    first = encode(encoder, *batch, seed=seed).root
    torch.manual_seed(seed + 1)                                        # the global state is not asked
    assert torch.equal(encode(encoder, *batch, seed=seed).root, first)


@every
def test_dropout(name):
    if "dropout" not in options_of(name):
        assert not [m for m in make(name).modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        return
    needed, x = FOR_DROPOUT.get(name, {}), states(MASK, 3)
    encoder, plain = make(name, dropout=0.5, **needed).double(), make(name, **needed).double()
    assert torch.equal(encode(encoder, x, MASK, TREES).root, encode(plain, x, MASK, TREES).root)      # in eval mode it does nothing
    encoder.train()
    def trained(seed):
        torch.manual_seed(seed)
        return encode(encoder, x, MASK, TREES).root
    assert torch.equal(trained(0), trained(0)) and not torch.equal(trained(0), trained(1))
    root = trained(0)
    (root * torch.randn_like(root)).sum().backward()
    assert root.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


# ---- gradients

@every
@few
@given(some_batches(scales=(0.0, 1.0, 100.0)), st.integers(0, 10**6))
def test_gradients_are_finite(name, batch, seed):
    x, mask, trees = batch
    encoder, x = make(name).double(), x.requires_grad_()
    out = encode(encoder, x, mask, trees)
    weights = torch.randn(out.root.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ((out.root * weights).sum() + out.loss).backward()
    assert x.grad.isfinite().all() and (x.grad[~mask] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


@every
def test_every_parameter_and_token_matters(name):
    encoder, x = make(name).double(), states(MASK, 4).requires_grad_()
    root = encode(encoder, x, MASK, TREES).root
    (root * torch.randn(root.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).sum().backward()
    idle = {key for key, p in encoder.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-12}      # zero but for rounding
    assert idle == NO_GRADIENT.get(name, set()) and len(idle) < len(list(encoder.parameters()))
    assert x.grad[MASK].any(-1).all()


# ---- precision

@every
@few
@given(some_batches(torch.float32, scales=(1.0, 100.0, 1e4)))
def test_autocast(name, batch):
    x, mask, trees = batch
    encoder, x = make(name), x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = encode(encoder, x, mask, trees, trace=True)
    assert out.root.shape == (len(x), DIM) and out.root.isfinite().all()
    for tensor in out.trace.values():                                  # what was decided: whole numbers, or floats that are numbers
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            assert tensor.dtype == torch.float32 and not tensor.isnan().any()
    (out.root.float() * torch.linspace(-1, 2, DIM)).sum().backward()
    assert x.grad.isfinite().all() and (x.grad[~mask] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


@every
@pytest.mark.parametrize("train", [False, True])
def test_autocast_is_near(name, train):
    if name not in GIVEN_TREES | NO_TREES:
        pytest.skip("a tree that is found may be another one in half precision")
    encoder, x = make(name).train(train), states(MASK, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rough = encode(encoder, x, MASK, TREES).root
    root = encode(encoder, x, MASK, TREES).root
    gap = (rough.float() - root).abs().max()
    assert 0 < gap < 0.1 * root.abs().max()


@every
def test_second_derivatives_are_right_or_refused(name):
    "A penalty on the gradient of the tokens, against finite differences in one weight of the leaves."
    encoder = make(name, **({"compiled": False} if "compiled" in options_of(name) else {}))
    x = states(MASK, 5, dtype=torch.float64)
    encoder, x = encoder.double(), x.double().requires_grad_()
    ways = torch.linspace(-1, 2, DIM, dtype=torch.float64)

    def penalty(create_graph=False):
        slope, = torch.autograd.grad((encode(encoder, x, MASK, TREES).root.square() @ ways).sum(), x, create_graph=create_graph)
        return slope.square().sum()
    try:
        found = penalty(True)
    except RuntimeError as error:
        assert "no second derivatives" in str(error)
        return
    weight = next(p for p in encoder.parameters() if p.dim() == 2)
    slope, = torch.autograd.grad(found, weight)
    apart = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight[0, 0] += step
        apart.append(penalty().item())
        with torch.no_grad():
            weight[0, 0] -= step
    assert math.isclose(float(slope[0, 0]), (apart[0] - apart[1]) / 2e-5, rel_tol=1e-3, abs_tol=1e-6)


@every
def test_gradients_belong_to_the_weights_of_the_forward_pass(name):
    "Weights given by functional_call: the encoder has its own ones again before the backward pass."
    encoder, x = make(name).double().train(), states(MASK, 5)
    other = {key: (value + 0.1 * torch.randn_like(value)).detach().requires_grad_() for key, value in encoder.named_parameters()}
    changed = make(name).double().train()
    changed.load_state_dict(changed.state_dict() | other)

    def gradients(call, weights):
        torch.manual_seed(3)
        return torch.autograd.grad(call(x, MASK, trees=TREES, generator=torch.Generator().manual_seed(4)).root.square().sum(), weights, materialize_grads=True,
                                   allow_unused=True)
    found = gradients(lambda *args, **kwargs: torch.func.functional_call(encoder, other, args, kwargs), [*other.values()])
    for key, one, wanted in zip(other, found, gradients(changed, [*changed.parameters()])):
        assert torch.allclose(one, wanted, rtol=1e-8, atol=1e-10), key


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@every
@pytest.mark.parametrize("train", [False, True])
def test_layers_of_another_kind_are_called_or_refused(name, train):
    x, called = states(MASK, 5), 0
    for path, layer in make(name).named_modules():
        if type(layer) is not torch.nn.Linear:
            continue
        plain, other = make(name).double().train(train), make(name).double().train(train)
        new = Doubled(layer.in_features, layer.out_features, layer.bias is not None).double()
        new.load_state_dict(layer.state_dict())
        other.set_submodule(path, new)
        with torch.no_grad():
            for weight in plain.get_submodule(path).parameters():
                weight *= 2
        roots = []
        for encoder in plain, other:
            torch.manual_seed(3)
            try:
                roots.append(encode(encoder, x, MASK, TREES).root)
            except TypeError as error:
                assert encoder is other and "reads the weights" in str(error), path
        if len(roots) == 2:
            called += 1
            assert torch.allclose(*roots, rtol=1e-8, atol=1e-10), path
    assert called or name in ("lstm", "bilstm", "self_iru"), "nothing was replaced"


@every
@pytest.mark.parametrize("train", [False, True])
def test_another_default_device_changes_nothing(name, train):
    "A default of meta: a tensor that is made without a device would have no values."
    encoder, x, found = make(name).double().train(train), states(MASK, 5).requires_grad_(), []
    for default in ("cpu", "meta"):
        torch.manual_seed(3)
        draws = torch.Generator().manual_seed(0)
        with torch.device(default):
            out = encoder(x, MASK, trees=TREES, generator=draws, trace=not train)
            found.append((out.root, *torch.autograd.grad(out.root.square().sum(), x)))
    assert all(map(torch.equal, *found))


class Residual(GRC):
    def forward(self, left, right):
        return super().forward(left, right) + (left + right) / 2

    def mix(self, below, keep=None):
        return super().mix(below, keep) + below[..., :self.dim] / 2


@every
@pytest.mark.parametrize("train", [False, True])
def test_a_cell_of_another_kind_is_called_or_refused(name, train):
    "Its result differs from that of the usual cell with the same weights."
    roots = []
    for kind in (GRC, Residual):
        encoder = make(name).train(train)
        for part in [part for part in encoder.modules() if type(part) is GRC]:
            part.__class__ = kind
        torch.manual_seed(3)
        try:
            roots.append(encode(encoder.double(), states(MASK, 5), MASK, TREES).root)
        except TypeError as error:
            assert kind is Residual and "reads the weights of a GRC" in str(error)
            return
    assert any(type(part) is Residual for part in encoder.modules()) != torch.equal(*roots)


@every
def test_parameters_may_be_registered_in_another_order(name):
    "Pruning that is made permanent registers the weight behind the bias."
    found = []
    for turned in (False, True):
        encoder, x = make(name).double().train(), states(MASK, 5)
        for part in encoder.modules() if turned else ():
            if type(part) in (torch.nn.Linear, torch.nn.LayerNorm):
                prune.remove(prune.identity(part, "weight"), "weight")
        torch.manual_seed(3)
        encode(encoder, x, MASK, TREES).root.square().sum().backward()
        found.append({key: weight.grad for key, weight in encoder.named_parameters() if weight.grad is not None})
    assert set(found[0]) == set(found[1])
    for key, grad in found[0].items():
        assert torch.allclose(grad, found[1][key], rtol=1e-8, atol=1e-10), key


@every
def test_a_pruned_layer_is_refused_or_right(name):
    "Its weight is no parameter, but computed from one."
    x = states(MASK, 5)
    for path, layer in make(name).named_modules():
        if type(layer) is torch.nn.Linear:
            encoder = make(name).double().train()
            prune.random_unstructured(encoder.get_submodule(path), "weight", 0.5)
            torch.manual_seed(3)
            try:
                encode(encoder, x, MASK, TREES).root.square().sum().backward()
            except TypeError as error:
                assert "reads the weights" in str(error)
                continue
            grad = encoder.get_submodule(path).weight_orig.grad
            assert grad is None or not grad[encoder.get_submodule(path).weight_mask == 0].any(), path


@pytest.mark.parametrize("name", ["bt_grc", "ebt_grc", "gumbel_tree", "ndr", "ordered_memory", "rir_ebt_grc", "rir_om", "rvnn"])
def test_a_compiled_model_computes_the_same(name):
    "Those that leave functions out or draw; the tracing is that of all backends, and batches have two shapes."
    encoder, found = make(name).double().train(), []
    torch.compiler.reset()
    for call in (encoder, torch.compile(encoder, backend="eager")):
        for rows in (slice(None), slice(2)):
            x = states(MASK, 5)[rows].nan_to_num().requires_grad_()
            torch.manual_seed(3)
            root = call(x, MASK[rows], trees=TREES[rows]).root
            found.append((root, *torch.autograd.grad(root.square().sum(), x)))
    found = [(*found[0], *found[1]), (*found[2], *found[3])]
    assert all(torch.allclose(*both, rtol=1e-8, atol=1e-10) for both in zip(*found))


@every
def test_a_backward_pass_within_autocast(name):
    encoder, x = make(name).train(), states(MASK, 5, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (encode(encoder, x, MASK, TREES).root.float() * torch.linspace(-1, 2, DIM)).sum().backward()
    assert x.grad[MASK].any() and x.grad.isfinite().all()


@every
def test_a_step_with_all_weights_in_bfloat16(name):
    encoder = make(name).bfloat16().train()
    x = states(MASK, 5, dtype=torch.float32).bfloat16().requires_grad_()
    root = encode(encoder, x, MASK, TREES).root
    (root.float() * torch.linspace(-1, 2, DIM)).sum().backward()
    assert root.dtype == x.grad.dtype == torch.bfloat16 and x.grad[MASK].any() and x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


@pytest.mark.parametrize("name", ["s4d", "mega", "rir_grc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_of_weights_in_half_precision_are_exact(name, dtype):
    half = make(name).to(dtype).eval()
    single = copy.deepcopy(half).float()           # the same rounded weights
    x = states(MASK, 5, dtype=torch.float32).to(dtype)
    rough, exact = half(x, MASK).root, single(x.float(), MASK).root
    assert rough.dtype == dtype and (rough.float() - exact).norm() < 10 * torch.finfo(dtype).eps * exact.norm()


# ---- copies

@every
def test_state_dict_round_trip(name):
    source, target, x = make(name, 0).double(), make(name, 1).double(), states(MASK, 6)
    root = encode(source, x, MASK, TREES).root
    assert not torch.equal(encode(target, x, MASK, TREES).root, root)
    target.load_state_dict(source.state_dict())
    assert torch.equal(encode(target, x, MASK, TREES).root, root)


@every
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))], ids=["deepcopy", "pickle"])
def test_copies(name, duplicate):
    encoder, x = make(name).double(), states(MASK, 7)
    root, twin = encode(encoder, x, MASK, TREES).root, duplicate(encoder)
    assert torch.equal(encode(twin, x, MASK, TREES).root, root)
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.1 * torch.randn_like(p))
    assert torch.equal(encode(twin, x, MASK, TREES).root, root) and not torch.equal(encode(encoder, x, MASK, TREES).root, root)


# ---- what is refused

X = torch.ones(2, 3, DIM)
TOKENS = torch.tensor([[True, True, True], [True, True, False]])
STEPS = torch.tensor([[1, 2, 0], [1, 0, 0]])


def complaint(name, x=X, mask=TOKENS, trees=STEPS):
    encode(make(name), X, TOKENS, STEPS)                               # the call itself is sound
    with pytest.raises(ValueError) as error:
        encode(make(name), x, mask, trees)
    assert "\n" not in str(error.value)
    return str(error.value)


@every
@pytest.mark.parametrize("x, said", [
    (X[0], f"(3, {DIM})"), (X[..., None], f"(2, 3, {DIM}, 1)"), (X.long(), "int64"), (X[..., :-1], f"{DIM - 1}"), (X[:, :2], "mask"),
    (X[:1], "mask")])
def test_bad_x(name, x, said):
    assert said in complaint(name, x=x)


@every
@pytest.mark.parametrize("mask, said", [
    (TOKENS.float(), "float32"), (TOKENS.long(), "int64"), (TOKENS[:, :2], "(2, 2)"), (TOKENS[0], "(3,)"),
    (TOKENS.flip(1), "row 1"), (torch.tensor([[True, True, True], [True, False, True]]), "[1, 0, 1]"),
    (torch.tensor([[False] * 3, [True, True, False]]), "row 0")])
def test_bad_mask(name, mask, said):
    message = complaint(name, mask=mask)
    assert said in message and "mask" in message


@pytest.mark.parametrize("name", sorted(GIVEN_TREES))
@pytest.mark.parametrize("trees, said", [
    (None, "trees="), (STEPS.float(), "float32"), (STEPS.bool(), "bool"), (STEPS[:, :2], "(2, 2)"), (STEPS[:1], "(1, 3)"),
    (torch.tensor([[1, 1, 0], [1, 0, 0]]), "row 0"), (torch.tensor([[1, 2, 0], [0, 0, 0]]), "row 1"),
    (torch.tensor([[1, 2, 3], [1, 0, 0]]), "row 0"), (torch.tensor([[1, 2, 0], [1, 2, 0]]), "row 1"),
    (torch.tensor([[-1, 2, 0], [1, 0, 0]]), "row 0"), (torch.tensor([[0, 0, 0], [0, 0, 0]]), "row 0")])
def test_bad_trees(name, trees, said):
    message = complaint(name, trees=trees)
    assert said in message and "tree" in message


@every
def test_trees_mean_something_only_where_they_are_given(name):
    other, x = torch.tensor([[2, 1, 0], [1, 0, 0]]), states(TOKENS, 8)
    encoder = make(name).double()
    root = encode(encoder, x, TOKENS, STEPS).root
    if name in GIVEN_TREES:
        moved = encode(encoder, x, TOKENS, other).root
        assert (moved[0] - root[0]).abs().max() > 1e-3 and torch.equal(moved[1], root[1])
    else:
        assert torch.equal(encode(encoder, x, TOKENS, None).root, root)
        assert torch.equal(encode(encoder, x, TOKENS, other).root, root)


# ---- as part of a classifier

EXAMPLES = [Example(2, ("[MAX", "2", "1", "]")), Example(7, ("7",)), Example(0, ("[MIN", "0", "[SM", "5", "5", "]", "]")),
            Example(9, ("[MED", "9", "]"))]


@every
def test_training(name):
    "The losses reported are those before each step, one a batch, and the steps are taken."
    model = Classifier(make(name), 15, 10)
    batch, begun = collate_listops(EXAMPLES), copy.deepcopy(model)
    torch.manual_seed(0)                                               # what is drawn in training, `train` draws from this seed
    with torch.no_grad():
        scores = begun.train()(batch.ids, batch.mask, trees=batch.trees)
        expected = -sum(float(row.log_softmax(0)[label]) for row, label in zip(scores.logits, batch.labels)) / len(EXAMPLES)
    outcome = train(model, BucketLoader(EXAMPLES, 4, collate_listops), optimizer="adamw", learning_rate=1e-2, steps=40, check_every=1)
    losses = [row["loss"] for row in outcome.history]
    assert len(losses) == 40 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(expected + float(scores.loss), abs=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    assert accuracy(begun, [batch]) < accuracy(model, [batch]) == 1
    assert not model.training


def test_verdicts_and_cross_entropy():
    two, many = torch.tensor([[0.5], [-2.0], [0.0]]), torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    assert predict_labels(two).tolist() == [1, 0, 0] and predict_labels(many).tolist() == [2, 0]
    by_hand = (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(2.0)) + math.log(2)) / 3
    assert float(cross_entropy(two, torch.tensor([1, 1, 0]))) == pytest.approx(by_hand)
    by_hand = sum(math.log(sum(map(math.exp, row))) - row[label] for row, label in zip(many.tolist(), (2, 1))) / 2
    assert float(cross_entropy(many, torch.tensor([2, 1]))) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["crvnn", "ebt_grc", "ordered_memory"])
def test_replicas_of_data_parallel_are_refused_with_a_remedy(name):
    "As DataParallel makes them on several GPUs: parameters are plain attributes of the copies."
    def replica(module):
        copied = module._replicate_for_data_parallel()
        for part, original in module.named_children():
            setattr(copied, part, replica(original))
        for weight, value in module._parameters.items():
            setattr(copied, weight, value)
        return copied
    with pytest.raises(TypeError, match="use DistributedDataParallel$"):
        encode(replica(make(name).double()), states(MASK, 5), MASK, TREES)
