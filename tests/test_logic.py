"What the logic chapter cannot show in a lesson: the published data, the distribution, faults and fuzz."
import lzma
import math
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice, product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rvnnbook.core import merge_targets, steps_from_tree, tree_from_steps
from rvnnbook.data.logic import (
    EVERYWHERE,
    FILES,
    PATTERNS,
    PUBLISHED,
    RELATIONS,
    TABLES,
    TOKEN_IDS,
    VARIABLES,
    VOCABULARY,
    LogicError,
    MissingFileError,
    LogicPair,
    collate_logic,
    formula_steps,
    draw_many,
    draw_pairs,
    every_tenth,
    file_number,
    first_seen,
    fold_formula,
    grow_formula,
    has_pattern,
    make_files,
    numbered,
    official_tests,
    operators,
    pair_length,
    parse,
    parse_lines,
    published_logic,
    read_pairs,
    relation,
    relations,
    spell,
    systematicity,
    training,
    truth_table,
    unparse,
    write_pairs,
)
from tests.helpers import published


@pytest.fixture(scope="session")
def folder():
    return published("propositionallogic", "train0", "train0.xz")


@pytest.fixture(scope="session")
def files(folder):
    "All of them; reading checks every label against the truth tables."
    return published_logic(folder)


@pytest.fixture(scope="session")
def drawn():
    "As many draws as the published data were made from, each pair once."
    return first_seen(draw_many(500_000, seed=0))


# ---- independent routes: they recurse, and look at one world after the other

WORLDS = [dict(zip(VARIABLES, (bool(number >> place & 1) for place in range(6)))) for number in range(64)]


def holds(formula, world):
    if isinstance(formula, str):
        return world[formula]
    if formula[0] == "not":
        return not holds(formula[1], world)
    left, right = holds(formula[0], world), holds(formula[2], world)
    return {"and": left and right, "or": left or right}[formula[1]]


def relation_by_worlds(left, right):
    "The definition of Bowman et al. 2015, in words of sets; None where it gives no relation."
    first = {n for n, world in enumerate(WORLDS) if holds(left, world)}
    second = {n for n, world in enumerate(WORLDS) if holds(right, world)}
    everything = set(range(64))
    if first in (set(), everything) or second in (set(), everything):
        return None
    if first == second: return "="
    if first < second: return "<"
    if first > second: return ">"
    if first == everything - second: return "^"
    if not first & second: return "|"
    return "v" if first | second == everything else "#"


def write(formula):
    if isinstance(formula, str):
        return formula
    if formula[0] == "not":
        return f"( not {write(formula[1])} )"
    return f"( {write(formula[0])} ( {formula[1]} {write(formula[2])} ) )"


formulas = st.recursive(
    st.sampled_from(VARIABLES),
    lambda parts: st.tuples(st.just("not"), parts) | st.tuples(parts, st.sampled_from(["and", "or"]), parts),
    max_leaves=25)


# ---- the published data

def test_published_counts(files):
    assert tuple(files) == FILES and sum(map(len, files.values())) == 249_069
    assert [len(files[f"train{k}"]) for k in range(13)] == PUBLISHED["train"]
    assert [len(files[f"test{k}"]) for k in range(13)] == PUBLISHED["test"]
    for k in range(13):
        pooled = files[f"train{k}"] + files[f"test{k}"]
        assert len(set(pooled)) == len(pooled) and 85 * len(pooled) // 100 == PUBLISHED["train"][k]
        labels = Counter(pair.label for pair in pooled)
        assert [labels[name] for name in RELATIONS] == PUBLISHED["labels"][k]
        words = Counter(token for pair in pooled for side in pair[1:] for token in side)
        assert [words["and"] + words["or"], words["not"]] == PUBLISHED["operators"][k]
    labels = Counter(pair.label for pair in files["test1"])
    assert [labels[name] for name in RELATIONS] == PUBLISHED["test1 labels"]
    lengths = Counter(len(pair.left) for pairs in files.values() for pair in pairs)
    assert [lengths[1 + 3 * step] for step in range(27)] == PUBLISHED["left tokens"]
    assert sum(lengths.values()) == sum(PUBLISHED["left tokens"])


