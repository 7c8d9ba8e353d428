"What the music chapter cannot show in a lesson: the published files, a second route to them, faults and fuzz."
import io
import lzma
import math
import struct
import subprocess
import sys
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rvnnbook.cli import main
from rvnnbook.data.batches import Batches
from rvnnbook.data.catalog import find
from rvnnbook.data.music import (
    CHORDS,
    COLLECTIONS,
    COMPRESSED,
    FOLLOWS,
    KEYS,
    MATRIX,
    PARTS,
    PUBLISHED,
    Matrix,
    MissingFileError,
    Music,
    MusicError,
    check_roll,
    chords_of,
    collate,
    count_keys,
    element,
    elements,
    inflate,
    key,
    make_music,
    matrix,
    pack_matrix,
    pack_music,
    parse_music,
    piano_roll,
    pieces_of,
    published,
    read_music,
    roll_of,
    walk,
    write_music,
)

SHARED = Path(__file__).parents[2] / "shared" / "data" / "polymusic"
HEAD = bytes(124) + b"\0\1IM"
ROLLS = st.integers(1, 40).flatmap(lambda steps: arrays(np.uint8, (steps, KEYS), elements=st.integers(0, 1)))


@pytest.fixture(scope="module")
def shared():
    if not SHARED.is_dir():
        pytest.skip("the folder shared/data/polymusic with the published files is not beside the checkout")
    return SHARED


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
        published("jsb")
    assert main(["data", "add", "polymusic", str(shared)]) == 0 and main(["data", "verify", "polymusic"]) == 0
    assert "none stated" in capsys.readouterr().out
    assert {file.path for file in find("polymusic").files} >= {f"polymusic/{file}" for file, _ in COLLECTIONS.values()}
    for name in COLLECTIONS:
        assert same(published(name), files[name])
    (tmp_path / "polymusic" / "JSB_Chorales.mat").replace(tmp_path / "polymusic" / "Nottingham.mat")
    assert "(229, 76, 77) pieces in the three parts, the published file has (694, 173, 170)" in refused(published, "nottingham")


def test_packing_a_published_collection_again(files):
    assert same(parse_music(pack_music(files["jsb"])), files["jsb"])


def test_a_published_file_with_a_byte_changed(shared, files):
    "A compressed stream has a checksum, and what stands around it is looked at; what is read in spite of a changed bit is the same."
    raw, random, noticed = lzma.decompress((shared / "JSB_Chorales.mat.xz").read_bytes()), Random(0), 0
    for place in [*range(124, 136), *(random.randrange(136, len(raw)) for _ in range(150))]:
        try:
            assert same(parse_music(raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1:]), files["jsb"])
        except MusicError:
            noticed += 1
    assert noticed > 155


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
    (np.full((1, KEYS), np.inf), "is inf"), (np.full((1, KEYS), .5), "is 0.5"), (np.eye(KEYS) * 2, "step 0, key 0 is 2.0"), ([[0] * 88, [1] * 3], None)])
def test_what_is_no_roll(values, said):
    with pytest.raises(MusicError if said else ValueError, match=said):
        check_roll(values)


def test_a_roll_of_any_numbers_becomes_bytes():
    for dtype in (bool, np.int64, np.float32):
        roll = check_roll(np.eye(3, KEYS, dtype=dtype))
        assert roll.dtype == np.uint8 and roll.sum() == 3 and roll.flags.c_contiguous


# ---- the format

