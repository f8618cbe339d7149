"""What Kedge's names are called in print."""

from __future__ import annotations

from kedge.evaluation.report import TITLES

__all__ = ["NAMES", "display"]

NAMES: dict[str, str] = {
    "resnet10": "ResNet-10",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "swin_t": "Swin-T",
    "cifar100": "CIFAR-100",
    "food101": "Food-101",
    "svhn": "SVHN",
    "tiny_imagenet": "Tiny ImageNet",
    "cross_entropy": "cross-entropy",
    "contrastive": "contrastive",
    "cam": "CAM",
    "arcface": "ArcFace",
    "cosface": "CosFace",
    "supcon": "SupCon",
    "multi_similarity": "multi-similarity",
    "proxy_anchor": "proxy anchor",
    "base": "base vectors",
    "two_stage": "two-stage",
    "knn1": "1-NN",
    **TITLES,
}


def display(name: str) -> str:
    """The name to show; an unknown one as it is.

    >>> display("resnet18"), display("my_loss")
    ('ResNet-18', 'my_loss')
    """
    return NAMES.get(name, name)