def test_published_labels_by_another_route(folder, files):
    lines = 0
    for name, pairs in files.items():          # all: fields, labels and text as they stand there
        text = lzma.decompress((folder / f"{name}.xz").read_bytes()).decode() \
            if (folder / f"{name}.xz").exists() else (folder / name).read_text()
        raw = [tuple(line.split("\t")) for line in text.splitlines()]
        assert [(pair.label, " ".join(pair.left), " ".join(pair.right)) for pair in pairs] == raw
        lines += len(raw)
    assert lines == 249_069
    every = [pair for pairs in files.values() for pair in pairs]
    for label, left, right in Random(0).sample(every, 1500):
        assert relation_by_worlds(parse(left), parse(right)) == label
        assert relation(truth_table(left), truth_table(right)) == label


def test_a_wrong_published_label_is_noticed(files):
    pairs = files["test7"]
    lines = [line(pair) for pair in pairs]
    lines[1234] = line(pairs[1234]._replace(label="=" if pairs[1234].label != "=" else "#"))
    with pytest.raises(LogicError, match=f"^line:1235: the label is .*the relation is {re.escape(pairs[1234].label)}"):
        parse_lines(lines)


def test_training_and_tests(folder, files, monkeypatch):
    raw = [pair for k in range(7) for pair in files[f"train{k}"]]
    learn, select = training(files=files)
    assert len(raw) == 135_529 and len(select) == 13_552 and len(learn) == 121_977
    assert select == [pair for counter, pair in enumerate(raw, 1) if counter % 10 == 0]
    assert set(learn) | set(select) == set(raw) and not set(learn) & set(select)
    assert len(training(12, files)[0]) == 190_532
    tests = official_tests(files)
    assert [len(tests[k]) for k in range(13)] == PUBLISHED["test"]
    assert not set(raw) & {pair for pairs in tests.values() for pair in pairs}
    monkeypatch.setenv("RVNNBOOK_DATA", str(folder.parent))
    assert [len(part) for part in training(1)] == [2_115, 234]


@pytest.mark.parametrize("split, expression, count", [
    ("A", r".*\( and \( not a \) \).*", 6_560), ("B", r".*\( and \( not .* \) \).*", 47_581),
    ("C", r".*\( (and|or) \( not .* \) \).*", 83_633)])
def test_systematicity_is_that_of_the_published_code(files, split, expression, count):
    matches = re.compile(expression).match
    kept, held = [], []
    for pair in (pair for k in range(7) for pair in files[f"train{k}"]):
        (held if matches(" ".join(pair.left)) or matches(" ".join(pair.right)) else kept).append(pair)
    parts = systematicity(split, files)
    assert parts.test == held and len(held) == count
    assert parts.validation == kept[9::10] and len(parts.train) == len(kept) - len(kept) // 10
    assert not set(parts.train) & set(parts.validation)


def test_missing_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    for function in (published_logic, training, official_tests, lambda: systematicity("A")):
        with pytest.raises(MissingFileError, match="train0|test0"):
            function()
        with pytest.raises(FileNotFoundError):
            function()
    with pytest.raises(LogicError, match="unknown split 'D'"):
        systematicity("D", {f"train{k}": [LogicPair("=", ("a",), ("a",))] for k in range(7)})


def test_a_pair_in_the_wrong_file(tmp_path):
    pairs = [LogicPair("=", ("a",), ("a",)), LogicPair("^", ("a",), unparse(("not", "a")))]
    write_pairs(tmp_path / "train0", pairs[:1])
    assert published_logic(tmp_path, ["train0"]) == {"train0": pairs[:1]}
    write_pairs(tmp_path / "train0.xz", pairs)
    assert published_logic(tmp_path, ["train0"]) == {"train0": pairs[:1]}          # the plain file goes first
    (tmp_path / "train0").unlink()
    with pytest.raises(LogicError, match="train0:2: .*1 operators"):
        published_logic(tmp_path, ["train0"])


