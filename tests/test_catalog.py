"""The catalog of data: bad lines, bad servers, bad archives, and programs that are killed. The server is a real one on this machine."""
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvnnbook.cli import main
from rvnnbook.data import catalog as module
from rvnnbook.data.catalog import (CatalogError, Dataset, File, add, request_file, candidates, catalog, checksum, contents, download, find_dataset, get,
                                   is_sound, listing, locked, install_file, present, show_progress, recognise, recorded_checksum, unpack_archive, verify)
from rvnnbook.data.listops import official_path

ROOT = Path(__file__).resolve().parents[1]
BODY = Random(0).randbytes(200_000)
sha = lambda data: hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    "Every test has a data folder of its own, and no proxy between it and its server."
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "data"


@pytest.fixture
def shared():
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.exists():
        pytest.skip("the published files are not here")
    return folder


# ---- a server that does as it is told

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.log.append((self.path, self.headers["Range"]))
        self.server.routes[self.path](self)

    def start(self):
        "The first byte that is asked for."
        return int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "bytes=0-")[1])

    def head(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def log_message(self, *words): pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *words): pass                       # a client that hangs up is no news

    def address(self, path="/file"):
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def ranges(self):
        return [asked for _, asked in self.log]


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.routes, server.log = {}, []
        threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
        yield server
        server.shutdown()


def ranged(body, cuts=()):
    "Answers with the part that is asked for, and hangs up after so many bytes of it, once for each cut."
    cuts = iter(cuts)

    def answer(handler):
        start = handler.start()
        if start >= len(body) > 0:
            return handler.head(416, Content_Range=f"bytes */{len(body)}")
        told = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        handler.head(206 if start else 200, Content_Length=len(body) - start, **told)
        handler.wfile.write(body[start:][:next(cuts, None)])
    return answer


def plain(body, cuts=()):
    "Knows nothing of ranges."
    cuts = iter(cuts)

    def answer(handler):
        handler.head(200, Content_Length=len(body))
        handler.wfile.write(body[:next(cuts, None)])
    return answer


def says(status, **headers):
    return lambda handler: handler.head(status, **headers)


def in_turn(*answers):
    answers = iter(answers)
    return lambda handler: next(answers)(handler)


def toy(server, body=BODY, name="file", **fields):
    "A set of one file on the server."
    return Dataset("toy", "Toy", (), "none", "", (File(f"toy/{name}", len(body), sha(body), server.address(), **fields),))


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


# ---- the table

def test_the_table_is_whole():
    for name, entry in catalog().items():
        assert name == entry.name and re.fullmatch("[a-z0-9_]+", name) and entry.title and entry.licence
        assert entry.papers and set(entry.papers) <= {"crvnn", "design_space", "rir", "self_iru"}
        paths = [file.path for file in entry.files]
        assert len(paths) == len(set(paths)) and len({file.checksum for file in entry.files}) >= len(paths) - 2
        for file in entry.files:
            assert re.fullmatch(rf"{name}(/[\w.-]+)+", file.path) and ".." not in file.path and not file.path.endswith((".part", "SHA256SUMS"))
            assert re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", file.checksum)
            assert file.size is None and len(file.checksum) == 40 or file.size > 0
            if file.address and "github" in file.address:
                assert re.match(r"https://raw\.githubusercontent\.com/[\w.-]+/[\w.-]+/[0-9a-f]{40}/[\w./%-]+$", file.address)
            elif file.address:
                assert file.address.startswith("https://") and file.address.isascii() and entry.how
            assert bool(file.unpacked) == bool(file.address and not file.path.endswith((".zip", "gz")) and file.address.endswith((".zip", "gz")))
        assert entry.how or paths and all(file.address for file in entry.files)
    for name in ("listops_train", "listops_lengths", "lra", "snli", "mnli", "mnli_stress", "qqp", "paws_qqp", "paws_wiki", "glove", "cifar10",
                 "iwslt14_deen", "iwslt15_envi_train"):
        find_dataset(name)


def test_every_published_file_of_the_collection_is_in_the_table(shared):
    known = {file.checksum for entry in catalog().values() for file in entry.files}
    rows = re.findall(r"^\| (\S+) \| \d+ \| \d+ \| ([0-9a-f]{64}) \| (.*) \|$", (shared / "MANIFEST.md").read_text(), re.M)
    missing = [path for path, digest, source in rows if digest not in known and "(converted)" not in source]
    assert len(rows) > 120 and set(missing) == {"listops/LICENSE.spinn.txt", "iwslt15_envi/dev-2012-en-vi.tgz", "iwslt15_envi/test-2013-en-vi.tgz"}


def test_import_is_light():
    code = "import sys, rvnnbook.data.catalog as c; c.listing(); sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- checksums

