"What the chapter on word vectors cannot show in a lesson: a plain reader beside it, faults and fuzz."
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.data.text import MissingFileError, TextError
from rvnnbook.data.vectors import ENTRY, HEAD, Vectors, entries_of, hash_word, make_index, parts_of, rows_for, spread_of


def refused(function, *values, **options):
    with pytest.raises(TextError) as error:
        function(*values, **options)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vectors")


def plain(text, dim):
    "Everything in a dictionary, read from behind; the first of equal words stays."
    table = {}
    for line in text.split("\n")[:-1]:
        fields = line.split(" ")
        table.setdefault(" ".join(fields[:-dim]), np.array(fields[-dim:], np.float32))
    return table


WORDS = st.text(st.sampled_from(list("ab.,0é \xa0\x85\u2028@")), min_size=1, max_size=6)
NUMBERS = st.floats(-9, 9, width=32).map(lambda x: f"{x:.5g}")
FILES = st.integers(1, 4).flatmap(lambda dim: st.tuples(
    st.just(dim), st.lists(st.tuples(WORDS, st.lists(NUMBERS, min_size=dim, max_size=dim)), min_size=1, max_size=12)))


@given(FILES, st.lists(WORDS, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_a_plain_reader(folder, drawn, others, ended):
    dim, rows = drawn
    text = "".join(f"{word} {' '.join(numbers)}\n" for word, numbers in rows)
    path = folder / "drawn.txt"
    path.unlink(missing_ok=True)
    path.write_text(text if ended else text.removesuffix("\n"), encoding="utf-8", newline="")
    vectors, table = Vectors(path, dim), plain(text, dim)
    assert len(vectors) == len(rows) and vectors.dim == dim
    for word in [word for word, _ in rows] + others:
        found = vectors.find(word)
        assert found is None if word not in table else np.array_equal(found, table[word])
    matrix, known = rows_for(vectors, table)
    assert known.all() and np.array_equal(matrix, np.array(list(table.values())))


def test_many_words_by_bisection(folder):
    path = folder / "many.txt"
    path.write_text("".join(f"w{n} {n}\n" for n in range(3000)) + "w7 0\n")
    vectors = Vectors(path)
    assert all(vectors.find(f"w{n}")[0] == n for n in range(3000)) and vectors.find("w3000") is None and vectors.find("w") is None
    assert (np.diff(vectors.entries["hash"].astype(float)) >= 0).all() and len(vectors) == 3001
    assert (folder / "many.txt.index").stat().st_size == HEAD.size + 3001 * ENTRY.itemsize


def test_words_with_one_fingerprint(folder, monkeypatch):
    "Were two fingerprints ever equal, the words would still be told apart."
    monkeypatch.setattr("rvnnbook.data.vectors.hash_word", lambda word: len(word))
    path = folder / "same.txt"
    path.write_text("aa 1\nbb 2\nc 3\naa 4\n")
    vectors = Vectors(path)
    assert [vectors.find(word)[0] for word in ("aa", "bb", "c")] == [1, 2, 3] and vectors.find("dd") is None and vectors.find("eee") is None


def test_a_change_that_keeps_size_and_time_gives_nobody_the_vector_of_another(folder):
    path = folder / "kept.txt"
    for before, after in (("aaaa 1 2 3\nfilm 0 1 2\n", "a 1 2 3\nmy film 9 9 9\n"), ("long 1 2 3\na 4 5 6\n", "a 4 5 6\nlong 1 2 3\n")):
        assert len(before) == len(after)
        path.write_text(before)
        os.utime(path, ns=(1, 1))
        Vectors(path)
        path.write_text(after)
        os.utime(path, ns=(1, 1))
        assert [Vectors(path).find(line.split()[0]) for line in before.splitlines()][-1] is None
        path.with_name("kept.txt.index").unlink()


def test_an_index_is_made_once_and_anew_when_it_does_not_fit(folder, monkeypatch):
    path, index = folder / "a.txt", folder / "a.txt.index"
    path.write_text("a 1 2\nb 3 4\n")
    Vectors(path)
    before = index.stat().st_mtime_ns, index.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("rvnnbook.data.vectors.make_index", lambda *_: pytest.fail("the index fits"))
        assert Vectors(path).find("b").tolist() == [3, 4]
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    whole = index.read_bytes()
    for damaged in (b"", whole[:10], whole[:HEAD.size], whole[:-1], b"x" + whole[1:]):
        index.write_bytes(damaged)
        assert Vectors(path).find("b").tolist() == [3, 4] and index.read_bytes() == whole
    path.write_text("c 1 2\nd 3 4\n")                        # as large as before
    os.utime(path, ns=(1, 1))
    assert Vectors(path).find("d").tolist() == [3, 4] and Vectors(path).find("a") is None
    assert Vectors(path, dim=1).find("d 3").tolist() == [4]  # the same file, read otherwise


@pytest.mark.parametrize("text, said", [
    ("", ": no vectors in it"), ("2 3\na 1 2 3\n", ":1: this header line"), ("a\n", ":1: expected a word and numbers"),
    ("a 1 2\nb 1\n", ":2: expected a word and 2 numbers"), ("a 1 2\n\n", ":2: expected a word and 2 numbers"), ("a 1 2\nb x 2\n", ":2: expected 2 numbers, one is b'x'"),
    (" 1 2\n", ":1: expected a word"), ("a 1 2\nb  1 \n", ":2: expected 2 numbers, one is b''")])
def test_files_that_are_no_vectors(folder, text, said):
    path = folder / "wrong.txt"
    path.write_text(text)
    assert refused(Vectors, path).startswith(str(path) + said) and not (folder / "wrong.txt.index").exists()


def test_other_refusals(folder):
    with pytest.raises(MissingFileError, match="data get glove"):
        Vectors(folder / "absent")
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a.txt", "a 1 2\n")
    assert "unpack it first" in refused(Vectors, folder / "a.zip")
    path = folder / "numbers.txt"
    path.write_text("a 1 2 3\nb 1 inf 3\nc 1 1,5 3\nd 1 1e40 3\n")
    vectors = Vectors(path)
    assert vectors.find("a").tolist() == [1, 2, 3]
    for word in "bcd":
        assert f"{path}: the vector of '{word}'" in refused(vectors.find, word)
    assert refused(parts_of, b"a 1", 2) and refused(list, entries_of([b"a 1 2\n"], "x", 3)).startswith("x:1: ")
    with pytest.raises(FileNotFoundError):
        make_index(folder / "absent", folder / "absent.index")


def test_words_without_vector_draw_for_themselves(folder):
    path = folder / "few.txt"
    path.write_text("".join(f"w{n} {n % 7 - 3} {n % 5 - 2}\n" for n in range(50)))
    vectors, known = Vectors(path), [f"w{n}" for n in range(50)]
    rows, found = rows_for(vectors, [*known, "x", "y"])
    again, _ = rows_for(vectors, ["y", *known[:9], "z", "x"])       # fewer are found
    assert found.tolist() == [True] * 50 + [False] * 2 and rows.dtype == np.float32
    assert np.array_equal(rows[50], again[-1]) and np.array_equal(rows[51], again[0]) and not np.array_equal(rows[50], rows[51])
    assert not np.array_equal(rows_for(vectors, [*known, "x"], seed=1)[0][50], rows[50])
    drawn = rows_for(vectors, [*known, *(f"x{n}" for n in range(500))])[0][50:]
    assert abs(drawn.std() / rows[:50].std() - 1) < .1 and abs(drawn.mean()) < .3
    assert rows_for(vectors, [])[0].shape == (0, 2) and rows_for(vectors, ["x"])[0].shape == (1, 2)


def test_the_spread_is_that_of_the_first_thousand_rows(folder):
    path = folder / "long.txt"
    path.write_text("".join(f"w{n} {n % 9} {n % 4}\n" for n in range(1000)) + "last 1e9 -1e9\n")
    numbers = [[n % 9, n % 4] for n in range(1000)]
    assert spread_of(Vectors(path)) == pytest.approx(np.std(numbers), rel=1e-5)
    path.write_text("a 1 x 2\n")
    assert f"{path}: a row" in refused(rows_for, Vectors(path, 3), ["b"])


def test_fingerprints_do_not_change():
    "An index is read by later versions."
    assert hash_word(b"film") == int.from_bytes(hashlib.blake2b(b"film", digest_size=8).digest(), "little") and hash_word(b"film") != hash_word(b"Film")
    assert HEAD.size == 32 and ENTRY.itemsize == 16


def test_import_is_light():
    code = "import sys, rvnnbook.data.vectors; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
