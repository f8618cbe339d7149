from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kedge.datasets import download
from kedge.datasets.download import Source, data_root, extract, fetch, obtain, read_lines
from kedge.errors import DataError, DownloadError

CONTENT = bytes(range(256)) * 4000


def tar(members: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in extra or []:
            archive.addfile(member)
    return stream.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_fetches_verifies_and_needs_the_network_once(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    target = root / "deep" / "file.bin"
    for _ in range(2):
        assert fetch(source.url, target, checksum=source.checksum).read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert leftovers() == []


def test_sha256(server, root: Path) -> None:
    server.source("file.bin", CONTENT)
    checksum = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    assert fetch(f"{server.url}/file.bin", root / "file.bin", checksum=checksum).exists()


def test_broken_transfers_are_resumed(server, root: Path) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after = [100_000, 50_000]
    assert fetch(source.url, root / "file.bin", checksum=source.checksum).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=100000-", "bytes=150000-"]


def test_servers_without_ranges_start_over(server, root: Path) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after, server.ranges = [100_000], False
    assert fetch(source.url, root / "file.bin", checksum=source.checksum).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=100000-"]


def test_a_range_that_is_refused_starts_over(server, root: Path) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after, server.statuses = [100_000], [0, 416]
    assert fetch(source.url, root / "file.bin", checksum=source.checksum).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=100000-", None]


def test_a_server_that_keeps_breaking_off(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    server.cut_after = [1000] * 100
    with pytest.raises(DownloadError, match=r"broke off after .* put the file there by hand: .*file\.bin"):
        fetch(source.url, root / "file.bin", checksum=source.checksum)
    assert len(server.requests) == download.ATTEMPTS
    assert leftovers() == []
    assert not (root / "file.bin").exists()


def test_checksum_mismatch(server, root: Path, leftovers) -> None:
    source = server.source("file.bin", CONTENT)
    server.files["file.bin"] = CONTENT[::-1]
    with pytest.raises(DownloadError, match="arrived damaged"):
        fetch(source.url, root / "file.bin", checksum=source.checksum)
    assert leftovers() == []
    assert not (root / "file.bin").exists()


def test_a_damaged_file_put_there_by_hand(server, root: Path) -> None:
    source = server.source("file.bin", CONTENT)
    (root / "file.bin").write_bytes(b"no")
    with pytest.raises(DownloadError, match=r"is damaged .* delete it"):
        fetch(source.url, root / "file.bin", checksum=source.checksum)


def test_missing_pages_are_not_asked_for_again(server, root: Path, leftovers) -> None:
    with pytest.raises(DownloadError, match=r"absent\.bin could not be fetched \(Not Found\)"):
        fetch(f"{server.url}/absent.bin", root / "absent.bin", checksum="md5:0")
    assert len(server.requests) == 1
    assert leftovers() == []


def test_busy_servers_are_asked_again(server, root: Path) -> None:
    source = server.source("file.bin", CONTENT)
    server.statuses = [503, 429]
    assert fetch(source.url, root / "file.bin", checksum=source.checksum).exists()


def test_no_network(root: Path, leftovers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with pytest.raises(DownloadError, match=r"could not be fetched .*by hand: .*x\.bin \(md5:1\)"):
        fetch("http://127.0.0.1:9/x.bin", root / "x.bin", checksum="md5:1")
    assert leftovers() == []


def test_unknown_checksums_are_refused(server, root: Path) -> None:
    server.source("file.bin", CONTENT)
    with pytest.raises(DownloadError, match="md5: or sha256:"):
        fetch(f"{server.url}/file.bin", root / "file.bin", checksum="crc:1")


@pytest.mark.parametrize("pack", [tar, zipped])
@pytest.mark.parametrize("prefix", ["", "top/"])
def test_extract(root: Path, pack, prefix: str, leftovers) -> None:
    (root / "archive").write_bytes(pack({f"{prefix}a.txt": b"A", f"{prefix}deep/имя b.txt": b"B"}))
    folder = extract(root / "archive", root / "out")
    assert (folder / "a.txt").read_bytes() == b"A"
    assert (folder / "deep" / "имя b.txt").read_bytes() == b"B"
    assert leftovers() == []


@pytest.mark.parametrize("pack", [tar, zipped])
@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..\\evil", "C:/evil"])
def test_members_that_point_outside(root: Path, pack, name: str, leftovers) -> None:
    (root / "archive").write_bytes(pack({"top/fine": b"", name: b"!"}))
    with pytest.raises(DownloadError, match="points outside"):
        extract(root / "archive", root / "out")
    assert not (root / "out").exists()
    assert leftovers() == []
    assert not list(root.parent.rglob("evil"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(root: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("top/link")
    member.type, member.linkname = kind, "../../outside"
    (root / "archive").write_bytes(tar({"top/fine": b""}, [member]))
    with pytest.raises(DownloadError, match="link or a device"):
        extract(root / "archive", root / "out")


def test_links_in_zips_are_refused(root: Path) -> None:
    with zipfile.ZipFile(root / "archive", "w") as archive:
        member = zipfile.ZipInfo("top/link")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "../../outside")
    with pytest.raises(DownloadError, match="is a link"):
        extract(root / "archive", root / "out")


@pytest.mark.parametrize("content", [b"", b"not an archive", tar({"a": CONTENT})[:-500]])
def test_damaged_archives(root: Path, content: bytes, leftovers) -> None:
    (root / "archive").write_bytes(content)
    with pytest.raises(DownloadError, match="could not be unpacked"):
        extract(root / "archive", root / "out")
    assert not (root / "out").exists()
    assert leftovers() == []


def test_a_faster_process_wins(root: Path) -> None:
    (root / "archive").write_bytes(tar({"top/a": b"mine"}))
    (root / "out").mkdir()
    (root / "out" / "a").write_bytes(b"theirs")
    assert (extract(root / "archive", root / "out") / "a").read_bytes() == b"theirs"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_while_extracting(root: Path) -> None:
    (root / "archive.tar.gz").write_bytes(tar({f"top/{i}.txt": b"x" for i in range(50)}))
    script = f"""
import time
from pathlib import Path
from kedge.datasets import download
copy = download.shutil.copyfileobj
def slow(*streams):
    copy(*streams)
    print("one", flush=True)
    time.sleep(0.05)
download.shutil.copyfileobj = slow
download.extract({str(root / "archive.tar.gz")!r}, {str(root / "out")!r})
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == b"one\n"
        process.send_signal(signal.SIGKILL)
    assert not (root / "out").exists()
    archive = (root / "archive.tar.gz").read_bytes()
    folder = obtain(
        Source("http://127.0.0.1:9/archive.tar.gz", f"md5:{hashlib.md5(archive).hexdigest()}"), root / "out"
    )
    assert len(list(folder.iterdir())) == 50


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_DATA", "/some/where")
    assert data_root() == Path("/some/where")
    assert data_root("~/mine") == Path.home() / "mine"
    monkeypatch.delenv("KEDGE_DATA")
    assert data_root() == Path.home() / ".cache" / "kedge" / "datasets"


def test_lines_that_are_not_there(root: Path) -> None:
    with pytest.raises(DataError, match=r"is not whole \(meta/x\.txt"):
        read_lines(root, "meta/x.txt")
