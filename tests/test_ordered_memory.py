"What the tests of all encoders and the lessons do not reach of stacks, slots and Ordered Memory."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, padding_gap, steps_from_tree, tree_from_steps
from rvnnbook.encoders import ordered_memory
from rvnnbook.encoders.ordered_memory import (
    OrderedMemory,
    compose_slots,
    likely_heights,
    read_memory,
    _slot_trees,
    _steps_from_heights,
)
from rvnnbook.layers import compiled_cell
from rvnnbook.layers.cells import GRC
from rvnnbook.layers.chunks import STARTS, fold_prefixes
from rvnnbook.layers.given_trees import compose_by_height
from tests.helpers import on_page
from tests.test_core import random_steps

run_stack, stack_heights, slot_sums, memory_step, slot_shares, match_slots, ordered_memory_literal = on_page(
    "implementations/ordered_memory", "run_stack", "stack_heights", "slot_sums", "memory_step", "slot_shares", "match_slots", "ordered_memory_literal")

few = settings(deadline=None, max_examples=15)


def make(dim=4, seed=0, sharp=1.0, **options):
    "A memory in double precision; with `sharp` its choices are nearly certain."
    torch.manual_seed(seed)
    memory = OrderedMemory(dim, **options).double().eval()
    with torch.no_grad():
        memory.beta.weight.mul_(sharp)
    return memory


def rows(lengths, dim=4, seed=0):
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, 0), mask


def read(memory, x, mask=None):
    "Outputs and choices of sentences in any order; without a mask all positions are tokens."
    lengths, order = (torch.full((len(x),), x.shape[1]) if mask is None else mask.sum(1)).sort(descending=True, stable=True)
    return [part[order.argsort()] for part in read_memory(memory, memory.norm(memory.input(x[order])), lengths)]


def slopes(root, inputs):
    push = torch.linspace(-1, 2, root.numel(), dtype=root.dtype).view_as(root)
    return torch.autograd.grad((root * push).sum(), inputs)


def nest(left, right):
    return left, right


@st.composite
def some_heights(draw, longest=9):
    heights = [0]
    for _ in range(draw(st.integers(0, longest - 1))):
        heights.append(draw(st.integers(1, heights[-1] + 1)))
    return heights


# ---- stacks

@given(random_steps(15))
def test_heights_are_right_turns(steps):
    tree = tree_from_steps(steps)

    def turns(node, count):
        return turns(node[0], count) + turns(node[1], count + 1) if isinstance(node, tuple) else [count]

    assert stack_heights(tree) == turns(tree, 0)
    assert run_stack(stack_heights(tree), range(len(steps)), nest) == tree


@given(some_heights(12))
def test_every_row_of_heights_is_a_tree(heights):
    tree = run_stack(heights, range(len(heights)), nest)
    assert stack_heights(tree) == heights
    assert tree_from_steps(steps_from_tree(tree)) == tree
    assert _steps_from_heights(heights) == steps_from_tree(tree)


@pytest.mark.parametrize("heights, said", [([1], "got height 1"), ([0, 2], "from 1 to 1, got 2"), ([0, 1, 0], "from 1 to 2, got 0"),
                                           ([0, 1, 1, 3], "after height 1 comes one from 1 to 2, got 3")])
def test_heights_that_are_none(heights, said):
    with pytest.raises(ValueError, match=said):
        run_stack(heights, range(len(heights)), nest)
    with pytest.raises(ValueError):
        run_stack([0, 1], range(3), nest)


def test_a_deep_tree_needs_no_recursion():
    tree = 0
    for leaf in range(1, 3000):
        tree = (tree, leaf)
    assert stack_heights(tree) == [0] + [1] * 2999


# ---- one step

@few
@given(st.lists(some_heights(), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 10**6))
def test_certain_choices_fold_a_tree(batch, spare, seed):
    torch.manual_seed(seed)
    slots, cell = max(1, *map(max, batch), 0) + spare, GRC(4).double()
    x, mask = rows([len(heights) for heights in batch], seed=seed)
    x.requires_grad_()
    heights = torch.tensor([row + [0] * (mask.shape[1] - len(row)) for row in batch])
    shares = F.one_hot(slots - heights, slots + 1)[..., :slots].double()
    memory = candidates = torch.randn(len(batch), slots, 4).double()          # what is there at the start does not matter
    roots = []
    for t in range(mask.shape[1]):
        memory, candidates = memory_step(x[:, t], memory, candidates, shares[:, t], lambda h, m: cell(m, h))
        roots.append(candidates[:, -1])
    root = torch.stack(roots, 1)[range(len(batch)), mask.sum(1) - 1]
    trees = torch.zeros(mask.shape, dtype=torch.int64)
    for row, heights in zip(trees, batch):
        row[:len(heights)] = torch.tensor(steps_from_tree(run_stack(heights, range(len(heights)), nest)))
    expected = compose_by_height(x, trees, mask, cell)
    assert_close(root, expected)
    assert_close(slopes(root, (x,)), slopes(expected, (x,)))
    assert torch.equal(_slot_trees(shares, mask), trees)


