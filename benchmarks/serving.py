"""`kedge serve` under load: requests per second with pictures in batches and one by one, in one run.

    python benchmarks/serving.py [--seconds 60] [--clients 64] [--only demo]
    python benchmarks/serving.py --seconds 3 --only tiny --out ''            short; writes nothing

Galleries: `demo`, which `kedge demo` builds; `resnet18-224`, which has a ResNet-18 for pictures of 224 pixels; `tiny`.
Each client sends a picture, waits for the answer and sends the next; when told to come back (429), it does. Servers
with and without batches are asked in turns. Exits with 1 if there was any other error, or if the server's memory grew
by more than 5% between a sixth of the time and its end.
"""

from __future__ import annotations

import argparse
import asyncio
import io
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

RESULTS = Path(__file__).parent / "results" / "serving.json"
BATCHES = {"batches": 32, "one by one": 1}
GROWTH = 0.05


class Setting(NamedTuple):
    """What is asked, and with what."""

    gallery: Path
    pictures: list[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=GALLERIES, default=["demo", "resnet18-224"])
    parser.add_argument("--out", default=str(RESULTS))
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            setting = GALLERIES[name](Path(folder))
            rows[name] = compared(setting, given.clients, given.seconds)
        print(name, json.dumps(rows[name]), flush=True)
    if given.out:
        record = {"clients": given.clients, "seconds": given.seconds, "galleries": rows, "machine": describe()}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")
    wrong = [name for name, row in rows.items() for way in BATCHES if row[way]["errors"] or row[way]["grew"] > GROWTH]
    sys.exit(f"Errors or growing memory: {', '.join(wrong)}" if wrong else 0)


def compared(setting: Setting, clients: int, seconds: float) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for way, batch in BATCHES.items():
        with serving(setting.gallery, batch) as (process, port):
            rows[way] = asyncio.run(under_load(process.pid, port, setting.pictures, clients, seconds))
    speeds = [rows[way]["requests_per_second"] for way in BATCHES]
    return rows | {"batches / one by one": round(speeds[0] / speeds[1], 3)}


@contextmanager
def serving(gallery: Path, batch: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "kedge", "serve", str(gallery), "--port", "0", "--batch", str(batch)]
    log = gallery.parent / f"serve-{batch}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, text=True)
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


async def under_load(pid: int, port: int, pictures: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    await first_answer(port, pictures[0])
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
            status, body = await ask(reader, writer, pictures[turn % len(pictures)])
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


async def first_answer(port: int, picture: bytes) -> None:
    """The server says where it is before it is ready."""
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status, _ = await ask(reader, writer, picture)
            writer.close()
            if status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("The server does not answer.")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, picture: bytes) -> tuple[int, bytes]:
    """By hand: with two cores for both, a client that costs little is half the benchmark."""
    head = (
        f"POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(picture)}"
    )
    writer.write(f"{head}\r\n\r\n".encode() + picture)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return int(answer[9:12]), await reader.readexactly(length)


def memory_of(pid: int) -> int:
    with Path(f"/proc/{pid}/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def demo_gallery(folder: Path) -> Setting:
    kedge("demo", "--folder", folder, "recipe.epochs=1")
    return Setting(folder / "gallery", [file.read_bytes() for file in sorted((folder / "queries").rglob("*.png"))])


def random_gallery(folder: Path, encoder: str, size: int) -> Setting:
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
    pictures = []
    for _ in range(20):
        stream = io.BytesIO()
        rough = Image.fromarray(chance.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        rough.resize((size, size), Image.Resampling.BICUBIC).save(stream, "PNG")
        pictures.append(stream.getvalue())
    return Setting(gallery.path, pictures)


GALLERIES = {
    "demo": demo_gallery,
    "resnet18-224": lambda folder: random_gallery(folder, "resnet18", 224),
    "tiny": lambda folder: random_gallery(folder, "resnet10", 28),
}

if __name__ == "__main__":
    main()