# ---- the distribution

def chance(ours, theirs):
    "p-value of Pearson's two-sample test (Wilson-Hilferty); cells too small are put together."
    ours, theirs = (np.array(counts, float).ravel() for counts in (ours, theirs))
    rare = ours + theirs < 20
    if rare.any():
        ours, theirs = (np.append(counts[~rare], counts[rare].sum() + 1e-9) for counts in (ours, theirs))
    ratio = (theirs.sum() / ours.sum())**.5
    return tail(((ours * ratio - theirs / ratio)**2 / (ours + theirs)).sum(), len(ours) - 1)


def tail(statistic, freedom):
    spread = 2 / (9 * freedom)
    return math.erfc(((statistic / freedom)**(1 / 3) - 1 + spread) / (2 * spread)**.5) / 2


def test_the_test_statistic():
    for freedom, at_one_in_thousand in ((3, 16.266), (9, 27.877), (19, 43.820), (90, 137.208)):
        assert abs(tail(at_one_in_thousand, freedom) - 1e-3) < 2e-4
    rng, below = np.random.default_rng(0), 0
    for _ in range(2000):
        below += chance(*(np.bincount(rng.integers(7, size=n), minlength=7) for n in (3000, 5000))) < .05
    assert 70 < below < 130                                           # uniform under the hypothesis


def by_file(drawn):
    return np.histogram2d(numbered(drawn), relations(*drawn.table), bins=(range(14), range(8)))[0]


def left_tokens(drawn):
    return np.bincount(np.minimum(drawn.nots[0] + 2 * drawn.joins[0], 26), minlength=27)


def against_the_table(drawn):
    "p-values: pairs by file, labels of each file, left tokens; then operators for each file as |z|."
    ours, pairs, gaps = by_file(drawn), np.sum(PUBLISHED["labels"], 1), []
    for k in range(2, 13):
        for place, counts in enumerate((drawn.joins, drawn.nots)):
            mine = counts.sum(0)[numbered(drawn) == k]
            error = mine.std() * (1 / len(mine) + 1 / pairs[k])**.5
            gaps.append(abs(PUBLISHED["operators"][k][place] / pairs[k] - mine.mean()) / error)
    return [chance(ours.sum(1), pairs), chance(left_tokens(drawn), PUBLISHED["left tokens"]),
            *(chance(ours[k], PUBLISHED["labels"][k]) for k in range(1, 13))], max(gaps)


def test_generator_follows_the_published_table(drawn):
    chances, gap = against_the_table(drawn)
    assert min(chances) > 1e-3 and gap < 4
    total = sum(PUBLISHED["train"]) + sum(PUBLISHED["test"])
    assert abs(drawn.code.shape[1] - total) < 1200                    # a few hundred from seed to seed


@pytest.mark.parametrize("rules", [
    {"operator_probability": .42}, {"variables": 5},
    pytest.param({"negation_probability": .31}, marks=pytest.mark.long),
    pytest.param({"draws": 600_000}, marks=pytest.mark.long),
    pytest.param({"operator_probability": .47}, marks=pytest.mark.long),
    pytest.param({"negation_probability": .35}, marks=pytest.mark.long),
    pytest.param({"variables": 3}, marks=pytest.mark.long), pytest.param({"variables": 6}, marks=pytest.mark.long),
    pytest.param({"draws": 420_000}, marks=pytest.mark.long),
])
def test_another_generator_does_not(rules):
    chances, gap = against_the_table(first_seen(draw_many(**{"draws": 500_000, "seed": 0, **rules})))
    assert min(chances) < 1e-9 or gap > 6