@given(st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0.0, 1e-5, 0.3]))
@few
def test_shares(slots, seed, least):
    gen = torch.Generator().manual_seed(seed)
    logits, before = 5 * torch.randn(3, slots, generator=gen).double(), torch.rand(3, slots, generator=gen).double()
    before = before / before.sum(-1, keepdim=True)
    before[0] = 0
    shares = slot_shares(logits, before, least)
    for row, scores, last in zip(shares, logits, before):
        reach = [float(last[:i + 2].sum()) if i < slots - 1 else 1.0 for i in range(slots)]
        weights = torch.tensor([(value if value >= least else 0) for value in reach]).double() * scores.exp()
        assert_close(row, weights / weights.sum())
    assert torch.equal(shares[0], torch.eye(slots).double()[-1])
    above, below = slot_sums(shares)
    for i in range(slots):
        assert_close(above[:, i], shares[:, :i + 1].sum(1))
        assert_close(below[:, i], shares[:, i:].sum(1))
    assert torch.equal(slot_shares(logits + 700, before, least).isfinite(), torch.ones(3, slots, dtype=torch.bool))


def test_what_is_out_of_reach_cannot_crowd_out():
    before = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    for far in (0.0, 1e4):
        assert slot_shares(torch.tensor([[far, far, 1.0, 1.0]]), before).tolist() == [[0, 0, 0.5, 0.5]]


def test_gradcheck():
    torch.manual_seed(0)
    cell = GRC(2, 3).double()
    token, memory, candidates, logits = (torch.randn(shape).double().requires_grad_() for shape in ((1, 2), (1, 3, 2), (1, 3, 2), (1, 3)))
    before = torch.tensor([[0.0, 0.4, 0.6]]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *parts: memory_step(*parts[:3], slot_shares(*parts[3:]), cell),
                                    (token, memory, candidates, logits, before))


# ---- literal and fast

@pytest.fixture(params=["loops", "operations"])
def form(request, monkeypatch):
    "What follows the products of a slot: compiled loops, or operations; gradients of few compositions at a time."
    loops = compiled_cell.numba is not None and request.param == "loops"
    monkeypatch.setattr(compiled_cell, "numba", compiled_cell.numba if loops else None)
    monkeypatch.setattr(ordered_memory, "GROUP", 7)
    made, real = [], compiled_cell.finish_slot
    monkeypatch.setattr(compiled_cell, "finish_slot", lambda *given: made.append(1) or real(*given))
    yield request.param
    assert bool(made) == loops


@pytest.mark.parametrize("slots, least", [(1, 1e-5), (2, 1e-5), (4, 0.0), (4, 1e-5), (4, 0.05), (12, 1e-5)])
@pytest.mark.parametrize("sharp", [1.0, 200.0])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_fast_is_literal(form, slots, least, sharp, activation):
    memory = make(slots=slots, least=least, sharp=sharp, activation=activation)
    x = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    fast, literal = tuple(read(memory, x)), ordered_memory_literal(memory, x)
    assert_close(fast, literal, rtol=1e-9, atol=1e-9)
    used = {key: p for key, p in memory.named_parameters() if slots > 1 or key.split(".")[0] in ("input", "norm", "cell")}
    used.pop("beta.bias", None)                                        # moves all logits alike
    inputs = (x, *used.values())
    both = [torch.cat([part.flatten() for part in form]) for form in (fast, literal)]
    for ours, theirs in zip(*(slopes(results, inputs) for results in both)):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("least", [0.0, 1e-5])
