"What the ListOps chapter cannot show in a lesson: the official data, the distribution, faults and fuzz."
import json
import lzma
import re
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.core import merge_targets, steps_from_tree, tree_from_steps
from rvnnbook.data import listops
from rvnnbook.data.listops import (
    DIGITS,
    OPERATORS,
    TOKEN_IDS,
    VOCABULARY,
    Example,
    LengthSampler,
    ListOpsError, max_min_examples,
    arguments,
    bracketed,
    choose_lengths,
    collate_listops,
    composition_steps,
    depth,
    draw_expression,
    evaluate,
    fingerprint,
    fingerprint_table,
    install_official_test,
    is_test_expression,
    length_table,
    make_split,
    expression_size,
    official_fingerprints,
    official_test,
    parse_expression,
    read_listops,
    tokenize,
    unique_draws,
    write_listops,
)
from tests.helpers import published

GOLDEN = json.loads((Path(__file__).parent / "golden" / "listops_official.json").read_text())


@pytest.fixture(scope="session")
def official_file():
    return published("listops", "test_d20s.tsv.xz") / "test_d20s.tsv.xz"


@pytest.fixture(scope="session")
def official_lines(official_file):
    return lzma.decompress(official_file.read_bytes()).decode().splitlines()


@pytest.fixture(scope="session")
def generated():
    "As many unique draws as the official data have, the test let in."
    return list(unique_draws(100_000, seed=0, exclude_test=False))


# ---- independent routes: everything here recurses, nothing uses `fold`

def recursive_value(tokens):
    def value(at):
        if tokens[at] in DIGITS:
            return int(tokens[at]), at + 1
        values, here = [], at + 1
        while tokens[here] != "]":
            got, here = value(here)
            values.append(got)
        name = tokens[at][1:]
        return {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)),
                "SM": lambda v: sum(v) % 10}[name](values), here + 1
    result, end = value(0)
    assert end == len(tokens)
    return result


def recursive_tree(tokens):
    def tree(at):
        if tokens[at] in DIGITS:
            return at, at + 1
        node, here = at, at + 1
        while tokens[here] != "]":
            child, here = tree(here)
            node = (node, child)
        return (node, here), here + 1
    return tree(0)[0]


def tree_from_parentheses(expression):
    stack, position = [], 0
    for word in expression.split():
        if word == ")":
            right, left, opened = stack.pop(), stack.pop(), stack.pop()
            assert opened == "("
            stack.append((left, right))
        elif word == "(":
            stack.append(word)
        else:
            stack.append(position)
            position += 1
    (tree,) = stack
    return tree


def nest(operator, children):
    return (operator, *(token for child in children for token in child), "]")


expressions = st.recursive(
    st.sampled_from(sorted(DIGITS)).map(lambda digit: (digit,)),
    lambda children: st.builds(nest, st.sampled_from(sorted(OPERATORS)), st.lists(children, min_size=1, max_size=6)),
    max_leaves=40)


# ---- the official test

def test_official_labels_trees_and_text(official_lines):
    assert len(official_lines) == 10_000
    for line in official_lines:
        label, expression = line.split("\t")
        tokens = tokenize(expression)
        assert evaluate(tokens) == recursive_value(tokens) == int(label)
        assert composition_steps(tokens) == steps_from_tree(tree_from_parentheses(expression))
        assert bracketed(tokens) == expression


def test_golden_counts_are_those_of_the_file(official_lines):
    counted = histograms(Example(0, tokenize(line.split("\t")[1])) for line in official_lines)
    for name, expected in golden_histograms().items():
        assert counted[name] == expected


def test_hash_table_is_that_of_the_official_expressions(official_file):
    table = fingerprint_table(read_listops(official_file))
    assert table.dtype == np.uint64 and (np.diff(table) > 0).all()
    assert set(table.tolist()) == official_fingerprints()
    stored = np.load(Path(listops.__file__).with_name("listops_test_hashes.npy"), allow_pickle=False)
    assert stored.dtype == np.uint64 and np.array_equal(stored, table)