def test_generator_follows_the_published_files(files, drawn):
    "Operators of either side and tokens of the longer one in each file; letters in a sample."
    number, sides, tokens = numbered(drawn), drawn.nots + drawn.joins, drawn.nots + 2 * drawn.joins
    for k in range(1, 13):
        pairs = files[f"train{k}"] + files[f"test{k}"]
        for side in (0, 1):
            theirs = np.bincount([operators(pair[1 + side]) for pair in pairs], minlength=23)
            assert chance(np.bincount(sides[side, number == k], minlength=23), theirs) > 1e-4, (k, side)
        theirs = np.bincount([pair_length(pair) // 3 for pair in pairs], minlength=27)
        assert chance(np.bincount(tokens[:, number == k].max(0), minlength=27), theirs) > 1e-4, k
    ours = Counter(token for code in drawn.code[0, ::20].tolist() for token in set(spell(code)))
    theirs = Counter(token for pairs in files.values() for pair in pairs[::20] for token in set(pair.left))
    assert set(ours) == set(theirs) == set(VOCABULARY)
    assert chance([ours[token] for token in VOCABULARY], [theirs[token] for token in VOCABULARY]) > 1e-4


def test_the_end_of_a_file_is_not_like_its_beginning(drawn):
    "Train and test differ in the published way, because the test came last."
    rows = np.flatnonzero(numbered(drawn) == 1)
    labels = relations(*drawn.table)[rows]
    cut = 85 * len(rows) // 100
    early, late = (np.bincount(part, minlength=7) for part in (labels[:cut], labels[cut:]))
    theirs = np.subtract(PUBLISHED["labels"][1], PUBLISHED["test1 labels"])
    assert chance(late, PUBLISHED["test1 labels"]) > 1e-3 and chance(early, theirs) > 1e-3
    assert chance(early, late) < 1e-9 and not late[4:].any()
    shuffled = np.random.default_rng(0).permutation(labels)[cut:]
    assert chance(np.bincount(shuffled, minlength=7), PUBLISHED["test1 labels"]) < 1e-6


def rule(levels, joined, negated, pool):
    "Exact distribution of the formulas that may come, as {formula: probability}."
    found = Counter({name: (1 - joined * (levels > 1)) / len(pool) for name in pool})
    if levels > 1:
        parts = rule(levels - 1, joined, negated, pool)
        for (left, p), (right, q), word in product(parts.items(), parts.items(), ("and", "or")):
            found[left, word, right] += joined * p * q / 2
    return Counter({f: p * (1 - negated) for f, p in found.items()}) \
        + Counter({("not", f): p * negated for f, p in found.items()})


@pytest.mark.parametrize("joined, negated", [(4 / 9, 1 / 3), (.9, .2)])
def test_formulas_are_drawn_as_often_as_they_should(joined, negated):
    count, exact = 100_000, rule(2, joined, negated, "be")
    assert abs(sum(exact.values()) - 1) < 1e-12 and len(exact) == 2 * (2 + 2 * 4**2)
    drawn = grow_formula(np.random.default_rng(0), np.tile([1, 4], (count, 1)), joined, negated, levels=2)
    counts = Counter(parse(spell(code, 2)) for code in drawn.code.tolist())
    assert set(counts) <= set(exact)
    statistic = sum((counts[f] - count * p)**2 / (count * p) for f, p in exact.items())
    assert 1e-3 < tail(statistic, len(exact) - 1) < 1 - 1e-3
    shares = Counter(rule(3, joined, negated, "b").keys())
    drawn = grow_formula(np.random.default_rng(0), np.tile([1], (count, 1)), joined, negated, levels=3)
    assert {parse(spell(code, 3)) for code in drawn.code.tolist()} <= set(shares)


def test_draws_are_a_stream_and_depend_on_the_seed_alone():
    first = list(islice(draw_pairs(seed=3), 6000))
    assert first == list(islice(draw_pairs(seed=3), 6000)) != list(islice(draw_pairs(seed=4), 6000))
    whole = draw_many(6000, seed=3)
    assert [(pair.left, pair.right) for pair in first] == [tuple(map(spell, sides)) for sides in whole.code.T.tolist()]
    assert all(relation_by_worlds(parse(pair.left), parse(pair.right)) == pair.label for pair in first[:300])
    assert all(len({*pair.left, *pair.right} & set(VARIABLES)) <= 2 for pair in islice(draw_pairs(0, variables=2), 500))


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_long_stream_needs_little_memory(count):
    tracemalloc.start()
    try:
        for _ in islice(draw_pairs(seed=0), count):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        spell.cache_clear()
    assert peak < 60e6


def test_files_are_cut_as_the_published_ones():
    made = make_files(20_000, seed=5)
    assert tuple(made) == FILES and made == make_files(20_000, seed=5) != make_files(20_000, seed=6)
    stream = list(dict.fromkeys(islice(draw_pairs(seed=5), 20_000)))
    for k in range(13):
        expected = [pair for pair in stream if file_number(pair) == k]
        assert made[f"train{k}"] + made[f"test{k}"] == expected
        assert len(made[f"train{k}"]) == int(.85 * len(expected))
    learn, select = training(files=made)
    assert len(learn) + len(select) == sum(len(made[f"train{k}"]) for k in range(7))
    assert every_tenth(stream[:25]) == (stream[:9] + stream[10:19] + stream[20:25], [stream[9], stream[19]])


# ---- properties

@settings(deadline=None, max_examples=200)
@given(formulas)
def test_reading_and_writing(formula):
    tokens = unparse(formula)
    assert " ".join(tokens) == write(formula) and parse(tokens) == formula
    table = truth_table(tokens)
    assert 0 <= table <= EVERYWHERE
    assert [table >> n & 1 for n in range(64)] == [int(holds(formula, world)) for world in WORLDS]
    assert operators(tokens) == sum(token in ("and", "or", "not") for token in write(formula).split())


def nested(formula, brackets, position=0):
    "The gold tree by recursion, and the position after it."
    if isinstance(formula, str):
        return position, position + 1
    groups = [("not", formula[1])] if formula[0] == "not" else [(formula[0], (formula[1], formula[2]))]
    return group(groups[0], brackets, position)


def group(parts, brackets, position):
    trees = []
    for part in ["(", *parts, ")"]:
        if isinstance(part, str) and part not in VARIABLES:
            if brackets or part not in "()":
                trees.append(position)
                position += 1
        elif isinstance(part, tuple) and part[0] in ("and", "or"):
            tree, position = group(part, brackets, position)
            trees.append(tree)
        else:
            tree, position = nested(part, brackets, position)
            trees.append(tree)
    tree = trees[0]
    for other in trees[1:]:
        tree = (tree, other)
    return tree, position


@settings(deadline=None, max_examples=200)
@given(formulas, st.booleans())
def test_gold_trees(formula, brackets):
    steps = formula_steps(unparse(formula), brackets)
    tree, length = nested(formula, brackets)
    assert len(steps) == length and steps == steps_from_tree(tree) and tree_from_steps(steps) == tree


@settings(deadline=None, max_examples=200)
@given(formulas, formulas)
def test_relations(left, right):
    tables = truth_table(unparse(left)), truth_table(unparse(right))
    expected = relation_by_worlds(left, right)
    (number,) = relations(*np.array(tables, np.uint64)[:, None])
    if expected is None:
        assert number == -1
        with pytest.raises(LogicError, match="everywhere or nowhere"):
            relation(*tables)
        return
    assert relation(*tables) == RELATIONS[number] == expected
    assert relation(*tables[::-1]) == {"<": ">", ">": "<"}.get(expected, expected)
    negated = [EVERYWHERE ^ table for table in tables]
    assert relation(*negated) == {"<": ">", ">": "<", "|": "v", "v": "|"}.get(expected, expected)
    assert relation(tables[0], negated[0]) == "^"


@settings(deadline=None, max_examples=100)
@given(formulas, formulas)
def test_laws(left, right):
    both, either = (left, "and", right), (left, "or", right)
    laws = [(("not", both), (("not", left), "or", ("not", right))),
            (("not", either), (("not", left), "and", ("not", right))),
            (("not", ("not", left)), left), (both, (right, "and", left)), ((left, "or", both), left)]
    for first, second in laws:
        first, second = (truth_table(unparse(side)) for side in (first, second))
        assert first == second
        if 0 < first < EVERYWHERE:
            assert relation(first, second) == "="
    tables = [truth_table(unparse(side)) for side in (both, left, either)]
    assume(all(0 < table < EVERYWHERE for table in tables))
    assert relation(tables[0], tables[1]) in "<=" and relation(tables[1], tables[2]) in "<="


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, EVERYWHERE), min_size=2, max_size=40))
def test_relations_of_any_tables(tables):
    pairs = list(product(tables, repeat=2))
    found = relations(*np.array(pairs, np.uint64).T)
    for (left, right), number in zip(pairs, found.tolist()):
        if {left, right} & {0, EVERYWHERE}:
            assert number == -1
        else:
            assert RELATIONS[number] == relation(left, right)


