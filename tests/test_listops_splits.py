"What the chapter on splits cannot show in a lesson: the official statistics, properties, memory, fuzz."
import json
import os
import re
import statistics
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.data.listops import (
    DIGITS,
    OPERATORS,
    VOCABULARY,
    ListOpsError,
    bracketed,
    draw_expression,
    evaluate,
    fingerprint,
    is_test_expression,
    parse_line,
    read_listops,
    unique_draws,
)
from rvnnbook.data.listops_splits import (
    AS_PUBLISHED,
    SPLITS,
    Fingerprints,
    ListOpsSplit,
    belongs,
    check_split,
    mixture,
    proposer,
    split_examples,
    stream_expressions,
    waste,
    whole,
)

SETS = [name for name, split in SPLITS.items() if split.as_a_set]
STREAMS = [name for name, split in SPLITS.items() if not split.as_a_set and not split.mixes]
THRESHOLD = 1e-3                                     # below this p-value two samples differ

# Counts over test_d20s.tsv, the official ListOps test of Nangia & Bowman (2018), repository nyu-mll/spinn:
# all operators by number of arguments and by name, and the labels; depth, root and length are in the golden file.
GOLDEN = json.loads((Path(__file__).parent / "golden" / "listops_official.json").read_text())
OFFICIAL = {
    "arguments": [21731, 22815, 23584, 24013],                                  # 2 to 5
    "operators": [23258, 22972, 22957, 22956],                                  # [MIN [MAX [MED [SM
    "labels": [1127, 1038, 967, 978, 991, 969, 895, 930, 964, 1141],            # 0 to 9
    "depth": GOLDEN["depth"],                                                   # 0 to 19
    "root_arguments": list(GOLDEN["root_arguments"].values()),                  # 2 to 5
    "length": GOLDEN["length"],                                                 # in bands
}


# ---- an independent reading of an expression: it recurses, nothing uses `fold`

def walk(tokens):
    "(value, depth, numbers of arguments, root's first) of an expression."
    counts = []

    def visit(at):
        if tokens[at] in DIGITS:
            return int(tokens[at]), 0, at + 1
        place = len(counts)
        counts.append(0)
        values, depths, here = [], [], at + 1
        while tokens[here] != "]":
            value, depth, here = visit(here)
            values.append(value)
            depths.append(depth)
        counts[place] = len(values)
        value = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)),
                 "SM": lambda v: sum(v) % 10}[tokens[at][1:]](values)
        return value, 1 + max(depths), here + 1

    value, depth, end = visit(0)
    assert end == len(tokens)
    return value, depth, counts


def check(split, examples):
    "Every example within the split's bounds, labelled right, all different."
    assert len({tokens for _, tokens in examples}) == len(examples)
    for label, tokens in examples:
        value, depth, counts = walk(tokens)
        assert value == label and set(tokens) <= set(VOCABULARY)
        assert split.length[0] <= len(tokens) <= split.length[1]
        assert split.depth[0] <= depth <= split.depth[1]
        assert all(split.arguments[0] <= count <= split.arguments[1] for count in counts)
        assert split.official or not is_test_expression(tokens)


# ---- names and bounds

def test_every_column_of_the_papers_has_a_split():
    named = {"near_iid": "listops_o_test", "lra_test": "lra_test", "depth_8_10": "dg2_test", "listops_lra": "lra_train",
             "listops_mix": "mix_train", "len_1500_2000": "lra_1500_2000"}
    columns = ["near_iid", "arg_10", "arg_15", "lra_test", "depth_8_10", "listops_lra", "listops_mix", "len_1500_2000",
               "len_200_250", "len_81_100", "len_101_200", "len_201_500", "len_501_700", "len_701_1000",
               *(f"len_{low}_{low + 100}" for low in range(200, 1000, 100))]
    for column in columns:
        name = named.get(column, column.replace("len_", "length_").replace("arg_", "arguments_"))
        split = SPLITS[name]
        if column.startswith("len_") and column != "len_1500_2000":
            assert split.length == tuple(map(int, column.split("_")[1:])) and split.arguments == (2, 5)
        if column.startswith("arg_"):
            assert split.length == (100, 1000) and split.arguments == (2, int(column[4:])) and split.depth[1] <= 10
    shared = Path(__file__).parents[2] / "shared" / "papers" / "results.yml"
    if shared.exists():
        printed = " ".join(re.findall(r"columns: \[(.*)\]", shared.read_text()))
        assert {"near_iid", "len_200_300", "arg_15", "depth_8_10", "listops_mix"} <= set(re.findall(r"\w+", printed))
        assert set(re.findall(r"\b(?:len_\d+_\d+|arg_\d+|depth_\d+_\d+)\b", printed)) <= set(columns)


