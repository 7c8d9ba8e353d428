"Recursion in recursion: the recursion sentence by sentence, its two ends, nested and flat, numbers of rounds, recorded chunks."
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.testing import assert_close

from rvnnbook.core import batch_gap, length_mask, pad_batch, padding_gap
from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.crvnn import CRvNN
from rvnnbook.encoders.rir import INNERS, RIR, LeftFold, _make_inner, _recurse
from rvnnbook.layers.chunks import CHUNK_RULES, compose_levels, compose_levels_literal, level_lengths
from rvnnbook.layers.given_trees import compose_by_height
from rvnnbook.registry import create_encoder

some = settings(deadline=None, max_examples=20)
lengths_of = st.lists(st.integers(1, 14), min_size=1, max_size=4)
arities, rules, seeds, inners = st.integers(2, 9), st.sampled_from(CHUNK_RULES), st.integers(0, 10**6), st.sampled_from(sorted(INNERS))
every = pytest.mark.parametrize("inner", sorted(INNERS))
GOLDEN = Path(__file__).parent / "golden"


def make(inner="grc", seed=0, **options):
    torch.manual_seed(seed)
    return RIR(4, inner, **{"arity": 3, "inference": "nested"} | options).double().eval()


def batch(lengths, seed=0, extra=0):
    "Token vectors, NaN on padding, and their mask."
    mask = torch.nn.functional.pad(length_mask(torch.tensor(lengths)), (0, extra))
    x = torch.randn(*mask.shape, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan), mask


def slopes(root, inputs):
    push = torch.randn(root.shape, generator=torch.Generator().manual_seed(7), dtype=root.dtype)
    return torch.autograd.grad((root * push).sum(), inputs, allow_unused=True)


def leaves_of(encoder, x, mask):
    "What is cut: through the layer before the cut and the leaf transform, one sentence at a time."
    rows = []
    for row, n in zip(x, mask.sum(1).tolist()):
        row = row[None, :n]
        row = row if encoder.s4d is None else encoder.s4d(row, torch.ones(1, n, dtype=torch.bool))
        rows.append(encoder.leaf_norm(encoder.leaf(row))[0])
    return rows


def by_sentence(encoder, x, mask, arity, rule):
    "The recursion as it is defined: a chunk at a time."
    def cell(nodes):
        return encoder.inner(torch.stack(nodes)[None], torch.ones(1, len(nodes), dtype=torch.bool)).root[0]
    return torch.stack([compose_levels_literal(list(leaves), arity, cell, rule) for leaves in leaves_of(encoder, x, mask)])


# ---- values

@some
@given(lengths_of, arities, rules, seeds, inners, st.sampled_from(["s4d", None]), st.integers(0, 2))
def test_every_sentence_is_composed_chunk_by_chunk(lengths, arity, rule, seed, inner, pre, extra):
    encoder, (x, mask) = make(inner, seed, arity=arity, rule=rule, pre=pre), batch(lengths, seed, extra)
    x.requires_grad_()
    out, literal = encoder(x, mask, trace=True), by_sentence(encoder, x, mask, arity, rule)
    assert_close(out.root, literal)
    ours, theirs = (slopes(root, (x, *encoder.leaf.parameters())) for root in (out.root, literal))
    assert_close(ours[0].nan_to_num(), theirs[0].nan_to_num())
    assert_close(ours[1:], theirs[1:])
    told = [level_lengths(n, arity, rule) for n in lengths]
    assert out.trace["nodes"].tolist() == [row + [1] * (max(map(len, told)) - len(row)) for row in told]


@some
@given(lengths_of, arities, rules, seeds)
def test_trees_of_a_fold(lengths, arity, rule, seed):
    encoder, (x, mask) = make("grc", seed, arity=arity, rule=rule, pre=None), batch(lengths, seed)
    out = encoder(x, mask, trace=True)
    leaves = torch.nn.utils.rnn.pad_sequence(leaves_of(encoder, x, mask), batch_first=True)
    assert_close(compose_by_height(leaves, out.trace["trees"], mask, encoder.inner.grc), out.root)