@settings(deadline=None, max_examples=20)
@given(body=st.binary(max_size=5000))
def test_checksums_are_those_of_other_programs(tmp_path_factory, body):
    folder = tmp_path_factory.mktemp("sums")
    (folder / "a").write_bytes(body)
    (folder / "a.xz").write_bytes(lzma.compress(body, preset=0))
    for path in (folder / "a", folder / "a.xz"):
        assert checksum(path) == sha(body) and b"".join(contents(path)) == body
        assert checksum(path, 40) == hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def test_forty_digits_are_what_git_says(tmp_path):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    (tmp_path / "body").write_bytes(BODY)
    said = subprocess.run(["git", "hash-object", "--no-filters", tmp_path / "body"], capture_output=True, text=True, check=True)
    assert checksum(tmp_path / "body", 40) == said.stdout.strip()


def test_a_packed_file_that_is_damaged_or_too_large(tmp_path):
    packed = lzma.compress(BODY)
    for number, wrong in enumerate((packed[:-1], packed[:1000], b"", b"BODY", packed[:500] + b"x" + packed[501:])):
        path = tmp_path / f"{number}.xz"
        path.write_bytes(wrong)
        with pytest.raises(CatalogError, match="cannot be unpacked"):
            checksum(path)
    (tmp_path / "bomb.xz").write_bytes(lzma.compress(bytes(10**7), preset=0))
    with pytest.raises(CatalogError, match="more than"):
        checksum(tmp_path / "bomb.xz", limit=10**7 - 1)
    assert checksum(tmp_path / "bomb.xz", limit=10**7) == sha(bytes(10**7))


def test_place_is_all_or_nothing(tmp_path, data):
    source = tmp_path / "source"
    source.write_bytes(BODY)
    good = File("toy/a/file", len(BODY), sha(BODY), None)
    assert install_file(source, good).read_bytes() == BODY
    packed = install_file(source, good._replace(path="toy/file.xz"))
    assert lzma.open(packed).read() == BODY and is_sound(good._replace(path="toy/file.xz"))
    for wrong in (BODY[:-1], BODY + b"x", b"x" + BODY[1:], b""):
        source.write_bytes(wrong)
        with pytest.raises(CatalogError, match="expected"):
            install_file(source, good)
        assert names(data) == ["toy/a/file", "toy/file.xz"] and (data / good.path).read_bytes() == BODY
    with pytest.raises(OSError):
        install_file(tmp_path / "nowhere", good)
    assert names(data) == ["toy/a/file", "toy/file.xz"] and is_sound(good)


# ---- lines

@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 3000), max_size=8), before=st.integers(0, 4000), honest=st.booleans(), know=st.booleans())
def test_a_line_that_is_cut_anywhere(tmp_path_factory, cuts, before, honest, know):
    "Whatever was there before and wherever the line is cut: the right bytes come, and none twice where the server understands ranges."
    body = BODY[:4000]
    with Server(("127.0.0.1", 0), Handler) as server:
        server.log, server.routes = [], {"/file": (ranged if honest else plain)(body, cuts)}
        threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
        os.environ["no_proxy"] = "127.0.0.1"
        part = tmp_path_factory.mktemp("cut") / "file.part"
        if before:
            part.write_bytes(body[:before])
        try:
            for call in range(4):                       # three attempts in a row without a byte end a call, not the download
                try:
                    one_piece = download(server.address(), part, 4000, 4000 if know else None, pause=0)
                    break
                except CatalogError:
                    assert all(part.read_bytes() == body[:part.stat().st_size] for part in [part] if part.exists())
        finally:
            server.shutdown()
        assert part.read_bytes() == body
        if honest and (know or before < 4000):
            starts = [int(asked[6:-1]) if asked else 0 for asked in server.ranges()]
            assert starts == sorted(starts) and (not starts or starts[0] == before)
        assert one_piece == (not before and len(server.log) == 1)


def test_a_cut_download_goes_on_in_the_next_call(server, data):
    server.routes["/file"] = ranged(BODY, [50_000, 0, 0, 0, 70_000])
    with pytest.raises(CatalogError, match="interrupted; 50000 bytes are kept"):
        get(toy(server), pause=0)
    assert names(data) == ["toy/file.part"] and not is_sound(toy(server).files[0])
    assert get(toy(server), pause=0)[0].read_bytes() == BODY
    assert server.ranges() == [None, *["bytes=50000-"] * 4, "bytes=120000-"] and names(data) == ["toy/file"]
    assert get(toy(server)) == [] and len(server.log) == 6


def test_three_attempts_without_new_bytes_end_a_resumed_download(server, data):
    server.routes["/file"] = ranged(BODY, [0] * 9)
    (data / "toy").mkdir(parents=True)
    (data / "toy" / "file.part").write_bytes(BODY[:50_000])
    with pytest.raises(CatalogError, match="interrupted; 50000 bytes are kept"):
        get(toy(server), pause=0)
    assert server.ranges() == ["bytes=50000-"] * 3


def test_bytes_after_a_part_was_refused_are_progress(server, data):
    "A part that the server calls too long is deleted, so the attempts are counted from its end no longer."
    server.routes["/file"] = in_turn(says(416, Content_Range="bytes */5"), *[ranged(BODY, [30_000])] * 4, ranged(BODY))
    (data / "toy").mkdir(parents=True)
    (data / "toy" / "file.part").write_bytes(BODY[:150_000])
    assert get(toy(server), pause=0)[0].read_bytes() == BODY