def test_the_numbers_of_the_papers():
    assert [SPLITS[name].size for name in ("listops_o_file", "listops_o_test", "lra_train", "lra_dev", "lra_test",
                                           "dg_train", "dg2_train", "mix_train")] == [
        90_000, 10_000, 96_000, 2000, 2000, 100_000, 1_000_000, 186_000]
    for table in (SPLITS, AS_PUBLISHED):
        assert all(check_split(split) is split and split.source for split in table.values())
    for name in ("dg_train", "dg2_train", "dg_test", "dg2_test"):
        assert SPLITS[name].length[1] == 100 and SPLITS[name].depth in ((0, 6), (8, 10))
    assert SPLITS["listops_o_train"].length[1] == 100 and SPLITS["listops_o_test"].length[1] == 1000
    assert [name for name, split in SPLITS.items() if split.official] == ["listops_o_test"]
    assert SPLITS["mix_train"].size == sum(SPLITS[name].size for name in SPLITS["mix_train"].mixes)
    assert SPLITS["mix_test"].share == SPLITS["lra_test"].share


# ---- properties

@settings(deadline=None, max_examples=60)
@given(st.sampled_from(STREAMS), st.integers(0, 2**70), st.integers(0, 6), st.integers(0, 6))
def test_streams_keep_their_promises(name, seed, few, more):
    examples = list(split_examples(name, seed, few + more))
    assert len(examples) == few + more
    check(SPLITS[name], examples)
    assert list(split_examples(name, seed, few)) == examples[:few]              # a prefix is a prefix
    assert list(islice(split_examples(SPLITS[name], seed), few + more)) == examples


@settings(deadline=None, max_examples=10)
@given(st.sampled_from(SETS), st.integers(0, 2**70), st.integers(0, 50))
def test_sets_keep_their_promises(name, seed, few):
    split = SPLITS[name]._replace(size=50)
    examples = list(split_examples(split, seed))
    assert len(examples) == 50
    check(split, examples)
    assert list(split_examples(split, seed, few)) == examples[:few]


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_published_depths(name):
    split, other = AS_PUBLISHED[name], SPLITS[name]
    examples = list(split_examples(split, 5, 150))
    check(split, examples)
    assert {walk(tokens)[1] for _, tokens in examples} >= set(range(max(split.depth[0], 3), split.depth[1] + 1))
    assert (split.size, split.length, split.operator_probability) == (other.size, other.length, other.operator_probability)


def test_every_bound_is_met():
    "The bounds are those of the examples and not only around them."
    for name, depths in (("dg2_train", range(2, 7)), ("dg2_test", range(8, 11)), ("dg2_dev", [7]), ("dg_dev", [7])):
        assert {walk(tokens)[1] for _, tokens in split_examples(name, 1, 400)} == set(depths)
    for name, most in (("arguments_5", 5), ("arguments_10", 10), ("arguments_15", 15), ("lra_test", 10)):
        counts = Counter(count for _, tokens in split_examples(name, 1, 60) for count in walk(tokens)[2])
        assert set(counts) == set(range(2, most + 1))
    for name in ("dg2_train", "length_200_250"):
        lengths = [len(tokens) for _, tokens in split_examples(name, 1, 600)]
        assert (min(lengths), max(lengths)) == SPLITS[name].length


def test_seeds_differ():
    for name in ("dg2_train", "lra_test", "arguments_15", "length_900_1000"):
        one, two = ({tokens for _, tokens in split_examples(name, seed, 5)} for seed in (0, 1))
        assert not one & two


