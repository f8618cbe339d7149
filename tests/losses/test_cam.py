from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.losses import CAMLoss
from kedge.losses.cam import deterministic_gather, minimum_norm, repeller

# (classes, dim): fewer classes than dimensions, as many, more.
SHAPES = [(4, 7), (6, 6), (9, 3), (23, 5)]


def example(classes: int, dim: int, seed: int = 0, scale: float = 1.5) -> tuple[CAMLoss, Tensor, Tensor]:
    """A loss with scattered anchors (some pairs inside the margin, some norms below p) and a batch."""
    generator = torch.Generator().manual_seed(seed)
    loss = CAMLoss(classes, dim).double()
    scattered = torch.randn(classes, dim, generator=generator, dtype=torch.float64) * scale / math.sqrt(dim)
    scattered[0] *= 0.2
    loss.anchors.data.copy_(scattered)
    embeddings = torch.randn(11, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(classes, (11,), generator=generator)
    return loss, embeddings, labels


def double_loop(embeddings: Tensor, labels: Tensor, anchors: Tensor, m: float, p: float) -> dict[str, float]:
    points, centres = embeddings.tolist(), anchors.tolist()
    attract = sum(
        0.5 * sum((a - b) ** 2 for a, b in zip(point, centres[label], strict=True))
        for point, label in zip(points, labels.tolist(), strict=True)
    ) / len(points)
    repel = 0.0
    for first in range(len(centres)):
        for second in range(first + 1, len(centres)):
            repel += 0.5 * max(0.0, 2 * m - math.dist(centres[first], centres[second])) ** 2
    norm = sum(0.5 * max(0.0, p - math.hypot(*centre)) ** 2 for centre in centres)
    return {"attractor": attract, "repeller": repel, "minimum_norm": norm}


@pytest.mark.parametrize(("classes", "dim"), SHAPES)
def test_equals_a_naive_double_loop(classes: int, dim: int) -> None:
    loss, embeddings, labels = example(classes, dim)
    parts = loss.components(embeddings, labels)
    expected = double_loop(embeddings, labels, loss.anchors, 2.0, 1.0)
    assert expected["repeller"] > 0
    assert expected["minimum_norm"] > 0
    for name, value in expected.items():
        assert parts[name].item() == pytest.approx(value, abs=1e-10, rel=1e-12)
    assert loss(embeddings, labels).item() == pytest.approx(sum(expected.values()), abs=1e-10, rel=1e-12)


@pytest.mark.parametrize(("classes", "dim"), SHAPES)
def test_gradients_equal_the_closed_forms(classes: int, dim: int) -> None:
    loss, embeddings, labels = example(classes, dim, seed=1)
    loss(embeddings, labels).backward()
    anchors = loss.anchors.detach()
    count = len(labels)

    to_embeddings = (embeddings.detach() - anchors[labels]) / count
    expected = torch.zeros_like(anchors)
    for row, label in enumerate(labels.tolist()):
        expected[label] += (anchors[label] - embeddings.detach()[row]) / count
    for y in range(classes):
        for other in range(classes):
            if other != y:
                difference = anchors[y] - anchors[other]
                distance = difference.norm()
                if 2 * loss.margin - distance > 0:
                    expected[y] -= (2 * loss.margin - distance) * difference / distance
        norm = anchors[y].norm()
        if loss.min_norm - norm > 0:
            expected[y] -= (loss.min_norm - norm) * anchors[y] / norm

    assert embeddings.grad is not None
    assert loss.anchors.grad is not None
    assert (embeddings.grad - to_embeddings).abs().max() < 1e-10
    assert (loss.anchors.grad - expected).abs().max() < 1e-10


def test_gradcheck() -> None:
    anchors = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: repeller(c, 2.0), anchors)
    assert torch.autograd.gradcheck(lambda c: minimum_norm(c, 3.0), anchors)


