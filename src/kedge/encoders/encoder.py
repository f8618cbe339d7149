"""The encoder: a backbone and a head, trained and saved as one module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from kedge.encoders.backbones import Backbone, build_backbone
from kedge.encoders.heads import build_head
from kedge.encoders.pretrained import load_weights, stored_spec
from kedge.encoders.transformers import HF, shown_name
from kedge.errors import ConfigError

__all__ = ["Encoder", "build_encoder"]


class Encoder(nn.Module):
    """Float images B x 3 x H x W in, embeddings B x ``dim`` out; made by :func:`build_encoder`."""

    def __init__(self, name: str, backbone: Backbone, *, dim: int, head: str) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.width = backbone.width
        self.stem = backbone.stem
        self.head_kind = head
        self.config = backbone.config
        self.text_source: str | None = None
        """Where the text tower is that shares the space of the features, ``hf:<model>``; None: there is none."""
        self.frozen = False
        self.backbone = backbone.network
        self.head = build_head(head, backbone.width, dim)

    def forward(self, images: Tensor, *, flip_tta: bool = False) -> Tensor:
        """Embed a batch of images."""
        return self.head(self.features(images, flip_tta=flip_tta))  # type: ignore[no-any-return]

    def features(self, images: Tensor, *, flip_tta: bool = False) -> Tensor:
        """Pooled features, the head's input; with ``flip_tta`` the mean over each image and its mirror image."""
        features: Tensor = self.backbone(images)
        return (features + self.backbone(images.flip(-1))) / 2 if flip_tta else features

    def freeze(self) -> Self:
        """Keep the backbone as it is: no gradients, and batch statistics that no longer move."""
        self.frozen = True
        self.backbone.requires_grad_(False)
        return self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training mode; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    @property
    def spec(self) -> dict[str, Any]:
        """The architecture, ready for JSON; :meth:`from_spec` builds it again."""
        spec = {"name": self.name, "dim": self.dim, "stem": self.stem, "head": self.head_kind}
        return spec if self.config is None else {**spec, "width": self.width, "config": self.config}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """The architecture that ``spec`` describes, with random weights; nothing is fetched for it."""
        options: dict[str, Any] = {}
        if spec["name"].startswith(HF):
            # Without them, the Hub would be asked for the one and a forward pass for the other.
            options = {"config": dict(spec["config"]), "width": _checked_dim(spec["width"])}
        backbone = build_backbone(spec["name"], stem=spec["stem"], **options)
        return cls(spec["name"], backbone, dim=_checked_dim(spec["dim"]), head=spec["head"])


def build_encoder(
    name: str = "resnet18",
    *,
    dim: int | None = None,
    stem: str = "auto",
    head: str = "linear",
    weights: str | Path | None = None,
    image_size: int | None = None,
) -> Encoder:
    """Build an encoder.

    Args:
        name: ``resnet10``, ``resnet18``, ``resnet50``, ``resnet101``, ``swin_t``, ``timm:<model>``, or a vision model
            of Hugging Face: ``hf:<organisation>/<model>`` or ``hf:<folder>``.
        dim: size of the embedding; by default the width of the backbone.
        stem: how a ResNet begins. ``imagenet``: 7 x 7, stride 2, then max-pooling; ``small``: 3 x 3,
            stride 1, no max-pooling; ``auto``: ``small`` for images of up to 64 pixels trained from scratch,
            otherwise ``imagenet``.
        head: ``none`` (the pooled features themselves), ``linear``, ``bounded`` (a linear layer for the paper's CAM),
            ``batchnorm`` (features of one scale, for a classifier on a frozen encoder), or ``unit`` (a linear layer,
            then L2-normalized: for losses of cosines).
        weights: ``None`` (random), ``default``, a torchvision name such as ``IMAGENET1K_V1``, a file
            (``.pth``, ``.pt``, ``.safetensors``), or the folder of a Kedge model or run; for Hugging Face's,
            ``default`` or a folder. A ``small`` stem keeps its first convolution random where the pretrained one has
            another shape.
        image_size: side of the images, where it is known.

    >>> encoder = build_encoder("resnet10", dim=64, image_size=32)
    >>> encoder.stem, encoder.width, encoder.dim
    ('small', 512, 64)
    """
    stored, own_name = stored_spec(weights), shown_name(name)
    if weights is not None and stem == "auto":
        stem = str(stored.get("stem", "imagenet"))
    config = stored.get("config") if stored.get("name") == own_name else None
    backbone = build_backbone(name, stem=stem, image_size=image_size, config=config)
    encoder = Encoder(own_name, backbone, dim=_checked_dim(backbone.width if dim is None else dim), head=head)
    if weights is not None:
        encoder.text_source = load_weights(name, backbone, weights)
    return encoder


def _checked_dim(dim: Any) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise ConfigError(f"dim must be a whole number of at least 1; found {dim!r}.")
    return dim