@pytest.mark.parametrize("dtype, sharp", [(torch.float32, 1e3), (torch.float64, 1e4)])
def test_shares_near_underflow(seed, least, dtype, sharp):
    "Choices so certain that other probabilities are near the smallest number: a quotient by one of them is infinite."
    memory = make(dim=8, slots=5, seed=seed, least=least, sharp=sharp).to(dtype)
    x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()
    inputs = (x, *(p for key, p in memory.named_parameters() if key != "beta.bias"))
    fast, shares = read(memory, x)
    sums = shares.flip(-1).cumsum(-1)
    assert ((sums > 0) & (sums < torch.finfo(dtype).tiny ** (7 / 8))).any()
    gradients = slopes(fast, inputs)
    assert all(one.isfinite().all() for one in gradients)
    if dtype == torch.float64:                             # in single precision, rounding changes such choices
        memory.least = max(least, torch.finfo(dtype).tiny ** (7 / 8))
        literal = ordered_memory_literal(memory, x)[0]
        assert_close(fast, literal, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(gradients, slopes(literal, inputs)):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max().clamp(min=1)


def test_a_window_that_shrinks_and_grows():
    "Slots above the window keep what they had long ago; coming back, the window must not see it."
    memory = make(slots=6, sharp=3000.0, seed=5)
    x = torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(2)).double()
    outputs, shares = read(memory, x)
    top = (shares[0] > 0).int().argmax(-1)[1:]                         # highest slot with a share
    assert (top.diff() > 0).any() and (top.diff() < 0).any() and top.min() < 4
    assert_close((outputs, shares), ordered_memory_literal(memory, x), rtol=1e-9, atol=1e-9)


def test_cells_that_are_called(monkeypatch):
    "One sentence of ten tokens in many slots: no cell above the highest slot that is reached."
    memory, calls = make(slots=21), []
    real = memory.cell.activation
    monkeypatch.setattr(memory.cell, "activation", lambda rows: calls.append(len(rows)) or real(rows))
    x = torch.randn(1, 10, 4).double()
    shares = read_memory(memory, x, torch.tensor([10]))[1]
    assert len(calls) == int((shares.cumsum(-1) > 0).sum()) <= 45
    monkeypatch.undo()
    calls.clear()
    memory.cell.w2.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    ordered_memory_literal(memory, x)
    assert len(calls) == 210


def test_climbing_alone():
    memory = make(slots=3)
    token, slots, above = torch.randn(2, 4).double(), torch.randn(3, 2, 4).double(), torch.rand(3, 2).double()
    second = memory.cell.w2.weight.roll(4, 0), memory.cell.w2.bias.roll(4)
    made, written, _ = compose_slots(memory, second, token, torch.zeros_like(slots), slots, (above, torch.ones_like(above)))
    running = token
    assert torch.equal(made[0], token) and torch.equal(written, slots)
    for candidate, slot, share in zip(made[1:], slots, above[..., None]):
        running = (1 - share) * token + share * memory.norm(memory.cell(running, slot))
        assert_close(candidate, running)


@pytest.mark.parametrize("slots, least, sharp", [(1, 1e-5, 1.0), (4, 0.0, 1.0), (4, 1e-5, 200.0), (12, 1e-5, 50.0), (6, 1e-5, 3000.0)])
def test_ragged_batches_equal_the_literal_form(form, slots, least, sharp):
    memory = make(slots=slots, least=least, sharp=sharp)
    x, mask = rows([3, 12, 1, 9, 12])
    x.requires_grad_()
    used = {key: p for key, p in memory.named_parameters() if slots > 1 or key.split(".")[0] in ("input", "norm", "cell")}
    used.pop("beta.bias", None)
    both = [torch.cat([(part * mask[..., None]).flatten() for part in form])
            for form in (read(memory, x, mask), ordered_memory_literal(memory, x))]
    assert_close(*both, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(*(slopes(results, (x, *used.values())) for results in both)):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max().clamp(min=1)


def test_dropout_is_the_same_in_both_directions(form):
    "With a fixed seed the memory is a function whose derivative is known by differences."
    memory, tokens = make(slots=3, dropout=0.5, activation="gelu").train(), torch.randn(3, 5, 4).double().requires_grad_()

    def drawn(tokens):
        torch.manual_seed(0)
        return read_memory(memory, tokens, torch.tensor([5, 5, 2]))

    assert torch.autograd.gradcheck(drawn, [tokens])
    assert not torch.equal(drawn(tokens)[0], read_memory(memory, tokens, torch.tensor([5, 5, 2]))[0])


def test_match():
    memory = make(slots=3, activation="gelu")
    query, candidates = torch.randn(2, 4).double(), torch.randn(2, 3, 4).double()
    logits = match_slots(memory, query, candidates)
    for b in range(2):
        for i in range(3):
            hidden = F.gelu(query[b] + memory.key_norm(memory.key(candidates[b, i])))
            assert_close(logits[b, i], memory.beta(hidden).squeeze() / 2)


# ---- ends of the range

@pytest.mark.parametrize("start", STARTS)
def test_one_slot_is_a_fold(start):
    memory, (x, mask) = make(slots=1), rows([5, 1, 2])
    tokens = memory.norm(memory.input(x))
    chain = fold_prefixes(lambda kept, new: memory.norm(memory.cell(new, kept)), tokens, mask, start)[:, -1]
    root = ordered_memory_literal(memory, x, start)[0][range(3), mask.sum(1) - 1]
    assert_close(root, chain)
    if start == "first":
        assert_close(memory(x, mask).root, chain)


@few
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 10**6))
def test_chunks_are_read_alone(lengths, seed):
    memory, (x, mask) = make(slots=3, seed=seed), rows([*lengths, 6], seed=seed)
    states, shares = read(memory, x, mask)
    assert not states[~mask].any() and not shares[~mask].any()
    for b, n in enumerate(lengths):
        if not n:
            continue
        outputs, choices = ordered_memory_literal(memory, x[b:b + 1, :n])
        assert_close(states[b, :n], outputs[0])
        assert_close(shares[b, :n], choices[0])


