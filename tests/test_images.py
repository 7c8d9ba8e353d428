"What the chapter on images cannot show in a lesson: the published files, damage at every byte of a head, fuzz, and a model that has to remember."
import gzip
import hashlib
import lzma
import math
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rvnnbook.cli import main
from rvnnbook.data.catalog import find_dataset
from rvnnbook.data.images import (
    COLLECTIONS,
    GLYPHS,
    MAX_BYTES,
    PUBLISHED,
    RECORD,
    TEST,
    TRAIN,
    ImageError,
    MissingFileError,
    Picture,
    collate_images,
    count_pixels,
    glyph,
    make_pictures,
    pack_cifar,
    pack_idx,
    parse_cifar,
    parse_idx,
    permutation,
    published_images,
    read_cifar,
    read_idx,
    sequences_of,
    unpacked,
)
from rvnnbook.registry import create_encoder
from rvnnbook.optimization import classification_loss, evaluate_classifier
from rvnnbook.tasks.classify import Classifier
from tests.helpers import published

few = settings(max_examples=40, deadline=None)
PIXELS = array_shapes(min_dims=3, max_dims=3, max_side=6).flatmap(lambda shape: arrays(np.uint8, shape))
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def refused(function, *values):
    with pytest.raises(ImageError) as caught:
        function(*values)
    return str(caught.value)


def same(one, other):
    return len(one) == len(other) and all(a.label == b.label and np.array_equal(a.pixels, b.pixels) for a, b in zip(one, other, strict=True))


def photographs(count, seed=0):
    random = np.random.default_rng(seed)
    return [Picture(random.integers(0, 256, (32, 32, 3), np.uint8), int(random.integers(10))) for _ in range(count)]


def archive(batches, folder="cifar-10-batches-bin", kind=tarfile.REGTYPE):
    with tarfile.open(fileobj=(file := BytesIO()), mode="w:gz") as tar:
        for name, content in batches:
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.type, member.linkname = len(content) * (kind == tarfile.REGTYPE), kind, "/etc/passwd"
            tar.addfile(member, BytesIO(content))
    return file.getvalue()


# ---- the published files

@pytest.fixture(scope="module")
def shared():
    return published("mnist", "t10k-images-idx3-ubyte.xz")


@pytest.fixture(scope="module")
def mnist(shared):
    return published_images("mnist", shared)


def test_the_counts_in_the_book_are_those_of_the_files(mnist):
    assert tuple(map(len, mnist)) == COLLECTIONS["mnist"] == (60_000, 10_000)
    assert tuple(map(count_pixels, mnist)) == PUBLISHED["mnist"]
    assert mnist.train[0].label == 5 and [picture.label for picture in mnist.test[:4]] == [7, 2, 1, 0]
    assert mnist.train[0].pixels.shape == (28, 28, 1)


def test_published_pictures_by_another_route(shared, mnist):
    "Byte by byte from the file, without numpy."
    raw = lzma.decompress((shared / "t10k-images-idx3-ubyte.xz").read_bytes())
    for number in (0, 1, 9999):
        start = 16 + 784 * number
        assert mnist.test[number].pixels.tobytes() == raw[start:start + 784]
    ids = collate_images(mnist.test[:2], pool=2).ids
    assert ids.shape == (2, 196, 1)
    places = [28 * y + x for y in (14, 15) for x in (12, 13)]
    assert math.isclose(float(ids[0, 7 * 14 + 6]), sum(raw[16 + place] for place in places) / 4 / 255, rel_tol=1e-6)


def test_catalog_installs_what_published_reads(shared, mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    with pytest.raises(MissingFileError, match="rvnnbook data get mnist"):
        published_images("mnist")
    assert main(["data", "add", "mnist", str(shared)]) == 0
    assert same(published_images("mnist").test[:50], mnist.test[:50])
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    raw = labels.read_bytes()
    for place in (0, len(raw) - 1):
        labels.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1:])
        assert refused(published_images, "mnist") == f"{labels}: its checksum is not that of the published file"