def test_a_part_of_unknown_place_before_there_is_one(server, data):
    strange = lambda handler: (handler.head(206, Content_Range="around the middle", Content_Length=3), handler.wfile.write(b"xyz"))
    server.routes["/file"] = in_turn(strange, ranged(BODY))
    assert get(toy(server), pause=0)[0].read_bytes() == BODY


def test_a_server_without_ranges(server, data):
    server.routes["/file"] = plain(BODY, [50_000])
    assert get(toy(server), pause=0)[0].read_bytes() == BODY
    assert server.ranges() == [None, "bytes=50000-"]


def test_a_part_that_is_whole_is_not_asked_for(server, data):
    (data / "toy").mkdir(parents=True)
    (data / "toy" / "file.part").write_bytes(BODY)
    assert get(toy(server))[0].read_bytes() == BODY and not server.log


@pytest.mark.parametrize("answer", [
    lambda handler: (handler.head(206, Content_Range=f"bytes 99000-199999/{len(BODY)}", Content_Length=101_000), handler.wfile.write(BODY[99_000:])),
    lambda handler: (handler.head(206, Content_Range="bytes 100000-199999/*", Content_Length=100_000), handler.wfile.write(BODY[100_000:])),
    lambda handler: (handler.head(206, Content_Range="bytes 100500-199999/200000", Content_Length=99_500), handler.wfile.write(BODY[100_500:])),
    lambda handler: (handler.head(206, Content_Range="around the middle", Content_Length=3), handler.wfile.write(b"xyz")),
    lambda handler: (handler.head(206, Content_Length=100_000), handler.wfile.write(BODY[100_000:])),
    says(416, Content_Range="bytes */5"), says(500), says(503), says(429), says(408),
    lambda handler: (handler.head(200, Transfer_Encoding="chunked"), handler.wfile.write(b"4\r\nabcd\r\n5\r\nab")),
    lambda handler: handler.wfile.write(b"good morning\r\n\r\n"),
    lambda handler: None,
])
def test_strange_answers_to_a_request_for_the_rest(server, data, answer):
    server.routes["/file"] = in_turn(answer, *[ranged(BODY)] * 3)
    (data / "toy").mkdir(parents=True)
    (data / "toy" / "file.part").write_bytes(BODY[:100_000])
    assert get(toy(server), pause=0)[0].read_bytes() == BODY and names(data) == ["toy/file"]
    assert server.ranges()[0] == "bytes=100000-" and len(server.log) <= 3


def test_a_server_that_never_tells_how_much(server, data):
    def endless(handler):
        handler.head(200)
        for _ in range(10_000):
            handler.wfile.write(BODY[:65536])

    def closing(handler):
        handler.head(200)
        handler.wfile.write(BODY)
    server.routes["/file"] = closing
    assert get(toy(server), pause=0)[0].read_bytes() == BODY
    (data / "toy" / "file").unlink()
    server.routes["/file"] = endless
    with pytest.raises(CatalogError, match="more than the 200000 bytes"):
        get(toy(server), pause=0)
    assert names(data) == []
    server.routes["/file"] = says(200, Content_Length=10**12)
    with pytest.raises(CatalogError, match="1000000000000 bytes, where at most 200000"):
        get(toy(server), pause=0)
    assert len(server.log) == 3


def test_wrong_bytes_are_refused(server, data):
    server.routes["/file"] = plain(b"x" + BODY[1:])
    with pytest.raises(CatalogError, match=f"expected the checksum {sha(BODY)}, got {sha(b'x' + BODY[1:])}"):
        get(toy(server), pause=0)
    assert names(data) == [] and len(server.log) == 1            # it came in one piece: to ask again would be to hope
    server.routes["/file"] = plain(BODY[:-1])
    with pytest.raises(CatalogError, match="expected the checksum"):
        get(toy(server), pause=0)
    assert names(data) == []


def test_a_file_that_changes_on_the_server_is_fetched_anew_once(server, data):
    old = b"old" + BODY[3:]
    server.routes["/file"] = in_turn(plain(old, [60_000]), ranged(BODY), ranged(BODY))
    assert get(toy(server), pause=0)[0].read_bytes() == BODY
    assert server.ranges() == [None, "bytes=60000-", None]
    (data / "toy" / "file").unlink()
    server.routes["/file"] = in_turn(plain(old, [60_000]), *[ranged(old)] * 5)
    with pytest.raises(CatalogError, match=sha(old)):
        get(toy(server), pause=0)
    assert server.ranges()[3:] == [None, "bytes=60000-", None] and names(data) == []