@given(st.lists(st.tuples(st.integers(0, 2**32 - 1).filter(lambda kind: kind != COMPRESSED), st.binary(max_size=40)), max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_elements_are_what_was_packed(boxes, data):
    raw = b"".join(element(*box) for box in boxes)
    assert [(kind, bytes(content)) for kind, content in elements(raw)] == boxes and len(raw) % 8 == 0
    cut = data.draw(st.integers(0, len(raw)))
    try:
        found = [(kind, bytes(content)) for kind, content in elements(raw[:cut])]
    except MusicError:
        return
    assert found == boxes[:len(found)]         # never half a box


def test_no_filling_behind_a_compressed_element():
    raw = struct.pack("<II3s", COMPRESSED, 3, b"abc") + element(1, b"d")
    assert [bytes(content) for _, content in elements(raw)] == [b"abc", b"d"]


@given(st.tuples(*[st.lists(ROLLS, min_size=1, max_size=3)] * 3))
@settings(max_examples=40, deadline=None)
def test_packed_music_is_read_again(parts):
    music = Music(*parts)
    assert same(parse_music(pack_music(music)), music)


ROLL = piano_roll(["C4 E4", "", "G4"])
CELL = pack_matrix(6, ROLL.shape, [element(2, ROLL.T.tobytes())])


def numbers(type=6, shape=(3, KEYS), kind=2, content=ROLL.T.tobytes(), more=()):
    return Matrix(type, shape, "", [(kind, content), *more])


@pytest.mark.parametrize("found, said", [
    (numbers(type=5), "type 5"), (numbers(type=1), "type 1"), (numbers(kind=7), r"kinds \[7\]"), (numbers(more=[(2, b"")]), r"kinds \[2, 2\]"),
    (numbers(shape=(KEYS, 3)), r"got \(88, 3\)"), (numbers(shape=(-3, -KEYS)), "got"), (numbers(shape=(-3, KEYS)), "got"), (numbers(shape=(4, KEYS)), "in 264 bytes"),
    (numbers(shape=(0, KEYS), content=b""), r"\(0, 88\)"), (numbers(kind=9), "in 264 bytes"), (numbers(content=b"\2" * 264), "step 0, key 0 is 2"),
    (numbers(kind=9, content=np.full((KEYS, 3), np.nan).tobytes()), "is nan")])
def test_matrices_that_are_no_rolls(found, said):
    with pytest.raises(MusicError, match=said):
        roll_of(found)
    assert np.array_equal(roll_of(numbers()), ROLL) and np.array_equal(roll_of(numbers(type=9)), ROLL)


@pytest.mark.parametrize("raw", [b"", element(6, bytes(8)), element(6, bytes(8)) + element(5, bytes(8)), element(5, bytes(8)) + element(6, bytes(8)) + element(1, b""),
                                 element(6, bytes(8)) + element(5, bytes(12)) + element(1, b""), element(6, bytes(8)) + element(5, bytes(8)) + element(2, b"")])
def test_beginnings_that_are_no_matrix(raw):
    assert "a matrix begins with its flags" in refused(matrix, raw)


@pytest.mark.parametrize("type, shape, cells, said", [
    (6, (1, 1), [CELL], "type 6"), (1, (2, 2), [CELL] * 4, r"\(2, 2\)"), (1, (2, 2), [CELL] * 2, "2 of them"), (1, (1, 2), [CELL], "1 of them"), (1, (1, 1), [element(2, CELL[8:])], "piece 0: a matrix begins"), (1, (1, 0), [], "0 of them"),
    (1, (1, 2), [CELL, element(2, b"")], "piece 1: a matrix begins"), (1, (3, 1), [CELL, CELL, pack_matrix(1, (1, 1), [CELL])], "piece 2: a matrix of numbers")])
def test_rows_that_are_no_pieces(type, shape, cells, said):
    with pytest.raises(MusicError, match=said):
        pieces_of(matrix(pack_matrix(type, shape, cells)[8:]))


def test_a_column_of_pieces_is_as_good_as_a_row():
    assert len(pieces_of(matrix(pack_matrix(1, (2, 1), [CELL, CELL])[8:]))) == 2


def part(name, cells=(CELL,)):
    return pack_matrix(1, (1, len(cells)), cells, name)


@pytest.mark.parametrize("raw, said", [
    (b"", "no MATLAB 5 file"), (b"\x80\x03}q\0.", "no MATLAB 5 file"), (bytes(124) + b"\1\0MI", "no MATLAB 5 file"), (HEAD, "got ''"),
    (HEAD + part("traindata") + part("validdata"), "got 'traindata, validdata'"), (HEAD + part("traindata") * 2 + part("validdata") + part("testdata"), "traindata, traindata"),
    (HEAD + b"".join(map(part, PARTS)) + part("more"), "more"), (HEAD + element(2, b"abc"), r"a matrix was expected, got kinds \[2\]"),
    (HEAD + element(COMPRESSED, zlib.compress(part("traindata") * 2)), r"got kinds \[14, 14\]"), (HEAD + element(COMPRESSED, zlib.compress(b"")), r"got kinds \[\]"),
    (HEAD + element(COMPRESSED, zlib.compress(part("x")) + b"tail"), "do not end in place"), (HEAD + part("n" * 999, [element(2, b"")]), "^n{20}: piece 0"),
    (HEAD + element(COMPRESSED, b"abc"), "damaged")])
def test_files_that_are_no_collections(tmp_path, raw, said):
    with pytest.raises(MusicError, match=said):
        parse_music(raw)
    (tmp_path / "JSB_Chorales.mat").write_bytes(raw)
    assert refused(published, "jsb", tmp_path).startswith(str(tmp_path / "JSB_Chorales.mat"))


def test_uncompressed_parts_in_any_order():
    music = parse_music(HEAD + part("testdata", [CELL] * 2) + part("traindata") + part("validdata", [CELL] * 3))
    assert tuple(map(len, music)) == (1, 3, 2)


def test_unpacking_has_a_limit():
    bomb = zlib.compress(bytes(2**27))
    assert len(bomb) < 2**18 and "do not end in place, or hold over 67108864" in refused(inflate, bomb)
    assert inflate(zlib.compress(bytes(100)), 100) == bytes(100) and refused(inflate, zlib.compress(bytes(101)), 100)


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes(raw, packed):
    for tail in (raw, element(MATRIX, raw), part("traindata", [element(MATRIX, raw)])):
        tail = element(COMPRESSED, zlib.compress(tail)) if packed else tail
        assert refused(parse_music, HEAD + tail)


def test_mutated_files_are_refused_or_read_as_rolls():
    "Uncompressed, so that no checksum helps: what is read in spite of a changed byte is still music."
    raw, random, read = HEAD + b"".join(map(part, PARTS)), Random(1), 0
    for _ in range(3000):
        place = random.randrange(len(raw))
        try:
            music = parse_music(raw[:place] + bytes([random.randrange(256)]) + raw[place + 1:])
        except MusicError:
            continue
        read += 1
        assert all(check_roll(piece).shape == (3, KEYS) for pieces in music for piece in pieces)
    assert 0 < read < 2000


def test_unreadable_files(tmp_path):
    assert "no such file" in refused(read_music, tmp_path / "absent.mat") and "cannot be read" in refused(read_music, tmp_path)
    with pytest.raises(FileNotFoundError):
        published("jsb", tmp_path)
    assert "there are jsb, nottingham, piano_midi, musedata" in refused(published, "JSB")


def test_writing_is_whole_or_not_at_all(tmp_path):
    path, music = tmp_path / "new" / "music.mat", make_music((2, 1, 1), shortest=1, longest=3)
    assert same(read_music(write_music(path, music)), music)
    before = path.read_bytes()
    assert refused(write_music, path, Music([np.full((2, KEYS), 3)], [], []))
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == ["music.mat"]


# ---- made music

def test_a_walk_keeps_the_rule():
    random, chords = Random(5), list(islice(walk(Random(4)), 40_000))
    changes = [place for place in range(1, len(chords)) if chords[place] != chords[place - 1]]
    stays = Counter(later - sooner for sooner, later in zip(changes, changes[1:]))
    assert set(stays) == {2, 4} and abs(stays[4] / stays.total() - .25) < 4 * math.sqrt(.25 * .75 / stays.total())
    for chord, followers in FOLLOWS.items():
        found = Counter(chords[place] for place in changes if chords[place - 1] == chord)
        assert set(found) == set(followers)
        spread = sum((count - found.total() / len(found)) ** 2 for count in found.values()) / (found.total() / len(found))
        assert spread < 20
    assert chords[0] == "C" and next(walk(random)) == "C"


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
    batch = collate(pieces)
    assert batch.rolls.dtype == torch.float32 and batch.mask.dtype == torch.bool and batch.rolls.shape == (len(pieces), max(map(len, pieces)), KEYS)
    for piece, roll, mask in zip(pieces, batch.rolls, batch.mask, strict=True):
        assert mask.tolist() == [True] * len(piece) + [False] * (len(mask) - len(piece))
        assert np.array_equal(roll[mask].numpy(), piece) and not roll[~mask].any()


def test_batches_refuse_what_is_no_music():
    assert "at least one piece" in refused(collate, []) and "step 0, key 0 is 2" in refused(collate, [np.full((1, KEYS), 2)])


def test_batches_deal_every_piece_once():
    pieces = make_music((50, 1, 1)).train
    dealt = [roll[mask].numpy() for batch in Batches(pieces, 8, collate, seed=0, length=len) for roll, mask in zip(*batch)]
    assert sorted(piece.astype(np.uint8).tobytes() for piece in dealt) == sorted(piece.tobytes() for piece in pieces)


@given(st.lists(ROLLS, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_counting(pieces):
    counts = count_keys(pieces)
    assert counts.steps == sum(map(len, pieces)) == sum(counts.sizes) and counts.sizes[-1] > 0
    assert counts.keys == tuple(sum(int(piece[:, number].sum()) for piece in pieces) for number in range(KEYS))
    assert sum(size * steps for size, steps in enumerate(counts.sizes)) == sum(counts.keys)


def test_import_is_light():
    code = "import sys, rvnnbook.data.music; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
