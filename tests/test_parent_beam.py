"BT-GRC in an arena: against the literal form in decisions, values and slopes, against enumeration, and what it composes."
import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.testing import assert_close

from rvnnbook.core import batch_gap, padding_gap, tree_from_steps
from rvnnbook.layers import parent_beam
from rvnnbook.encoders.beam_tree import BeamTree
from rvnnbook.layers.parent_beam import (
    PairLifetimes,
    _compose_neighbors,
    _parent_arena,
    search_parents,
    _trace_lifetimes,
    initial_rows,
    lifetime_scores,
    parent_search,
    _place_step,
    merge_places,
)
from rvnnbook.literal import LiteralBeamTree, one_step
from rvnnbook.layers.given_trees import compose_tree
from rvnnbook.layers.topk import EPSILON
from rvnnbook.layers.tree_search import find_pairs, plan_replay, search_states
from rvnnbook.registry import create_encoder
from tests.helpers import DIM, assert_same, batch_of

few = settings(deadline=None, max_examples=25)
lengths = st.lists(st.integers(1, 11), min_size=1, max_size=4)
beams = st.integers(1, 7)
seeds = st.integers(0, 10**6)
GOLDEN = Path(__file__).parent / "golden"


def make(seed=0, beam=3, sharper=1.0, kind=BeamTree, **options):
    "An encoder in double precision whose scores are multiplied by a factor, with layer norms that show."
    torch.manual_seed(seed)
    encoder = kind(DIM, beam, **{"hidden": 10, **options}).double()
    with torch.no_grad():
        for norm in (encoder.leaf_norm, encoder.grc.norm):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
        for parameter in encoder.scorer.parameters():
            parameter *= sharper
    return encoder


def both(seed=0, beam=3, sharper=1.0, **options):
    return (make(seed, beam, sharper, kind, **options) for kind in (LiteralBeamTree, BeamTree))


def answers(encoder, x, mask, seed=0):
    "Trace; root and the gradients of its product with fixed numbers, in the token vectors and in every parameter."
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    out = encoder(x, mask, generator=torch.Generator().manual_seed(seed), trace=True)
    weight = torch.linspace(-1, 1, out.root.numel(), dtype=out.root.dtype).view_as(out.root)
    return out.trace, (out.root, *torch.autograd.grad((out.root * weight).sum(), [x, *encoder.parameters()], materialize_grads=True))


def found_in(encoder, sizes, seed, generator=None):
    leaves, mask = batch_of(sizes, seed)
    return leaves, mask, search_parents(encoder, leaves, mask, generator)


# ---- two forms

@few
@given(lengths, beams, seeds, st.booleans(), st.sampled_from([0.0, 1.0, 30.0, 3000.0]), st.booleans(), st.sampled_from(["gelu", "relu"]),
       st.integers(0, 2))
@example([9, 1, 2, 7], 5, 0, True, 3000.0, True, "gelu", 2)
@example([9, 1, 2, 7], 5, 0, False, 0.0, False, "gelu", 0)                     # all scores are equal
@example([1, 1], 3, 0, True, 1.0, True, "gelu", 1)                             # nothing to compose
@example([11, 11, 11], 7, 3, True, 300.0, False, "relu", 0)
def test_arena_is_literal_form(sizes, beam, seed, train, sharper, noise, activation, padding):
    "Trees, origins and scores of every step; roots, and slopes in everything."
    x, mask = batch_of(sizes, seed)
    x, mask = torch.nn.functional.pad(x, (0, 0, 0, padding)), torch.nn.functional.pad(mask, (0, padding))
    (written, expected), (placed, found) = (answers(encoder.train(train), x, mask, seed)
                                            for encoder in both(seed, beam, sharper, noise=noise, activation=activation))
    assert_same(found, expected)
    for key in ("beams", "trees", "picks", "origins"):
        assert torch.equal(placed[key], written[key])
    for key in ("scores", "step_scores", "weights"):
        assert_close(placed[key], written[key], rtol=1e-9, atol=1e-9)
    there = written["scores"] > -torch.inf
    assert_close(placed["roots"][there], written["roots"][there])


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), beams, seeds)
def test_onesoft_equals_the_literal_form(sizes, beam, seed):
    x, mask = batch_of(sizes, seed)
    for train in (False, True):
        (_, expected), (_, found) = (answers(encoder.train(train), x, mask, seed) for encoder in both(seed, beam, 2.0, soft=True))
        assert_same(found, expected)