def test_a_bad_request_is_told_at_once():
    good = SPLITS["dg2_test"]
    for request, complaint in [
        (("dg2", 0), "no split is named 'dg2'; there are listops_o_file"), ((good, 0, -1), "-1 examples"),
        (("listops_o_test", 0, 10_001), "10000 examples, not 10001"), (("mix_train", 0, 10**6), "186000 examples"),
        ((good._replace(length=(100, 20)), 0), "length must be a pair"), ((good._replace(length=(2.5, 20)), 0), "length must"),
        ((good._replace(depth=7), 0), "depth must"), ((good._replace(share=(.5, 1.5)), 0), "share"),
        ((good._replace(levels=0), 0), "levels"), ((good._replace(size=-1), 0), "size"),
    ]:
        with pytest.raises(ListOpsError, match=complaint):
            split_examples(*request)


@settings(deadline=None, max_examples=150)
@given(st.builds(ListOpsSplit, st.integers(0, 9), st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
                 st.tuples(st.integers(-1, 5), st.integers(-1, 5)), st.just("fuzz"),
                 arguments=st.tuples(st.integers(-1, 4), st.integers(0, 6)), operator_probability=st.floats(-.1, 1.1),
                 levels=st.sampled_from([None, 0, 1, 4, 9]), share=st.tuples(st.floats(-.1, 1.1), st.floats(0, 1.1)),
                 as_a_set=st.booleans()), st.integers(0, 9))
def test_any_split_gives_what_it_says_or_a_reason(split, seed):
    try:
        check_split(split)
        proposals = whole(split, seed) if split.as_a_set and split.length[1] < 5 else stream_expressions(split, seed, patience=10_000)
        kept = list(islice(proposals, split.size))
    except ListOpsError as problem:
        assert len(str(problem)) > 20
    else:
        check(split, [(evaluate(tokens), tokens) for tokens in kept])
        assert all(belongs(split, tokens) for tokens in kept)


# ---- disjointness

def test_parts_share_nothing_whatever_the_seeds():
    for group in (("listops_o_dev", "listops_o_train", "listops_o_test"), ("lra_train", "lra_dev", "lra_test"),
                  ("listops_o_file", "listops_o_test"), ("lra_1500_2000", "lra_test")):
        shares = sorted(SPLITS[name].share for name in group)
        assert all(one[1] <= two[0] for one, two in zip(shares, shares[1:]))
    small = {name: {tokens for seed in (0, 1) for tokens in whole(SPLITS[name]._replace(size=size), seed)}
             for name, size in (("listops_o_dev", 40), ("listops_o_train", 3000), ("listops_o_test", 400))}
    assert not small["listops_o_train"] & (small["listops_o_test"] | small["listops_o_dev"])
    assert not small["listops_o_dev"] & small["listops_o_test"]
    for kind in ("dg", "dg2"):
        for table in (SPLITS, AS_PUBLISHED):
            assert table[f"{kind}_train"].depth[1] < table[f"{kind}_dev"].depth[0]
            assert table[f"{kind}_dev"].depth[1] < table[f"{kind}_test"].depth[0]
    for name in [*(f"length_{low}_{low + 100}" for low in range(200, 1000, 100)), "lra_test"]:
        assert SPLITS["listops_o_train"].length[1] < SPLITS[name].length[0]


def test_no_training_on_the_official_test():
    folders = [Path(__file__).parents[2] / "shared" / "data", Path(os.environ.get("RVNNBOOK_DATA") or "data")]
    files = [folder / "listops" / "test_d20s.tsv.xz" for folder in folders]
    if not any(file.exists() for file in files):
        pytest.skip("the official ListOps test is not installed (rvnnbook data get listops)")
    official = [tokens for _, tokens in read_listops(next(file for file in files if file.exists()))]
    for split in {**SPLITS, **AS_PUBLISHED}.values():
        if not split.official:
            assert not any(belongs(split, tokens) for tokens in official)
    assert 900 < sum(belongs(SPLITS["listops_o_test"], tokens) for tokens in official) < 1100     # a tenth may occur