def test_chunks_have_gradients():
    memory, (x, mask) = make(slots=3), rows([4, 0, 2])
    last = torch.arange(3), mask.sum(1).sub(1).clamp(min=0)
    slope, = slopes(read(memory, x.requires_grad_(), mask)[0][last], (x,))
    assert slope.isfinite().all() and slope[mask].any(-1).all() and not slope[~mask].any()


@pytest.mark.parametrize("sharp", [1.0, 200.0])
@pytest.mark.parametrize("slots", [1, 3, 21])
def test_padding_and_mates(slots, sharp):
    memory, (x, mask) = make(slots=slots, sharp=sharp), rows([9, 1, 2, 5])
    assert batch_gap(memory, x, mask) <= 1e-9 and padding_gap(memory, x, mask) <= 1e-9


# ---- the tree and the options

@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6))
@few
def test_any_choices_are_read_as_a_tree(length, slots, seed):
    shares = torch.rand(length, slots, generator=torch.Generator().manual_seed(seed))
    heights = likely_heights(shares)
    assert max(heights) <= slots and stack_heights(run_stack(heights, range(length), nest)) == heights
    for t in range(1, length):
        top = max(slots - heights[t - 1] - 1, 0)
        assert shares[t, slots - heights[t]] == shares[t, top:].max()


def test_trace():
    memory, (x, mask) = make(slots=4), rows([6, 1, 3])
    out = memory(x, mask, trace=True)
    assert out.trace["slots"].shape == (3, 6, 4) and not out.trace["slots"].requires_grad
    assert torch.equal(out.trace["trees"], _slot_trees(out.trace["slots"], mask)) and not out.trace["trees"][~mask].any()
    for row, n in zip(out.trace["trees"].tolist(), (6, 1, 3)):
        tree_from_steps(row[:n])


@pytest.mark.parametrize("where", ["first", "all but the last", "cell", "query", "key", "beta"])
def test_nan_reaches_the_root(where):
    memory, (x, mask) = make(slots=4), rows([6, 3])
    if where in ("first", "all but the last"):
        x[0, :1 if where == "first" else 5] = torch.nan
    else:
        with torch.no_grad():
            next(weight for name, weight in memory.named_parameters() if name.startswith(where) and weight.dim() == 2)[0] = torch.nan
    root = memory(x.requires_grad_(), mask).root
    grad, = torch.autograd.grad(root.sum(), x)
    assert root[0].isnan().all() and grad[0, :6].isnan().any()
    assert where not in ("first", "all but the last") or root[1].isfinite().all(), "only in its own sentence"


def test_more_slots_with_the_same_weights():
    few_slots, many = make(slots=3), make(slots=8, seed=1)
    many.load_state_dict(few_slots.state_dict())
    x, mask = rows([3, 2])
    assert_close(many(x, mask).root, few_slots(x, mask).root)          # three tokens do not reach the fourth slot
    x, mask = rows([9])
    assert (many(x, mask).root - few_slots(x, mask).root).abs().max() > 1e-3


def test_least_is_a_small_cut():
    cut, whole = make(slots=8), make(slots=8, least=0.0)
    x, mask = rows([12, 5])
    gap = (cut(x, mask).root - whole(x, mask).root).abs().max()
    assert gap < 1e-3
    coarse = make(slots=8, least=0.4)
    assert (coarse(x, mask).root - whole(x, mask).root).abs().max() > gap


@pytest.mark.parametrize("options, said", [(dict(slots=0), "slots must be a whole number from 1, got 0"),
                                           (dict(least=-0.1), "least must be in [0, 1), got -0.1"),
                                           (dict(least=1.0), "least must be in [0, 1), got 1.0"), (dict(hidden=0), "hidden must"),
                                           (dict(activation="tanh"), "'tanh'")])
def test_refusals(options, said):
    with pytest.raises(ValueError) as error:
        OrderedMemory(8, **options)
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="'last'; known: zero, first"):
        ordered_memory_literal(make(), rows([2])[0], "last")