@pytest.mark.parametrize("start", ["origin", "together", "two together"])
@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (5, 1), (3, 2), (10, 2), (10, 8), (40, 8), (100, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaves_the_states_where_the_closed_form_is_undefined(
    start: str, classes: int, dim: int, dtype: torch.dtype
) -> None:
    loss = CAMLoss(classes, dim).to(dtype)
    with torch.no_grad():
        if start == "origin":
            loss.anchors.zero_()
        elif start == "together":
            loss.anchors.fill_(0.7)
        else:
            loss.anchors[1] = loss.anchors[0]
    closest = torch.pdist(loss.anchors.detach()).min()
    assert closest == 0

    optimiser = torch.optim.SGD(loss.parameters(), lr=0.5 / classes)
    for _ in range(10):
        optimiser.zero_grad()
        (repeller(loss.anchors, loss.margin) + minimum_norm(loss.anchors, loss.min_norm)).backward()
        assert loss.anchors.grad is not None
        assert loss.anchors.grad.isfinite().all()
        optimiser.step()
    assert loss.anchors.isfinite().all()
    assert torch.pdist(loss.anchors.detach()).min() > 0.05
    assert loss.anchors.detach().norm(dim=1).max() < 100


def test_only_the_attractor_reaches_the_encoder() -> None:
    loss, embeddings, labels = example(6, 6)
    parts = loss.components(embeddings, labels)
    assert parts["attractor"].requires_grad
    gradient = torch.autograd.grad(parts["repeller"] + parts["minimum_norm"], embeddings, allow_unused=True)
    assert gradient == (None,)


def test_switches() -> None:
    on, embeddings, labels = example(6, 4)
    off = CAMLoss(6, 4, repel=False, keep_norm=False).double()
    off.anchors.data.copy_(on.anchors.data)
    parts = off.components(embeddings, labels)
    assert parts["repeller"] == 0
    assert parts["minimum_norm"] == 0
    assert off(embeddings, labels) == on.components(embeddings, labels)["attractor"]


def test_base_anchors_start_without_repulsion() -> None:
    loss = CAMLoss(10, 32)
    parts = loss.components(loss.anchors.detach(), torch.arange(10))
    assert parts["attractor"] == 0
    assert parts["repeller"].item() == pytest.approx(0, abs=1e-9)
    assert parts["minimum_norm"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_precision_under_autocast(dtype: torch.dtype) -> None:
    loss = CAMLoss(5, 4)
    embeddings = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 5
    expected = loss(embeddings.to(dtype).float(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(embeddings.to(dtype), labels)
        assert loss.predict(embeddings.to(dtype)).dtype == torch.int64
    assert value.dtype == torch.float32
    assert value == expected
    assert loss.anchors.dtype == torch.float32


def test_compiled_equals_eager() -> None:
    loss, embeddings, labels = example(9, 3)
    expected = torch.autograd.grad(loss(embeddings, labels), [embeddings, loss.anchors])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(embeddings, labels), [embeddings, loss.anchors])
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_predict_is_the_nearest_anchor() -> None:
    loss, embeddings, _ = example(23, 5)
    nearest = [
        min(range(23), key=lambda y: math.dist(point, loss.anchors[y].tolist())) for point in embeddings.tolist()
    ]
    assert loss.predict(embeddings).tolist() == nearest


def test_predict_in_parts_is_the_nearest_anchor_and_of_several_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, embeddings, _ = example(23, 5)
    whole = loss.predict(embeddings)
    monkeypatch.setattr("kedge.losses.cam._DISTANCES", 3 * 23)
    assert torch.equal(loss.predict(embeddings), whole)
    twice = CAMLoss(46, 5).double()
    twice.anchors.data.copy_(loss.anchors.data.repeat(2, 1))
    assert torch.equal(twice.predict(embeddings), whole)
    assert loss.predict(embeddings[:0]).shape == (0,)


def test_the_sample_reaches_the_repeller_alone() -> None:
    exact, embeddings, labels = example(23, 5)
    sampled = CAMLoss(23, 5, repel_sample=4).double()
    sampled.anchors.data.copy_(exact.anchors.data)
    torch.manual_seed(0)
    parts, estimated = exact.components(embeddings, labels), sampled.components(embeddings, labels)
    assert estimated["repeller"] != parts["repeller"]
    assert estimated["attractor"] == parts["attractor"]
    assert estimated["minimum_norm"] == parts["minimum_norm"]
    assert "repel_sample=4" in repr(sampled)


def test_bad_input() -> None:
    loss = CAMLoss(3, 4)
    points = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match=r"0 … 2, found 3"):
        loss(points, torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match=r"0 … 2, found -1"):
        loss(points, torch.tensor([0, -1]))
    with pytest.raises(ConfigError, match=r"batch × 4, found 2 × 5"):
        loss(torch.zeros(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="integers"):
        loss(points, torch.tensor([0.0, 1.0]))
    with pytest.raises(ConfigError, match="margin"):
        CAMLoss(3, 4, margin=0)
    with pytest.raises(ConfigError, match="min_norm"):
        CAMLoss(3, 4, min_norm=-1)
    for wrong in (0, -1, 2.5, True, "all"):
        with pytest.raises(ConfigError, match=r"repel_sample must be a whole number of at least 1, or null .* found"):
            CAMLoss(3, 4, repel_sample=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-5, 1e-6])
def test_near_anchors_part_along_their_difference(distance: float) -> None:
    """In float32, the difference of two anchors far from the origin keeps what digits it has."""
    anchors = torch.full((2, 8), 1.0)
    anchors[1, 0] += distance
    anchors.requires_grad_()
    repeller(anchors, 2.0).backward()
    assert anchors.grad is not None
    assert anchors.grad[1, 0].item() == pytest.approx(-4.0, rel=0.01)
    assert anchors.grad[1, 1:].abs().max() < 0.01


def test_an_anchor_whose_norm_underflows_leaves_the_origin() -> None:
    anchors = torch.full((1, 4), 1e-30, requires_grad=True)
    minimum_norm(anchors, 1.0).backward()
    assert anchors.grad is not None
    assert anchors.grad.norm().item() == pytest.approx(1.0, rel=1e-3)


def test_a_product_takes_the_same_anchors_as_a_lookup() -> None:
    loss, _, labels = example(9, 3)
    weights = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [deterministic_gather(labels, loss.anchors), torch.nn.functional.embedding(labels, loss.anchors)]
    assert torch.equal(*found)
    gradients = [torch.autograd.grad((one * weights).sum(), loss.anchors)[0] for one in found]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
