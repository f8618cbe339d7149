"""CAM with a classifier: the expected anchor, its log loss, and memory that many classes do not fill."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.losses import CAMLoss, cam
from kedge.losses.cam import minimum_norm, repeller

LAMBDA = 4.0


def example(classes: int = 6, dim: int = 5, batch: int = 9) -> tuple[CAMLoss, Tensor, Tensor]:
    """A loss whose classifier has learned something, whose anchors are too close, and a batch."""
    generator = torch.Generator().manual_seed(classes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    loss = CAMLoss(classes, dim, discriminate=LAMBDA).double()
    assert loss.classifier is not None
    loss.classifier.weight.data.copy_(draw(classes, dim))
    loss.classifier.bias.data.copy_(draw(classes))
    loss.anchors.data.copy_(draw(classes, dim))
    labels = torch.randint(classes, (batch,), generator=generator)
    return loss, draw(batch, dim).requires_grad_(), labels


def expected_anchor(loss: CAMLoss, output: list[float]) -> tuple[list[float], list[float]]:
    """p and Σ p_j c_j, number by number."""
    assert loss.classifier is not None
    rows, biases, anchors = loss.classifier.weight.tolist(), loss.classifier.bias.tolist(), loss.anchors.tolist()
    logits = [
        sum(w * f for w, f in zip(row, output, strict=True)) + bias for row, bias in zip(rows, biases, strict=True)
    ]
    total = sum(math.exp(logit) for logit in logits)
    shares = [math.exp(logit) / total for logit in logits]
    mean = [sum(p * anchor[axis] for p, anchor in zip(shares, anchors, strict=True)) for axis in range(len(anchors[0]))]
    return shares, mean


def test_parts_equal_sums_over_images_and_classes() -> None:
    loss, outputs, labels = example()
    parts = loss.components(outputs, labels)
    told = pulled = 0.0
    anchors = loss.anchors.tolist()
    for output, label in zip(outputs.tolist(), labels.tolist(), strict=True):
        shares, mean = expected_anchor(loss, output)
        told -= math.log(shares[label])
        pulled += math.dist(mean, anchors[label]) ** 2 / 2
    assert parts["discriminate"].item() == pytest.approx(LAMBDA * told / len(labels), rel=1e-12)
    assert parts["attractor"].item() == pytest.approx(pulled / len(labels), rel=1e-12)
    assert loss(outputs, labels).item() == pytest.approx(sum(value.item() for value in parts.values()), rel=1e-12)


def test_a_mixed_image_has_the_parts_of_both_classes_by_their_shares() -> None:
    loss, outputs, labels = example()
    others = labels.roll(1)
    weights = torch.linspace(0, 1, len(labels), dtype=torch.float64)
    found = loss.mixed_components(outputs, labels, others, weights)
    for name in ("attractor", "discriminate"):
        each = [
            weight * loss.components(row, own)[name] + (1 - weight) * loss.components(row, other)[name]
            for row, own, other, weight in zip(
                outputs.split(1), labels.split(1), others.split(1), weights.tolist(), strict=True
            )
        ]
        torch.testing.assert_close(found[name], torch.stack(each).mean())


def test_embeddings_are_the_expected_anchors_and_classes_the_nearest() -> None:
    loss, outputs, _ = example()
    wanted = torch.tensor([expected_anchor(loss, output)[1] for output in outputs.tolist()], dtype=torch.float64)
    embeddings = loss.embed(outputs)
    torch.testing.assert_close(embeddings, wanted)
    assert loss.predict(embeddings).tolist() == torch.cdist(wanted, loss.anchors).argmin(1).tolist()


def test_gradients_reach_the_outputs_and_the_classifier() -> None:
    loss, outputs, labels = example()
    assert loss.classifier is not None
    weight, bias = loss.classifier.weight, loss.classifier.bias

    def value(outputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        changed = {"classifier.weight": weight, "classifier.bias": bias}
        return torch.func.functional_call(loss, changed, (outputs, labels))

    assert torch.autograd.gradcheck(value, (outputs, weight, bias))


def test_the_papers_three_parts_alone_move_the_anchors() -> None:
    loss, outputs, labels = example()
    loss(outputs, labels).backward()
    anchors = loss.anchors.detach().clone().requires_grad_()
    embeddings = loss.embed(outputs).detach()
    attracted = (embeddings - anchors[labels]).square().sum(1).mean() / 2
    (attracted + repeller(anchors, loss.margin) + minimum_norm(anchors, loss.min_norm)).backward()
    torch.testing.assert_close(loss.anchors.grad, anchors.grad)


@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_of_a_few_rows_give_the_same(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[Tensor]:
        loss, outputs, labels = example()
        if mixed:
            parts = loss.mixed_components(outputs, labels, labels.roll(1), torch.full((9,), 0.3, dtype=torch.float64))
        else:
            parts = loss.components(outputs, labels)
        torch.stack(list(parts.values())).sum().backward()
        assert loss.classifier is not None
        gradients = outputs.grad, loss.anchors.grad, loss.classifier.weight.grad
        return [*parts.values(), loss.embed(outputs), *(one for one in gradients if one is not None)]

    whole = found()
    rows: list[int] = []
    checkpoint = cam.checkpoint

    def counted(function: object, points: Tensor, *rest: Tensor, **options: bool) -> Tensor:
        rows.append(len(points))
        result: Tensor = checkpoint(function, points, *rest, **options)
        return result

    monkeypatch.setattr(cam, "checkpoint", counted)
    monkeypatch.setattr(cam, "_ENTRIES", 2 * 6 + 1)
    blocks = found()
    assert rows == [2, 2, 2, 2, 1]
    assert len(whole) == len(blocks) == 8
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_it_the_loss_is_the_papers() -> None:
    loss, plain = CAMLoss(5, 4, discriminate=0.0), CAMLoss(5, 4)
    assert loss.classifier is None
    outputs = torch.randn(7, 4)
    labels = torch.arange(7) % 5
    assert loss.components(outputs, labels) == plain.components(outputs, labels)
    assert loss.embed(outputs) is outputs
    assert set(loss.state_dict()) == {"anchors"}


def test_the_classifier_learns_as_fast_as_that_of_cross_entropy() -> None:
    assert CAMLoss(3, 4, discriminate=64.0).lr_mult == 1 / 64
    assert CAMLoss(3, 4, discriminate=0.5).lr_mult == 1.0  # no faster than the encoder
    assert CAMLoss(10, 4).lr_mult == 1.0


def test_the_encoder_sees_a_mean_of_attractor_and_log_loss() -> None:
    assert CAMLoss(10, 4, discriminate=LAMBDA).encoder_scale == 1 / (1 + LAMBDA)
    assert CAMLoss(10, 4).encoder_scale == 1.0


def test_half_precision_outputs_are_computed_in_full() -> None:
    loss = CAMLoss(4, 8, discriminate=LAMBDA)
    outputs = torch.randn(6, 8).bfloat16()
    labels = torch.arange(6) % 4
    with torch.autocast("cpu", torch.bfloat16):
        parts = loss.components(outputs, labels)
        assert loss.embed(outputs).dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in parts.values())


@pytest.mark.parametrize(
    ("wrong", "words"), [({"discriminate": -1.0}, "at least 0"), ({"normalize": 1}, "true or false")]
)
def test_settings_that_mean_nothing(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CAMLoss(3, 4, **wrong)  # type: ignore[arg-type]


def test_anchors_that_do_not_learn_stay() -> None:
    loss = CAMLoss(5, 3, discriminate=1.0, learn_anchors=False)
    before = loss.anchors.detach().clone()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    embeddings = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        parts = loss.components(embeddings, torch.arange(8) % 5)
        optimizer.zero_grad()
        sum(parts.values()).backward()
        optimizer.step()
    assert torch.equal(loss.anchors, before)
    assert parts["repeller"] == parts["minimum_norm"] == 0
    assert loss.classifier is not None
    assert loss.classifier.weight.abs().max() > 0


def test_a_class_is_predicted_as_the_model_will() -> None:
    loss = CAMLoss(2, 2, discriminate=LAMBDA, normalize=True)
    loss.anchors.data.copy_(torch.tensor([[4.0, 0.0], [0.0, 1.0]]))
    points = torch.tensor([[0.5, 0.4], [0.4, 0.5]])
    assert loss.predict(points).tolist() == [0, 1]  # by direction; by distance both are nearer to the short anchor
    loss.normalize = False
    assert loss.predict(points).tolist() == [1, 1]
