"What the chapters on sentences and corpora cannot show in a lesson: the published files, second routes to them, faults and fuzz."
import csv
import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.core import merge_targets, steps_from_tree
from rvnnbook.data.batches import BucketLoader, Vocabulary
from rvnnbook.data.catalog import add, find_dataset
from rvnnbook.data.corpora import (
    DJANGO,
    FORMS,
    READERS,
    check_brackets,
    cut,
    entities,
    parse_inference,
    paws_tokens,
    read_formulas,
    read_inferences,
    read_parallel,
    read_published,
    read_table,
    symbols,
)
from rvnnbook.data.text import (
    ADJECTIVES,
    BYTES,
    GRADES,
    INFERENCES,
    PARAPHRASES,
    SENTIMENTS,
    UNKNOWN,
    MissingFileError,
    SentencePair,
    Sentence,
    TextError,
    Translation,
    SentenceTree,
    binary,
    byte_tokens,
    collate_text,
    installed,
    length_of,
    lines_of,
    make_trees,
    parse_tree,
    phrases,
    read_lines,
    read_numbered,
    read_trees,
    read_vocabulary,
    spaces,
    subtrees,
    tree_line,
    unescape,
    vocabulary_for,
    words,
    write_vocabulary,
)

SETS = ("sst", "imdb", "imdb_contrast", "imdb_counterfactual", "snli_counterfactual", "snli_break", "snli_hard", "conjnli",
        "semparse", "django", "iwslt15_envi")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "A data folder with every set that is at hand, each put there by `rvnnbook data add`, which looks at the checksums."
    places = [Path(os.environ["RVNNBOOK_DATA"])] if os.environ.get("RVNNBOOK_DATA") else []
    places.append(Path(__file__).parents[2] / "shared" / "data")
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RVNNBOOK_DATA", str(folder))
        for name in SETS:
            for place in places:
                if (place / name).is_dir() and not (folder / name).exists():
                    add(find_dataset(name), place / name)
        yield folder
    shutil.rmtree(folder)


def published(data, name, **options):
    name_of_set = name.partition("/")[0]
    if not (data / name_of_set).exists():
        way = "get" if name_of_set != "imdb" else "add"
        pytest.skip(f"{name_of_set} is not at hand (remedy: rvnnbook data {way} {name_of_set}, into $RVNNBOOK_DATA)")
    return read_published(name, **options)


def refused(function, *values, **options):
    with pytest.raises(TextError) as error:
        function(*values, **options)
    return str(error.value)


def raw_lines(data, name):
    return (data / name).read_bytes().decode().split("\n")[:-1]


def by_label(examples):
    return dict(Counter(example.label for example in examples))


# ---- the published files: how many examples with which label

def halves(negative, positive):
    return {"negative": negative, "positive": positive}


def thirds(*counts):
    return dict(zip(INFERENCES, counts))