def test_where_the_arena_is_used(monkeypatch):
    "In training with OneSoft it is not."
    used = []
    monkeypatch.setattr(parent_beam, "search_parents", lambda *given: used.append(given) or search_parents(*given))
    x, mask = batch_of([5, 3], 0)
    for soft, train in ((False, False), (False, True), (True, False), (True, True)):
        make(soft=soft).train(train)(x, mask)
    assert len(used) == 3


def test_single_precision():
    x, mask = batch_of([11, 7, 3], 3)
    (_, expected), (_, found) = (answers(encoder.float().train(), x.float(), mask) for encoder in both(3, 5, noise=True))
    assert_same(found, expected, 1e-4)
    assert found[0].dtype == torch.float32


def test_no_gradients_are_no_replay(monkeypatch):
    encoder, (x, mask) = make(1, 4), batch_of([8, 3, 1], 1)
    expected = encoder(x, mask).root.detach()
    monkeypatch.setattr(parent_beam, "replay", None)
    with torch.no_grad():
        assert_same([encoder(x, mask).root], [expected])


@pytest.mark.parametrize("options", [{"beam": 2}, {"beam": 4, "noise": True}])
def test_slopes_are_the_slopes(options):
    encoder, (x, mask) = make(5, sharper=2.0, **options).train(), batch_of([5, 3], 5)
    draw = lambda: torch.Generator().manual_seed(0)
    assert torch.autograd.gradcheck(lambda x: encoder(x, mask, generator=draw()).root, x.requires_grad_())


@few
@given(lengths, beams, seeds)
def test_padding_and_batch_mates_do_not_matter(sizes, beam, seed):
    encoder, (x, mask) = make(seed, beam, 2.0).train(), batch_of(sizes, seed)
    assert batch_gap(encoder, x, mask) < 1e-9 and padding_gap(encoder, x, mask) < 1e-9


