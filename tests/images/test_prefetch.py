from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kedge.images import prefetch


def test_order_and_bound() -> None:
    started: list[int] = []
    used = 0

    def decode(number: int) -> int:
        started.append(number)
        return number * number

    for position, square in enumerate(prefetch(decode, range(50), ahead=5, workers=3)):
        assert square == position * position
        used += 1
        assert max(started) <= used + 5, "no more than `ahead` items are decoded before they are asked for"
    assert used == 50


def test_an_error_comes_in_its_turn() -> None:
    def decode(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    results: Iterator[int] = prefetch(decode, range(10), ahead=8)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(results)


def test_what_is_pending_is_cancelled() -> None:
    release, decoded = threading.Event(), []

    def decode(number: int) -> int:
        if number:
            release.wait(60)
        decoded.append(number)
        return number

    results = prefetch(decode, range(100), ahead=50, workers=1)
    assert next(results) == 0
    threading.Timer(0.1, release.set).start()
    results.close()  # type: ignore[attr-defined]
    assert len(decoded) <= 2, "the one at work is finished, the others are not begun"