def test_redirects(server, data, tmp_path):
    for number in range(5):
        server.routes[f"/{number}"] = says((301, 302, 303, 307, 308)[number], Location=f"/{number + 1}")
    server.routes["/5"] = ranged(BODY, [1000])
    entry = toy(server)
    far = entry._replace(files=(entry.files[0]._replace(address=server.address("/0")),))
    assert get(far, pause=0)[0].read_bytes() == BODY
    assert server.log[5] == ("/5", None) and server.log[-1] == ("/5", "bytes=1000-")     # the range goes along
    (data / "toy" / "file").unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(BODY)                             # even if it would be the right one
    with Server(("127.0.0.1", 0), Handler) as other:
        other.log, other.routes = [], {"/file": plain(BODY)}
        threading.Thread(target=other.serve_forever, args=(.01,), daemon=True).start()
        for location, said in [(secret.as_uri(), "not allowed"), ("ftp://127.0.0.1/file", "not https"), (other.address(), "not https"),
                               ("gopher://x/", "not allowed"), ("/file", "infinite loop"), ("data:text/plain,x", "not allowed")]:
            server.routes["/file"], server.log[:] = says(302, Location=location), []
            with pytest.raises(CatalogError, match=said) as refused:
                get(entry, pause=0)
            assert names(data) == [] and "\n" not in str(refused.value) and len(server.log) <= 11
        assert not other.log
        other.shutdown()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "/etc/passwd", ""])
def test_only_the_web_is_asked(address):
    with pytest.raises(CatalogError, match="not an http or https address"):
        request_file(address, 0, 1)


def test_what_will_not_change_is_not_tried_again(server, data):
    for status in (400, 401, 403, 404, 410):
        server.routes["/file"], server.log[:] = says(status), []
        with pytest.raises(CatalogError, match=rf"{server.address()}: {status} \w+"):
            get(toy(server), pause=0)
        assert len(server.log) == 1
    server.routes["/file"], server.log[:] = says(500), []
    with pytest.raises(CatalogError, match="Internal Server Error; 0 bytes are kept"):
        get(toy(server), pause=0)
    assert len(server.log) == 3 and names(data) == []
    server.routes["/file"] = in_turn(says(500), says(503), ranged(BODY, [5]), says(500), says(502), ranged(BODY))
    assert get(toy(server), pause=0)[0].read_bytes() == BODY         # what brings a byte forward starts the count anew


def test_pauses_grow(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.routes["/file"] = says(500)
    with pytest.raises(CatalogError):
        get(toy(server), pause=1)
    assert pauses == [1, 2]


def test_a_silent_server_and_a_slow_one(server, data):
    def slow(handler):
        handler.head(200, Content_Length=1000)
        for start in range(0, 1000, 100):
            handler.wfile.write(BODY[start:start + 100])
            time.sleep(.05)

    def silent(handler):
        handler.head(206 if handler.start() else 200, Content_Length=1000 - handler.start(), Content_Range=f"bytes {handler.start()}-999/1000")
        handler.wfile.write(BODY[handler.start():300])
        server.stop.wait(10)
    server.stop, server.routes["/file"] = threading.Event(), slow
    assert get(toy(server, BODY[:1000]), timeout=.3, pause=0)[0].read_bytes() == BODY[:1000]       # longer than the timeout, never silent
    (data / "toy" / "file").unlink()
    server.routes["/file"], start = silent, time.monotonic()
    with pytest.raises(CatalogError, match="timed out; 300 bytes are kept"):
        get(toy(server, BODY[:1000]), timeout=.1, pause=0)
    assert time.monotonic() - start < 3 and names(data) == ["toy/file.part"]
    server.stop.set()


def test_nobody_answers(data):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))                     # bound and not listening: refused
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        with pytest.raises(CatalogError, match="refused; 0 bytes are kept"):
            get(Dataset("toy", "", (), "", "", (File("toy/x", 5, sha(b"hallo"), address),)), pause=0)


def test_the_progress_line(capsys, monkeypatch):
    show_progress("x", 5, 10)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_progress("x", 5_000_000, None)
    show_progress("x", 5_000_000, 10_000_000)
    show_progress("x", 10_000_000, 10_000_000)
    said = capsys.readouterr()
    assert said.out == "" and said.err == "\rx: 5.0 MB \rx: 5.0 of 10.0 MB \rx: 10.0 of 10.0 MB\n"


def test_a_file_known_by_its_git_name_alone(server, data):
    git = hashlib.sha1(b"blob %d\0" % len(BODY) + BODY).hexdigest()
    entry = Dataset("toy", "", (), "", "", (File("toy/file", None, git, server.address()),))
    server.routes["/file"] = ranged(BODY, [30_000])
    assert get(entry, pause=0)[0].read_bytes() == BODY and verify(entry) == []
    (data / "toy" / "file").write_bytes(BODY + b"\n")
    assert git in verify(entry)[0]
    (data / "toy" / "copy").write_bytes(BODY)
    assert add(entry, data / "toy" / "copy") == [data / "toy" / "file"] and verify(entry) == []


# ---- archives

