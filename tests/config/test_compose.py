"""Configurations are composed for whoever asks, also for several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kedge.config.compose import compose


def test_threads_compose_side_by_side() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: compose([f"seed={seed}"]), range(24)))
    assert [config.seed for config in found] == list(range(24))
