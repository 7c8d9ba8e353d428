"What the music chapter cannot show in a lesson: the published files, a second route to them, faults and fuzz."
import hashlib
import io
import lzma
import math
import subprocess
import sys
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rvnnbook.cli import main
from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.catalog import find_dataset
from rvnnbook.data.music import (
    CHORDS,
    COLLECTIONS,
    FOLLOWS,
    KEYS,
    PARTS,
    PUBLISHED,
    MissingFileError,
    Music,
    MusicError,
    check_roll,
    chords_of,
    collate_music,
    count_keys,
    key,
    make_music,
    pack_music,
    parse_music,
    piano_roll,
    published_music,
    read_music,
    random_melody,
    write_music,
)
from tests.helpers import published

ROLLS = st.integers(1, 40).flatmap(lambda steps: arrays(np.uint8, (steps, KEYS), elements=st.integers(0, 1)))


@pytest.fixture(scope="module")
def shared():
    return published("polymusic", "JSB_Chorales.npz.xz")


@pytest.fixture(scope="module")
def files(shared):
    return {name: parse_music(lzma.decompress((shared / f"{file}.xz").read_bytes())) for name, (file, _) in COLLECTIONS.items()}


def same(one, other):
    return all(len(a) == len(b) and all(x.dtype == y.dtype == np.uint8 and np.array_equal(x, y) for x, y in zip(a, b, strict=True))
               for a, b in zip(one, other, strict=True))


def refused(function, *values):
    with pytest.raises(MusicError) as caught:
        function(*values)
    return str(caught.value)


# ---- the published files

def test_published_counts(files):
    assert {name: tuple(map(len, music)) for name, music in files.items()} == {
        "jsb": (229, 76, 77), "nottingham": (694, 173, 170), "piano_midi": (87, 12, 25), "musedata": (524, 135, 124)}


@pytest.mark.parametrize("name", COLLECTIONS)
def test_published_pieces_by_another_route(shared, files, name):
    "Another program converted the same files to bits; numpy reads those."
    stem = COLLECTIONS[name][0].removesuffix(".mat")
    with np.load(io.BytesIO(lzma.decompress((shared / f"{stem}.npz.xz").read_bytes())), allow_pickle=False) as bits:
        for part, pieces in zip(PARTS, files[name], strict=True):
            frames, offsets = np.unpackbits(bits[f"{part}_packed"], axis=1), bits[f"{part}_offsets"]
            assert len(offsets) == len(pieces) + 1 and offsets[-1] == len(frames)
            assert all(np.array_equal(frames[a:b], piece) for a, b, piece in zip(offsets, offsets[1:], pieces, strict=False))


def test_the_counts_in_the_book_are_those_of_the_files(files):
    assert {name: count_keys(music.train) for name, music in files.items()} == PUBLISHED