@settings(deadline=None, max_examples=200)
@given(formulas)
def test_patterns_are_about_right_operands(formula):
    def right_operands(part):
        if isinstance(part, tuple):
            yield from right_operands(part[0])
            yield from right_operands(part[-1])
            if len(part) == 3:
                yield part[1:]
    negated = {(word, operand) for word, operand in right_operands(formula) if operand[0] == "not"}
    tokens = unparse(formula)
    assert has_pattern(tokens, "A") == (("and", ("not", "a")) in negated)
    assert has_pattern(tokens, "B") == any(word == "and" for word, _ in negated)
    assert has_pattern(tokens, "C") == bool(negated)
    assert set(PATTERNS) == {"A", "B", "C"}


def line(pair):
    return "\t".join((pair.label, " ".join(pair.left), " ".join(pair.right))).encode() + b"\n"


def pairs_of(several):
    made = [LogicPair(relation_by_worlds(left, right), unparse(left), unparse(right)) for left, right in several]
    return [pair for pair in made if pair.label]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(formulas, formulas), min_size=1, max_size=6), st.sampled_from(["pairs", "pairs.xz"]))
def test_round_trip(tmp_path_factory, several, name):
    pairs = pairs_of(several)
    assume(pairs)
    path = tmp_path_factory.mktemp("round") / name
    assert read_pairs(write_pairs(path, pairs)) == pairs
    raw = path.read_bytes()
    assert (lzma.decompress(raw) if name.endswith("xz") else raw) == b"".join(map(line, pairs))
    assert [file.name for file in path.parent.iterdir()] == [name]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(formulas, formulas), min_size=1, max_size=5), st.booleans())