def test_install(official_file, tmp_path, monkeypatch):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path / "data"))
    assert official_test() is None
    raw = lzma.decompress(official_file.read_bytes())
    plain = tmp_path / "mine.tsv"
    plain.write_bytes(raw)
    target = install_official_test(plain)                    # a plain file is compressed
    assert target == tmp_path / "data" / "listops" / "test_d20s.tsv.xz"
    assert lzma.decompress(target.read_bytes()) == raw
    assert len(official_test()) == 10_000
    target.unlink()

    lines = raw.splitlines(keepends=True)
    for content, complaint in ((lines[:-1], "has 9999"), (lines[:-1] + [b"7\t7\n"], "line 10000"),
                               (lines[:-1] + lines[:1], "twice"), (lines[:5] + [b"1\t2\n"] + lines[6:], "mine.tsv:6:")):
        plain.write_bytes(b"".join(content))
        with pytest.raises(ListOpsError, match=complaint):
            install_official_test(plain)
        assert not target.exists()


# ---- the distribution

def histograms(examples):
    depths, roots, lengths = Counter(), Counter(), Counter()
    for _, tokens in examples:
        depths[depth(tokens)] += 1
        lengths[int(np.searchsorted(GOLDEN["length_from"], len(tokens), side="right")) - 1] += 1
        if len(tokens) > 1:
            level = roots_seen = 0
            for token in tokens[1:-1]:
                roots_seen += level == 0
                level += (token in OPERATORS) - (token == "]")
            roots[roots_seen] += 1
    return {"depth": [depths[i] for i in range(20)], "root_arguments": [roots[k] for k in range(2, 6)],
            "length": [lengths[i] for i in range(len(GOLDEN["length_from"]))]}


def golden_histograms():
    return {"depth": GOLDEN["depth"], "root_arguments": list(GOLDEN["root_arguments"].values()), "length": GOLDEN["length"]}


def chi_square(ours, theirs):
    "Two-sample statistic over its critical value at one in a thousand (Wilson-Hilferty)."
    pairs, rest = [], [0, 0]
    for a, b in zip(ours, theirs):
        if b >= 5:
            pairs.append((a, b))
        else:
            rest = [rest[0] + a, rest[1] + b]
    pairs += [tuple(rest)] * (sum(rest) > 0)
    ratio = (sum(b for _, b in pairs) / sum(a for a, _ in pairs))**.5
    statistic = sum((ratio * a - b / ratio)**2 / (a + b) for a, b in pairs)
    return statistic / critical(len(pairs) - 1)


def critical(freedom, z=3.0902):
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom))**.5)**3


def worst_gap(examples):
    ours = histograms(examples)
    return max(chi_square(ours[name], theirs) for name, theirs in golden_histograms().items())


def test_critical_values():
    for freedom, exact in ((3, 16.266), (9, 27.877), (19, 43.820)):     # table of the distribution
        assert abs(critical(freedom) - exact) < .02 * exact


def test_generator_follows_the_official_distribution(generated):
    assert len({tokens for _, tokens in generated}) == 100_000
    assert worst_gap(generated) < 1


@pytest.mark.parametrize("count, rules", [
    (5_000, {}),                                     # too few unique draws are too short
    (100_000, {"operator_probability": .23}),
    pytest.param(100_000, {"arguments": (2, 4)}, marks=pytest.mark.long),
    pytest.param(100_000, {"operator_probability": .3}, marks=pytest.mark.long),
    pytest.param(100_000, {"max_depth": 19}, marks=pytest.mark.long),
    pytest.param(1_000_000, {}, marks=pytest.mark.long),     # too many are too long
])
def test_another_generator_does_not(count, rules):
    assert worst_gap(unique_draws(count, seed=0, exclude_test=False, **rules)) > 1


def test_draws_without_the_test(generated):
    hits = sum(is_test_expression(tokens) for _, tokens in generated)
    assert 500 < hits < 900                          # letting the test in means meeting it
    kept = list(unique_draws(20_000, seed=1))
    assert not any(is_test_expression(tokens) for _, tokens in kept)
    assert len({tokens for _, tokens in kept}) == 20_000
    assert all(evaluate(tokens) == label for label, tokens in kept)
    lengths = [len(tokens) for _, tokens in kept]    # shuffled: the beginning is no shorter than the end
    first, last = np.mean(lengths[:10_000]), np.mean(lengths[10_000:])
    assert abs(first - last) < 4 * (2 * np.var(lengths) / 10_000)**.5