def test_streams_at_twenty_tokens_have_no_order():
    "The early examples of a stream are like the late ones."
    lengths = [len(tokens) for tokens in islice(stream_expressions(SPLITS["dg2_train"], 0), 8000)]
    first, last = np.mean(lengths[:4000]), np.mean(lengths[4000:])
    assert abs(first - last) < 4 * (2 * np.var(lengths) / 4000)**.5
    halves = [len(tokens) for tokens in whole(SPLITS["listops_o_test"]._replace(size=2000), 0)]
    assert abs(np.mean(halves[:1000]) - np.mean(halves[1000:])) < 4 * (2 * np.var(halves) / 1000)**.5


# ---- distributions

def chi_square_tail(statistic, freedom):
    return float(torch.special.gammaincc(*torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)))


def p_value(ours, theirs):
    "Two-sample chi-square on counts; rows with few are pooled."
    pairs, rest = [], [0, 0]
    for a, b in zip(ours, theirs, strict=True):
        if a + b >= 20:
            pairs.append((a, b))
        else:
            rest = [rest[0] + a, rest[1] + b]
    pairs += [tuple(rest)] * (sum(rest) > 0)
    if len(pairs) == 1:
        return 1.
    ratio = (sum(b for _, b in pairs) / sum(a for a, _ in pairs))**.5
    statistic = sum((ratio * a - b / ratio)**2 / (a + b) for a, b in pairs)
    return chi_square_tail(statistic, len(pairs) - 1)


def counts_of(examples):
    counted = {name: Counter() for name in OFFICIAL}
    for label, tokens in examples:
        _, depth, widths = walk(tokens)
        counted["labels"][label] += 1
        counted["depth"][depth] += 1
        counted["arguments"].update(widths)
        counted["operators"].update(token for token in tokens if token in OPERATORS)
        counted["root_arguments"].update(widths[:1])
        counted["length"][int(np.searchsorted(GOLDEN["length_from"], len(tokens), side="right")) - 1] += 1
    keys = {"labels": range(10), "depth": range(20), "arguments": range(2, 6), "operators": OPERATORS,
            "root_arguments": range(2, 6), "length": range(len(GOLDEN["length_from"]))}
    return {name: [counted[name][key] for key in keys[name]] for name in OFFICIAL}


def p_values(split, seed=0):
    counted = counts_of(split_examples(split, seed))
    return {name: p_value(counted[name], OFFICIAL[name]) for name in OFFICIAL}


def test_p_values():
    for statistic, freedom, exact in ((16.266, 3, .001), (27.877, 9, .001), (3.841, 1, .05)):      # table of the distribution
        assert abs(chi_square_tail(statistic, freedom) / exact - 1) < 1e-3
    assert p_value([100, 100], [100, 100]) == 1 and abs(p_value([60, 40], [40, 60]) - .004678) < 1e-6
    null = [p_value(*(np.random.default_rng([k, side]).multinomial(1000, [.2, .3, .5]) for side in range(2))) for k in range(400)]
    assert sum(p < .05 for p in null) < 60


def test_near_iid_has_the_official_statistics():
    found = p_values("listops_o_test")
    assert min(found.values()) > THRESHOLD, found


WRONG = {
    "p = .27": {"operator_probability": .27},
    "p = .23": {"operator_probability": .23},
    "2 to 6 arguments": {"arguments": (2, 6)},
    "2 to 4 arguments": {"arguments": (2, 4)},
    "a level more": {"levels": 21, "depth": (0, 20)},
    "a level less": {"depth": (0, 18)},
    "a set five times as large": {"size": 50_000},
}


@pytest.mark.parametrize("name", ["p = .27", *(pytest.param(name, marks=pytest.mark.long) for name in WRONG if name != "p = .27")])
def test_a_wrong_generator_fails_the_same_test(name):
    found = p_values(SPLITS["listops_o_test"]._replace(**WRONG[name]))
    assert min(found.values()) < THRESHOLD, found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_near_iid_has_the_official_statistics_for_other_seeds(seed):
    found = p_values("listops_o_test", seed)
    assert min(found.values()) > THRESHOLD, found


