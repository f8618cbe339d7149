"""The losses of pytorch-metric-learning, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.deps import require
from kedge.errors import ConfigError
from kedge.losses.base import RetrievalLoss, check_count, check_labels, in_full_precision

__all__ = ["MetricLearningLoss"]

_LIBRARY = "pytorch_metric_learning"
_BASES = {"losses": "BaseMetricLossFunction", "miners": "BaseMiner"}
_REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the library raises where something does not suit it."""
_LENGTH_MATTERS = {"AngularLoss", "LargeMarginSoftmaxLoss", "SphereFaceLoss"}
"""Losses that multiply by the length of an embedding."""


class MetricLearningLoss(RetrievalLoss):
    """A loss of pytorch-metric-learning and, if wanted, one of its miners, each by the name of its class.

    `arguments` and `miner_arguments` go to their constructors; the number of classes and the size of embeddings go
    to those that cannot do without. `name` is what models and tables call it: by default, the name of its class.
    Where the library keeps a proxy for each class (ArcFace, CosFace, ProxyAnchor …), it classifies by the most similar.
    With `projection`, the loss sees embeddings through two layers of its own of that output size, which no model keeps,
    as in SupCon; the model's embeddings are then divided by their length.

    Computed in at least float32, whatever the autocast dtype. Its parameters are trained, saved and resumed; what the
    library keeps elsewhere (the histogram of DynamicSoftMarginLoss) starts anew in a resumed run.

    >>> loss = MetricLearningLoss(num_classes=2, dim=2, loss="TripletMarginLoss", arguments={"margin": 0.5})
    >>> round(loss(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1])).item(), 4)
    1.1488
    """

    # On the sphere what looks at directions only, as the library's losses do by default. Not on the bounded head, which
    # starts at zero: that is no direction.
    heads: tuple[str, ...] = ("unit", "linear", "none")
    probe: ClassVar[dict[str, int] | None] = {"num_classes": 3, "dim": 4}

    def __init__(
        self,
        num_classes: int,
        dim: int,
        loss: str,
        arguments: Mapping[str, Any] | None = None,
        miner: str | None = None,
        miner_arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        if miner is None and miner_arguments:
            raise ConfigError(f"miner_arguments={dict(miner_arguments)} without a miner: name one, or leave them out.")
        self.dim = dim
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            check_count("projection", projection, otherwise="null")
            self.projection = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(inplace=True), nn.Linear(dim, projection))
            self.normalize = True
            dim = projection
        sizes = {"num_classes": num_classes, "embedding_size": dim, "descriptors_dim": dim}
        self.num_classes = num_classes
        self.loss = _built("losses", loss, arguments or {}, sizes)
        normalizes = getattr(getattr(self.loss, "distance", None), "normalize_embeddings", True)
        if loss in _LENGTH_MATTERS or not normalizes:
            self.heads = ("linear", "none", "unit")
        if projection is not None:
            self.heads = ("none", "linear")
        self.miner = None if miner is None else _built("miners", miner, miner_arguments or {}, {})
        self.name = loss if name is None else name
        # The library's own reducer, but asked here: between the single losses and it, images are mixed.
        self.reducer = self.loss.reducer
        self.loss.reducer = _module("reducers").DoNothingReducer()

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`loss`, the only part."""
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = self.projection(in_full_precision(embeddings))
            return self._reduced(self._single_losses(embeddings, labels), embeddings, labels)

    @property
    def classifier(self) -> tuple[Tensor, None] | None:
        """The proxies, of length 1, as weights of a linear classifier; None where classes have none of their own."""
        if isinstance(self.projection, nn.Sequential) or type(self.loss).__name__ in _LENGTH_MATTERS:
            return None
        proxies, weight = (getattr(self.loss, name, None) for name in ("proxies", "W"))
        proxies = proxies if weight is None else weight.T
        if proxies is None or proxies.shape != (self.num_classes, self.dim):
            return None
        return nn.functional.normalize(proxies.detach(), dim=1), None

    @property
    def predicts_classes(self) -> bool:
        """Whether the library keeps a proxy for each class."""
        return self.classifier is not None

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor | None:
        """The class with the most similar proxy, for each embedding; None where there are no proxies."""
        if self.classifier is None:
            return None
        with torch.autocast(embeddings.device.type, enabled=False):
            return (in_full_precision(embeddings) @ self.classifier[0].T).argmax(dim=1)

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """`loss` with both classes of each image, by their shares, where an image has a loss of its own."""
        if not self._takes_images_one_by_one:
            return super().mixed_components(embeddings, labels, others, weights)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = self.projection(in_full_precision(embeddings))
            parts, other_parts = (self._single_losses(embeddings, classes) for classes in (labels, others))
            # Of those images that the library leaves out, the loss is zero.
            own, other = (
                embeddings.new_zeros(len(embeddings)).index_put((part["loss"]["indices"],), part["loss"]["losses"])
                for part in (parts, other_parts)
            )
            mixed = torch.lerp(other, own, weights.to(own.dtype))
            rows = torch.arange(len(mixed), device=mixed.device)
            # Whatever else there is regularises embeddings or weights, and asks for no labels.
            parts["loss"] = {**parts["loss"], "losses": mixed, "indices": rows}
            return self._reduced(parts, embeddings, labels)

    @property
    def _takes_images_one_by_one(self) -> bool:
        """Whether an image's loss comes from its own class alone: the library then knows logits of classes.

        ProxyAnchorLoss knows them too, but sums up by proxies; its losses have other names.
        """
        return self.miner is None and hasattr(self.loss, "get_logits") and "loss" in self.loss.sub_loss_names()

    def _single_losses(self, embeddings: Tensor, labels: Tensor) -> dict[str, dict[str, Any]]:
        """What the library's loss says of each image, pair or triplet, before its reducer."""
        check_labels(labels, self.num_classes)
        with _one_sentence(f"The loss {self.name} cannot be computed"):
            mined = None if self.miner is None else self.miner(embeddings, labels)
            parts: dict[str, dict[str, Any]] = self.loss(embeddings, labels, mined)
        return parts

    def _reduced(self, parts: dict[str, dict[str, Any]], embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for name, part in parts.items():
            if isinstance(part["losses"], Tensor) and part["losses"].numel() == 0:
                parts[name] = self.loss.zero_loss()  # a mean over no pairs would be NaN
        value: Tensor = self.reducer(parts, embeddings, labels)
        return {"loss": value.reshape(())}


def _module(name: str) -> Any:
    return require(f"{_LIBRARY}.{name}", extra="league", purpose="This loss")


def _built(group: str, name: Any, arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The class called `name` in the library's `group`, built with these arguments and those sizes that it needs."""
    module = _module(group)
    base = getattr(module, _BASES[group])
    kinds = {key: kind for key, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}
    if name not in kinds or kinds[name] is base:
        near = difflib.get_close_matches(str(name), kinds, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        role = "loss" if group == "losses" else "miner"
        raise ConfigError(f"{role} must be the name of a class in {_LIBRARY}.{group}, found {name!r}.{hint}")
    required = _required_arguments(kinds[name])
    with _one_sentence(f"{name} cannot be built with {arguments}"):
        return kinds[name](**arguments, **{key: size for key, size in sizes.items() if key in required})


def _required_arguments(kind: type[Any]) -> set[str]:
    """Those of its constructor, including what it hands on to the constructors of its bases."""
    required: dict[str, bool] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            for parameter in parameters:
                required.setdefault(parameter.name, parameter.default is parameter.empty)
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
    return {name for name, is_required in required.items() if is_required}


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """What the library refuses, in one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"{what}: {reason.rstrip('.')}.") from error