def test_draws_depend_on_the_seed_alone():
    assert list(unique_draws(50, seed=3)) == list(unique_draws(50, seed=3)) != list(unique_draws(50, seed=4))
    with pytest.raises(ListOpsError, match="of 11 found"):
        list(unique_draws(11, seed=0, max_depth=1, exclude_test=False))
    for rules in ({"max_depth": 0}, {"operator_probability": 1.5}, {"arguments": (0, 2)}, {"arguments": (3, 2)}):
        with pytest.raises(ListOpsError):
            next(unique_draws(1, seed=0, **rules))


# ---- drawing by length

@cache
def shapes(length, level, p, fewest, most, bottom):
    "All shapes of an argument with (probability, depth), by enumeration."
    if length == 1:
        return {".": (1. if level == bottom else 1 - p, 0)}
    found = {}
    if level < bottom:
        for count in range(fewest, most + 1):
            for row, (chance, deep) in rows(count, length - 2, level + 1, p, fewest, most, bottom).items():
                found[f"[{row}]"] = p / (most - fewest + 1) * chance, deep + 1
    return found


@cache
def rows(count, shared, *rules):
    if count == 0:
        return {"": (1., 0)} if shared == 0 else {}
    return {a + b: (x * y, max(d, e)) for size in range(1, shared + 1)
            for a, (x, d) in shapes(size, *rules).items() for b, (y, e) in rows(count - 1, shared - size, *rules).items()}


@pytest.mark.parametrize("p, fewest, most, bottom", [(.25, 2, 5, 20), (.4, 2, 3, 3), (.6, 1, 2, 4), (1., 3, 3, 3)])
def test_length_table_is_the_sum_over_all_shapes(p, fewest, most, bottom):
    rules = {"operator_probability": p, "arguments": (fewest, most), "max_depth": bottom}
    for deepest in (None, 0, 1, 2, 30):
        table = length_table(12, **rules, deepest=deepest)[0, 1]
        for length in range(1, 13):
            every = shapes(length, 1, p, fewest, most, bottom).values()
            assert abs(table[length] - sum(x for x, d in every if deepest is None or d <= deepest)) < 1e-14


def test_lengths_far_out():
    lengths = length_table(3000)[0, 1]
    mean = 1.
    for _ in range(19):
        mean = .75 + .25 * (2 + 3.5 * mean)
    assert abs(lengths.sum() - 1) < 1e-9 and abs((lengths * np.arange(3001)).sum() - mean) < 1e-6
    assert (lengths[4:] > 0).all()


def shape(tokens):
    return "".join("." if token in DIGITS else token[0] for token in tokens)


@pytest.mark.parametrize("length, deepest", [(5, None), (14, None), (16, 2)])
def test_sampler_draws_every_shape_as_often_as_it_should(length, deepest):
    sampler, random, count = LengthSampler(20, deepest=deepest), Random(0), 20_000
    every = {name: x for name, (x, d) in shapes(length, 1, .25, 2, 5, 20).items() if deepest is None or d <= deepest}
    drawn = [sampler.draw_length(random, length, length) for _ in range(count)]
    counted = Counter(map(shape, drawn))
    assert set(counted) <= set(every)
    total = sum(every.values())
    statistic = sum((counted[name] - count * x / total)**2 / (count * x / total) for name, x in every.items())
    assert statistic < critical(max(len(every) - 1, 1))
    names = Counter(token for tokens in drawn for token in tokens)                  # tokens are uniform, too
    for group in (list(OPERATORS), list(DIGITS)):
        expected = sum(names[token] for token in group) / len(group)
        assert sum((names[token] - expected)**2 for token in group) / expected < critical(len(group) - 1)


