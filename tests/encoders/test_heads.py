from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.encoders.heads import GAIN, BoundedHead, L2NormHead, build_head


@pytest.mark.parametrize("offset", [0.0, 5.0, 500.0])
def test_bounded_input_has_bounded_curvature(offset: float) -> None:
    torch.manual_seed(0)
    head = BoundedHead(64, 8).train()
    # one strong common direction: the worst case for the largest eigenvalue
    features = offset + torch.randn(256, 1) * torch.rand(64) * 40 + torch.randn(256, 64) * 0.1
    seen: list[torch.Tensor] = []
    head.linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    head(features)
    moment = seen[0].double().T @ seen[0].double() / len(features)
    largest = torch.linalg.eigvalsh(moment)[-1].item()
    assert 0.5 * GAIN**2 < largest <= GAIN**2 * (1 + 1e-6)


def test_bounded_matches_the_formula() -> None:
    head = BoundedHead(6, 3).train()
    nn.init.normal_(head.linear.weight)
    features = torch.randn(10, 6) * 7 + 3
    standard = (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-5).sqrt()
    expected = standard * (3.0 / 6**0.5) @ head.linear.weight.T + head.linear.bias
    torch.testing.assert_close(head(features), expected)


def test_bounded_starts_at_zero_and_learns() -> None:
    head = BoundedHead(16, 4)
    output = head(torch.randn(8, 16))
    assert torch.equal(output, torch.zeros(8, 4))
    (output - 1).square().sum().backward()
    assert head.linear.weight.grad.abs().sum() > 0
    assert [name for name, _ in head.named_parameters()] == ["linear.weight", "linear.bias"]


def test_bounded_trains_on_one_image() -> None:
    head = BoundedHead(5, 2).train()
    nn.init.normal_(head.linear.weight)
    for _ in range(50):
        head(torch.randn(32, 5) * 2 + 1)
    before = {name: value.clone() for name, value in head.norm.state_dict().items()}
    one = torch.randn(1, 5)
    output = head(one)
    output.sum().backward()
    assert output.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in head.norm.state_dict().items())
    torch.testing.assert_close(output, head.eval()(one))


def test_bounded_compiles() -> None:
    head = BoundedHead(5, 2).train()
    nn.init.normal_(head.linear.weight)
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    for size in (4, 1, 7):
        features = torch.randn(size, 5)
        torch.testing.assert_close(compiled(features), head(features))


def test_none_is_the_features_themselves_where_it_can_be() -> None:
    features = torch.randn(3, 6)
    assert build_head("none", 6, 6)(features) is features
    assert isinstance(build_head("none", 6, 4), nn.Linear)
    assert isinstance(build_head("linear", 6, 6), nn.Linear)


def test_unit_divides_by_the_length() -> None:
    head = build_head("unit", 6, 3)
    assert isinstance(head, L2NormHead)
    features = torch.randn(10, 6) * 7 + 3
    expected = torch.stack([row / row.square().sum().sqrt() for row in head.linear(features)])
    torch.testing.assert_close(head(features), expected)
    torch.testing.assert_close(head.double()(features.double()).norm(dim=1), torch.ones(10, dtype=torch.float64))
    assert [name for name, _ in head.named_parameters()] == ["linear.weight", "linear.bias"]


def test_on_the_sphere_distances_and_cosines_agree() -> None:
    points = build_head("unit", 6, 4)(torch.randn(30, 6))
    by_distance = torch.cdist(points, points).argsort(dim=1)
    by_cosine = (points @ points.T).argsort(dim=1, descending=True)
    assert torch.equal(by_distance[:, 1:], by_cosine[:, 1:])


def test_unit_without_a_direction() -> None:
    head = L2NormHead(6, 3)
    nn.init.zeros_(head.linear.bias)
    features = torch.randn(4, 6)
    features[1] = 0
    features.requires_grad_()
    output = head(features)
    assert torch.equal(output[1], torch.zeros(3))
    # A loss of cosines divides once more, by next to nothing.
    nn.functional.normalize(output, dim=1)[:, 0].sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    assert not features.grad[1].any()
    assert features.grad[0].any()
    assert head.linear.weight.grad.abs().max() < 100
    assert head(torch.full((1, 6), torch.nan)).isnan().all()


def test_unit_under_autocast() -> None:
    head = L2NormHead(64, 32)
    features = torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = head(features)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.norm(dim=1), torch.ones(16))
    assert (output - head(features)).norm(dim=1).max() < 0.05


def test_unit_compiles() -> None:
    head = L2NormHead(5, 2).train()
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    features = torch.randn(4, 5)
    torch.testing.assert_close(compiled(features), head(features))