def tar(path, *entries, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, body, *kind in entries:
            info = tarfile.TarInfo(name)
            info.size = len(body) if not kind else 0
            if kind:
                info.type, info.linkname = kind[0], "good"
            archive.addfile(info, io.BytesIO(body))
    return path


def zipped(path, *entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body, *mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = (mode[0] if mode else stat.S_IFREG | 0o644) << 16
            archive.writestr(info, body)
    return path


ESCAPES = ["../evil", "/evil", "a/../../evil", "..", "a/..", "//evil", "C:/evil", "C:evil", "..\\evil", "\\evil", "a\\b", "/"]
LINKS = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, b"?"]


def refused(archive, tmp_path, said, limit=10**6):
    "The archive is refused, and nothing of it is anywhere."
    before = names(tmp_path)
    (tmp_path / "out" / "in").mkdir(parents=True)
    with pytest.raises(CatalogError, match=said):
        unpack_archive(archive, tmp_path / "out" / "in", limit)
    assert names(tmp_path) == before and not any((tmp_path / "out" / "in").iterdir()) and not Path("/evil").exists()
    shutil.rmtree(tmp_path / "out")


def test_honest_archives(tmp_path):
    body = {"README": b"", "data/train": BODY, "data/deep/er/..test": b"test", "data/été 雪.txt": b"\xff\0"}
    makers = [zipped, tar, lambda path, *entries: tar(path, *entries, mode="w"), lambda path, *entries: tar(path, *entries, mode="w:xz")]
    for number, make in enumerate(makers):
        unpack_archive(make(tmp_path / "a", *body.items()), tmp_path / str(number), 10**6)
        assert {name: (tmp_path / str(number) / name).read_bytes() for name in names(tmp_path / str(number))} == body
    with zipfile.ZipFile(tmp_path / "folders.zip", "w") as archive:
        archive.mkdir("empty")
        archive.writestr("full/file", b"x")
    unpack_archive(tmp_path / "folders.zip", tmp_path / "folders", 10)
    assert names(tmp_path / "folders") == ["full/file"] and stat.S_IMODE((tmp_path / "folders/full/file").stat().st_mode) & 0o111 == 0


@pytest.mark.parametrize("names", [("a", "./a"), ("a", "a/b"), ("a/b", "a"), ("a/./b", "a//b")])
def test_one_path_under_two_names(tmp_path, names):
    entries = [("good", b"good"), *((name, b"evil") for name in names)]
    refused(tar(tmp_path / "a.tgz", *entries), tmp_path, "occurs twice|is inside a file")
    refused(zipped(tmp_path / "a.zip", *entries), tmp_path, "occurs twice|is inside a file")


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_out(tmp_path, name):
    refused(tar(tmp_path / "a.tgz", ("good", b"good"), (name, b"evil")), tmp_path, "leads out of the folder")
    if not name.endswith("/"):
        refused(zipped(tmp_path / "a.zip", ("good", b"good"), (name, b"evil")), tmp_path, "leads out of the folder")


@pytest.mark.parametrize("kind", LINKS)
def test_links_and_devices(tmp_path, kind):
    if kind == b"?":
        for mode in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK):
            refused(zipped(tmp_path / "a.zip", ("good", b"good"), ("link", b"/etc", mode | 0o777), ("link/evil", b"evil")), tmp_path, "link or a device")
    else:
        refused(tar(tmp_path / "a.tgz", ("good", b"good"), ("link", b"", kind), ("link/evil", b"evil")), tmp_path, "link or a device")


def test_bombs(tmp_path):
    zeros = bytes(2 * 10**6)
    refused(zipped(tmp_path / "a.zip", ("good", b"good"), ("bomb", zeros)), tmp_path, "too large")
    refused(tar(tmp_path / "a.tgz", ("good", b"good"), ("bomb", zeros)), tmp_path, "too large|more than")
    many = [(f"part{number}", zeros[:2000]) for number in range(600)]
    refused(zipped(tmp_path / "b.zip", *many), tmp_path, "too large")
    refused(tar(tmp_path / "b.tgz", *many), tmp_path, "too large|more than")
    refused(tar(tmp_path / "c.tgz", ("good", b"one"), ("good", b"two")), tmp_path, "occurs twice")
    (tmp_path / "d.tgz").write_bytes(gzip.compress(b"".join(tarfile.TarInfo(f"{n}").tobuf() for n in range(3000)), 1))
    refused(tmp_path / "d.tgz", tmp_path, "more than")                # members of no size, and their headers
    with tarfile.open(tmp_path / "e.tgz", "w:gz", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 2 * 10**6}) as archive:
        archive.addfile(tarfile.TarInfo("good"))                      # the header alone is a bomb
    refused(tmp_path / "e.tgz", tmp_path, "more than")


def test_a_zip_file_whose_sizes_lie(tmp_path):
    data = bytearray(zipped(tmp_path / "a.zip", ("bomb", bytes(10**6))).read_bytes())
    small = (10).to_bytes(4, "little")
    for signature, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.index(signature) + at
        data[start:start + 4] = small
    (tmp_path / "a.zip").write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(CatalogError):
        unpack_archive(tmp_path / "a.zip", tmp_path / "out", 100)
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 10