def test_collate(several, brackets):
    pairs = pairs_of(several)
    assume(pairs)
    batch = collate_logic(pairs, brackets)
    assert batch.ids.dtype == batch.trees.dtype == batch.labels.dtype == torch.int64 and batch.mask.dtype == torch.bool
    assert batch.ids.shape == batch.mask.shape == batch.trees.shape == (len(pairs), 2, batch.mask.sum(2).max())
    for row, pair in enumerate(pairs):
        assert RELATIONS[batch.labels[row]] == pair.label
        for side in (0, 1):
            tokens = [token for token in pair[1 + side] if brackets or token not in "()"]
            n = len(tokens)
            assert [VOCABULARY[i] for i in batch.ids[row, side, :n]] == tokens
            assert batch.mask[row, side].tolist() == [True] * n + [False] * (batch.mask.shape[2] - n)
            assert batch.ids[row, side, n:].sum() == batch.trees[row, side, n:].sum() == 0
            assert batch.trees[row, side, :n].tolist() == formula_steps(pair[1 + side], brackets)
    assert (merge_targets(batch.trees.flatten(0, 1), batch.mask.flatten(0, 1)) >= 0).all()
    with pytest.raises(LogicError, match="at least one"):
        collate_logic([])


def test_names_are_fixed():
    assert " ".join(VOCABULARY) == "( ) a b c d e f and or not" and " ".join(RELATIONS) == "# = < > ^ | v"
    assert TOKEN_IDS == {token: index for index, token in enumerate(VOCABULARY)}
    assert list(TABLES) == list(VARIABLES)


def test_import_is_light():
    code = "import sys, rvnnbook.data.logic; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


# ---- faults