COUNTS = {
    "sst/trees/train.txt": dict(zip(GRADES, (1092, 2218, 1624, 2322, 1288))),
    "sst/trees/dev.txt": dict(zip(GRADES, (139, 289, 229, 279, 165))),
    "sst/trees/test.txt": dict(zip(GRADES, (279, 633, 389, 510, 399))),
    "sst/sentences/stsa.fine.train": dict(zip(GRADES, (1092, 2218, 1624, 2322, 1288))),
    "sst/sentences/stsa.fine.dev": dict(zip(GRADES, (139, 289, 229, 279, 165))),
    "sst/sentences/stsa.fine.test": dict(zip(GRADES, (279, 633, 389, 510, 399))),
    "sst/sentences/stsa.binary.train": halves(3310, 3610), "sst/sentences/stsa.binary.dev": halves(428, 444),
    "sst/sentences/stsa.binary.test": halves(912, 909),
    "imdb_contrast/dev_contrast.tsv": halves(52, 48), "imdb_contrast/dev_original.tsv": halves(48, 52),
    "imdb_contrast/test_contrast.tsv": halves(245, 243), "imdb_contrast/test_original.tsv": halves(243, 245),
    "imdb_counterfactual/orig/train.tsv": halves(851, 856), "imdb_counterfactual/orig/dev.tsv": halves(122, 123),
    "imdb_counterfactual/orig/test.tsv": halves(243, 245), "imdb_counterfactual/new/train.tsv": halves(856, 851),
    "imdb_counterfactual/new/dev.tsv": halves(123, 122), "imdb_counterfactual/new/test.tsv": halves(245, 243),
    "imdb_counterfactual/combined/train.tsv": halves(1707, 1707), "imdb_counterfactual/combined/dev.tsv": halves(245, 245),
    "imdb_counterfactual/combined/test.tsv": halves(488, 488),
    "imdb_counterfactual/combined_paired/train_paired.tsv": halves(1707, 1707),
    "imdb_counterfactual/combined_paired/dev_paired.tsv": halves(245, 245),
    "imdb_counterfactual/combined_paired/test_paired.tsv": halves(488, 488),
    "snli_counterfactual/original/train.tsv": thirds(562, 554, 550), "snli_counterfactual/original/dev.tsv": thirds(74, 75, 51),
    "snli_counterfactual/original/test.tsv": thirds(146, 123, 131),
    "snli_counterfactual/revised_premise/train.tsv": thirds(1104, 1112, 1116),
    "snli_counterfactual/revised_premise/dev.tsv": thirds(126, 125, 149),
    "snli_counterfactual/revised_premise/test.tsv": thirds(254, 277, 269),
    "snli_counterfactual/revised_hypothesis/train.tsv": thirds(1104, 1112, 1116),
    "snli_counterfactual/revised_hypothesis/dev.tsv": thirds(126, 125, 149),
    "snli_counterfactual/revised_hypothesis/test.tsv": thirds(254, 277, 269),
    "snli_counterfactual/revised_combined/train.tsv": thirds(2208, 2224, 2232),
    "snli_counterfactual/revised_combined/dev.tsv": thirds(252, 250, 298),
    "snli_counterfactual/revised_combined/test.tsv": thirds(508, 554, 538),
    "snli_counterfactual/all_combined/train.tsv": thirds(2770, 2778, 2782),
    "snli_counterfactual/all_combined/dev.tsv": thirds(326, 325, 349), "snli_counterfactual/all_combined/test.tsv": thirds(654, 677, 669),
    "snli_break/dataset.jsonl": thirds(982, 47, 7164), "snli_hard/snli_1.0_test_hard.jsonl": thirds(1058, 1068, 1135),
    "conjnli/conj_dev.tsv": thirds(204, 281, 138), "conjnli/conj_test.tsv": {None: 1000},
}
TRANSLATIONS = {
    "semparse/unimer/geo/geo_anonymous_lambda_train.txt": 600, "semparse/unimer/geo/geo_anonymous_lambda_test.txt": 280,
    "semparse/unimer/geo/geo_prolog_train.tsv": 600, "semparse/unimer/geo/geo_prolog_test.tsv": 280,
    "semparse/unimer/geo/geo_lambda_calculus_train.tsv": 600, "semparse/unimer/geo/geo_lambda_calculus_test.tsv": 280,
    "semparse/unimer/geo/geo_funql_train.tsv": 600, "semparse/unimer/geo/geo_funql_test.tsv": 280,
    "semparse/unimer/atis/atis_lambda_train.tsv": 4473, "semparse/unimer/atis/atis_lambda_dev.tsv": 497,
    "semparse/unimer/atis/atis_lambda_test.tsv": 448, "semparse/unimer/job/jobs_anonymous_prolog_train.txt": 500,
    "semparse/unimer/job/jobs_anonymous_prolog_test.txt": 140, "semparse/unimer/job/job_prolog_train.tsv": 500,
    "semparse/unimer/job/job_prolog_test.tsv": 140, "semparse/unimer/job/job_lambda_train.tsv": 500,
    "semparse/unimer/job/job_lambda_test.tsv": 140, "semparse/dual/atis/atis_train.tsv": 4433, "semparse/dual/atis/atis_dev.tsv": 491,
    "semparse/dual/atis/atis_test.tsv": 448, "semparse/dual/geo/geo_train.tsv": 500, "semparse/dual/geo/geo_dev.tsv": 100,
    "semparse/dual/geo/geo_test.tsv": 280, "semparse/dual/geo/train600.tsv": 600,
    "django/all.anno": 18805, "iwslt15_envi/tst2012.en": 1553, "iwslt15_envi/tst2013.en": 1268,
}


def test_the_counts_name_every_file_of_the_catalog():
    files = {file.path for name in SETS for file in find_dataset(name).files}
    spoken_for = {*COUNTS, *TRANSLATIONS, "django/all.code", "iwslt15_envi/tst2012.vi", "iwslt15_envi/tst2013.vi", "imdb/train.tsv", "imdb/test.tsv"}
    assert {file for file in files if not re.search("LICENSE|README", file)} == spoken_for


@pytest.mark.parametrize("name", COUNTS)
def test_every_published_file_has_the_published_counts(data, name):
    examples = published(data, name)
    assert by_label(examples) == COUNTS[name]
    for example in examples:
        assert isinstance(example, SentencePair if len(example) == 3 else SentenceTree if "trees" in name else Sentence)
        assert all(token and token == token.strip(" \t\n") for token in (*example[1], *(example[2] if len(example) == 3 else ())))


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_every_published_file_of_sequences(data, name):
    examples = published(data, name)
    assert len(examples) == TRANSLATIONS[name] and all(example.source and example.target for example in examples)
    for example, line in zip(examples, (data / name).read_text().split("\n")):
        source, *formula = line.split("\t")
        assert "".join(example.source) == "".join((entities if "iwslt" in name else spaces)(source))
        assert not formula or "".join(example.target).replace(" ", "") == formula[0].replace(" ", "")


def test_a_formula_is_cut_where_it_is_spaced(data):
    "Where the published formulas have spaces between all symbols these are the symbols."
    for name in ("semparse/dual/atis/atis_train.tsv", "semparse/unimer/geo/geo_anonymous_lambda_train.txt", "semparse/unimer/geo/geo_prolog_train.tsv",
                 "semparse/unimer/job/jobs_anonymous_prolog_train.txt", "semparse/unimer/atis/atis_lambda_dev.tsv"):
        targets = [example.target for example in published(data, name)]
        spaced = [tuple(line.split("\t")[1].split(" ")) for line in (data / name).read_text().rstrip("\n").split("\n")]
        assert targets == spaced, name