def test_half_precision_around_it():
    encoder, (x, mask) = make(2).float(), batch_of([5, 3], 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = encoder(x.float(), mask, trace=True)
    assert out.root.dtype == out.trace["roots"].dtype == torch.float32 and out.root.isfinite().all()
    assert out.trace["scores"].dtype == torch.float32


# ---- against enumeration

def expected_root(encoder, nodes):
    if len(nodes) == 1:
        return nodes[0]
    parents = [encoder.grc(left, right) for left, right in zip(nodes[:-1], nodes[1:])]
    shares = torch.cat([encoder.scorer[0](parent) for parent in parents]).softmax(-1)
    return sum(share * expected_root(encoder, [*nodes[:j], parents[j], *nodes[j + 2:]]) for j, share in enumerate(shares.unbind()))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_wide_beam_sees_everything(n):
    encoder, (x, mask) = make(n, 24, 2.0).train(), batch_of([n], n)
    x.requires_grad_()
    out, expected = encoder(x, mask, trace=True), expected_root(encoder, list(encoder.leaf_norm(encoder.leaf(x[0]))))
    assert_close(out.root[0], expected)
    assert float(out.trace["scores"].exp().sum()) == pytest.approx(1)
    inputs = [x, *encoder.parameters()]
    slopes = [torch.autograd.grad(root.square().sum(), inputs, materialize_grads=True) for root in (out.root[0], expected)]
    assert_same(*slopes)


@few
@given(st.integers(2, 9), beams, seeds)
def test_every_hypothesis_is_its_tree(n, beam, seed):
    encoder, (x, mask) = make(seed, beam, 2.0), batch_of([n], seed)
    story, leaves = encoder(x, mask, trace=True).trace, list(encoder.leaf_norm(encoder.leaf(x[0])))
    for slot in (story["scores"][0] > -torch.inf).nonzero().flatten().tolist():
        tree = tree_from_steps(story["beams"][0, slot].tolist())
        assert_close(story["roots"][0, slot], compose_tree(tree, leaves, encoder.grc))


# ---- the arena

@few
@given(lengths, beams, seeds, st.sampled_from([None, 1, 7]))
def test_every_place_holds_the_parent_of_its_children(sizes, beam, seed, entries):
    "However large the table; with a large one no pair twice."
    encoder, (leaves, mask) = make(seed, beam), batch_of(sizes, seed)
    room = int((mask.sum(1) - 1).sum()) * (2 * beam + 1)
    with torch.no_grad():
        arena = _parent_arena(encoder, leaves[mask], room)
        if entries:
            arena.table = torch.zeros(entries, dtype=torch.int64)
        arena.nodes[arena.used:] = torch.nan                                   # as memory may hold what it likes
        _, scores, _ = search_states(initial_rows(arena, mask), mask.sum(1), beam, _place_step(encoder, arena))
        made = slice(1 + int(mask.sum()), arena.used)
        left, right = arena.states[arena.children(made)].unbind(1)
        assert_close(arena.states[made], encoder.grc(left, right))
        assert_close(arena.notes[made], encoder.scorer[0](arena.states[made]))
        assert_close(scores, search_states(leaves, mask.sum(1), beam, one_step(encoder))[1])
    assert (arena.children(made) > 0).all() and (arena.children(made) < torch.arange(made.start, made.stop)[:, None]).all()
    assert arena.used <= len(arena.states) == 1 + int(mask.sum()) + room
    assert not arena.states[0].any() and arena.states[arena.used:].isnan().all()
    codes = arena.children(made) @ torch.tensor([len(arena.states), 1])
    if not entries:
        assert len(codes) - len(codes.unique()) <= 0.2 * len(codes)            # now and then an entry is taken
    assert arena.used - made.start <= sum(n - 1 + 2 * beam * max(n - 2, 0) for n in sizes)


def test_a_known_pair_is_not_composed_again():
    encoder, (leaves, mask) = make(), batch_of([4], 0)
    with torch.no_grad():
        arena = _parent_arena(encoder, leaves[mask], 9)
        first = _compose_neighbors(arena, torch.tensor([[[1, 2], [2, 3]], [[1, 2], [0, 4]]]))
        assert arena.used == 5 + 2 and first.tolist() == [[5, 6], [5, 0]] and arena.children(slice(5, 7)).tolist() == [[1, 2], [2, 3]]
        assert _compose_neighbors(arena, torch.tensor([[2, 3], [5, 3], [4, 0]])).tolist() == [6, 7, 0] and arena.used == 8
        assert find_pairs(arena, torch.tensor([[3, 4], [1, 4], [3, 4]])).tolist() == [9, 8, 9] and arena.used == 10
        assert find_pairs(arena, torch.zeros(0, 2, dtype=torch.int64)).tolist() == [] and arena.used == 10
    assert arena.kept is None


def test_rows_at_the_beginning():
    encoder, (leaves, mask) = make(), batch_of([3, 1, 2], 0)
    with torch.no_grad():
        rows = initial_rows(_parent_arena(encoder, leaves[mask], 20), mask)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[[1, 7, 0], [2, 8, 0], [3, 0, 0]], [[4, 0, 0], [0, 0, 0], [0, 0, 0]], [[5, 9, 0], [6, 0, 0], [0, 0, 0]]]


def test_only_the_pairs_beside_a_merge_are_new():
    encoder, (leaves, mask) = make(), batch_of([4, 4], 0)
    with torch.no_grad():
        arena = _parent_arena(encoder, leaves[mask], 20)
        rows = initial_rows(arena, mask)[:, None].expand(-1, 2, -1, -1)        # pairs at 9 to 14
        rows = torch.stack([rows[:, 0], rows[:, 1] + torch.tensor([0, 0, 7])], 1)
        after, ended = merge_places(arena, rows[1:], torch.tensor([[1, 0, 1]]), torch.tensor([[1, 0, 2]]), 3)
    assert arena.children(slice(15, arena.used)).tolist() == [[5, 13], [6, 14], [12, 7], [13, 8]]
    assert after[0].tolist() == [[[5, 15, 3], [13, 18, 3], [8, 0, 7]], [[12, 17, 3], [7, 14, 0], [8, 0, 0]], [[5, 12, 7], [6, 16, 3], [14, 0, 3]]]
    assert ended[0].tolist() == [[[12, 7], [13, 7], [14, 7]], [[0, 0], [12, 0], [13, 0]], [[13, 7], [14, 7], [0, 7]]]