def test_a_fold_by_hand():
    torch.manual_seed(0)
    fold, (x, mask) = LeftFold(4).double(), batch([3, 2, 1])
    x = x.nan_to_num()
    f = fold.grc
    assert_close(fold(x, mask).root, torch.stack([f(f(x[0, 0], x[0, 1]), x[0, 2]), f(x[1, 0], x[1, 1]), x[2, 0]]))
    zeros = LeftFold(4, start="zero").double()
    zeros.load_state_dict(fold.state_dict())
    nothing = torch.zeros(4).double()
    assert_close(zeros(x, mask).root[1:], torch.stack([f(f(nothing, x[1, 0]), x[1, 1]), f(nothing, x[2, 0])]))


# ---- the two ends

@every
@pytest.mark.parametrize("rule", CHUNK_RULES)
def test_wide_chunks_are_the_inner_model(inner, rule):
    encoder, (x, mask) = make(inner, arity=9, rule=rule, pre=None), batch([9, 2, 5])
    x.requires_grad_()
    leaves = encoder.leaf_norm(encoder.leaf(torch.where(mask[..., None], x, 0)))
    root, alone = encoder(x, mask).root, encoder.inner(leaves, mask).root
    assert_close(root, alone)
    assert_close(slopes(root, (x, *encoder.parameters())), slopes(alone, (x, *encoder.parameters())))


@pytest.mark.parametrize("rule", CHUNK_RULES)
def test_pairs_are_the_balanced_binary_tree(rule):
    encoder, tree = make(arity=2, pre=None, rule=rule), BalancedTree(4).double()
    tree.load_state_dict({name.removeprefix("inner."): value for name, value in encoder.state_dict().items()})
    x, mask = batch([13, 1, 2, 8])
    x.requires_grad_()
    ours, theirs = encoder(x, mask, trace=True), tree(x, mask, trace=True)
    assert_close(ours.root, theirs.root)
    assert torch.equal(ours.trace["trees"], theirs.trace["trees"])
    names = [name for name, _ in tree.named_parameters()]
    mine = dict(encoder.named_parameters())
    assert_close(slopes(ours.root, [x, *(mine[name if name in mine else f"inner.{name}"] for name in names)]),
                 slopes(theirs.root, [x, *tree.parameters()]))


# ---- nested and flat

@every
def test_flat_gives_whole_sentences_in_evaluation_only(inner):
    encoder, (x, mask) = make(inner, inference="flat"), batch([13, 1, 2, 8])
    nested = make(inner)
    wide = make(inner, arity=13)
    assert_close(encoder(x, mask).root, wide(x, mask).root)
    assert (encoder(x, mask).root - nested(x, mask).root).abs().amax(1)[[0, 3]].min() > 1e-4
    assert encoder(x, mask, trace=True).trace["nodes"].tolist() == [[13, 1], [1, 1], [2, 1], [8, 1]]
    assert torch.equal(encoder.train()(x, mask).root, nested.train()(x, mask).root)


def test_default_inference():
    assert RIR(4).inference == "nested" and RIR(4, "crvnn").inference == "flat"
    assert RIR(4, "grc", inference="flat").inference == "flat" and RIR(4, "crvnn", inference="nested").inference == "nested"


@every
@pytest.mark.parametrize("rule", CHUNK_RULES)
@pytest.mark.parametrize("inference", ["nested", "flat"])
def test_company_and_padding(inner, rule, inference):
    encoder, (x, mask) = make(inner, rule=rule, arity=6, inference=inference), batch([13, 1, 8, 9, 6])
    assert batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9


# ---- rounds, losses, states

@pytest.mark.parametrize("arity", [2, 3, 5])
def test_rounds_are_fewer_than_nodes_of_a_chunk(arity):
    torch.manual_seed(0)
    inner, rounds = _make_inner("crvnn", 4, threshold=1e-6).double().eval(), []

    def counted(chunks, real):
        out = inner(chunks, real, trace=True)
        rounds.append(int(out.trace["rounds"].max()))
        return out
    x, mask = batch([14, 3])
    _recurse(counted, x.nan_to_num(), mask, arity)
    assert rounds == [min(n, arity) - 1 for n in level_lengths(14, arity)[:-1]]