def test_django_has_its_three_parts(data):
    parts = cut(published(data, "django/all.anno"), DJANGO)
    assert list(map(len, parts)) == [16000, 1000, 1805]
    assert parts[0][0] == Translation(tuple("from threading import local into default name space.".split()), tuple("from threading import local".split()))


def test_contrast_and_counterfactual_reviews_mirror_their_originals(data):
    for there, here in (("imdb_contrast/dev_original.tsv", "imdb_contrast/dev_contrast.tsv"), ("imdb_contrast/test_original.tsv", "imdb_contrast/test_contrast.tsv")):
        originals, changed = published(data, there), published(data, here)
        assert all(a.label != b.label and a.tokens != b.tokens for a, b in zip(originals, changed, strict=True))
    paired = published(data, "imdb_counterfactual/combined_paired/dev_paired.tsv")
    assert all({a.label, b.label} == set(SENTIMENTS) for a, b in zip(paired[::2], paired[1::2], strict=True))
    whole = Counter(published(data, "imdb_counterfactual/combined/dev.tsv"))
    assert whole == Counter(published(data, "imdb_counterfactual/orig/dev.tsv") + published(data, "imdb_counterfactual/new/dev.tsv"))


def test_the_originals_of_both_sets_are_reviews_to_train_on(data):
    "All of them are in the published training part, so a model may have seen each with the other verdict."
    def beginning(text): return re.sub("[^a-z]", "", text.replace("\\n", " ").replace("<br />", "").lower())[:80]
    published(data, "imdb_contrast/test_original.tsv"), published(data, "imdb_counterfactual/orig/test.tsv")
    if not (data / "imdb").exists():
        pytest.skip("imdb is not at hand (remedy: rvnnbook data add imdb, into $RVNNBOOK_DATA)")
    known = {beginning(line.split("\t", 3)[3]) for line in raw_lines(data, "imdb/train.tsv")[1:]}
    for name in ("imdb_contrast/test_original.tsv", "imdb_counterfactual/orig/test.tsv"):
        rows = list(csv.reader(io.StringIO((data / name).read_bytes().decode()), delimiter="\t"))[1:]
        assert len(rows) == 488 and all(beginning(row[1]) in known for row in rows)


def test_combined_pairs_are_those_that_were_combined(data):
    def read(folder): return Counter(published(data, f"snli_counterfactual/{folder}/test.tsv"))
    revised = read("revised_premise") + read("revised_hypothesis")
    assert revised == read("revised_combined") and revised + read("original") == read("all_combined")


def test_tokens_of_snli_are_the_leaves_of_its_other_parse(data):
    "The constituency parse, read by a regular expression, has the same words."
    pairs = published(data, "snli_hard/snli_1.0_test_hard.jsonl")
    for pair, line in zip(pairs, raw_lines(data, "snli_hard/snli_1.0_test_hard.jsonl"), strict=True):
        row = json.loads(line)
        for side, name in ((pair.left, "sentence1"), (pair.right, "sentence2")):
            assert side == tuple(map(unescape, re.findall(r"\(\S+ ([^()\s]+)\)", row[f"{name}_parse"])))
    own = sum(words(json.loads(line)["sentence1"]) == pair.left for pair, line in zip(pairs, raw_lines(data, "snli_hard/snli_1.0_test_hard.jsonl")))
    assert own > .95 * len(pairs)      # the rule of the book and the tokeniser of the set, in plain sentences


@pytest.mark.long
def test_all_reviews(data):
    for part, ratings in (("train", (5100, 2284, 2420, 2696, 2496, 3009, 2263, 4732)), ("test", (5022, 2302, 2541, 2635, 2307, 2850, 2344, 4999))):
        examples = published(data, f"imdb/{part}.tsv")
        assert by_label(examples) == halves(12500, 12500) and min(map(length_of, examples)) > 3
        assert not {"<br", "br"} & set(vocabulary_for(examples, least=1000).tokens)
        stars = Counter(line.split("\t")[2] for line in raw_lines(data, f"imdb/{part}.tsv")[1:])
        assert tuple(stars[str(n)] for n in (1, 2, 3, 4, 7, 8, 9, 10)) == ratings


def test_reviews_as_bytes_are_cut(data):
    "The Text task of the Long Range Arena: 25 000 of them, and what the cut takes away."
    examples = published(data, "imdb/test.tsv", tokenize=partial(byte_tokens, limit=4000))
    assert by_label(examples) == halves(12500, 12500)
    lengths = [len(example.tokens) for example in examples]
    texts = [line.split("\t", 3)[3] for line in raw_lines(data, "imdb/test.tsv")[1:]]
    sizes = [len(text.encode()) - sum(map(text.count, (r"\\", r"\t", r"\n", r"\r"))) for text in texts]
    assert max(sizes) == 12988 and lengths == [min(size, 4000) for size in sizes]


# ---- trees: a second route, and every published one