def test_what_is_composed_is_linear():
    "Twice the length, about twice the parents; the literal form has four times."
    made = []
    for n in (40, 80):
        _, _, found = found_in(make(0, 5), [n], n)
        made.append(found.arena.used - 1 - n)
    assert made[0] < 39 + 10 * 38 and made[1] < 3 * made[0] < 39 * 38


# ---- lineages

@few
@given(lengths, beams, seeds, st.booleans())
def test_lives(sizes, beam, seed, noise):
    "Retold from picks and origins with lists: which pairs ended, since when they were there, and log Z."
    leaves, mask, found = found_in(make(seed, beam, 2.0, noise=noise).train(), sizes, seed, torch.Generator().manual_seed(seed))
    lives, arena = _trace_lifetimes(found), found.arena
    known = {tuple(pair): place for place, pair in reversed(list(enumerate(arena.children(slice(None)).tolist()))) if all(pair)}
    start = 1
    for b, n in enumerate(sizes):
        for slot in range(beam):
            if found.scores[b, slot] == -torch.inf:
                assert not lives.pairs[b, slot].any()
                continue
            merges, at = [], slot
            for rows, _, picks, origins, *_ in found.history[n - 2::-1] if n > 1 else []:
                here = rows.tolist().index(b)
                merges.append(int(picks[here, at]))
                at = int(origins[here, at])
            row = list(range(start, start + n))
            since = {pair: 0 for pair in zip(row[:-1], row[1:])}
            for step, j in enumerate(merges[::-1]):
                pairs = list(zip(row[:-1], row[1:]))
                ended = [pairs[i] if 0 <= i < len(pairs) else None for i in (j - 1, j, j + 1)]
                places = lives.pairs[b, slot, step].tolist()
                assert [None if not place else tuple(arena.children(place).tolist()) for place in places] == ended
                assert [at for at, pair in zip(lives.since[b, slot, step].tolist(), ended) if pair] == [since[pair] for pair in ended if pair]
                norm = arena.notes[[known[pair] for pair in pairs], 0].logsumexp(0)
                assert_close(lives.norms[b, slot, step], norm)
                row[j:j + 2] = [places[1]]
                since |= {pair: step + 1 for pair in zip(row[:-1], row[1:]) if places[1] in pair}
            assert row == [int(found.roots[b, slot])] and not lives.pairs[b, slot, max(n - 1, 0):].any()
        start += n


@few
@given(lengths, beams, seeds)
def test_plan_has_what_survivors_held(sizes, beam, seed):
    leaves, mask, found = found_in(make(seed, beam), sizes, seed)
    lives, count = _trace_lifetimes(found), int(mask.sum())
    plan = plan_replay([lives.lines], count, found.arena.used, found.arena.kept is None)
    held = lives.pairs.unique()
    held = held[held > 0]
    assert sorted(set(plan.number[held].tolist())) == list(range(count, count + len(plan.children)))
    assert sum(plan.counts) == len(plan.children) <= len(held)
    assert plan.number[1:count + 1].tolist() == list(range(count))
    for place in held.tolist():
        assert plan.children[plan.number[place] - count].tolist() == plan.number[found.arena.children(place)].tolist()


@pytest.mark.parametrize("lead", [0.0, 5.0, 45.0, 46.0, 47.0, 100.0, 1e4])
def test_slopes_at_the_floor(lead):
    "Against PyTorch's slope of the formula as it is written, in two steps with a pair that lives through both."
    u = torch.tensor([0.0, lead, 1.0, -0.5, 2.0]).double().requires_grad_()
    first, second = u[[0, 1, 4]], u[[2, 4]]                                    # 0 is composed; then 2, made of it and its neighbor
    written = (first.softmax(0)[0] + 2 * EPSILON).log() + (second.softmax(0)[0] + 2 * EPSILON).log()
    lives = PairLifetimes(torch.tensor([[[[0, 1, 2], [0, 3, 5], [0, 4, 0]]]]), torch.tensor([[[[0, 0, 0], [0, 1, 0], [0, 2, 0]]]]),
                  torch.stack([first.logsumexp(0), second.logsumexp(0), u[3]]).detach()[None, None])
    found = lifetime_scores(u, torch.tensor([5, 0, 1, 2, 3, 4]), lives, written.detach()[None, None])
    assert_close(found[0, 0], written)
    slopes = [torch.autograd.grad(score.sum(), u)[0] for score in (found, written)]
    assert_close(*slopes, rtol=1e-9, atol=1e-12)
    assert (slopes[0][0] < 1e-9) == (lead >= 100)


