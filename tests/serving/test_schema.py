"""Whatever the description allows, and much that it does not, is sent to a real server."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

OPERATIONS = 15
COUNTS = [pytest.param(100, id="100"), pytest.param(5000, id="5000", marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=["read only", "writable"])
def server(
    request: pytest.FixtureRequest,
    built: Path,
    serving_in_thread: Callable[..., AbstractContextManager[Any]],
    key: str,
    bearer: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, dict[str, str]]]:
    own = Path(shutil.copytree(built, tmp_path_factory.mktemp("described") / "gallery"))
    writable = request.param == "writable"
    with serving_in_thread(own, writable=writable, key=key if writable else None) as running:
        yield running.url, bearer if writable else {}


@pytest.mark.parametrize("count", COUNTS)
def test_no_answer_outside_the_description(
    server: tuple[str, dict[str, str]], count: int, query: Callable[..., bytes]
) -> None:
    url, headers = server
    described = schemathesis.openapi.from_url(f"{url}/api/v1/openapi.json", headers=headers)
    described.config.update(headers=headers)
    operations = [one.ok() for one in described.get_all_operations()]
    assert len(operations) == OPERATIONS
    asked: list[int] = []
    for operation in operations:
        ways: list[dict[str, Any]] = [{"generation_mode": mode} for mode in GenerationMode]
        takes_picture = operation.method.upper() == "POST"
        if takes_picture:
            ways.append({"body": query("level"), "media_type": "application/octet-stream"})
        for way in ways:
            # Bytes at random fit the description, but are hardly ever a picture.
            at_random = takes_picture and "body" not in way
            cases = operation.as_strategy(**way)
            # Twice as many, since some operations have few ways to be asked.
            _ask(cases, 2 * count // (len(ways) * OPERATIONS), asked, at_random=at_random)
    assert len(asked) >= count
    assert set(asked) >= {200, 404, 422}


def _ask(cases: Any, count: int, asked: list[int], *, at_random: bool) -> None:
    excluded = [positive_data_acceptance] if at_random else []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        answer = case.call_and_validate(excluded_checks=excluded)
        asked.append(answer.status_code)

    with contextlib.suppress(Unsatisfiable):  # without parameters there is nothing that could be wrong
        ask()