def test_catalog_installs_what_published_reads(shared, files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    with pytest.raises(MissingFileError, match="rvnnbook data get polymusic"):
        published_music("jsb")
    assert main(["data", "add", "polymusic", str(shared)]) == 0 and main(["data", "verify", "polymusic"]) == 0
    assert "none stated" in capsys.readouterr().out
    assert {file.path for file in find_dataset("polymusic").files} >= {f"polymusic/{file}" for file, _ in COLLECTIONS.values()}
    for name in COLLECTIONS:
        assert same(published_music(name), files[name])
    (tmp_path / "polymusic" / "JSB_Chorales.mat").replace(tmp_path / "polymusic" / "Nottingham.mat")
    assert "Nottingham.mat: its checksum is not that of the published file" in refused(published_music, "nottingham")


def test_published_reads_the_file_that_the_catalog_names(tmp_path, monkeypatch):
    "Without the published files: a made one, with its checksum in the catalog."
    music = make_music((3, 1, 2), longest=9)
    folder = tmp_path / "polymusic"
    folder.mkdir()
    raw = write_music(folder / "JSB_Chorales.mat", music).read_bytes()
    entry = find_dataset("polymusic")
    made = entry._replace(files=tuple(
        file._replace(checksum=hashlib.sha256(raw).hexdigest()) if file.path.endswith("JSB_Chorales.mat") else file for file in entry.files))
    monkeypatch.setattr("rvnnbook.data.catalog.find_dataset", {"polymusic": made}.__getitem__)
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    assert same(published_music("jsb"), music) and same(published_music("jsb", folder), music)
    (folder / "JSB_Chorales.mat").write_bytes(raw + b" ")
    assert "its checksum is not that of the published file" in refused(published_music, "jsb")


def test_packing_a_published_collection_again(files):
    assert same(parse_music(pack_music(files["jsb"])), files["jsb"])


def test_a_published_file_with_a_bit_changed_or_cut(shared, tmp_path, monkeypatch):
    "Nothing but the published bytes ever reaches scipy, which damaged ones can bring down."
    raw, random, path = lzma.decompress((shared / "JSB_Chorales.mat.xz").read_bytes()), Random(0), tmp_path / "JSB_Chorales.mat"
    monkeypatch.setattr("rvnnbook.data.music.parse_music", lambda raw: pytest.fail("read before it was checked"))
    for place in [*range(124, 140), *(random.randrange(len(raw)) for _ in range(150))]:
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1:])
        assert refused(published_music, "jsb", tmp_path) == f"{path}: its checksum is not that of the published file"
        path.write_bytes(raw[:place])
        assert "its checksum" in refused(published_music, "jsb", tmp_path)


def test_a_published_file_cut(shared):
    raw = lzma.decompress((shared / "JSB_Chorales.mat.xz").read_bytes())
    for cut in [*range(0, 200), *Random(0).sample(range(200, len(raw)), 50), *range(len(raw) - 20, len(raw))]:
        assert refused(parse_music, raw[:cut])


# ---- keys and rolls

def test_every_key_has_one_name_that_is_written():
    names = chords_of(np.eye(KEYS, dtype=np.uint8))
    assert [key(name) for name in names] == list(range(KEYS)) and names[0] == "A0" and names[3] == "C1" and names[87] == "C8"
    assert [key(name.replace("b", "")) - key(name) for name in ("Db4", "Eb1", "Ab7")] == [1, 1, 1]
    assert key("E#2") == key("F2") and key("B#3") == key("C4") == key("Dbb4".replace("bb", "")) - 2


@pytest.mark.parametrize("name", ["", "C", "4", "C44", "C9", "G0", "Ab0", "C#8", "c4", "H1", "C##4", " C4", "C4 ", "C4\n", "C-1", "x" * 999])
def test_what_is_no_key(name):
    assert len(refused(key, name)) < 120


@given(ROLLS)
@settings(max_examples=50, deadline=None)
def test_chords_are_another_writing_of_a_roll(roll):
    assert np.array_equal(piano_roll(chords_of(roll)), roll)
    assert piano_roll([]).shape == (0, KEYS)


@pytest.mark.parametrize("values, said", [
    (np.zeros(KEYS), r"got \(88,\)"), (np.zeros((0, KEYS)), r"got \(0, 88\)"), (np.zeros((3, 87)), r"got \(3, 87\)"),
    (np.zeros((1, 3, KEYS)), r"got \(1, 3, 88\)"), (np.full((1, KEYS), -1), "step 0, key 0 is -1"), (np.full((1, KEYS), np.nan), "is nan"),
    (np.full((1, KEYS), np.inf), "is inf"), (np.full((1, KEYS), .5), "is 0.5"), (np.eye(KEYS) * 2, "step 0, key 0 is 2.0"),
    (np.eye(KEYS) * 1j, "real numbers, got complex128"), (np.full((1, KEYS), "1"), "real numbers, got <U1"), (np.full((1, KEYS), None), "got object"), ([[0] * 88, [1] * 3], None)])
def test_what_is_no_roll(values, said):
    with pytest.raises(MusicError if said else ValueError, match=said):
        check_roll(values)


def test_a_roll_of_any_numbers_becomes_bytes():
    for dtype in (bool, np.int64, np.float32):
        roll = check_roll(np.eye(3, KEYS, dtype=dtype))
        assert roll.dtype == np.uint8 and roll.sum() == 3 and roll.flags.c_contiguous