def test_what_published_asks_the_catalog_is_there(tmp_path):
    assert {Path(file.path).name for file in find_dataset("mnist").files} == {f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")}
    file, = find_dataset("cifar10").files
    path = tmp_path / Path(file.path).name
    path.write_bytes(archive([(name, pack_cifar(photographs(1))) for name in TRAIN + TEST]))
    assert refused(published_images, "cifar10", tmp_path) == f"{path}: its checksum is not that of the published file"
    assert "there are mnist, cifar10" in refused(published_images, "MNIST")


@pytest.mark.parametrize("kind", PACKERS)
def test_published_reads_the_files_that_the_catalog_names(tmp_path, monkeypatch, kind):
    "Without the published files: made ones, with their checksums in the catalog."
    random, made, raw = np.random.default_rng(0), {}, {}
    for part, count in (("train", 7), ("t10k", 3)):
        made[part] = [Picture(random.integers(0, 256, (28, 28, 1), np.uint8), int(random.integers(10))) for _ in range(count)]
        raw[f"{part}-images-idx3-ubyte"] = pack_idx(np.stack([picture.pixels[..., 0] for picture in made[part]]))
        raw[f"{part}-labels-idx1-ubyte"] = pack_idx(np.array([picture.label for picture in made[part]], np.uint8))
    folder, entry = tmp_path / "mnist", find_dataset("mnist")
    folder.mkdir()
    for name, content in raw.items():
        (folder / f"{name}{kind}").write_bytes(PACKERS[kind](content))
    named = entry._replace(files=tuple(file._replace(checksum=hashlib.sha256(raw[Path(file.path).name]).hexdigest()) for file in entry.files))
    monkeypatch.setattr("rvnnbook.data.catalog.find_dataset", {"mnist": named}.__getitem__)
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    for found in (published_images("mnist"), published_images("mnist", folder)):
        assert same(found.train, made["train"]) and same(found.test, made["t10k"])


# ---- idx

@given(array_shapes(max_dims=4, max_side=5).flatmap(lambda shape: arrays(np.uint8, shape)))
@few
def test_a_packed_array_is_read_again(values):
    raw = pack_idx(values)
    assert raw[:4] == bytes([0, 0, 8, values.ndim]) and len(raw) == 4 + 4 * values.ndim + values.size
    assert [int.from_bytes(raw[at:at + 4], "big") for at in range(4, 4 + 4 * values.ndim, 4)] == list(values.shape)
    found = parse_idx(raw, values.ndim)
    assert found.dtype == np.uint8 and np.array_equal(found, values)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (1, 256, 1)])
def test_every_other_byte_in_a_head_is_refused(shape):
    raw, head = pack_idx(np.zeros(shape, np.uint8)), 4 + 4 * len(shape)
    for place in range(head):
        for value in range(256):
            if value != raw[place]:
                said = refused(parse_idx, raw[:place] + bytes([value]) + raw[place + 1:], len(shape))
                assert ("begins with 00 00 08" in said) == (place < 4) and "expected" in said


@given(PIXELS, st.data())
@few
def test_what_is_cut_or_continued_is_refused(pixels, data):
    raw = pack_idx(pixels)
    assert "expected" in refused(parse_idx, raw[:data.draw(st.integers(0, len(raw) - 1))], 3)
    assert "after the header" in refused(parse_idx, raw + data.draw(st.binary(min_size=1, max_size=9)), 3)
    assert "00 00 08 01" in refused(parse_idx, raw, 1)


def test_a_file_without_entries_is_refused():
    assert "at least one" in refused(parse_idx, bytes([0, 0, 8, 1, 0, 0, 0, 0]), 1)
    huge = bytes([0, 0, 8, 3]) + b"\xff" * 12               # a product that does not fit into 64 bits
    assert "got 0" in refused(parse_idx, huge, 3)


@given(PIXELS, st.sampled_from(list(PACKERS)), st.sampled_from(list(PACKERS)), st.data())
@few
def test_pictures_and_labels_in_files_of_any_packing(tmp_path_factory, pixels, one, other, data):
    folder = tmp_path_factory.mktemp("idx")
    labels = data.draw(arrays(np.uint8, len(pixels), elements=st.integers(0, 9)))
    paths = folder / f"images{one}", folder / f"labels{other}"
    for path, kind, values in zip(paths, (one, other), (pixels, labels), strict=True):
        path.write_bytes(PACKERS[kind](pack_idx(values)))
    pictures = read_idx(*paths)
    assert [picture.label for picture in pictures] == labels.tolist()
    assert np.array_equal(np.stack([picture.pixels for picture in pictures]), pixels[..., None])