def test_sampler_equals_rejection():
    low, high, random, sampler = 20, 60, Random(0), LengthSampler(100)
    kept = list(islice((tokens for tokens in iter(lambda: draw_expression(random), None) if low <= len(tokens) <= high), 4000))
    drawn = [sampler.draw_length(random, low, high) for _ in range(4000)]
    for question in (depth, lambda tokens: len(tokens) // 5, evaluate, lambda tokens: sum(t in OPERATORS for t in tokens)):
        ours, theirs = Counter(map(question, drawn)), Counter(map(question, kept))
        keys = sorted(ours | theirs)
        assert chi_square([ours[key] for key in keys], [theirs[key] for key in keys]) < 1


def test_choose_at_the_edges():
    class Edge(Random):
        def __init__(self, value):
            self.value = value
        def random(self):
            return self.value
    weights = np.array([0., 0., .1, .2, 0., 0.])
    assert choose_lengths(Edge(1 - 2**-53), weights) == 2 and choose_lengths(Edge(0.), weights) == 3
    with pytest.raises(ListOpsError, match="no expression"):
        LengthSampler(50).draw(Random(0), 3)
    for low, high in ((2, 3), (10, 51), (0, 0), (30, 20)):
        with pytest.raises(ListOpsError, match="no expression"):
            LengthSampler(50).draw_length(Random(0), low, high)


# ---- splits

@pytest.mark.parametrize("bounds", [
    {"length": (900, 1000)}, {"length": (5, 5)}, {"depth": (18, 18)}, {"depth": (0, 2), "length": (25, 37)},
    {"depth": (22, 25)}, {"length": (100, 1000), "arguments": (10, 10)}, {"length": (100, 300), "arguments": (15, 15)},
    {"arguments": (2, 3)}, {"length": (30, 40), "depth": (4, 5), "arguments": (4, 6)},
])
def test_split_keeps_its_bounds(bounds):
    split = make_split(30, 5, **bounds)
    sizes = [expression_size(tokens) for _, tokens in split]
    assert len({tokens for _, tokens in split}) == 30 and split == make_split(30, 5, **bounds)
    assert not any(is_test_expression(tokens) for _, tokens in split)
    assert all(recursive_value(tokens) == label for label, tokens in split)
    for name, (low, high) in bounds.items():
        values = [getattr(size, name) for size in sizes]
        assert low <= min(values) and max(values) <= high
    if "arguments" not in bounds:
        assert max(size.arguments for size in sizes) <= 5


@pytest.mark.parametrize("bounds", [
    {"length": (2, 3)}, {"length": (10, 5)}, {"length": (-1, 5)}, {"length": 5}, {"length": (1, 30), "depth": (10, 10)},
    {"length": (1, 12), "arguments": (12, 12)}, {"arguments": (1, 1)}, {"depth": (0, 0), "arguments": (2, 5)},
    {"depth": (1, 3), "arguments": (0, 0)}, {"length": (800, 900), "depth": (0, 3)}, {"length": (0, 0)},
    {"length": (1, 1)}, {"length": (4, 4), "arguments": (3, 3)}, {"length": (301, 302), "depth": (0, 3)},
    {"length": (1001, 1001), "arguments": (2, 2)},
])
def test_impossible_splits_are_refused(bounds):
    with pytest.raises(ListOpsError):
        make_split(401, 0, **bounds)


def test_split_can_use_up_a_small_world():
    everything = {(name, a, b, "]") for name in OPERATORS for a in DIGITS for b in DIGITS}
    outside = {tokens for tokens in everything if not is_test_expression(tokens)}
    assert 300 < len(outside) < 400
    assert {tokens for _, tokens in make_split(len(outside), 0, length=(4, 4))} == outside


# ---- properties

@settings(deadline=None, max_examples=200)
@given(expressions)
def test_values_and_trees(tokens):
    assert evaluate(tokens) == recursive_value(tokens)
    steps = composition_steps(tokens)
    tree = recursive_tree(tokens)
    assert steps == steps_from_tree(tree) == steps_from_tree(tree_from_parentheses(bracketed(tokens)))
    assert tree_from_steps(steps) == tree
    assert tokenize(bracketed(tokens)) == tokenize(" ".join(tokens)) == tokens
    levels = np.cumsum([(token in OPERATORS) - (token == "]") for token in tokens])
    assert depth(tokens) == levels.max()
    assert (arguments(tokens) == 0) == (len(tokens) == 1)


@settings(deadline=None, max_examples=50)
@given(st.lists(expressions, min_size=1, max_size=8), st.sampled_from(["a.tsv", "a.tsv.xz"]))
def test_round_trip(tmp_path_factory, several, name):
    examples = [Example(evaluate(tokens), tokens) for tokens in several]
    path = tmp_path_factory.mktemp("round") / name
    assert read_listops(write_listops(path, examples)) == examples
    assert [file.name for file in path.parent.iterdir()] == [name]


@settings(deadline=None, max_examples=50)
@given(st.lists(expressions, min_size=1, max_size=6))
def test_collate(several):
    batch = collate_listops([Example(evaluate(tokens), tokens) for tokens in several])
    assert batch.ids.dtype == batch.trees.dtype == batch.labels.dtype == torch.int64 and batch.mask.dtype == torch.bool
    for row, tokens in enumerate(several):
        n = len(tokens)
        assert [VOCABULARY[i] for i in batch.ids[row, :n]] == list(tokens)
        assert batch.mask[row].tolist() == [True] * n + [False] * (batch.mask.shape[1] - n)
        assert batch.ids[row, n:].sum() == batch.trees[row, n:].sum() == 0
        assert batch.labels[row] == recursive_value(tokens)
    assert (merge_targets(batch.trees, batch.mask) >= 0).all()       # the core accepts the trees
    with pytest.raises(ListOpsError, match="at least one"):
        collate_listops([])


def test_vocabulary_is_fixed():
    assert " ".join(VOCABULARY) == "[MIN [MAX [MED [SM 0 1 2 3 4 5 6 7 8 9 ]"
    assert TOKEN_IDS == {token: index for index, token in enumerate(VOCABULARY)}


def test_import_is_light():
    code = "import sys, rvnnbook.data.listops; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


# ---- faults

def test_a_hundred_thousand_levels(tmp_path):
    levels = 100_000
    tokens = ("[SM", "1") * levels + ("3",) + ("]",) * levels
    assert evaluate(tokens) == 3 and depth(tokens) == levels
    steps = composition_steps(tokens)
    assert max(steps) == 2 * levels + 1 and steps[-1] == 0 and steps[:2] == [1, 2 * levels]
    example = Example(3, tokens)
    assert read_listops(write_listops(tmp_path / "deep.tsv", [example])) == [example]


@pytest.mark.parametrize("text, complaint", [
    ("", "empty"), ("]", "token 0.*closes no"), ("[MAX 2 ] ]", "token 3.*after the end"), ("2 3", "token 1.*after the end"),
    ("[MAX 2 [MIN 3 ]", r"token 0, \[MAX, is never closed"), ("[MAX 2 [MIN 3", r"token 2, \[MIN, is never closed"),
    ("[MAX [SM ] 3 ]", r"token 1, \[SM, has no argument"), ("[MAX 2 x ]", "token 2 is 'x'"), ("[MAX ٣ ]", "token 1"),
    ("10", "token 0"),
])
def test_malformed_expressions(text, complaint):
    for question in (evaluate, depth, arguments, composition_steps, bracketed):
        with pytest.raises(ListOpsError, match=complaint):
            question(text.split())
    with pytest.raises(ListOpsError, match=complaint):
        parse_expression(text)


def test_a_text_in_place_of_its_tokens():
    with pytest.raises(ListOpsError, match=r"^token 0 is '\[', which is none of .*; split the text first$"):
        evaluate("[MAX 1 2 ]")


def test_expressions_in_text_are_split_with_and_without_parentheses():
    for tokens in (tokenize("[MAX 2 9 [MIN 4 7 ] 0 ]"), ("7",)):
        assert parse_expression(" ".join(tokens)) == parse_expression(bracketed(tokens)) == tokens


@pytest.mark.parametrize("line, complaint", [
    (b"", "two fields"), (b"7 7", "two fields"), (b"7\t7\t7", "two fields"), (b"x\t7", "label is 'x'"), (b"-1\t7", "label"),
    (b"\t7", "label"), ("٣\t3".encode(), "label"), (b"3\t4", "label is 3.*value 4"), (b"7\t", "empty"),
    (b"7\t[PM 7 ]", "PM"), (b"7\t[MAX 7", "never closed"), (b"7\t\xff", "UTF-8"), (b"7\t( 7", "parentheses"),
    (b"7\t( ( [MAX 7 ) )", "never closed"), (b"7\t( ( [MAX 7 ] ) )", "parentheses"),
])
def test_malformed_lines_name_file_and_line(tmp_path, line, complaint):
    for name in ("bad.tsv", "bad.tsv.xz"):
        path = tmp_path / name
        data = b"7\t7\n2\t( ( [MAX 2 ) ] )\n" + line + b"\n3\t3\n"
        path.write_bytes(lzma.compress(data) if name.endswith("xz") else data)
        with pytest.raises(ListOpsError, match=rf"^{re.escape(str(path))}:3: .*{complaint}"):
            read_listops(path)


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.tsv.*rvnnbook data get listops") as caught:
        read_listops(tmp_path / "nowhere.tsv")
    assert isinstance(caught.value, ListOpsError)
    with pytest.raises(ListOpsError, match="cannot be read"):
        read_listops(tmp_path)
    for name, data in (("empty.tsv", b""), ("empty.tsv.xz", b""), ("none.tsv.xz", lzma.compress(b"")), ("text.tsv.xz", b"7\t7\n")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ListOpsError, match=rf"{name}:1: "):
            read_listops(tmp_path / name)
    (tmp_path / "windows.tsv").write_bytes(b"7\t7\r\n2\t[MAX 2 ]")          # line ends of another world are fine
    assert read_listops(tmp_path / "windows.tsv") == [(7, ("7",)), (2, ("[MAX", "2", "]"))]


def test_write_leaves_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "kept.tsv"
    write_listops(path, [Example(7, ("7",))])
    for bad in ([Example(7, ("7",)), Example(3, ("4",))], [], [Example(7, ("[MAX", "7"))]):
        with pytest.raises(ListOpsError):
            write_listops(path, bad)
    assert path.read_bytes() == b"7\t7\n"
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(OSError):
        write_listops(tmp_path / "folder", [Example(7, ("7",))])                     # a folder cannot be replaced
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "kept.tsv"]