@pytest.mark.parametrize("name", ["arguments_10", "lra_test", "dg2_dev", "length_200_250"])
def test_both_ways_of_drawing_agree(name):
    split, samples = SPLITS[name]._replace(share=(0., 1.)), []
    for limit in (0., float("inf")):
        propose, random, kept = proposer(split, limit), Random(11), []
        while len(kept) < 300:
            tokens = propose(random)
            if belongs(split, tokens):
                kept.append(tokens)
        samples.append(kept)
    questions = {"length": lambda tokens: len(tokens) * 8 // split.length[1], "depth": lambda tokens: walk(tokens)[1],
                 "value": lambda tokens: walk(tokens)[0], "widest": lambda tokens: max(walk(tokens)[2]),
                 "first": lambda tokens: tokens[1] in DIGITS}
    for question, ask in questions.items():
        ours, theirs = (Counter(map(ask, kept)) for kept in samples)
        keys = sorted(ours | theirs)
        assert p_value([ours[key] for key in keys], [theirs[key] for key in keys]) > THRESHOLD, question


def test_waste_is_what_discarding_costs():
    for name in ("dg2_train", "arguments_10"):
        split, random, drawn, kept = SPLITS[name], Random(0), 0, 0
        for _ in range(20_000 if name == "dg2_train" else 4000):
            size = len(draw_expression(random, max_depth=split.depth[1] + 1, arguments=split.arguments,
                                       operator_probability=split.operator_probability))
            drawn, kept = drawn + size, kept + size * (split.length[0] <= size <= split.length[1])
        assert .85 < drawn / kept / waste(split) < 1.15
    assert waste(SPLITS["arguments_15"]) > 10 < waste(SPLITS["length_900_1000"]) and waste(SPLITS["lra_train"]) < 10
    assert waste(ListOpsSplit(1, (2, 3), (0, 5), "no expression has two or three tokens")) == float("inf")


def test_a_set_is_the_same_draws_as_unique_draws():
    "All shares together, with the same seed, are the set of `unique_draws`."
    split = ListOpsSplit(500, (1, 10**6), (0, 19), "all", as_a_set=True, official=True)._replace(length=(1, 4000))
    ours = {tokens for _, tokens in split_examples(split, 7)}
    assert ours == {tokens for _, tokens in unique_draws(500, 7, exclude_test=False)}


# ---- mixtures

def test_a_mixture_is_a_shuffle():
    parts = [SPLITS["dg2_test"]._replace(size=60), SPLITS["length_200_250"]._replace(size=20)]
    mixed = list(mixture(parts, 0))
    assert len(mixed) == 80 and list(mixture(parts, 0)) == mixed
    for part in parts:                               # each part is all there, in the order of its own stream
        assert [tokens for tokens in mixed if part.length[0] <= len(tokens) <= part.length[1]] == list(islice(stream_expressions(part, 0), part.size))
    random, count, firsts, middles = Random(0), 2000, 0, 0
    for _ in range(count):                           # every place is as likely to come from the smaller part
        order = [len(tokens) > 10 for tokens in mixture([ListOpsSplit(6, (4, 5), (0, 1), ""), ListOpsSplit(2, (11, 20), (0, 2), "")],
                                                        random.getrandbits(32))]
        firsts, middles = firsts + order[0], middles + order[4]
        assert sum(order) == 2
    for found in (firsts, middles):
        assert abs(found / count - .25) < 4 * (.25 * .75 / count)**.5


# ---- memory

def test_fingerprints_are_a_set():
    random, seen, plain = Random(0), Fingerprints(recent=100), set()
    for _ in range(5000):
        key = random.choice((random.getrandbits(11), 2**64 - 1 - random.getrandbits(3), random.getrandbits(64)))
        assert seen.add(key) == (key not in plain)
        plain.add(key)
        assert len(seen) == len(plain)
    assert seen.sorted.dtype == np.uint64 and (np.diff(seen.sorted) > 0).all()