@pytest.mark.parametrize("ending", list(PACKERS))
def test_files_that_are_damaged_are_named(tmp_path, ending):
    images, labels = tmp_path / f"images{ending}", tmp_path / f"labels{ending}"
    good = pack_idx(np.arange(24).reshape(2, 3, 4)), pack_idx(np.array([3, 7]))

    def write(one, other):
        images.write_bytes(PACKERS[ending](one))
        labels.write_bytes(PACKERS[ending](other))
    with pytest.raises(MissingFileError, match="images.*no such file"):
        read_idx(images, labels)
    write(*good)
    assert len(read_idx(images, labels)) == 2
    assert refused(read_idx, images, labels, ["0" * 64] * 2).startswith(f"{images}: its checksum")
    for place, path in enumerate((images, labels)):
        for at in range(16 if place == 0 else 8):
            changed = [*good]
            changed[place] = good[place][:at] + bytes([good[place][at] ^ 16]) + good[place][at + 1:]
            write(*changed)
            assert refused(read_idx, images, labels).startswith(f"{path}: expected")
    write(good[0], pack_idx(np.array([3, 10])))
    assert refused(read_idx, images, labels) == f"{labels}: picture 1: the label is 10, expected 0 to 9"
    write(good[0], pack_idx(np.array([3])))
    assert refused(read_idx, images, labels) == f"{labels}: expected 2 labels, one for each picture in {images.name}, got 1"
    write(*good)
    images.write_bytes(images.read_bytes()[:-5])
    assert refused(read_idx, images, labels).startswith(f"{images}: ")


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_what_is_packed_may_not_be_anything(tmp_path, ending):
    path = tmp_path / f"file{ending}"
    path.write_bytes(b"not packed at all")
    assert refused(unpacked, path, "mnist").startswith(f"{path}: cannot be read")
    assert "cannot be read" in refused(unpacked, tmp_path, "mnist")


def test_what_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    assert MAX_BYTES > 47_040_016                                   # the largest published file
    monkeypatch.setattr("rvnnbook.data.images.MAX_BYTES", 1000)
    path = tmp_path / "bomb.xz"
    path.write_bytes(lzma.compress(bytes(1000)))
    assert len(unpacked(path, "mnist")) == 1000
    path.write_bytes(lzma.compress(bytes(10**6)))
    assert refused(unpacked, path, "mnist") == f"{path}: expected at most 1000 bytes in it"


# ---- CIFAR-10

@given(st.lists(st.tuples(arrays(np.uint8, (32, 32, 3)), st.integers(0, 9)), min_size=1, max_size=3))
@settings(max_examples=10, deadline=None)
def test_packed_photographs_are_read_again(pairs):
    pictures = [Picture(*pair) for pair in pairs]
    raw = pack_cifar(pictures)
    assert len(raw) == RECORD * len(pictures) == 3073 * len(pictures) and same(parse_cifar(raw), pictures)
    pixels, label = pictures[-1]
    record = raw[-RECORD:]
    assert record[0] == label and all(record[1 + 1024 * c + 32 * y + x] == pixels[y, x, c] for c in range(3) for y in (0, 5, 31) for x in (0, 7, 31))


def test_records_that_are_none():
    raw = pack_cifar(photographs(2))
    for cut in (0, 1, 3072, 3074, len(raw) - 1):
        assert f"got {cut} bytes" in refused(parse_cifar, raw[:cut])
    for label in range(10, 256):
        assert refused(parse_cifar, raw[:RECORD] + bytes([label]) + raw[RECORD + 1:]) == f"picture 1: the label is {label}, expected 0 to 9"


