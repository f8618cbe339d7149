"""A writer killed at any moment loses nothing that it was told is safe, and leaves nothing torn."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kedge.gallery import Gallery

DIM = 8

# Adds, removes and optimises for ever; says what it is about to do, and what was done.
WRITER = """
import json, sys
import numpy as np
from kedge.gallery import Gallery

path, seed, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = np.random.default_rng(seed)
gallery = Gallery.open(path)
mine = []

def say(**what):
    print(json.dumps(what), flush=True)

say(ready=True)
while True:
    count = int(chance.integers(1, 200))
    tag = int(chance.integers(1 << 30))
    vectors = chance.normal(size=(count, dim)).astype("float32")
    say(adding=count, tag=tag)
    ids = gallery.add_embeddings(vectors, labels=[str(tag % 7)] * count, metadata={"tag": [tag] * count})
    say(added=ids, tag=tag)
    mine += ids
    if chance.random() < 0.5:
        gone = [int(one) for one in chance.choice(mine, min(len(mine), 20), replace=False)]
        say(removing=gone)
        gallery.remove(gone)
        say(removed=gone)
        mine = [one for one in mine if one not in set(gone)]
    if chance.random() < 0.4:
        gallery.optimize()
        say(optimized=True)
"""


def kill_once(path: Path, chance: random.Random, present: set[int]) -> set[int]:
    """Start a writer, kill it at a random moment, and check what it leaves; returns the ids that are there."""
    command = [sys.executable, "-c", WRITER, str(path), str(chance.randrange(10**6)), str(DIM)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while "added" not in lines[-1]:
        lines.append(process.stdout.readline())
    time.sleep(chance.uniform(0.0, 0.6))
    process.send_signal(signal.SIGKILL)
    said = []
    for line in [*lines, *process.stdout.read().splitlines()]:
        try:
            said.append(json.loads(line))
        except ValueError:  # the last line may be cut
            break
    process.wait()

    must, open_tag, open_count, may_go = set(present), None, 0, set[int]()
    for what in said:
        if "adding" in what:
            open_tag, open_count = what["tag"], what["adding"]
        elif "added" in what:
            must |= set(what["added"])
            open_tag = None
        elif "removing" in what:
            may_go = set(what["removing"])
        elif "removed" in what:
            must -= may_go
            may_go = set()

    gallery = Gallery.open(path)
    table = gallery._table.columns(["id", "tag", "embedding"])
    found = dict(zip(table.column("id").to_pylist(), table.column("tag").to_pylist(), strict=True))
    assert len(found) == table.num_rows
    there = set(found)
    assert must - may_go <= there
    # What was under way is there as a whole or not at all.
    extra = there - must
    assert extra == {one for one in extra if found[one] == open_tag}
    assert len(extra) in (0, open_count)
    assert not may_go or may_go <= there or not may_go & there

    # The lists agree with the table, and the next writer starts at once.
    query = np.zeros(DIM, np.float32)
    hits = gallery.search(query, k=max(1, len(there)), method="brute_force")
    assert {hit.id for hit in hits} == there
    assert {hit.id for hit in gallery.search(query, k=max(1, len(there)), probes=10**6)} == there
    (new,) = gallery.add_embeddings(np.ones((1, DIM)), labels=["after"])
    assert new not in there
    return there | {new}


def run(tmp_path: Path, kills: int, seed: int) -> None:
    Gallery.create(tmp_path / "g", dim=DIM)
    chance = random.Random(seed)
    present: set[int] = set()
    for _ in range(kills):
        present = kill_once(tmp_path / "g", chance, present)
    assert len(present) > kills


def test_a_killed_writer(tmp_path: Path) -> None:
    run(tmp_path, kills=1, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_killed_writers(tmp_path: Path) -> None:
    run(tmp_path, kills=200, seed=1)