def test_empty_slots_stay_empty():
    u = torch.zeros(1).double().requires_grad_()
    lives = PairLifetimes(torch.zeros(1, 2, 1, 3).long(), torch.zeros(1, 2, 1, 3).long(), torch.zeros(1, 2, 1).double())
    scores = torch.tensor([[0.0, -torch.inf]]).double()
    found = lifetime_scores(u, torch.tensor([1]), lives, scores)
    assert torch.equal(found, scores)
    assert not torch.autograd.grad(found.softmax(-1)[0, 0], u)[0].any()


# ---- dropout

def test_replay_drops_what_the_search_dropped():
    encoder, (leaves, mask) = make(4, 4, dropout=0.4).train(), batch_of([9, 5, 1], 4)
    torch.manual_seed(0)
    found = search_parents(encoder, leaves, mask)
    torch.manual_seed(0)
    roots, scores, _ = parent_search(encoder, leaves, mask)
    there = found.scores > -torch.inf
    assert_close(roots[there].detach(), found.arena.states[found.roots][there])
    assert_close(scores.detach(), found.scores)
    made = slice(1 + int(mask.sum()), found.arena.used)
    assert 0.5 < found.arena.kept[made].double().mean() < 0.7 and not found.arena.kept[:made.start].any()
    keep = found.arena.kept[made].double() / 0.6
    left, right = found.arena.states[found.arena.children(made)].unbind(1)
    hidden = encoder.grc.activation(encoder.grc.w1(torch.cat([left, right], 1))) * keep
    *gates, content = encoder.grc.w2(hidden).chunk(4, 1)
    keep_left, keep_right, write = (gate.sigmoid() for gate in gates)
    assert_close(encoder.grc.norm(keep_left * left + keep_right * right + write * content).detach(), found.arena.states[made])


def test_slopes_with_dropout():
    encoder, (x, mask) = make(6, 3, 2.0, dropout=0.3).train(), batch_of([5, 2], 6)
    def root(x):
        torch.manual_seed(1)
        return encoder(x, mask).root
    assert torch.autograd.gradcheck(root, x.requires_grad_())


def test_dropout_is_for_training():
    x, mask = batch_of([6, 3], 0)
    (_, expected), (_, found) = (answers(encoder.eval(), x, mask) for encoder in both(0, 3, dropout=0.5))
    assert_same(found, expected)
    assert search_parents(make(dropout=0.5).eval(), x, mask).arena.kept is None is search_parents(make().train(), x, mask).arena.kept


# ---- recordings and the door

@pytest.mark.parametrize("path", sorted(GOLDEN.glob("bt_grc*/*.safetensors")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_both_forms_on_recorded_inputs(path):
    "With the parameters of a recording, in double precision."
    with safe_open(path, framework="pt") as file:
        tensors, config = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])
    found = []
    for kind in (LiteralBeamTree, BeamTree):
        encoder = kind(config["hidden_size"], config["beam_size"], hidden=config["cell_size"], soft=path.parent.name == "bt_grc_os")
        encoder.load_state_dict({key[6:]: value.float() for key, value in tensors.items() if key.startswith("param.")})
        encoder.double().train(config["mode"] != "eval")
        found.append(answers(encoder, tensors["in.x"].double(), tensors["in.mask"].bool())[1])
    assert_same(*found)


def test_the_door():
    for name, soft in (("bt_grc", False), ("bt_grc_os", True)):
        encoder = create_encoder(name, dim=4, beam=2)
        assert type(encoder) is BeamTree and encoder.soft is soft and encoder.beam == 2 and not encoder.noise
    with pytest.raises(ValueError, match="beam must be a whole number from 1, got 0"):
        create_encoder("bt_grc", dim=4, beam=0)
    x, mask = batch_of([3, 2], 0)
    with pytest.raises(ValueError):
        make()(x, mask.float())
    names = {f"{part}.{kind}" for part in ("leaf", "leaf_norm", "grc.w1", "grc.w2", "grc.norm", "scorer.0") for kind in ("weight", "bias")}
    assert {name for name, _ in make().named_parameters()} == names