def by_recursion(line):
    "Grade, tree over positions, words; by a recursion over the text."
    words = []

    def node(at):
        grade, at = line[at + 1], at + 3
        assert line[at - 3] == "(" and line[at - 1] == " "
        if line[at] != "(":
            end = line.index(")", at)
            words.append(line[at:end])
            return len(words) - 1, [(len(words) - 1, len(words) - 1, grade)], end + 1
        left, first, at = node(at)
        right, second, at = node(at + 1)
        assert line[at] == ")"
        return (left, right), [*first, *second, (first[-1][0], second[-1][1], grade)], at + 1
    tree, grades, end = node(0)
    assert end == len(line)
    return tree, {(first, last): GRADES[int(grade)] for first, last, grade in grades}, tuple(map(unescape, words))


@pytest.mark.parametrize("part, sizes", [pytest.param("train", (318582, 163563), marks=pytest.mark.long), ("dev", (41447, 21274)), ("test", (82600, 42405))])
def test_every_published_tree_by_two_routes(data, part, sizes):
    trees = published(data, f"sst/trees/{part}.txt")
    assert (sum(len(tree.grades) for tree in trees), sum(len(tree.tokens) for tree in trees)) == sizes
    for tree, line in zip(trees, raw_lines(data, f"sst/trees/{part}.txt"), strict=True):
        assert tree_line(tree) == line
        shape, grades, tokens = by_recursion(line)
        assert (list(tree.steps), tree.grades, tree.tokens) == (steps_from_tree(shape), grades, tokens)
    for numbered, examples in (("fine", trees), ("binary", binary(trees))):
        other = published(data, f"sst/sentences/stsa.{numbered}.{part}")
        assert Counter(other) == Counter(Sentence(each.label, tuple(token.lower() for token in each.tokens)) for each in examples)


TOKENS = st.text(st.sampled_from(list("abcXYZ019'-.,;$é\xa0\x85/*()[]{}`")), min_size=1, max_size=6).filter(
    lambda token: unescape(token) == token)
SHAPES = st.recursive(TOKENS.map(lambda token: (token,)), lambda parts: st.tuples(parts, parts), max_leaves=12)


def grown(shape, grades):
    mark = f"({next(grades)} "
    if len(shape) == 1:
        names = {"(": "-LRB-", ")": "-RRB-", "/": r"\/", "*": r"\*"}
        return mark + "".join(names.get(letter, letter) for letter in shape[0]) + ")"
    return mark + " ".join(grown(part, grades) for part in shape) + ")"


LINES = st.tuples(SHAPES, st.randoms(use_true_random=False)).map(
    lambda drawn: grown(drawn[0], iter(lambda: drawn[1].randrange(5), None)))


@given(LINES)
@settings(max_examples=150, deadline=None)
def test_made_trees_by_two_routes(line):
    tree = parse_tree(line)
    shape, grades, tokens = by_recursion(line)
    assert (list(tree.steps), tree.grades, tree.tokens) == (steps_from_tree(shape), grades, tokens)
    assert tree_line(tree) == line and tree.label == grades[0, len(tokens) - 1]
    parts = list(subtrees([tree]))
    assert [part[:2] for part in parts] == [tuple(phrase) for phrase in phrases([tree])] and len(parts) == 2 * len(tokens) - 1
    assert all(parse_tree(tree_line(part)) == part for part in parts)


@given(LINES, st.data())
@settings(max_examples=150, deadline=None)
def test_a_tree_cut_or_with_a_wrong_mark_is_refused(line, draw):
    column = draw.draw(st.integers(0, len(line) - 1))
    assert re.match(r"column \d+: expected ", refused(parse_tree, line[:column]))
    mark = draw.draw(st.sampled_from([at for at, letter in enumerate(line) if letter in "() "]))
    assert refused(parse_tree, line[:mark] + line[mark + 1:])
    assert refused(parse_tree, line[:mark] + "((" + line[mark + 1:])
    assert refused(parse_tree, line + draw.draw(st.sampled_from(["x", " ", ")", "(", line, " " + line])))
    assert refused(parse_tree, re.sub(r"\([0-4]", draw.draw(st.sampled_from(["(5", "(-1", "(x", "(", "( 1", "[2"])), line, count=1))


def test_every_token_of_a_phrase_can_stand_in_a_deep_tree():
    "No recursion: neither a chain to the left nor one to the right is too deep."
    for line in ("(2 " * 3000 + "(2 a)" + " (2 b))" * 3000, "(2 (2 a) " * 3000 + "(2 b)" + ")" * 3000):
        tree = parse_tree(line)
        assert max(tree.steps) == 3000 and tree_line(tree) == line


# ---- lines and files

def test_lines_end_at_line_feeds_only(tmp_path):
    path, text = tmp_path / "a.txt", "one\x0btwo\x0c\x1c\x1d\x1e\x85\u2028\u2029\nthree\r\n\n four \rx"
    expected = ["one\x0btwo\x0c\x1c\x1d\x1e\x85\u2028\u2029", "three", "", " four \rx"]
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(lines_of(path)) == expected
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(path.read_bytes()))
    assert list(lines_of(tmp_path / "a.txt.xz")) == expected
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "in/a.txt")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(path, "in/a.txt")
    for packed in ("a.zip", "a.tar.gz"):
        assert list(lines_of(tmp_path / packed, "in/a.txt")) == expected
        assert "in/b.txt" in refused(list, lines_of(tmp_path / packed, "in/b.txt"))


