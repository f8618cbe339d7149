from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from kedge.datasets import download
from kedge.datasets.download import Source, data_root, extract, fetch, obtain, read_lines
from kedge.errors import DataError, DownloadError

CONTENT = bytes(range(256)) * 4000


def test_fetches_verifies_and_needs_the_network_once(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    for _ in range(2):
        assert fetch(source, root / "deep").read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert leftovers() == []
    sha256 = Source(source.url, f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")
    assert fetch(sha256, root / "deep") == root / "deep" / "file.bin"


@pytest.mark.parametrize(
    ("cuts", "statuses", "ranges", "requests"),
    [
        ([100_000, 50_000], [], True, [None, "bytes=100000-", "bytes=150000-"]),
        ([100_000], [], False, [None, "bytes=100000-"]),
        ([], [503, 429], True, [None, None, None]),
    ],
    ids=["resumed", "a server without ranges", "busy"],
)
def test_broken_transfers(server, root: Path, cuts, statuses, ranges, requests) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after, server.statuses, server.ranges = cuts, statuses, ranges
    assert fetch(source, root).read_bytes() == CONTENT
    assert server.requests == requests


def test_a_server_that_keeps_breaking_off(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after = [1000] * 100
    with pytest.raises(DownloadError, match=r"broke off after .* save the file as .*file\.bin"):
        fetch(source, root)
    assert len(server.requests) == download.ATTEMPTS
    assert leftovers() == []
    assert not (root / "file.bin").exists()


def test_damaged_files(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    server.files["file.bin"] = CONTENT[::-1]
    with pytest.raises(DownloadError, match="arrived damaged"):
        fetch(source, root)
    assert leftovers() == []
    assert not (root / "file.bin").exists()
    (root / "file.bin").write_bytes(b"put there by hand")
    with pytest.raises(DownloadError, match=r"is damaged .* delete it"):
        fetch(source, root)


def test_what_cannot_be_fetched(server, root: Path, leftovers) -> None:
    with pytest.raises(DownloadError, match=r"absent\.bin could not be downloaded \(Not Found\)"):
        fetch(Source(f"{server.url}/absent.bin", "md5:0"), root)
    assert len(server.requests) == 1
    with pytest.raises(DownloadError, match=r"could not be downloaded .*save the file as .*x\.bin \(md5:1\)"):
        fetch(Source("http://127.0.0.1:9/x.bin", "md5:1"), root)
    with pytest.raises(DownloadError, match="unsupported hash"):
        fetch(Source(server.source("file.bin", CONTENT).url, "unheard-of:1"), root)
    assert leftovers() == []


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("prefix", ["", "top/"])
def test_extract(root: Path, pack, kind: str, prefix: str, leftovers) -> None:
    (root / "archive").write_bytes(pack({f"{prefix}a.txt": b"A", f"{prefix}deep/имя b.txt": b"B"}, kind))
    folder = extract(root / "archive", root / "out")
    assert (folder / "a.txt").read_bytes() == b"A"
    assert (folder / "deep" / "имя b.txt").read_bytes() == b"B"
    assert leftovers() == []


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["../../../evil", "/evil", "a/../../../../evil", "C:/evil"])
def test_nothing_is_written_outside(root: Path, pack, kind: str, name: str, leftovers) -> None:
    (root / "archive").write_bytes(pack({"top/fine": b"", name: b"!"}, kind))
    (root / "deep").mkdir()
    try:
        extract(root / "archive", root / "deep" / "out")
    except DownloadError:
        assert not (root / "deep" / "out").exists()
    assert [path for path in root.rglob("*evil") if root / "deep" / "out" not in path.parents] == []
    assert not Path("/evil").exists()
    assert leftovers() == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_to_elsewhere_and_devices_are_refused(root: Path, pack, kind: bytes) -> None:
    member = tarfile.TarInfo("top/link")
    member.type, member.linkname = kind, "../../outside"
    (root / "archive").write_bytes(pack({"top/fine": b""}, extra=(member,)))
    with pytest.raises(DownloadError, match="link"):
        extract(root / "archive", root / "out")
    assert not (root / "out").exists()


def test_links_in_zips_are_no_links(root: Path) -> None:
    with zipfile.ZipFile(root / "archive", "w") as archive:
        member = zipfile.ZipInfo("top/link")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "../../outside")
    assert not (extract(root / "archive", root / "out") / "link").is_symlink()


@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_damaged_archives(root: Path, pack, damage: str, leftovers) -> None:
    content = {"empty": b"", "text": b"not an archive", "cut": pack({"a": CONTENT})[:-500]}[damage]
    (root / "archive").write_bytes(content)
    with pytest.raises(DownloadError, match="could not be unpacked"):
        extract(root / "archive", root / "out")
    assert not (root / "out").exists()
    assert leftovers() == []


def test_a_faster_process_wins(root: Path, pack) -> None:
    (root / "archive").write_bytes(pack({"top/a": b"mine"}))
    (root / "out").mkdir()
    (root / "out" / "a").write_bytes(b"theirs")
    assert (extract(root / "archive", root / "out") / "a").read_bytes() == b"theirs"


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGKILL")
def test_killed_while_extracting(root: Path, pack, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = pack({f"top/{i}.txt": b"x" for i in range(50)})
    (root / "archive.tar.gz").write_bytes(archive)
    fork = multiprocessing.get_context("fork")
    written = fork.Semaphore(0)
    copy = tarfile.copyfileobj

    def slow(*streams: object, **options: object) -> None:
        copy(*streams, **options)
        written.release()
        time.sleep(0.05)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "copyfileobj", slow)
        child = fork.Process(target=extract, args=(root / "archive.tar.gz", root / "out"))
        child.start()
    for _ in range(5):
        assert written.acquire(timeout=60)
    child.kill()
    child.join()
    assert not (root / "out").exists()
    source = Source("http://127.0.0.1:9/archive.tar.gz", f"md5:{hashlib.md5(archive).hexdigest()}")
    assert len(os.listdir(obtain(source, root / "out"))) == 50  # noqa: PTH208


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_DATA", "/some/where")
    assert data_root() == Path("/some/where")
    assert data_root("~/mine") == Path.home() / "mine"
    monkeypatch.delenv("KEDGE_DATA")
    assert data_root() == Path.home() / ".cache" / "kedge" / "datasets"


def test_lines_that_are_not_there(root: Path) -> None:
    with pytest.raises(DataError, match=r"is incomplete \(meta/x\.txt"):
        read_lines(root, "meta/x.txt")
