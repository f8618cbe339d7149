from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tiny: list[str]) -> list[str]:
    """The run of the other tests with an encoder of a tenth of the size, since it is trained here over and over."""
    others = [override for override in tiny if not override.startswith("encoder")]
    return [*others, "encoder=timm", "encoder.name=timm:test_resnet", "encoder.dim=8", "logger=none"]