def test_fingerprints_are_small():
    tracemalloc.start()
    try:
        random, seen = Random(0), Fingerprints()
        for _ in range(150_000):
            seen.add(random.getrandbits(64))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) == 150_000 and len(seen.latest) < 2**16
    assert held < 4e6 and peak < 12e6                       # as Python numbers in a set: more than 13 MB


STREAMED = """
import resource, sys
from rvnnbook.data.listops_splits import split_examples
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
for at, (label, tokens) in enumerate(split_examples("dg2_train", 0), 1):
    if at == 1000: before = peak()
print(at, peak() - before)
"""


@pytest.mark.long
def test_a_million_examples_stream_in_bounded_memory():
    done = subprocess.run([sys.executable, "-c", STREAMED], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    count, grown = done.stdout.split()
    assert int(count) == 1_000_000 and float(grown) < 60             # MiB, in all, since the first thousand


def test_import_is_light():
    code = "import sys, rvnnbook.data.listops_splits; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SETS, "mix_train"])
def test_sets_at_full_size(name):
    seen, split, count = set(), SPLITS[name], 12_000 if name == "mix_train" else None       # the mixture draws its set in full
    for label, tokens in split_examples(name, 2, count):
        seen.add(fingerprint(tokens))
        assert split.length[0] <= len(tokens) <= split.length[1] and (split.official or not is_test_expression(tokens))
    assert len(seen) == (count or split.size)


# ---- malformed lines

def damaged(line, random):
    "A line with something wrong in it, most often."
    kind = random.randrange(8)
    if kind < 3:                                                     # bytes lost, changed or put in
        data = bytearray(line)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(data))
            data[at:at + random.choice((0, 1, 1, 5))] = random.choice((b"", b" ", b"]", b"(", b")", b"\t", b"3", b"\xff", b"[MIN "))
        return bytes(data)
    label, expression = line.decode().rstrip("\n").split("\t")
    words = expression.split()
    at = random.randrange(len(words))
    if kind == 3:                                                    # a word lost, doubled or put elsewhere
        word = words.pop(at)
        for _ in range(random.choice((0, 1, 2))):
            words.insert(random.randint(0, len(words)), word)
    elif kind == 4:                                                  # words of other languages
        words[at] = random.choice(("[FIRST", "[PM", "X", "10", "-1", "٣", "[", "[min", "]]", "(", ")", "\u00a0", "[MAX" * 50))
    elif kind == 5:                                                  # another label
        label = random.choice(("", "10", "-1", "a", "٣", " 1", str((int(label) + random.randint(1, 9)) % 10)))
    elif kind == 6:                                                  # any words in any order
        words = random.choices([*VOCABULARY, "(", ")"], k=random.randint(0, 12))
    else:                                                            # other fields
        return random.choice((f"{expression}\t{label}", f"{label}\t{expression}\t", f"{label} {expression}", expression,
                              f"Source\tTarget{expression}", "")).encode()
    return f"{label}\t{' '.join(words)}\n".encode()


def refusals(wanted, seed):
    "Damage lines until so many were refused; every reason must be plain, every other line true."
    random, refused, read_as_true = Random(seed), 0, 0
    good = [f"{evaluate(tokens)}\t{' '.join(tokens) if random.random() < .3 else bracketed(tokens)}\n".encode()
            for tokens in (tokens for tokens in (draw_expression(random) for _ in range(4000)) if 4 <= len(tokens) <= 40)][:150]
    assert len(good) == 150 and all(parse_line(line) for line in good)
    while refused < wanted:
        line = damaged(random.choice(good), random)
        try:
            label, tokens = parse_line(line)
        except ListOpsError as problem:                              # any other exception fails the test
            reason = str(problem)
            assert 10 < len(reason) < 200 and reason.isprintable(), reason
            refused += 1
        else:
            assert walk(tokens)[0] == label
            read_as_true += 1
    return read_as_true


def test_malformed_lines_are_refused_with_a_reason():
    assert 0 < refusals(10_000, seed=0) < 2000


@pytest.mark.long
def test_a_million_malformed_lines_are_refused_with_a_reason():
    assert 0 < refusals(1_000_000, seed=1) < 200_000