@settings(deadline=None, max_examples=80)
@given(number=st.integers(0, 2), cut=st.none() | st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, .999), st.integers(1, 255)), max_size=3))
def test_damaged_archives(tmp_path_factory, number, cut, flips):
    "Whatever is changed in an archive: it is refused with our error, or what comes out lies in the folder and is no more than allowed."
    folder = tmp_path_factory.mktemp("damaged")
    make = (zipped, tar, lambda path, *entries: tar(path, *entries, mode="w"))[number]
    data = bytearray(make(folder / "a", ("data/train", BODY[:300]), ("data/test", b"test"), ("README", b"zero")).read_bytes())
    for where, change in flips:
        data[int(where * len(data))] ^= change
    (folder / "a").write_bytes(data[:None if cut is None else int(cut * len(data))])
    try:
        unpack_archive(folder / "a", folder / "out" / "in", 10**5)
        with candidates(folder / "a", 10**5) as paths:
            assert paths[0] == folder / "a"
    except CatalogError as error:
        assert str(error).startswith(str(folder / "a")) and len(str(error).splitlines()) == 1
    found = names(folder)
    assert found[0] == "a" and all(name.startswith("out/in/") for name in found[1:])
    assert sum((folder / name).stat().st_size for name in found[1:]) <= 10**5


def test_what_we_take_pythons_filter_takes_too(tmp_path):
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no data filter")
    for name in [*ESCAPES, "good", "a/b", "été", "...", ". ", "a/./b"]:
        info = tarfile.TarInfo(name)
        try:
            module.check_members([module.Member(name, 0, "file", None)], 10)
        except CatalogError:
            assert name in ESCAPES
        else:
            assert name not in ESCAPES and tarfile.data_filter(info, str(tmp_path)).name == name


def test_a_set_inside_an_archive(server, data):
    inside = tar(data.parent / "a.tgz", ("deep/train", BODY), ("LICENSE", b"do"), ("other", b"not asked for")).read_bytes()
    files = tuple(File(f"toy/{name}", len(body), sha(body), server.address(), 10**6) for name, body in (("train.txt", BODY), ("LICENSE", b"do")))
    entry = Dataset("toy", "", (), "", "", files)
    server.routes["/file"] = ranged(inside, [10_000])
    assert [path.read_bytes() for path in get(entry, pause=0)] == [BODY, b"do"]
    assert server.ranges() == [None, "bytes=10000-"] and names(data) == ["toy/LICENSE", "toy/train.txt"]    # one address, fetched once
    (data / "toy" / "LICENSE").unlink()
    evil = tar(data.parent / "b.tgz", ("LICENSE", b"do"), ("../train", BODY)).read_bytes()
    server.routes["/file"] = ranged(evil)
    with pytest.raises(CatalogError, match="leads out"):
        get(entry, pause=0)
    server.routes["/file"] = ranged(tar(data.parent / "c.tgz", ("LICENSE", b"da")).read_bytes())
    with pytest.raises(CatalogError, match=sha(b"do")):
        get(entry, pause=0)
    server.routes["/file"] = ranged(b"no archive at all")
    with pytest.raises(CatalogError, match=sha(b"do")):
        get(entry, pause=0)
    assert names(data) == ["toy/train.txt"]
    assert len(add(entry, data.parent / "a.tgz")) == 2 and verify(entry) == []
    for path in (data / "toy").glob("[A-Za-z]*"):
        path.unlink()
    folder = data.parent / "folder"                       # archives in a folder are looked into, and a bad one is passed by
    folder.mkdir()
    for name in ("a.tgz", "b.tgz"):
        (data.parent / name).rename(folder / name)
    assert len(add(entry, folder)) == 2 and verify(entry) == []


# ---- killed, and not alone

CHILD = """
import sys
from pathlib import Path
from rvnnbook.data.catalog import *
from rvnnbook.data.catalog import Dataset, File
size, checksum, address = int(sys.argv[2]), sys.argv[3], sys.argv[4]
file = File("toy/file", size, checksum, address)
if sys.argv[1] == "get":
    get(Dataset("toy", "", (), "", "", (file,)), pause=0)
while sys.argv[1] == "place":
    install_file(Path(address), file)
    print("placed", flush=True)
"""