@pytest.mark.parametrize("name, pack", [("a.txt.xz", lzma.compress), ("a.tar.gz", None), ("a.zip", None)])
def test_packed_files_cut_anywhere(tmp_path, name, pack):
    raw, member = "".join(f"line {n}\n" for n in range(2000)).encode(), None if pack else "a.txt"
    if pack:
        (tmp_path / name).write_bytes(pack(raw))
    elif name.endswith("zip"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", raw)
    else:
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            info = tarfile.TarInfo("a.txt")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    whole = (tmp_path / name).read_bytes()
    assert len(list(lines_of(tmp_path / name, member))) == 2000
    for cut_at in range(0, len(whole) - 60, max(1, len(whole) // 40)):
        (tmp_path / name).write_bytes(whole[:cut_at])
        assert name in refused(list, lines_of(tmp_path / name, member))


def test_what_is_no_file(tmp_path):
    assert "cannot be read" in refused(list, lines_of(tmp_path))
    with pytest.raises(MissingFileError, match="rvnnbook data list"):
        list(lines_of(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        read_trees(tmp_path / "absent")
    (tmp_path / "a").write_bytes(b"good\n\xff\n")
    assert refused(list, lines_of(tmp_path / "a")) == f"{tmp_path / 'a'}:2: not UTF-8 at byte 0"
    assert refused(read_lines, tmp_path / "a", lambda line: None).endswith("not UTF-8 at byte 0")


def test_installed_and_not(tmp_path, monkeypatch):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    for name, remedy in (("sst/trees/dev.txt", "get sst"), ("imdb/train.tsv", "add imdb PATH"), ("qqp/a.tsv", "add qqp PATH --unverified")):
        assert refused(read_published, name).endswith(f"not installed. Remedy: rvnnbook data {remedy}")
    (tmp_path / "sst" / "trees").mkdir(parents=True)
    (tmp_path / "sst" / "trees" / "dev.txt.xz").write_bytes(lzma.compress(b"(3 good)\n"))
    assert installed("sst/trees/dev.txt").suffix == ".xz" and read_published("sst/trees/dev.txt")[0].tokens == ("good",)
    (tmp_path / "iwslt15_envi").mkdir()
    (tmp_path / "iwslt15_envi" / "a.en").write_text("it &apos;s\n")
    (tmp_path / "iwslt15_envi" / "a.vi").write_text("x\n")
    assert read_published("iwslt15_envi/a.en") == [Translation(("it", "'s"), ("x",))]
    assert "no reader for" in refused(read_published, "mnist/x") and set(READERS)
    with pytest.raises(ValueError, match="no data set 'semparser'"):
        installed("semparser/x")


# ---- numbered sentences

PLAIN = st.text(st.sampled_from(list("abcXYZ019'-.,;$é\xa0\x85`\"\\")), min_size=1, max_size=6).filter(lambda token: unescape(token) == token)
SENTENCES = st.lists(PLAIN, min_size=1, max_size=6).map(tuple)


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("text") / "lines.txt"


@given(st.lists(st.tuples(st.sampled_from(GRADES), SENTENCES), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_numbered_sentences_are_read_again(path, drawn):
    examples = [Sentence(*each) for each in drawn]
    write(path, *(f"{GRADES.index(label)} {' '.join(tokens)}" for label, tokens in examples))
    assert read_numbered(path, GRADES) == examples


@pytest.mark.parametrize("line", ["", "1", "1 ", "2 a", "-1 a", " 1 a", "1\ta", "a b", "11 a", "01 a"])
def test_what_is_no_numbered_sentence(path, line):
    assert f"{path}:2: expected a number below 2" in refused(read_numbered, write(path, "0 a b", line), SENTIMENTS)


# ---- tables

def field(text, quoted):
    return '"' + text.replace('"', '""') + '"' if quoted and (set('"\n\t') & set(text) or len(text) % 2) else text


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_tables_are_read_again(path, name, data):
    form = FORMS[name]
    texts = st.text(st.sampled_from(list("ab \"'.é\x85") + ["\n"] * form.quoted), min_size=1, max_size=12).filter(
        lambda text: text.strip(" \n\x85") and not text.startswith(("b'", 'b"')))
    rows = data.draw(st.lists(st.tuples(st.sampled_from([*form.names] or [None]), *[texts] * len(form.texts)), min_size=1, max_size=5))
    lines = ["\t".join(form.header)] * form.headed
    for label, *sides in rows:
        fields = dict.fromkeys(form.header, "7") | dict(zip(form.texts, sides)) | ({form.label: label} if form.label else {})
        lines.append("\t".join(field(fields[column], form.quoted) for column in form.header))
    kind = Sentence if len(form.texts) == 1 else SentencePair
    expected = [kind(form.names.get(label), *map(byte_tokens, sides)) for label, *sides in rows]
    assert read_table(write(path, *lines), name, tokenize=byte_tokens) == expected
    assert len(read_table(path, form)) == len(rows)


@pytest.mark.parametrize("name", FORMS)
def test_damaged_tables(path, name):
    form = FORMS[name]
    good = ["\t".join(form.header)] * form.headed + ["\t".join(next(iter(form.names)) if column == form.label else "ab" for column in form.header)]
    number = len(good) + 1
    assert len(read_table(write(path, *good, good[-1]), name)) == 2
    def said(*lines): return refused(read_table, write(path, *lines), name)
    for line in ("", good[-1] + "\tab", good[-1].rpartition("\t")[0], good[-1].replace("\t", " ")):
        assert said(*good, line).startswith(f"{path}:{number}: expected {len(form.header)} fields")
    if form.label:
        wrong = "\t".join("2" if column == form.label else "ab" for column in form.header)
        assert said(*good, wrong).startswith(f"{path}:{number}: the {form.label} is '2', expected one of ")
    if form.headed:
        assert said(*good[1:]).startswith(f"{path}:1: expected the header") and "no examples" in said(good[0])
        assert "expected the header" in said("\t".join(reversed(form.header)), good[-1])
    gap = "\t".join("" if column == form.texts[-1] else next(iter(form.names)) if column == form.label else "ab" for column in form.header)
    if form.gaps:
        assert len(read_table(write(path, *good, gap), name)) == 1
    else:
        assert said(*good, gap) == f"{path}:{number}: the {form.texts[-1]} has no tokens"
    if form.quoted:
        last = form.texts[-1]
        for text in ('"ab', '"ab" c'):
            line = "\t".join(text if column == last else next(iter(form.names)) if column == form.label else "ab" for column in form.header)
            assert f"{path}:{number}: quotes do not match" in said(*good, line)


def test_members_of_archives(tmp_path):
    header, rows = "\t".join(FORMS["paws"].header), "1\ta b\tb a\t0\n2\tc\tc d\t1\n"
    with tarfile.open(tmp_path / "paws.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("final/dev.tsv")
        info.size = len(raw := f"{header}\n{rows}".encode())
        archive.addfile(info, io.BytesIO(raw))
    pairs = read_table(tmp_path / "paws.tar.gz", "paws", member="final/dev.tsv")
    assert pairs == [SentencePair("different", ("a", "b"), ("b", "a")), SentencePair("same", ("c",), ("c", "d"))]
    (tmp_path / "paws.tar.gz").write_bytes(gzip.compress(b"no archive"))
    assert "paws.tar.gz" in refused(read_table, tmp_path / "paws.tar.gz", "paws", member="final/dev.tsv")


def test_sets_that_are_not_at_hand_by_their_names_in_the_catalog(tmp_path, monkeypatch):
    "Packed as they are published, or as the catalog would put them."
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    row = json.dumps({"gold_label": "neutral", "sentence1": "A.", "sentence2": "B."}) + "\n"
    for name, member in (("snli/snli_1.0.zip", "snli_1.0/snli_1.0_dev.jsonl"), ("mnli/multinli_1.0.zip", "multinli_1.0/multinli_1.0_train.jsonl")):
        assert find_dataset(name.partition("/")[0]).files[0].path == name
        (tmp_path / name).parent.mkdir()
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, row * 2)
        assert read_published(name, member=member) == [SentencePair("neutral", ("A", "."), ("B", "."))] * 2
    files = {"mnli_stress/Negation/multinli_0.9_negation_matched.jsonl": row, "lra/lra_release/tsv_data/new_aan_pairs.test.tsv": "1.0\t3\t4\tab\tcd\n",
             "qqp/quora_duplicate_questions.tsv": "\t".join(FORMS["qqp"].header) + '\n0\t1\t2\tWho?\t"Who ""is"" it?"\t1\n',
             "paws_qqp/dev_and_test.tsv": "\t".join(FORMS["paws"].header) + "\n1\tb'a b'\tb\"b 'a\"\t0\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert [read_published(name)[0] for name in files] == [
        SentencePair("neutral", ("A", "."), ("B", ".")), SentencePair("related", ("a", "b"), ("c", "d")),
        SentencePair("same", ("Who", "?"), ("Who", '"', "is", '"', "it", "?")), SentencePair("different", ("a", "b"), ("b", "'a"))]
    (tmp_path / "iwslt14_deen").mkdir()
    (tmp_path / "iwslt14_deen" / "test.de").write_text("guten morgen\n")
    (tmp_path / "iwslt14_deen" / "test.en").write_text("good morning\n")
    assert read_published("iwslt14_deen/test.de") == [Translation(("guten", "morgen"), ("good", "morning"))]


@given(SENTENCES.filter(lambda tokens: not " ".join(tokens).startswith("b'")))
@settings(max_examples=50, deadline=None)
def test_bytes_written_out_are_read(tokens):
    text = " ".join(tokens)
    assert paws_tokens(text) == paws_tokens(repr(text.encode())) == tokens


# ---- JSON

JSON_PAIRS = st.tuples(st.sampled_from([*INFERENCES, "-"]), SENTENCES, SENTENCES)


@given(st.lists(JSON_PAIRS, min_size=1, max_size=5).filter(lambda rows: any(label != "-" for label, *_ in rows)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_inferences_are_read_again(path, rows, own):
    def tree(tokens):
        return tokens[0] if len(tokens) == 1 else f"( {tokens[0]} {tree(tokens[1:])} )"
    lines = [json.dumps({"gold_label": label, "pairID": 3, **{name: " ".join(side) for name, side in zip(("sentence1", "sentence2"), sides)},
                         **({f"{name}_binary_parse": tree(side) for name, side in zip(("sentence1", "sentence2"), sides)} if own else {})},
                        ensure_ascii=own) for label, *sides in rows]
    found = read_inferences(write(path, *lines), None if own else spaces)
    assert found == [SentencePair(*row) for row in rows if row[0] != "-"]


GOOD = {"gold_label": "neutral", "sentence1": "A b.", "sentence2": "C d."}


@pytest.mark.parametrize("line, said", [
    ("", "this is no JSON"), ("[1]", "expected an object"), ('"a"', "expected an object"), (json.dumps(GOOD) + "}", "this is no JSON"),
    (json.dumps(GOOD | {"gold_label": 1}), "expected a text called gold_label"), (json.dumps(GOOD | {"gold_label": "Neutral"}), "the gold_label is 'Neutral'"),
    (json.dumps({key: value for key, value in GOOD.items() if key != "sentence2"}), "expected a text called sentence2"),
    (json.dumps(GOOD | {"sentence1": " "}), "sentence1 has no tokens"), (json.dumps(GOOD | {"sentence2_binary_parse": "( ( ) )"}), "sentence2 has no tokens")])
def test_what_is_no_inference(path, line, said):
    assert f"{path}:2: {said}" in refused(read_inferences, write(path, json.dumps(GOOD), line))


def test_an_inference_cut_anywhere():
    line = json.dumps(GOOD)
    for end in range(len(line)):
        assert "this is no JSON" in refused(parse_inference, line[:end])


# ---- sequences

FORMULAS = st.recursive(st.sampled_from(["$0", "c0", "'new york'", "loc:<lo,<lo,t>>", "_flight"]),
                        lambda parts: st.lists(parts, min_size=1, max_size=3).map(lambda each: ["(", *each, ")"]), max_leaves=8)


def flat(part):
    return [part] if isinstance(part, str) else [token for each in part for token in flat(each)]


@given(st.lists(st.tuples(SENTENCES, FORMULAS.map(flat)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=50, deadline=None)
def test_formulas_are_read_again(path, rows, tight):
    def spelt(tokens):
        text = " ".join(tokens)
        return text.replace("( ", "(").replace(" )", ")") if tight else text
    write(path, *(f"{' '.join(source)}\t{spelt(target)}" for source, target in rows))
    assert read_formulas(path) == [Translation(source, tuple(target)) for source, target in rows]


@pytest.mark.parametrize("line", ["", "a", "a\t", "\ta", "a\tb\tc", "a\t( b", "a\tb )", "a\t) (", "a\t( ( b )"])
def test_what_is_no_formula(path, line):
    assert f"{path}:2: " in refused(read_formulas, write(path, "a\tb", line))
    check_brackets(symbols("f(a,'(')"))


def test_files_that_do_not_belong_together(tmp_path):
    left, right = write(tmp_path / "a.en", "a", "b"), write(tmp_path / "a.vi", "c", "d")
    assert read_parallel(left, right) == [Translation(("a",), ("c",)), Translation(("b",), ("d",))]
    assert "do not belong together" in refused(read_parallel, left, write(right, "c"))
    assert f"{right}:2: the line is empty" in refused(read_parallel, left, write(right, "c", " ", "d"))
    assert entities("&quot; a &amp;amp; b &lt;") == ('"', "a", "&amp;", "b", "<") and entities("AT&T") == ("AT&T",)
    for sizes in ((2, 2), (), (6,)):
        assert "there are 5" in refused(cut, "abcde", sizes)


# ---- tokens, vocabularies, batches

@given(st.text(max_size=60))
@settings(max_examples=80, deadline=None)
def test_words_lose_nothing_but_space_and_breaks(text):
    def bare(text): return "".join(letter for letter in text if not letter.isspace())
    seen = re.sub(r"<br\s*/?>", " ", text, flags=re.I)
    assert "".join(words(text)) == bare(seen) and all(words(text))
    assert "".join(byte_tokens(text)).encode("latin-1") == text.encode() and set(byte_tokens(text, 9)) <= set(BYTES)


@pytest.mark.parametrize("text, tokens", [
    ("don't can't won't", "do n't ca n't wo n't"), ("Don’t!", "Do n’t !"), ("it's they're I'm he'd", "it 's they 're I 'm he 'd"),
    ("the 1980's, 3,000.50 at 10:30.", "the 1980 's , 3,000.50 at 10:30 ."), ("e.g. U.S.A.", "e.g. U.S.A."), ("a<br>b<BR />c<br/>d", "a b c d"),
    ("co-writer--no...", "co-writer -- no ..."), ("'quoted'", "' quoted '"), ("naïve café", "naïve café"), ("*****/10", "* * * * * / 10")])
def test_words(text, tokens):
    assert words(text) == tuple(tokens.split(" "))


@given(st.lists(st.text(min_size=1, max_size=5), unique=True, min_size=1, max_size=8).filter(lambda tokens: UNKNOWN not in tokens), st.booleans())
@settings(max_examples=50, deadline=None)
def test_vocabularies_are_read_again(path, tokens, unknown):
    vocabulary = Vocabulary([UNKNOWN, *tokens] if unknown else tokens, UNKNOWN if unknown else None)
    again = read_vocabulary(write_vocabulary(path, vocabulary))
    assert (again.tokens, again.unknown) == (vocabulary.tokens, vocabulary.unknown)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tokens": ["a"]}', '{"tokens": [1], "unknown": null}', '{"tokens": ["a", "a"], "unknown": null}',
                                  '{"tokens": ["a"], "unknown": "b"}', '{"tokens": ["a"], "unknown"'])
def test_what_is_no_vocabulary(path, text):
    path.write_text(text)
    assert f"{path}" in refused(read_vocabulary, path)


def test_a_vocabulary_follows_from_the_examples_only():
    examples = [Sentence("positive", ("a", "b", "b")), Sentence(None, ("c", "b", "a")), Sentence(None, ("d",))]
    for order in (examples, examples[::-1]):
        assert vocabulary_for(order).tokens == (UNKNOWN, "b", "a", "c", "d") and vocabulary_for(order, 2).tokens == (UNKNOWN, "b", "a")
    assert vocabulary_for([SentencePair("same", ("a",), ("b", "b")), Translation(("c",), ("b",))]).tokens == (UNKNOWN, "b", "a", "c")


@given(st.lists(LINES.map(parse_tree), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_batches_of_trees(trees):
    vocabulary = vocabulary_for(trees)
    batch = collate_text(trees, vocabulary, GRADES)
    assert merge_targets(batch.trees, batch.mask).shape == batch.ids.shape
    for tree, ids, mask, steps, label in zip(trees, *batch, strict=True):
        assert [vocabulary.tokens[number] for number in ids[mask]] == list(tree.tokens) and not ids[~mask].any()
        assert steps[mask].tolist() == list(tree.steps) and GRADES[label] == tree.label and int(mask.sum()) == length_of(tree)


@given(st.lists(st.tuples(st.sampled_from(PARAPHRASES), SENTENCES, SENTENCES), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_batches_of_pairs(rows):
    pairs = [SentencePair(*row) for row in rows]
    vocabulary = vocabulary_for(pairs)
    batch = collate_text(pairs, vocabulary, PARAPHRASES)
    assert batch.ids.shape == batch.mask.shape == batch.trees.shape == (len(pairs), 2, max(map(length_of, pairs)))
    for pair, ids, mask, label in zip(pairs, batch.ids, batch.mask, batch.labels, strict=True):
        for side in (0, 1):
            assert [vocabulary.tokens[number] for number in ids[side][mask[side]]] == list(pair[1 + side])
        assert PARAPHRASES[label] == pair.label
    sentences = [Sentence("positive", pair.left) for pair in pairs]
    flat = collate_text(sentences, vocabulary, SENTIMENTS)
    assert flat.ids.shape == flat.trees.shape and flat.labels.tolist() == [1] * len(pairs) and torch.equal(flat.ids, batch.ids[:, 0, :flat.ids.shape[1]])


def test_batches_refuse_what_they_cannot_hold():
    vocabulary, sentence = Vocabulary(["a"]), Sentence("positive", ("a",))
    for examples in ([], [sentence, SentencePair("same", ("a",), ("a",))], [Sentence(None, ("a",))], [Sentence("neutral", ("a",))]):
        refused(collate_text, examples, vocabulary, SENTIMENTS)
    dealt = BucketLoader([sentence] * 5, 2, partial(collate_text, vocabulary=vocabulary, labels=SENTIMENTS), seed=0, length=length_of)
    assert sum(len(batch.labels) for batch in dealt) == 5


def test_import_is_light():
    code = "import sys, rvnnbook.data.corpora; sys.exit(bool({'torch', 'matplotlib', 'nltk', 'datasets'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


# ---- the treebank made up

@pytest.mark.parametrize("levels", [0, 1, 3])
def test_made_opinions_follow_their_rules(levels):
    "Every grade again, from the words alone."
    def grade(tokens):
        if "but" in tokens:
            return min(grades_behind(tokens))
        value = ADJECTIVES[tokens[-1]]
        value = {1: 0, 3: 4}.get(value, value) if tokens[-2] == "very" else value
        return 4 - value if "not" in tokens else value

    def grades_behind(tokens):           # what stands behind the last but says the whole
        return [grade(tokens[len(tokens) - tokens[::-1].index("but"):])]
    trees = make_trees(300, seed=levels, levels=levels)
    assert trees == make_trees(300, seed=levels, levels=levels) != make_trees(300, seed=9, levels=levels)
    for tree in trees:
        assert tree.label == GRADES[grade(tree.tokens)] and parse_tree(tree_line(tree)) == tree
        assert tree.tokens.count("but") <= 2**levels - 1
    assert {tree.label for tree in trees} == set(GRADES) and any("but" in tree.tokens for tree in trees) == (levels > 0)