def fuzz(path, rounds, seed, packed):
    "Damage valid files; each must be refused with file and line, or be read as something true."
    random, refused = Random(seed), 0
    good = [f"{evaluate(tokens)}\t{bracketed(tokens)}\n".encode() for tokens in
            (LengthSampler(60).draw_length(random, 4, 60) for _ in range(50))]
    for _ in range(rounds):
        data = bytearray(b"".join(random.choices(good, k=random.randint(1, 3))))
        data = bytearray(lzma.compress(data, preset=0)) if packed else data
        for _ in range(random.randint(1, 3)):
            at, kind = random.randrange(len(data)), random.randrange(4)
            if kind == 0:
                del data[at:at + random.choice((1, 1, 2, 20))]
            elif kind == 1:
                data[at:at] = random.choice((b" ", b"(", b")", b"]", b"3", b"[MIN ", b"\t", b"\n", b"\xc3", b"\0"))
            elif kind == 2:
                data[at] = random.randrange(256)
            else:
                data[at:at + 1] = data[at:at + 1] * 2
            data = data or bytearray(b"\n")
        path.write_bytes(data)
        try:
            examples = read_listops(path)
        except ListOpsError as error:
            assert re.match(re.escape(str(path)) + r":\d+: \S", str(error)), error
            refused += 1
        else:
            assert examples and all(recursive_value(tokens) == label for label, tokens in examples)
    return refused / rounds


@pytest.mark.parametrize("name, rounds", [("fuzz.tsv", 3000), ("fuzz.tsv.xz", 1000)])
def test_damaged_files_are_refused(tmp_path, name, rounds):
    assert .7 < fuzz(tmp_path / name, rounds, seed=0, packed=name.endswith("xz")) <= 1


@pytest.mark.long
def test_a_million_damaged_files(tmp_path):
    assert .7 < fuzz(tmp_path / "fuzz.tsv", 900_000, seed=1, packed=False) < 1
    assert .7 < fuzz(tmp_path / "fuzz.tsv.xz", 100_000, seed=2, packed=True) <= 1


def test_fingerprint_table():
    rows = [("1",), ("2",), ("[MAX", "1", "2", "]")]
    table = fingerprint_table(Example(0, row) for row in rows)
    assert table.dtype == np.uint64 and table.tolist() == sorted(map(fingerprint, rows)) and 0 not in table


def test_more_different_expressions_than_there_are():
    assert len(max_min_examples(200, 0, 4, 4)) == 200          # of two operators with two digits
    with pytest.raises(ListOpsError, match="200 of 201 found"):
        max_min_examples(201, 0, 4, 4)