def child(action, body, address):
    words = [sys.executable, "-c", CHILD, action, str(len(body)), sha(body), str(address)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_killed_in_mid_download(server, data):
    def held(handler):
        handler.head(200, Content_Length=len(BODY))
        handler.wfile.write(BODY[:90_000])
        handler.wfile.flush()
        server.stop.wait(20)
    server.stop, server.routes["/file"] = threading.Event(), held
    process, part = child("get", BODY, server.address()), data / "toy" / "file.part"
    for _ in range(1000):
        if part.exists() and part.stat().st_size >= 65536:
            break
        time.sleep(.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.stop.set()
    have = part.stat().st_size
    assert names(data) == ["toy/file.part"] and part.read_bytes() == BODY[:have] and have >= 65536
    server.routes["/file"] = ranged(BODY)
    assert get(toy(server), pause=0)[0].read_bytes() == BODY           # the lock of the dead is free
    assert server.ranges()[1:] == [f"bytes={have}-"] and names(data) == ["toy/file"]


def test_killed_while_a_file_is_put_in_place(tmp_path, data):
    "Whenever the kill comes, the file is whole."
    random, body, source = Random(1), Random(2).randbytes(2 * 10**6), tmp_path / "source"
    source.write_bytes(body)
    for turn in range(4):
        process = child("place", body, source)
        assert process.stdout.readline() == "placed\n"                # and now it is placed again and again
        time.sleep(random.uniform(0, .05))
        process.kill()
        process.communicate()
        assert (data / "toy" / "file").read_bytes() == body


def test_two_at_once_fetch_it_once(server, data):
    def slowly(handler):
        handler.head(200, Content_Length=len(BODY))
        for start in range(0, len(BODY), 50_000):
            handler.wfile.write(BODY[start:start + 50_000])
            time.sleep(.05)
    server.routes["/file"] = slowly
    processes = [child("get", BODY, server.address()) for _ in range(3)]
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert (data / "toy" / "file").read_bytes() == BODY and len(server.log) == 1 and names(data) == ["toy/file"]


def test_a_folder_that_cannot_be_written(data, capsys):
    data.parent.mkdir(exist_ok=True)
    data.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        with locked(find_dataset("listops")):
            pass
    assert main(["data", "get", "conjnli"]) == 1 and capsys.readouterr().err.startswith("rvnnbook: ")


# ---- files that are here already

def test_a_file_is_known_by_what_it_holds(tmp_path, data):
    one, two, twin = BODY[:5000], BODY[5000:9000], BODY[:5000]
    entry = Dataset("toy", "", (), "", "", tuple(File(f"toy/{name}", len(body), sha(body), None) for name, body in
                                                 (("one.txt", one), ("sub/two.txt", two), ("twin.txt", twin))))
    folder = tmp_path / "from"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b").write_bytes(two)
    (folder / "a.txt.xz").write_bytes(lzma.compress(one))
    (folder / "one.txt").write_bytes(one[:-1] + b"?")
    assert sorted(add(entry, folder / "deep" / "b")) == [data / "toy/sub/two.txt"]
    assert verify(entry) == [f"{data}/toy/one.txt: missing", f"{data}/toy/twin.txt: missing"] and len(present(entry)) == 1
    assert len(add(entry, folder)) == 3 and verify(entry) == []
    with pytest.raises(CatalogError, match=f"expected {sha(one)}, got {sha(one[:-1] + b'?')}"):
        add(entry, folder / "one.txt")
    (folder / "bomb.xz").write_bytes(lzma.compress(bytes(10**6)))
    with pytest.raises(CatalogError, match="no file of toy|more than"):
        add(entry, folder / "bomb.xz")
    assert len(add(entry, folder)) == 3
    with candidates(folder, 0) as paths:
        assert set(recognise(paths, entry.files).values()) == {folder / "a.txt.xz", folder / "deep" / "b"}


def test_a_packed_file_that_no_longer_opens_is_told(data):
    body = BODY[:5000]
    entry = Dataset("toy", "", (), "", "", (File("toy/one.xz", len(body), sha(body), None),))
    packed = data / "toy" / "one.xz"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(lzma.compress(body))
    assert verify(entry) == []
    for damaged in (packed.read_bytes()[:2000], b"no archive", b""):
        packed.write_bytes(damaged)
        line, = verify(entry)
        assert str(packed) in line


def test_files_of_unknown_checksums(tmp_path, data):
    entry = find_dataset("lra")
    folder = tmp_path / "release"
    (folder / "sub").mkdir(parents=True)
    (folder / "a file.tsv").write_bytes(b"a")
    (folder / "sub" / "b.xz").write_bytes(lzma.compress(b"b"))
    with pytest.raises(ValueError, match="--unverified"):
        add(entry, folder)
    with pytest.raises(ValueError, match="leave --unverified out"):
        add(find_dataset("sst"), folder, unverified=True)
    assert not data.exists()
    add(entry, folder, unverified=True)
    assert names(data) == ["lra/SHA256SUMS", "lra/a file.tsv", "lra/sub/b"] and verify(entry) == [] and len(present(entry)) == 2
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=data / "lra", check=True)
    (tmp_path / "c").write_bytes(b"c")
    add(entry, tmp_path / "c", unverified=True)
    assert [file.path for file in recorded_checksum(entry)] == ["lra/a file.tsv", "lra/sub/b", "lra/c"]
    (data / "lra" / "c").write_bytes(b"C")
    (data / "lra" / "sub" / "b").unlink()
    assert [line.split(": ")[1].split()[0] for line in verify(entry)] == ["missing", "expected"]
    assert "2/3" in next(line for line in listing().splitlines() if line.startswith("lra "))
    (tmp_path / "line\nfeed").write_bytes(b"c")
    with pytest.raises(ValueError, match="rename"):
        add(entry, tmp_path / "line\nfeed", unverified=True)
    assert len(recorded_checksum(entry)) == 3


def test_everything_that_is_here_installs_and_is_checked(shared, data, capsys):
    for name in ("propositionallogic", "semparse", "django", "sst", "snli_break", "conjnli", "iwslt15_envi"):
        assert main(["data", "add", name, str(shared / name)]) == 0
        assert verify(find_dataset(name)) == [] and len(present(find_dataset(name))) == len(find_dataset(name).files)
    assert main(["data", "verify"]) == 0 and main(["data", "verify", "sst"]) == 0
    capsys.readouterr()
    path = data / "sst" / "trees" / "dev.txt"
    body = bytearray(path.read_bytes())
    body[1000] ^= 1
    path.write_bytes(body)
    (data / "django" / "all.code").unlink()
    assert main(["data", "verify", "conjnli"]) == 0
    for words in (["verify"], ["verify", "sst"], ["verify", "django"]):
        assert main(["data", *words]) == 1
    said = capsys.readouterr().err
    assert said.count("sst/trees/dev.txt: expected the checksum") == 2 and said.count("django/all.code: missing") == 2
    assert not [name for name in names(data) if name.startswith("new.") or name.endswith(".part")]


def test_the_official_test_of_listops(shared, server, data, capsys):
    packed = shared / "listops" / "test_d20s.tsv.xz"
    assert main(["data", "add", "listops", str(packed)]) == 0
    assert capsys.readouterr().out == f"installed as {official_path()}\n" and verify(find_dataset("listops")) == []
    assert lzma.open(official_path()).read() == lzma.open(packed).read()
    official_path().unlink()
    file = find_dataset("listops").files[0]
    server.routes["/file"] = ranged(lzma.open(packed).read(), [10**6])
    assert get(find_dataset("listops")._replace(files=(file._replace(address=server.address()),)), pause=0) == [official_path()]
    assert lzma.open(official_path()).read() == lzma.open(packed).read()


# ---- the command

@pytest.mark.parametrize("words, status, said", [
    (["get", "nothing_like_it"], 2, "no data set 'nothing_like_it'; the nearest name"), (["verify", "ssst"], 2, "'sst'"), (["add", "ssst", "x"], 2, "'sst'"),
    (["get", "lra"], 2, "cannot be downloaded from here. One archive"), (["get", "imdb"], 2, "Made, not published"),
    (["add", "sst", "nowhere"], 2, "nowhere: no such file"), (["add", "listops", "nowhere"], 2, "nowhere: no such file or folder"), (["add", "lra", "."], 2, "--unverified"),
    (["add", "sst", "tests/test_catalog.py"], 1, "no file of sst"), (["verify", "sst"], 1, "sst: not installed"),
    (["add", "sst", ".", "--unverified"], 2, "leave --unverified out"), (["add", "listops", "tests/test_catalog.py"], 2, "test_catalog.py:1:"),
])
def test_refusals_are_one_line(words, status, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["data", *words]) == status
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("rvnnbook: ") and shown.err.count("\n") == 1 and said in shown.err


@pytest.mark.parametrize("words", [[], ["get"], ["add", "sst"], ["list", "sst"], ["take", "sst"], ["get", "sst", "now"]])
def test_wrong_words(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["data", *words])
    assert left.value.code == 2


def test_get_and_list_by_command(server, data, monkeypatch, capsys):
    monkeypatch.setitem(catalog(), "toy", toy(server))
    server.routes["/file"] = ranged(BODY)
    assert main(["data", "get", "toy"]) == 0
    assert capsys.readouterr() == (f"toy: 1 of 1 files in {data / 'toy'}. Licence: none\n", "")         # no progress line off a terminal
    assert main(["data", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(catalog()) + 1 and re.fullmatch(r"toy +0\.20  yes +none +get", rows[-1])
    (data / "toy" / "file").write_bytes(BODY[1:])
    assert main(["data", "verify", "toy"]) == 1 and main(["data", "get", "toy"]) == 0 and main(["data", "verify", "toy"]) == 0
    server.routes["/file"] = says(404)
    (data / "toy" / "file").unlink()
    capsys.readouterr()
    assert main(["data", "get", "toy"]) == 1
    assert capsys.readouterr().err == f"rvnnbook: {server.address()}: 404 Not Found\n"


def test_stopped_by_the_keyboard(server, data, monkeypatch, capsys):
    monkeypatch.setitem(catalog(), "toy", toy(server))
    server.routes["/file"] = ranged(BODY)

    def interrupt(name, got, total):
        raise KeyboardInterrupt
    monkeypatch.setattr(module, "get", lambda entry: get(entry, report=interrupt))
    assert main(["data", "get", "toy"]) == 1
    assert "the downloaded part is kept" in capsys.readouterr().err and names(data) == ["toy/file.part"]


def test_the_table_is_written_one_file_a_line():
    lines = (ROOT / "rvnnbook" / "data" / "catalog.json").read_text(encoding="utf-8").splitlines()
    assert sum(len(entry.files) for entry in catalog().values()) == sum(bool(re.match(r' +\["', line)) for line in lines)
    assert len(json.loads("\n".join(lines))) == len(catalog())
