"""Encoders: images in, embeddings out. A backbone (torchvision, timm, Hugging Face), then a head."""

from __future__ import annotations

from kedge.encoders.backbones import NAMES, STEMS
from kedge.encoders.encoder import Encoder, build_encoder
from kedge.encoders.heads import HEADS
from kedge.encoders.pretrained import DEFAULT_ENCODER, fetch_weights, pretrained_cfg, pretrained_preprocessing

__all__ = [
    "DEFAULT_ENCODER",
    "HEADS",
    "NAMES",
    "STEMS",
    "Encoder",
    "build_encoder",
    "fetch_weights",
    "pretrained_cfg",
    "pretrained_preprocessing",
]