def test_loss_is_the_sum_of_the_levels():
    encoder, (x, mask) = make("crvnn", pre=None), batch([9, 9])
    leaves = torch.stack(leaves_of(encoder, x, mask))
    level = encoder.inner(leaves.reshape(6, 3, 4), torch.ones(6, 3, dtype=torch.bool))
    above = encoder.inner(level.root.reshape(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    out = encoder(x, mask)
    assert_close(out.root, above.root)
    assert_close(out.loss, level.loss + above.loss)
    assert out.loss > 0 and encoder(*batch([1])).loss == 0 == make()(x, mask).loss


def test_nodes_have_no_leaf_transform():
    inner, plain = _make_inner("crvnn", 4), CRvNN(4)
    names = {name for name, _ in plain.named_parameters()} - {name for name, _ in inner.named_parameters()}
    assert names == {"leaf.weight", "leaf.bias", "leaf_norm.weight", "leaf_norm.bias"}
    assert torch.equal(inner.leaves(torch.ones(1, 2, 4)), torch.ones(1, 2, 4))


# ---- what is refused

@pytest.mark.parametrize("options, said", [
    ({"arity": 1}, "arity=1"), ({"rule": "never"}, "'never'"), ({"inner": "lstm"}, "'lstm'"), ({"inference": "deep"}, "'deep'"),
    ({"pre": "rnn"}, "'rnn'"), ({"options": {"start": "last"}}, "'last'"), ({"inner": "crvnn", "options": {"cell": "lstm"}}, "'lstm'")])
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        RIR(4, **options)


# ---- recorded chunks

@pytest.mark.parametrize("name", ["rir_grc/chunk5_equal", "rir_grc/nonchunk_ragged", "rir_crvnn/nonchunk_equal", "rir_om/nonchunk_equal"])
def test_levels_are_cut_as_recorded(name):
    "The published code cuts by width; with sentences of one length that is by length."
    with safe_open(GOLDEN / f"{name}.safetensors", framework="pt") as file:
        config, tensors = json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}
    mask = tensors["in.mask"].bool()
    arity = config["model_chunk_size"] if config["chunk_mode_inference"] else mask.shape[1]
    recorded, levels = [tensors[f"trace.level{level}.input_mask"].bool() for level in range(sum(key.endswith("input_mask") for key in tensors))], []

    def cell(chunks, real):
        levels.append(real)
        return chunks[:, 0]
    compose_levels(mask[..., None].double(), mask, arity, cell, "late")
    for real, chunks in zip(levels, recorded, strict=True):
        assert torch.equal(real, chunks[chunks.sum(1) > 1, :real.shape[1]]) and not chunks[:, real.shape[1]:].any()
    assert [int(chunks.any(1).sum()) for chunks in recorded] == [*(int(chunks.sum()) for chunks in recorded[1:]), len(mask)]


@pytest.mark.parametrize("name", ["transformer", "lstm", "s4d", "ordered_memory"])
def test_an_encoder_as_inner_model(name):
    encoder = RIR(8, create_encoder(name, dim=8), arity=3, inference="nested", pre=None).double().eval()
    x, mask = pad_batch([torch.randn(n, 8).double() for n in (10, 1, 4)])
    assert batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9
    one = encoder.leaf_norm(encoder.leaf(x[2, :4]))
    def inner(nodes):
        return encoder.inner(torch.stack(nodes)[None], torch.ones(1, len(nodes), dtype=torch.bool)).root[0]
    assert_close(encoder(x, mask).root[2], inner([inner(list(one[:3])), one[3]]))


@pytest.mark.parametrize("options", [{"hidden": 4}, {"dropout": .1}, {"options": {"start": "zero"}}])
def test_options_of_a_module_as_inner_model_refused(options):
    with pytest.raises(ValueError, match="where the encoder is made"):
        RIR(8, create_encoder("lstm", dim=8), **options)