def test_an_archive_and_what_may_be_wrong_with_it(tmp_path):
    path, pictures = tmp_path / "cifar.tar.gz", photographs(12)
    batches = [(name, pack_cifar(pictures[2 * at:2 * at + 2])) for at, name in enumerate(TRAIN + TEST)]
    path.write_bytes(whole := archive([("readme.html", b"hello"), *batches]))
    found = read_cifar(path)
    assert same(found.train, pictures[:10]) and same(found.test, pictures[10:])
    wrong = {"expected cifar-10-batches-bin/test_batch.bin in it": archive(batches[:-1]),
             "expected one file": archive([*batches, batches[0]]),
             "data_batch_2.bin: expected records of 3073 bytes": archive([batches[0], (TRAIN[1], b"x"), *batches[2:]]),
             "data_batch_1.bin in it": archive(batches, folder="../cifar-10-batches-bin/.."),
             "data_batch_1.bin: expected one file": archive(batches, kind=tarfile.SYMTYPE), "cannot be read": b"no archive"}
    for said, raw in wrong.items():
        path.write_bytes(raw)
        assert (text := refused(read_cifar, path)).startswith(f"{path}: ") and said in text
    for cut in (*range(0, len(whole), len(whole) // 10), *range(len(whole) - 20, len(whole))):
        path.write_bytes(whole[:cut])
        assert refused(read_cifar, path).startswith(f"{path}: ")
    for place in range(len(whole) // 20, len(whole), len(whole) // 10):     # pixels too: gzip has a checksum
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:])
        assert refused(read_cifar, path).startswith(f"{path}: ")
    with pytest.raises(MissingFileError, match="get cifar10"):
        read_cifar(tmp_path / "absent.tar.gz")


def test_members_come_in_any_order(tmp_path):
    path, pictures = tmp_path / "cifar.tar.gz", photographs(6)
    batches = [(name, pack_cifar([picture])) for name, picture in zip(TRAIN + TEST, pictures, strict=True)]
    path.write_bytes(archive(batches[::-1]))
    assert same(read_cifar(path).train, pictures[:5])


# ---- sequences

@given(arrays(np.uint8, array_shapes(min_dims=4, max_dims=4, max_side=4)), st.integers(1, 3), st.integers(0, 99))
@few
def test_sequences_by_another_route(pixels, pool, seed):
    "Every mean in a loop, of pictures that are made as large as it takes."
    large = pixels.repeat(pool, 1).repeat(pool, 2)
    large[:, 0, 0] = 255 - large[:, 0, 0]
    count, high, wide, channels = pixels.shape
    order = permutation(high * wide, seed)
    found, mixed = sequences_of(large, pool), sequences_of(large, pool, order)
    assert found.dtype == np.float32 and found.shape == (count, high * wide, channels) and 0 <= found.min() and found.max() <= 1
    for step in range(high * wide):
        y, x = divmod(step, wide)
        mean = large[:, pool * y:pool * y + pool, pool * x:pool * x + pool].astype(float).mean((1, 2)) / 255
        np.testing.assert_allclose(found[:, step], mean, atol=1e-6)
    assert np.array_equal(mixed[:, np.argsort(order)], found)
    if pool == 1:
        assert np.array_equal(np.rint(255 * found).astype(np.uint8).reshape(large.shape), large), "nothing is lost"


def test_a_permutation_is_the_same_everywhere():
    assert permutation(10, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9] and permutation(784, 0)[:5].tolist() == [269, 11, 403, 600, 196]
    assert np.array_equal(permutation(784, 3), permutation(784, 3)) and not np.array_equal(permutation(784, 3), permutation(784, 4))
    assert permutation(5, None).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("pool, order, said", [(0, None, "squares of 0 x 0"), (5, None, "do not fill a picture of 6 x 6"), (1, np.arange(9), "an order of 9 pixels for pictures of 36")])
def test_sequences_that_cannot_be(pool, order, said):
    assert said in refused(sequences_of, np.zeros((1, 6, 6, 1), np.uint8), pool, order)


# ---- made pictures and batches

def test_made_pictures():
    assert [len(rows) for rows in GLYPHS] == [5] * 10 and len({glyph(digit).tobytes() for digit in range(10)}) == 10
    made = make_pictures((500, 10), side=9, seed=4)
    counts = count_pixels(made.train)
    assert sum(counts.labels) == 500 and min(counts.labels) > 25
    places = set()
    for pixels, label in made.train:
        inked = pixels[..., 0] >= 160
        fitting = [(y, x) for y in range(5) for x in range(7) if np.array_equal(inked, np.pad(glyph(label), ((y, 4 - y), (x, 6 - x))) == 1)]
        assert len(fitting) == 1
        places.add(fitting[0])
    assert len(places) == 5 * 7
    assert same(make_pictures((5, 1), seed=1).train, make_pictures((9, 1), seed=1).train[:5])
    for values in ((0, 1), 7), ((1, 1), 4):
        assert "at least one picture" in refused(make_pictures, *values)


def test_counts_of_pictures_that_are_black():
    black, point = np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)
    point[0, 1, 2] = 7
    counts = count_pixels([Picture(black, 0), Picture(point, 9)])
    assert (counts.total, counts.squares, counts.blank) == (7, 49, 6 + 4) and counts.labels == (1, *[0] * 8, 1)


def test_a_batch_is_what_a_classifier_trains_on():
    "The gradient of the loss reaches the map of pixels, and what is read last does not decide alone."
    torch.manual_seed(0)
    made = make_pictures((32, 8), side=5)
    batch = collate_images(made.train, order=permutation(25, 0))
    assert batch.ids.dtype == torch.float32 and batch.labels.tolist() == [picture.label for picture in made.train] and not batch.trees.any()
    for name in ("lstm", "bilstm", "self_iru"):
        model = Classifier(create_encoder(name, dim=8), vocabulary=1, classes=10, embedding_dim=1)
        model.embedding = torch.nn.Identity()
        classification_loss(model, batch).backward()
        assert model.in_proj.weight.grad.abs().sum() > 0
        assert 0 <= evaluate_classifier(model, [batch])["accuracy"] <= 1
    assert "at least one picture" in refused(collate_images, [])
    assert "of one size" in refused(collate_images, [made.train[0], photographs(1)[0]])


def test_reading_needs_numpy_and_no_more():
    code = ("import sys\nfrom rvnnbook.data.images import *\n"
            "made = make_pictures((2, 1)); permutation(9, 0); parse_idx(pack_idx(made.train[0].pixels), 3)\n"
            "heavy = {'torch', 'matplotlib', 'scipy', 'PIL', 'torchvision'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