@pytest.mark.parametrize("text, complaint", [
    ("", "ends after 0 tokens, expected a variable or \\("), ("a b", "token 1 is 'b', expected nothing"),
    ("( not a ) )", r"token 4 is '\)', expected nothing"), (")", r"token 0 is '\)', expected a variable or \("),
    ("not a", "token 0 is 'not', expected a variable or"), ("( a )", r"token 2 is '\)', expected \("),
    ("( not a", r"ends after 3 tokens, expected \)"), ("( a and b )", r"token 2 is 'and', expected \("),
    ("( and a )", r"token 1 is 'and', expected a variable, \( or not"), ("( a ( b ) )", "token 3 is 'b', expected 'and' or 'or'"),
    ("( a ( and b ) ", r"ends after 6 tokens, expected \)"), ("( a ( not b ) )", "token 3 is 'not', expected 'and' or 'or'"),
    ("g", "token 0 is 'g', expected a variable or"), ("( a ( and b c ) )", r"token 5 is 'c', expected \)"),
    ("( a ( and ( b ) ) )", r"token 6 is '\)', expected \("), ("( " * 10_000, r"expected a variable, \( or not"),
    ("( not " * 10_000 + "a" + " )" * 9_999, r"expected \)"), ("x" * 1000, "'x{20}'"), ("A", "'A'"), ("end", "'end'"),
    ("formula", "'formula'"), ("not )", "token 0"), ("( connective", "expected a variable"),
])
def test_malformed_formulas(text, complaint):
    for function in (truth_table, parse):
        with pytest.raises(LogicError, match=complaint):
            function(text.split())


@pytest.mark.parametrize("raw, complaint", [
    (b"", "three fields"), (b"\n", "three fields"), (b"=\ta\n", "found 2"), (b"=\ta\ta\t\n", "found 4"),
    (b"~\ta\ta\n", "the label is '~'"), (b"=\ta\t\xff\n", "UTF-8 at byte 4"), (b"=\ta\t\n", "ends after 0 tokens"),
    (b"#\ta\ta\n", "the label is #, but the relation is ="), (b"\xef\xbb\xbf=\ta\ta\n", "the label is"),
    (b"#\ta\t( b ( or ( not b ) ) )\n", "everywhere or nowhere"), (b"= \ta\ta\n", "the label is '= '"),
])
def test_malformed_lines(tmp_path, raw, complaint):
    good = b"<\t( a ( and b ) )\ta\r\n"
    with pytest.raises(LogicError, match=f"^line:3: .*{complaint}"):
        parse_lines([good, good, raw])
    path = tmp_path / "pairs"
    path.write_bytes(good + raw.rstrip(b"\n") + b"\n")
    with pytest.raises(LogicError, match=f"pairs:2: .*{complaint}"):
        read_pairs(path)


def test_unreadable_files(tmp_path):
    path = write_pairs(tmp_path / "pairs.xz", list(islice(draw_pairs(0), 3000)))
    whole = path.read_bytes()
    for damaged in (whole[:-50], whole[:200], whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]):
        path.write_bytes(damaged)
        with pytest.raises(LogicError, match="damaged or cut short|pairs.xz:[0-9]+: "):
            read_pairs(path)
    for content in (b"", lzma.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(LogicError, match="empty"):
            read_pairs(path)
    with pytest.raises(LogicError, match="cannot be read"):
        read_pairs(tmp_path)
    with pytest.raises(MissingFileError):
        read_pairs(tmp_path / "nothing")
    target = tmp_path / "kept"
    target.write_text("before")
    with pytest.raises(LogicError, match="kept:2: the label is ="):
        write_pairs(target, [LogicPair("=", ("a",), ("a",)), LogicPair("=", ("a",), ("b",))])
    with pytest.raises(LogicError, match="no pairs"):
        write_pairs(target, [])
    assert target.read_text() == "before" and {file.name for file in tmp_path.iterdir()} == {"kept", "pairs.xz"}


@pytest.mark.parametrize("opening, closing, same", [
    ("( not", ")", "a"), ("(", "( and b ) )", "( a ( and b ) )"), ("( b ( or", ") )", "( a ( or b ) )")])
def test_ten_thousand_levels(tmp_path, opening, closing, same):
    levels = 10_000
    tokens = tuple(opening.split() * levels + ["a"] + closing.split() * levels)
    assert truth_table(tokens) == truth_table(same.split())
    assert unparse(parse(tokens)) == tokens and operators(tokens) == levels
    for brackets in (True, False):
        steps = formula_steps(tokens, brackets)
        assert steps[-1] == 0 and max(steps) >= levels and min(steps[:-1]) >= 1
    pair = LogicPair("=", tokens, tuple(same.split()))
    assert read_pairs(write_pairs(tmp_path / "deep", [pair])) == [pair]
    assert collate_logic([pair]).ids.shape == (1, 2, len(tokens))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.lists(st.sampled_from([*VOCABULARY, "\t", *RELATIONS]), max_size=30)
       .map(lambda words: re.sub(" ?\t ?", "\t", " ".join(words)).encode()))