# ---- the format

@given(st.tuples(*[st.lists(ROLLS, min_size=1, max_size=3)] * 3))
@settings(max_examples=20, deadline=None)
def test_packed_music_is_read_again(parts):
    music = Music(*parts)
    assert same(parse_music(pack_music(music)), music)


ROLL = piano_roll(["C4 E4", "", "G4"])


def row(*cells, shape=None):
    part = np.empty(len(cells), object)
    for place, cell in enumerate(cells):
        part[place] = cell
    return part.reshape(shape or (1, -1))


def saved(packed=True, **values):
    scipy.io.savemat(file := io.BytesIO(), values, do_compression=packed)
    return file.getvalue()


GOOD = dict.fromkeys(PARTS, row(ROLL))


@given(st.tuples(*[st.lists(ROLLS, min_size=1, max_size=3)] * 3), st.sampled_from([np.uint8, bool, np.int32, np.float32, np.float64]), st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_any_numbers_in_any_order_in_rows_or_columns(parts, dtype, packed, column):
    values = {name: row(*(piece.astype(dtype) for piece in pieces), shape=(-1, 1) if column else None) for name, pieces in zip(PARTS, parts, strict=True)}
    assert same(parse_music(saved(packed, **dict(reversed(values.items())))), Music(*parts))


def test_the_same_music_is_the_same_bytes():
    raw = pack_music(Music([ROLL], [ROLL], [ROLL]))
    assert raw.startswith(b"made by rvnnbook   ") and raw[124:128] == b"\0\1IM"
    assert hashlib.sha256(raw).digest() == hashlib.sha256(pack_music(Music([ROLL], [ROLL], [ROLL]))).digest()
    assert {name: kind for name, _, kind in scipy.io.whosmat(io.BytesIO(raw))} == dict.fromkeys(PARTS, "cell")


@pytest.mark.parametrize("part, said", [
    (ROLL, r"a row of matrices was expected, got uint8 of the shape \(3, 88\)"), (row(*[ROLL] * 4, shape=(2, 2)), r"got object of the shape \(2, 2\)"),
    (row(), r"got object of the shape \(1, 0\)"), ({"roll": ROLL}, "a row of matrices was expected"), ("music", "a row of matrices was expected"), (scipy.sparse.csc_array(ROLL * 1.), "a row of matrices was expected"),
    (row(ROLL.T), r"piece 0: a roll has the shape \(steps, 88\) and at least one step, got \(88, 3\)"), (row(ROLL, ROLL[:0]), r"piece 1: .*got \(0, 88\)"), (row(ROLL, ROLL, ROLL * 2), "piece 2: step 0, key 39 is 2"),
    (row(ROLL * np.nan), "piece 0: step 0, key 0 is nan"), (row(ROLL, row(ROLL)), r"piece 1: a roll has"), (row(ROLL, "x" * KEYS), "piece 1: "), (row(ROLL * 1j), "real numbers"), (row(row(*[0] * KEYS)), "real numbers, got object"),
    (row({"a": 1}), "piece 0: "), (row(scipy.sparse.csc_array(ROLL * 1.)), "piece 0: "), (row(ROLL[None]), r"got \(1, 3, 88\)")])
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_no_pieces(name, part, said):
    with pytest.raises(MusicError, match=f"^{name}: .*{said}|^{name}: {said}"):
        parse_music(saved(**GOOD | {name: part}))


@pytest.mark.parametrize("raw, said", [
    (b"", "scipy cannot read this"), (b"\x80\x03}q\0.", "scipy cannot read this"), (bytes(300), "scipy cannot read this"), (bytes(19) + b"a" * 281, "no MATLAB 5 file"), (b"a" * 300, "scipy cannot read this"), (b"a" * 124 + b"\0\2IM", "no MATLAB 5 file"),
    (b"a" * 124 + b"\0\1IM", "got ''"), (saved(melody=ROLL), "a collection has traindata, validdata, testdata, got 'melody'"), (saved(traindata=row(ROLL), validdata=row(ROLL)), "got 'traindata, validdata'"),
    (saved(**GOOD, more=ROLL), "testdata, more'"), (saved(**GOOD) + saved(traindata=row(ROLL))[128:], "testdata, traindata'"), (saved(**{"n" * 31: ROLL}, m=ROLL), "nnn, m'"),
    (saved(**GOOD) + b"more", "scipy cannot read this"), (saved(False, **GOOD)[:-8], "scipy cannot read this")])
def test_files_that_are_no_collections(tmp_path, raw, said):
    with pytest.raises(MusicError, match=said):
        parse_music(raw)
    (tmp_path / "music.mat").write_bytes(raw)
    assert refused(read_music, tmp_path / "music.mat").startswith(str(tmp_path / "music.mat"))
    (tmp_path / "JSB_Chorales.mat").write_bytes(raw)
    assert "its checksum" in refused(published_music, "jsb", tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_a_file_cut_anywhere(packed):
    raw = saved(packed, **GOOD)
    assert same(parse_music(raw), Music([ROLL], [ROLL], [ROLL]))
    for cut in range(len(raw)):
        assert refused(parse_music, raw[:cut])


@pytest.mark.parametrize("problem", [ValueError("x"), MemoryError("x"), RecursionError("x"), KeyError("x"), OSError("x"), UserWarning("x")])
def test_whatever_scipy_says_is_no_news(monkeypatch, problem):
    "An error of any kind, and a warning, is a refusal; that something will change in a later version is not."
    read = scipy.io.loadmat
    def loadmat(*values, **options):
        warnings.warn("later", DeprecationWarning, stacklevel=1)
        if isinstance(problem, Warning):
            warnings.warn(problem, stacklevel=1)
        elif problem:
            raise problem
        return read(*values, **options)
    monkeypatch.setattr("scipy.io.matlab.loadmat", loadmat)
    assert "scipy cannot read this as a MATLAB file" in refused(parse_music, saved(**GOOD))
    problem = None
    assert same(parse_music(saved(**GOOD)), Music([ROLL], [ROLL], [ROLL]))


def test_a_checksum_that_is_asked_for(tmp_path):
    path, music = tmp_path / "music.mat", Music([ROLL], [ROLL], [ROLL])
    checksum = hashlib.sha256(write_music(path, music).read_bytes()).hexdigest()
    assert same(read_music(path, checksum), music) and same(read_music(path), music)
    assert refused(read_music, path, checksum[::-1]) == f"{path}: its checksum is not that of the published file"


def test_without_scipy(tmp_path):
    "All but the files; and those say what to install."
    write_music(tmp_path / "music.mat", Music([ROLL], [ROLL], [ROLL]))
    code = ("import sys; sys.modules['scipy'] = None\n"
            "from rvnnbook.data.music import *\n"
            "music = make_music((1, 1, 1))\n"
            "for function, *values in ((read_music, sys.argv[1]), (parse_music, b''), (pack_music, music), (published_music, 'jsb', '/absent')):\n"
            "    try: function(*values)\n"
            "    except MusicError as error: print(error)")
    said = subprocess.run([sys.executable, "-c", code, tmp_path / "music.mat"], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(said) == 4 and "no such file" in said[3]
    assert all(line.endswith('scipy, which is not installed. Remedy: pip install "rvnnbook[music]"') for line in said[:3])


def test_unreadable_files(tmp_path):
    assert "no such file" in refused(read_music, tmp_path / "absent.mat") and "cannot be read" in refused(read_music, tmp_path)
    with pytest.raises(FileNotFoundError):
        published_music("jsb", tmp_path)
    assert "there are jsb, nottingham, piano_midi, musedata" in refused(published_music, "JSB")


def test_writing_is_whole_or_not_at_all(tmp_path):
    path, music = tmp_path / "new" / "music.mat", make_music((2, 1, 1), shortest=1, longest=3)
    assert same(read_music(write_music(path, music)), music)
    before = path.read_bytes()
    assert refused(write_music, path, Music([np.full((2, KEYS), 3)], [], []))
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == ["music.mat"]


# ---- made music

def test_a_walk_keeps_the_rule():
    random, chords = Random(5), list(islice(random_melody(Random(4)), 40_000))
    changes = [place for place in range(1, len(chords)) if chords[place] != chords[place - 1]]
    stays = Counter(later - sooner for sooner, later in zip(changes, changes[1:]))
    assert set(stays) == {2, 4} and abs(stays[4] / stays.total() - .25) < 4 * math.sqrt(.25 * .75 / stays.total())
    for chord, followers in FOLLOWS.items():
        found = Counter(chords[place] for place in changes if chords[place - 1] == chord)
        assert set(found) == set(followers)
        spread = sum((count - found.total() / len(found)) ** 2 for count in found.values()) / (found.total() / len(found))
        assert spread < 20
    assert chords[0] == "C" and next(random_melody(random)) == "C"


def test_chords_are_different_and_their_followers_exist():
    assert len({roll.tobytes() for roll in piano_roll(CHORDS.values())}) == len(CHORDS) == len(FOLLOWS) == 7
    assert {chord for later in FOLLOWS.values() for chord in later} == set(CHORDS) and all(chord not in FOLLOWS[chord] for chord in CHORDS)


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_made_music(seed, shortest, more):
    music = make_music((3, 2, 1), seed, shortest, shortest + more)
    assert tuple(map(len, music)) == (3, 2, 1) and same(music, make_music((3, 2, 1), seed, shortest, shortest + more))
    for piece in sum(music, []):
        assert shortest <= len(check_roll(piece)) <= shortest + more and chords_of(piece)[0] == CHORDS["C"]


def test_made_lengths_are_uniform_and_seeds_differ():
    lengths = Counter(map(len, make_music((6000, 1, 1), shortest=3, longest=8).train))
    assert set(lengths) == set(range(3, 9)) and sum((count - 1000) ** 2 for count in lengths.values()) / 1000 < 30
    assert not same(make_music((5, 1, 1), 0), make_music((5, 1, 1), 1))


@pytest.mark.parametrize("words", [{"sizes": (0, 1, 1)}, {"shortest": 0}, {"shortest": 5, "longest": 4}])
def test_music_that_cannot_be_made(words):
    with pytest.raises(MusicError, match="music needs a piece in every part"):
        make_music(**words)


# ---- batches

@given(st.lists(ROLLS, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_collate(pieces):
    batch = collate_music(pieces)
    assert batch.rolls.dtype == torch.float32 and batch.mask.dtype == torch.bool and batch.rolls.shape == (len(pieces), max(map(len, pieces)), KEYS)
    for piece, roll, mask in zip(pieces, batch.rolls, batch.mask, strict=True):
        assert mask.tolist() == [True] * len(piece) + [False] * (len(mask) - len(piece))
        assert np.array_equal(roll[mask].numpy(), piece) and not roll[~mask].any()


def test_batches_refuse_what_is_no_music():
    assert "at least one piece" in refused(collate_music, []) and "step 0, key 0 is 2" in refused(collate_music, [np.full((1, KEYS), 2)])


def test_batches_deal_every_piece_once():
    pieces = make_music((50, 1, 1)).train
    dealt = [roll[mask].numpy() for batch in BucketLoader(pieces, 8, collate_music, seed=0, length=len) for roll, mask in zip(*batch)]
    assert sorted(piece.astype(np.uint8).tobytes() for piece in dealt) == sorted(piece.tobytes() for piece in pieces)


@given(st.lists(ROLLS, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_counting(pieces):
    counts = count_keys(pieces)
    assert counts.steps == sum(map(len, pieces)) == sum(counts.sizes) and counts.sizes[-1] > 0
    assert counts.keys == tuple(sum(int(piece[:, number].sum()) for piece in pieces) for number in range(KEYS))
    assert sum(size * steps for size, steps in enumerate(counts.sizes)) == sum(counts.keys)


def test_import_is_light():
    code = "import sys, rvnnbook.data.music; sys.exit(bool({'torch', 'matplotlib', 'scipy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
