"""`kedge serve` beside clients that never finish: what is left for the ordinary ones, in one run.

    python benchmarks/slow_clients.py                      writes benchmarks/results/slow_clients.json
    python benchmarks/slow_clients.py --seconds 3 --rounds 1 --out ''

200 clients send one byte of a header per second, 64 send half a body and wait; closed by the server, they come back.
32 ordinary clients search with pictures, in turns without and with the others beside them; all share one address and
one server. `ratio` is the median over the rounds of requests per second with the others, divided by those without.
Exits with 1 if an ordinary request was refused; prints NOT MET if the ratio is below 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kedge.reproduce.machine import describe
from serving import GALLERIES, ask, first_answer, serving

RESULTS = Path(__file__).parent / "results" / "slow_clients.json"
TARGET = 0.9
WARM_SECONDS = 1.5
"""From the start of the others until all of them are connected."""
HEADER = b"GET /api/v1/info HTTP/1.1\r\nHost: localhost\r\nX-Nothing: " + b"x" * 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each half of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slow-headers", type=int, default=200)
    parser.add_argument("--half-bodies", type=int, default=64)
    parser.add_argument("--body", type=int, default=2**20, help="bytes that a half body promises")
    parser.add_argument("--gallery", choices=GALLERIES, default="tiny")
    parser.add_argument("--out", default=str(RESULTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = GALLERIES[given.gallery](Path(folder))
        with serving(setting.gallery, 32) as (_, port):
            asyncio.run(first_answer(port, setting.pictures[0]))
            rows = []
            for _ in range(given.rounds):
                row = {"without": asyncio.run(ordinary(port, setting.pictures, given.clients, given.seconds))}
                with others(port, given.slow_headers, given.half_bodies, given.body):
                    row["with"] = asyncio.run(ordinary(port, setting.pictures, given.clients, given.seconds))
                row["ratio"] = round(row["with"]["requests_per_second"] / row["without"]["requests_per_second"], 3)
                print(json.dumps(row), flush=True)
                rows.append(row)
    refused = sum(row[half]["refused"] for row in rows for half in ("without", "with"))
    ratio = statistics.median(row["ratio"] for row in rows)
    record = {**vars(given), "rounds": rows, "ratio": ratio, "refused": refused, "target": TARGET}
    del record["out"]
    print(json.dumps({"ratio": ratio, "refused": refused, "met": ratio >= TARGET and refused == 0}), flush=True)
    if ratio < TARGET:
        print(f"NOT MET: the ordinary clients kept {ratio:.0%} of their requests per second, {TARGET:.0%} are wanted.")
    if given.out:
        Path(given.out).write_text(json.dumps(record | {"machine": describe()}, indent=1) + "\n")
    sys.exit(f"{refused} ordinary requests were refused." if refused else 0)


async def ordinary(port: int, pictures: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Searches one after the other, over connections that stay open."""
    times: list[float] = []
    wrong: Counter[str] = Counter()
    begun = time.perf_counter()

    async def search(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        turn = number
        while time.perf_counter() < begun + seconds:
            started = time.perf_counter()
            status, _ = await ask(reader, writer, pictures[turn % len(pictures)])
            turn += clients
            if status == 200:
                times.append(time.perf_counter() - started)
            else:
                wrong[str(status)] += 1
        writer.close()

    ended = await asyncio.gather(*(search(number) for number in range(clients)), return_exceptions=True)
    wrong.update(type(error).__name__ for error in ended if error is not None)
    elapsed = time.perf_counter() - begun
    hundredths = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    return {
        "requests_per_second": round(len(times) / elapsed, 1),
        "p50_ms": round(hundredths[49] * 1000, 1),
        "p99_ms": round(hundredths[98] * 1000, 1),
        "answers": len(times),
        "refused": wrong.total(),
        "what": dict(wrong),
    }


@contextmanager
def others(port: int, slow_headers: int, half_bodies: int, body: int) -> Iterator[None]:
    """Clients that never finish, in a process of their own."""
    process = multiprocessing.get_context("spawn").Process(
        target=attack, args=(port, slow_headers, half_bodies, body), daemon=True
    )
    process.start()
    time.sleep(WARM_SECONDS)
    try:
        yield
    finally:
        if not process.is_alive():
            raise SystemExit("The clients that never finish have ended.")
        process.kill()
        process.join()


def attack(port: int, slow_headers: int, half_bodies: int, body: int) -> None:
    async def all_of_them() -> None:
        headers = [again(lambda: slow_header(port)) for _ in range(slow_headers)]
        bodies = [again(lambda: half_body(port, body)) for _ in range(half_bodies)]
        await asyncio.gather(*headers, *bodies)

    asyncio.run(all_of_them())


async def again(act: Any) -> None:
    """For ever; whoever is sent away waits a second."""
    while True:
        with suppress(OSError):
            await act()
        await asyncio.sleep(1)


async def slow_header(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError):
        for byte in HEADER:
            writer.write(bytes([byte]))
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 1)
                break  # it was answered or closed
    writer.close()


async def half_body(port: int, body: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {body}"
    writer.write(f"{head}\r\n\r\n".encode() + bytes(body // 2))
    with suppress(OSError):
        await reader.read(1)
    writer.close()


if __name__ == "__main__":
    main()
