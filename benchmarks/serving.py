"""`kedge serve` under load: requests per second in batches, one by one, and at another commit, in one run.

    python benchmarks/serving.py [--commit COMMIT] [--photos FOLDER] [--seconds 60] [--clients 64] [--only demo]
    python benchmarks/serving.py --seconds 3 --only tiny --out ''            short; writes nothing

Galleries: `demo`, which `kedge demo` builds; `efficientnet-224` and `resnet18-224`, whose encoders take images of 224
pixels, and which are asked with photos of FOLDER (*/*.jpg) or, without one, with random images; `tiny`. Each client
sends an image, waits for the answer and sends the next; when told to come back (429), it does. The servers are asked
one after the other; that of another commit serves a gallery of its own, made by it in the same way (what it needs
beside our requirements is found through PYTHONPATH). Exits with 1 if there was any other error, or if a server's memory
grew by more than 5% between a sixth of the time and its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.reproduce.machine import describe
from runs import kedge

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "serving.json"
GROWTH = 0.05


class Server(NamedTuple):
    """A source of Kedge, and how many images share a batch."""

    source: Path
    batch: int = 32

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.source), os.environ.get("PYTHONPATH", "")])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=GALLERIES, default=["demo", "efficientnet-224", "resnet18-224"])
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", help="to compare with")
    parser.add_argument("--photos", type=Path, help="class folders of photos to ask with")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:  # in a process of the Kedge that is to serve it
        GALLERIES[given.only[0]](given.make)
        return
    rows: dict[str, Any] = {}
    photos = [] if given.photos is None else sorted(given.photos.glob("*/*.jpg"))
    with tempfile.TemporaryDirectory() as scratch, source_of(given.commit, Path(scratch)) as then:
        servers = {"batches": Server(ROOT / "src"), "one by one": Server(ROOT / "src", 1)}
        servers |= {"then": Server(then)} if then else {}
        for name in given.only:
            rows[name] = compared(name, servers, Path(scratch, name), photos, given.clients, given.seconds)
            print(name, json.dumps(rows[name]), flush=True)
    if given.out:
        record = {"clients": given.clients, "seconds": given.seconds, "photos": len(photos), "then": given.commit}
        Path(given.out).write_text(json.dumps({**record, "galleries": rows, "machine": describe()}, indent=1) + "\n")
    judged = ((name, row[way]) for name, row in rows.items() for way in ("batches", "one by one"))
    wrong = {name for name, row in judged if row["errors"] or row["grew"] > GROWTH}
    sys.exit(f"Errors or growing memory: {', '.join(sorted(wrong))}" if wrong else 0)


@contextmanager
def source_of(commit: str | None, scratch: Path) -> Iterator[Path | None]:
    """The source of another commit; None without one."""
    if commit is None:
        yield None
        return
    other = scratch / "other"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, commit], cwd=ROOT, check=True)
    try:
        yield other / "src"
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)


def compared(
    name: str, servers: dict[str, Server], folder: Path, photos: list[Path], clients: int, seconds: float
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for way, server in servers.items():
        made = folder / server.source.parent.name
        if not made.exists():
            made.mkdir(parents=True)
            make = [sys.executable, __file__, "--make", made, "--only", name]
            subprocess.run(make, check=True, env=server.environment, stderr=subprocess.DEVNULL)
        taken = photos[:: max(1, len(photos) // 20)] if name != "demo" else []
        images = [file.read_bytes() for file in taken or sorted((made / "queries").rglob("*.png"))]
        with serving(made / "gallery", server) as (process, port):
            rows[way] = asyncio.run(under_load(process.pid, port, images, clients, seconds))
    speed = {way: row["requests_per_second"] for way, row in rows.items()}
    return rows | {f"batches / {way}": round(speed["batches"] / speed[way], 3) for way in speed if way != "batches"}


@contextmanager
def serving(gallery: Path, server: Server) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "kedge", "serve", str(gallery), "--port", "0", "--batch", str(server.batch)]
    log = gallery.parent / f"serve-{server.batch}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, text=True, env=server.environment)
    try:
        while "The API" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield process, int(log.read_text().partition("127.0.0.1:")[2].partition("/")[0])
        process.send_signal(signal.SIGTERM)
        if process.wait(60):
            raise SystemExit(f"The server ended with {process.returncode}.\n{log.read_text()[-2000:]}")
    finally:
        process.kill()


async def under_load(pid: int, port: int, images: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    await first_answer(port, images[0])
    times: list[float] = []
    busy = 0
    errors: list[str] = []
    begun = time.perf_counter()
    end = begun + seconds

    async def one(number: int) -> None:
        nonlocal busy
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        turn = number
        while time.perf_counter() < end:
            started = time.perf_counter()
            status, body = await ask(reader, writer, images[turn % len(images)])
            turn += clients
            if status == 200:
                times.append(time.perf_counter() - started)
            elif status == 429:
                busy += 1
                await asyncio.sleep(0.05)
            else:
                errors.append(f"{status} {body[:100]!r}")
        writer.close()

    async def watch() -> tuple[int, int]:
        await asyncio.sleep(seconds / 6)
        early = memory_of(pid)
        await asyncio.sleep(max(0, end - time.perf_counter() - 0.2))
        return early, memory_of(pid)

    watching = asyncio.create_task(watch())
    ended = await asyncio.gather(*(one(number) for number in range(clients)), return_exceptions=True)
    errors += [repr(error) for error in ended if error is not None]
    elapsed = time.perf_counter() - begun
    early, late = await watching
    hundredths = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    return {
        "requests_per_second": round(len(times) / elapsed, 1),
        "p50_ms": round(hundredths[49] * 1000, 1),
        "p99_ms": round(hundredths[98] * 1000, 1),
        "answers": len(times),
        "busy": busy,
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "grew": round(late / early - 1, 4),
        "memory_mib": round(late / 2**20),
    }


async def first_answer(port: int, image: bytes) -> None:
    """The server says where it is before it is ready."""
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status, _ = await ask(reader, writer, image)
            writer.close()
            if status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("The server does not answer.")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, image: bytes) -> tuple[int, bytes]:
    """By hand: with two cores for both, a client that costs little is half the benchmark."""
    head = f"POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(image)}"
    writer.write(f"{head}\r\n\r\n".encode() + image)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return int(answer[9:12]), await reader.readexactly(length)


def memory_of(pid: int) -> int:
    with Path(f"/proc/{pid}/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def demo_gallery(folder: Path) -> None:
    kedge("demo", "--folder", folder, "recipe.epochs=1")


def random_gallery(folder: Path, encoder: str, size: int) -> None:
    """Weights do not matter for the time it takes."""
    chance = np.random.default_rng(0)
    built = build_encoder(encoder, image_size=size)
    anchors = torch.from_numpy(chance.normal(size=(10, built.dim)).astype(np.float32))
    names = [f"class {number}" for number in range(10)]
    model = Model(built, anchors=anchors, classes=names, preprocessing=Preprocessing(size=size))
    gallery = Gallery.create(folder / "gallery", model)
    labels = [names[row % 10] for row in range(5000)]
    gallery.add_embeddings(chance.normal(size=(5000, built.dim)).astype(np.float32), labels=labels)
    gallery.optimize()
    (folder / "queries").mkdir()
    for number in range(20):
        rough = Image.fromarray(chance.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        rough.resize((size, size), Image.Resampling.BICUBIC).save(folder / "queries" / f"{number}.png")


GALLERIES = {
    "demo": demo_gallery,
    "efficientnet-224": lambda folder: random_gallery(folder, "timm:efficientnet_lite0", 224),
    "resnet18-224": lambda folder: random_gallery(folder, "resnet18", 224),
    "tiny": lambda folder: random_gallery(folder, "resnet10", 28),
}

if __name__ == "__main__":
    main()