def test_any_bytes(raw):
    check(raw)


def check(raw):
    "Whether a line is refused; one that is read must be what it says."
    try:
        (pair,) = parse_lines([raw])
    except LogicError as problem:
        assert str(problem).startswith("line:1: ")
        return True
    label, left, right = raw.decode().rstrip("\r\n").split("\t")
    assert pair == (label, tuple(left.split()), tuple(right.split()))
    assert relation_of_text(left, right) == label
    return False


def relation_of_text(left, right):
    return relation_by_worlds(*(recursive_parse(side.split()) for side in (left, right)))


def recursive_parse(tokens):
    def formula(at):
        if tokens[at] in VARIABLES:
            return tokens[at], at + 1
        assert tokens[at] == "("
        if tokens[at + 1] == "not":
            inner, end = formula(at + 2)
            assert tokens[end] == ")"
            return ("not", inner), end + 1
        left, end = formula(at + 1)
        assert tokens[end] == "(" and tokens[end + 1] in ("and", "or")
        right, last = formula(end + 2)
        assert tokens[last:last + 2] == [")", ")"]
        return (left, tokens[end + 1], right), last + 2
    found, end = formula(0)
    assert end == len(tokens)
    return found


def mutate(random, raw):
    "Change a line in one to three places: tokens, fields or bytes."
    for _ in range(random.randint(1, 3)):
        kind = random.randrange(6)
        if kind == 0:                                                 # cut
            raw = raw[:random.randrange(len(raw) + 1)]
        elif kind == 1 and raw:                                       # another byte
            at = random.randrange(len(raw))
            raw = raw[:at] + bytes([random.randrange(256)]) + raw[at + 1:]
        else:
            words = re.split(rb"([ \t])", raw)
            at, other = random.randrange(len(words)), random.randrange(len(words))
            if kind == 2:
                words[at] = random.choice([*VOCABULARY, *RELATIONS, "\t", "", "( not a )"]).encode()
            elif kind == 3:
                del words[at:at + random.randint(1, 4)]
            elif kind == 4:
                words[at], words[other] = words[other], words[at]
            else:
                words[at:at] = words[min(at, other):max(at, other)]
            raw = b"".join(words)
    return raw


def fuzz(rounds, seed):
    "Share of mutated lines that are refused."
    random, refused = Random(seed), 0
    lines = [line(pair).rstrip(b"\n") for pair in islice(draw_pairs(seed), 2000)]
    for _ in range(rounds):
        refused += check(mutate(random, random.choice(lines)))
    return refused / rounds


def test_mutated_lines_are_refused():
    assert .7 < fuzz(4000, seed=0) < 1


@pytest.mark.long
def test_a_million_mutated_lines():
    assert .7 < fuzz(1_000_000, seed=1) < 1


def test_fold_visits_in_order():
    visits = []
    tokens = "( ( not a ) ( and ( b ( or c ) ) ) )".split()
    fold_formula(tokens, lambda name: visits.append(name) or name, lambda part: visits.append(("not", part)) or "n",
                 lambda *parts: visits.append(parts) or "j")
    assert visits == ["a", ("not", "a"), "b", "c", ("b", "or", "c"), ("n", "and", "j")]
