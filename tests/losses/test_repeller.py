from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kedge.losses import CAMLoss, cam
from kedge.losses.repeller import _PAIRS, repeller

MARGIN = 2.0


def scattered(classes: int, dim: int, scale: float = 1.5, seed: int = 0) -> Tensor:
    """Some pairs inside two margins, some outside."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(classes, dim, generator=generator, dtype=torch.float64) * scale / math.sqrt(dim) * 2


def double_loop(anchors: Tensor) -> tuple[float, Tensor]:
    value, gradient = 0.0, torch.zeros_like(anchors)
    for i, j in itertools.combinations(range(len(anchors)), 2):
        difference = anchors[i] - anchors[j]
        distance = math.hypot(*difference.tolist())
        if distance < 2 * MARGIN:
            value += 0.5 * (2 * MARGIN - distance) ** 2
            gradient[i] -= (2 * MARGIN - distance) * difference / distance
            gradient[j] += (2 * MARGIN - distance) * difference / distance
    return value, gradient


def both(anchors: Tensor, sample: int | None = None) -> tuple[Tensor, Tensor]:
    anchors = anchors.clone().requires_grad_()
    value = repeller(anchors, MARGIN, sample)
    return value.detach(), torch.autograd.grad(value, anchors)[0]


@pytest.fixture(params=[1, 20, None], ids=["row by row", "in blocks", "at once"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setitem(_PAIRS, "cpu", request.param)


@pytest.mark.parametrize(("classes", "dim"), [(1, 3), (2, 1), (4, 7), (9, 3), (23, 5), (30, 16)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_blocks_equal_a_double_loop(blocks: None, classes: int, dim: int, offset: float) -> None:
    anchors = scattered(classes, dim)
    value, gradient = double_loop(anchors)
    found, found_gradient = both(anchors + offset)
    tolerance = 1e-10 if offset == 0 else 1e-8
    assert found.item() == pytest.approx(value, abs=tolerance, rel=1e-12)
    assert (found_gradient - gradient).abs().max() < tolerance


@pytest.mark.parametrize("start", ["origin", "together", "two together"])
@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (10, 2), (21, 8)])
def test_blocks_leave_the_states_where_the_closed_form_is_undefined(
    blocks: None, start: str, classes: int, dim: int
) -> None:
    anchors = scattered(classes, dim).float() * 3
    if start == "two together":
        anchors[1] = anchors[0]
    else:
        anchors.fill_(0.0 if start == "origin" else 0.7)
    for _ in range(10):
        value, gradient = both(anchors)
        assert value.isfinite()
        assert gradient.isfinite().all()
        anchors = anchors - gradient * 0.5 / classes
    assert torch.pdist(anchors).min() > 0.05
    assert anchors.norm(dim=1).max() < 100


def test_coinciding_anchors_count_in_full(blocks: None) -> None:
    anchors = torch.ones(4, 6, dtype=torch.float64)
    anchors[3] += 50
    value, gradient = both(anchors)
    assert value.item() == pytest.approx(3 * 0.5 * (2 * MARGIN) ** 2, abs=1e-12)
    # What one of two feels, the other feels the other way, and the far one feels nothing.
    assert gradient.sum(dim=0).abs().max() < 1e-12
    assert (gradient[3] == 0).all()
    assert torch.pdist(gradient[:3]).min() > MARGIN / 2


def test_what_is_no_number_is_noticed(blocks: None) -> None:
    anchors = torch.eye(30) * 100
    assert both(anchors)[0] == 0
    anchors[17, 3] = math.nan
    assert both(anchors)[0].isnan()


def test_blocks_agree_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = torch.randn(130, 16, generator=torch.Generator().manual_seed(0))
    whole = both(anchors)
    monkeypatch.setitem(_PAIRS, "cpu", 3000)
    blocks = both(anchors)
    assert whole[0] > 0
    assert torch.allclose(blocks[0], whole[0], rtol=1e-6)
    assert torch.allclose(blocks[1], whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sample", [1, 2, 5])
def test_estimates_are_unbiased_over_all_draws(blocks: None, sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = scattered(7, 3)
    anchors[3] = anchors[5]
    exact = both(anchors)
    estimates = []
    for drawn in itertools.combinations(range(7), sample):
        monkeypatch.setattr(torch, "randperm", lambda *_, drawn=drawn, **__: torch.tensor(drawn))
        estimates.append(both(anchors, sample))
    values, gradients = (torch.stack(part) for part in zip(*estimates, strict=True))
    assert values.std() > 0
    assert (values.mean() - exact[0]).abs() < 1e-12
    assert (gradients.mean(dim=0) - exact[1]).abs().max() < 1e-12


def test_draws_average_to_the_exact_value_and_gradient() -> None:
    torch.manual_seed(0)
    anchors = scattered(40, 6)
    exact = both(anchors)
    values, gradients = (torch.stack(part) for part in zip(*(both(anchors, 8) for _ in range(1500)), strict=True))
    for estimates, truth in ((values, exact[0]), (gradients.flatten(1), exact[1].flatten())):
        error = (estimates.mean(dim=0) - truth).abs()
        assert (error <= 5 * estimates.std(dim=0) / math.sqrt(len(estimates)) + 1e-12).all()
    # And each draw is worth something: its gradient points where the exact one does.
    assert (torch.cosine_similarity(gradients.flatten(1), exact[1].flatten(), dim=1) > 0).float().mean() > 0.95


def test_draws_follow_the_global_generator() -> None:
    anchors = scattered(40, 6)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(both(anchors, 5)[0])
    assert draws[0] == draws[1] != draws[2]
    torch.manual_seed(1)
    assert both(anchors, 5)[0] != both(anchors, 5)[0]
    for enough in (40, 41):
        assert torch.equal(both(anchors, enough)[1], both(anchors)[1])


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@pytest.mark.parametrize("sample", [None, 3000])
def test_many_classes_need_no_matrix_of_pairs(sample: int | None) -> None:
    anchors = torch.randn(9000, 4, generator=torch.Generator().manual_seed(0)) * 40
    with Largest() as largest:
        value, gradient = both(anchors, sample)
    assert value > 0
    assert gradient.isfinite().all()
    assert largest.elements <= 2**22
    with Largest() as largest:
        cam.nearest(anchors, torch.cat([anchors] * 3))
    assert largest.elements <= 2048 * 16384


def test_the_loss_never_make_the_host_wait() -> None:
    """On meta tensors there is nothing to wait for: whoever asks for a value fails."""
    anchors, embeddings = (torch.zeros(rows, 16, device="meta", requires_grad=True) for rows in (100, 8))
    labels = torch.zeros(8, dtype=torch.long, device="meta")
    for sample in (None, 20):
        parts = [
            cam.attractor(embeddings, labels, anchors),
            cam.minimum_norm(anchors, 1.0),
            repeller(anchors, MARGIN, sample),
        ]
        torch.stack(parts).sum().backward()
        assert cam.nearest(embeddings, anchors).shape == (8,)


@pytest.mark.parametrize("sample", [None, 4])
def test_compiled_blocks_equal_eager_ones(blocks: None, sample: int | None) -> None:
    torch.compiler.reset()
    loss = CAMLoss(9, 3, repel_sample=sample).double()
    loss.anchors.data.copy_(scattered(9, 3))
    embeddings, labels = scattered(5, 3).requires_grad_(), torch.arange(5)
    torch.manual_seed(0)
    expected = torch.autograd.grad(loss(embeddings, labels), [embeddings, loss.anchors])
    torch.manual_seed(0)
    compiled = torch.compile(loss, backend="aot_eager")
    found = torch.autograd.grad(compiled(embeddings, labels), [embeddings, loss.anchors])
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
