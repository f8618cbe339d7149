"""Encoders: pictures in, embeddings out. A backbone (torchvision; timm and Hugging Face with extras), then a head."""

from __future__ import annotations

from kedge.encoders.backbones import NAMES, STEMS
from kedge.encoders.encoder import Encoder, build_encoder
from kedge.encoders.heads import HEADS
from kedge.encoders.published import fetch_weights, published_settings

__all__ = [
    "HEADS",
    "NAMES",
    "STEMS",
    "Encoder",
    "build_encoder",
    "fetch_weights",
    "published_settings",
]
