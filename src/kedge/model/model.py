"""``Model``: what training leaves and search uses."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from kedge.encoders import DEFAULT_ENCODER, Encoder, build_encoder, pretrained_preprocessing
from kedge.encoders.backbones import TIMM
from kedge.encoders.text import EXAMPLE, TextTower
from kedge.encoders.transformers import HF
from kedge.errors import ConfigError
from kedge.images import Preprocessing
from kedge.losses.cam import posterior_mean
from kedge.model import hub
from kedge.model.calibration import Calibration
from kedge.model.inference import Inference
from kedge.model.inputs import ImageInput, pixel_batches, shape_text
from kedge.model.io import StoredEncoder, build_stored, read_description, read_weights, wrap_misfits, write_folder

__all__ = ["Classification", "Model", "Prediction", "Vectors"]


class Classification(str):
    """The class of an image: a string, equal to the class's name, that also has the model's `confidence` in it.

    >>> found = Classification("cat", 0.9)
    >>> found == "cat", found.confidence
    (True, 0.9)
    """

    confidence: float
    """From 0 to 1, see `Model.classify`."""

    def __new__(cls, name: str, confidence: float = math.nan) -> Self:
        """A name with a confidence."""
        self = super().__new__(cls, name)
        self.confidence = confidence
        return self

    def __repr__(self) -> str:
        return f"Classification({str(self)!r}, confidence={self.confidence:.3f})"


@dataclass(frozen=True)
class Prediction:
    """What a model says about N images."""

    names: list[str]
    """The class of each image."""
    indices: Tensor
    """Its row in ``Model.classes``, int64."""
    scores: Tensor
    """N x t, higher is nearer; see ``Model.scores``."""
    confidences: Tensor
    """The probability of each image's class, from 0 to 1; see ``Model.classify``."""


class Vectors(NamedTuple):
    """N images in the two spaces of a model."""

    embeddings: Tensor
    """N x dim: where the images of a class gather at its anchor."""
    features: Tensor
    """N x width: what the encoder saw, before head and anchors; compared by cosine."""


class Model:
    """An encoder with its anchors, classes and preprocessing.

    Args:
        encoder: embeds images; kept, not copied.
        anchors: one row per class (t x n): learned by CAM, or the class means of the training embeddings.
        classes: the t names, in the order of the anchors.
        preprocessing: how an image becomes the encoder's input.
        classifier: a linear layer n -> t, or its weight and bias, where the loss trained one.
        loss: the name of the loss it was trained with.
        posterior: whether an embedding is the expected anchor under the classifier (`CAMLoss.embed`).
        normalize: whether embeddings, and with them the anchors, have length 1: distances then rank as cosines do.
        calibration: how far from every training image, by cosine distance of the features, an image is unknown.
    """

    def __init__(
        self,
        encoder: Encoder | StoredEncoder,
        *,
        anchors: Tensor | None,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        classifier: nn.Linear | tuple[Tensor, Tensor | None] | None = None,
        loss: str = "cam",
        posterior: bool = False,
        normalize: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        self._encoder = encoder
        self._inference = Inference()
        self._text_tower: TextTower | None = None
        self.classes = tuple(classes)
        self.preprocessing = preprocessing
        self.loss = loss
        self.calibration = calibration
        if not all(isinstance(name, str) for name in self.classes) or len(set(self.classes)) < len(self.classes):
            raise ConfigError("classes must be names that all differ.")
        shape = len(self.classes), encoder.dim
        self._anchors = None if anchors is None else self._own("anchors", anchors, *shape)
        self.posterior, self.normalize = posterior, normalize
        if posterior and (anchors is None or classifier is None):
            raise ConfigError("posterior=True needs anchors and a classifier: the embedding is the expected anchor.")
        if normalize and not posterior and classifier is not None:
            raise ConfigError("normalize=True needs anchors to classify by: a classifier reads embeddings as they are.")
        self.classifier: tuple[Tensor, Tensor] | None = None
        if classifier is not None:
            if isinstance(classifier, nn.Linear):
                classifier = classifier.weight, classifier.bias
            weight = self._own("classifier weight", classifier[0], *shape)
            bias = weight.new_zeros(len(weight)) if classifier[1] is None else classifier[1]
            self.classifier = weight, self._own("classifier bias", bias, len(weight))

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:3]) + (", …" if len(self.classes) > 3 else "")
        classes = f"{len(self.classes):,} classes ({names})" if self.classes else "no classes"
        return f"Model({self.encoder_name}, {classes}, dim={self.dim}, loss={self.loss}, device={self.device})"

    @property
    def encoder(self) -> Encoder:
        """The network, built when it is first asked for where `load` was lazy."""
        if isinstance(self._encoder, StoredEncoder):
            self._encoder = self._encoder.build()
        return self._encoder

    @encoder.setter
    def encoder(self, encoder: Encoder) -> None:
        self._encoder = encoder

    @property
    def encoder_name(self) -> str:
        """Such as ``timm:tf_efficientnet_lite0``."""
        return self._encoder.name

    @property
    def dim(self) -> int:
        """Size of an embedding."""
        return self._encoder.dim

    @property
    def width(self) -> int:
        """Size of a feature vector."""
        return self._encoder.width

    @property
    def has_features(self) -> bool:
        """Whether features and embeddings are two spaces; without a head, an embedding is the features themselves."""
        return self.posterior or not isinstance(self._encoder.head, nn.Identity)

    @property
    def anchors(self) -> Tensor | None:
        """The anchors in the space of the embeddings, t x n."""
        return F.normalize(self._anchors, dim=1) if self.normalize and self._anchors is not None else self._anchors

    @anchors.setter
    def anchors(self, anchors: Tensor | None) -> None:
        self._anchors = anchors

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        encoder = self._encoder
        return encoder.device if isinstance(encoder, StoredEncoder) else next(encoder.parameters()).device

    def to(self, device: str | torch.device) -> Self:
        """Move to ``device``: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1`` ..."""
        target = _device(device)
        self._encoder.to(target)
        self._anchors = None if self._anchors is None else self._anchors.to(target)
        if self.classifier is not None:
            self.classifier = (self.classifier[0].to(target), self.classifier[1].to(target))
        return self

    @property
    def engine(self) -> str:
        """How the encoder runs on a CPU, in words; set it to choose.

        `auto` (the default, unless `$KEDGE_ENGINE` says otherwise): batch normalisation folded or fused, channels last.
        `onnxruntime`: a session of it (`kedge[onnx]`). `eager`: the encoder as it is. Embeddings are the same within
        1e-4 of their length.
        """
        return self._inference.describe(self.encoder)

    @engine.setter
    def engine(self, name: str) -> None:
        self._inference = Inference(name)

    def tune(self, batch_size: int = 1) -> str:
        """Has no effect any more; returns `engine`."""
        del batch_size
        warnings.warn("Model.tune no longer has an effect; leave it out.", DeprecationWarning, stacklevel=2)
        return self.engine

    def embed(self, images: ImageInput | Iterable[ImageInput], *, batch_size: int = 64) -> Tensor:
        """Embeddings of one or many images: N x n, float32, on the CPU (one image: N = 1).

        An image is a path, a PIL image, a uint8 array (H x W, H x W x 3) or a uint8 tensor (3 x H x W, or a
        batch B x 3 x H x W); kinds may be mixed.
        """
        return self.vectors(images, batch_size=batch_size).embeddings

    def vectors(self, images: ImageInput | Iterable[ImageInput], *, batch_size: int = 64) -> Vectors:
        """Embeddings and features of one or many images, as in `embed`, of one pass through the encoder."""
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; found {batch_size}.")
        embeddings, features = [torch.empty(0, self.dim)], [torch.empty(0, self.width)]
        for pixels in pixel_batches(images, self.preprocessing, batch_size):
            part = self.features(pixels)
            features.append(part.float().cpu())
            embeddings.append(self.embed_features(part).float().cpu())
        return Vectors(torch.cat(embeddings), torch.cat(features))

    @property
    def text_source(self) -> str | None:
        """Where the text tower of `embed_text` is: ``hf:<organisation>/<model>[@<revision>]`` or ``hf:<folder>``.

        Set it where it moved, and `save`. None: the features share no space with texts.
        """
        return self._encoder.text_source

    @text_source.setter
    def text_source(self, source: str | None) -> None:
        if source is not None and (not isinstance(source, str) or source[:3] != HF or source == HF):
            raise ConfigError(f"text_source must be {HF}<model> or {HF}<folder>; found {source!r}.")
        if source is not None and (folder := Path(source.removeprefix(HF)).expanduser()).is_dir():
            source = f"{HF}{folder.resolve()}"
        self._encoder.text_source, self._text_tower = source, None

    def embed_text(self, texts: str | Sequence[str]) -> Tensor:
        """Texts in the space of the features: N x width, of length 1, float32, on the CPU (one text: N = 1).

        Needs an encoder that was trained with a text tower (CLIP, SigLIP), which is loaded at the first call from
        where `text_source` says. Texts are taken as they are, and cut off where the tower's input ends.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ConfigError("text must not be empty: describe what to look for, such as 'a photo of a red car'.")
        if self.text_source is None:
            raise ConfigError(
                f"the encoder {self.encoder_name} has no text tower, or was trained away from it: use a pretrained or "
                f"frozen CLIP or SigLIP, such as {EXAMPLE}."
            )
        if self._text_tower is None:
            self._text_tower = TextTower(self.text_source)
        vectors = self._text_tower.embed(texts) if texts else torch.empty(0, self.width)
        if vectors.shape[1] != self.width:
            raise ConfigError(
                f"the text tower of {self.text_source} makes vectors of {vectors.shape[1]} numbers, and the features "
                f"have {self.width}: it is that of another model."
            )
        return vectors

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """Embeddings, B x n on the model's device, of uint8 pixels B x 3 x H x W of the final size."""
        return self.embed_features(self.features(pixels))

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """Features, B x width on the model's device, of uint8 pixels B x 3 x H x W of the final size."""
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
            found = f"{pixels.dtype}, {shape_text(pixels.shape)}"
            raise ConfigError(f"pixels must be uint8, B x 3 x H x W; found {found}.")
        images = self.preprocessing.to_input(pixels.to(self.device))
        flip_tta = self.preprocessing.flip_tta
        if images.is_cpu and not self.encoder.training:
            return self._inference(self.encoder, images, flip_tta=flip_tta)
        with self._evaluating():
            return self.encoder.features(images, flip_tta=flip_tta)

    @torch.inference_mode()
    def embed_features(self, features: Tensor) -> Tensor:
        """Embeddings of images whose features are known, B x n on the model's device."""
        with self._evaluating():
            outputs: Tensor = self._encoder.head(features.to(self.device))
        return self.project(outputs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The encoder is in evaluation mode inside the block."""
        if not self._encoder.training:
            yield
            return
        self.encoder.eval()
        try:
            yield
        finally:
            self.encoder.train()

    def project(self, outputs: Tensor) -> Tensor:
        """From the encoder's outputs to embeddings: themselves, unless `posterior` or `normalize` says otherwise."""
        if self.posterior and self._anchors is not None and self.classifier is not None:
            with torch.autocast(outputs.device.type, enabled=False):
                outputs = posterior_mean(outputs.float(), *self.classifier, self._anchors)
        return F.normalize(outputs, dim=1) if self.normalize else outputs

    def scores(self, embeddings: Tensor) -> Tensor:
        """N x t, higher is nearer: the classifier's logits if there is one, otherwise minus the distance."""
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dim:
            raise ConfigError(f"embeddings must be N x {self.dim}; found {shape_text(embeddings.shape)}.")
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        device = embeddings.device
        with torch.autocast(device.type, enabled=False):
            points = embeddings.to(dtype)
            if self.classifier is not None and not self.posterior:
                weight, bias = (part.to(device, dtype) for part in self.classifier)
                return F.linear(points, weight, bias)
            if self.anchors is None:
                raise ConfigError("This model has neither anchors nor a classifier, so it cannot predict classes.")
            # By differences: through matrix products two near anchors could change places.
            mode = "donot_use_mm_for_euclid_dist"
            return -torch.cdist(points, self.anchors.to(device, dtype), compute_mode=mode)

    @overload
    def classify(  # type: ignore[overload-overlap]
        self, images: str | Path | Image.Image | np.ndarray, *, batch_size: int = 64
    ) -> Classification: ...

    @overload
    def classify(self, images: Tensor, *, batch_size: int = 64) -> Classification | list[Classification]: ...

    @overload
    def classify(self, images: Iterable[ImageInput], *, batch_size: int = 64) -> list[Classification]: ...

    def classify(
        self, images: ImageInput | Iterable[ImageInput], *, batch_size: int = 64
    ) -> Classification | list[Classification]:
        """The class of one image, or a list with the class of each of several: names that have a `confidence`.

        The confidence is the probability of the class: the classifier's softmax where the model has one, otherwise
        exp(-d²/2) for the distance d to the class's anchor, divided by the sum over all classes, as if the images of a
        class were spread around its anchor with variance 1. It is not calibrated: an image of no class at all gets the
        most similar class, sometimes with a high confidence.
        """
        prediction = self.predict(images, batch_size=batch_size)
        confidences = prediction.confidences.tolist()
        classes = [Classification(*both) for both in zip(prediction.names, confidences, strict=True)]
        is_batch = isinstance(images, Tensor) and images.ndim == 4
        return classes[0] if isinstance(images, ImageInput) and not is_batch else classes

    def predict(self, images: ImageInput | Iterable[ImageInput], *, batch_size: int = 64) -> Prediction:
        """The class of each image, as a name and as an index, the scores of all classes, and the confidences."""
        if not self.classes:
            raise ConfigError("This model has no classes: train one on class folders, or search a gallery instead.")
        vectors = self.vectors(images, batch_size=batch_size)
        scores = self.scores(vectors.embeddings)
        indices = scores.argmax(dim=1)
        confidences = self._probabilities(vectors.features, scores).gather(1, indices[:, None])[:, 0]
        return Prediction([self.classes[index] for index in indices.tolist()], indices, scores, confidences)

    def _probabilities(self, features: Tensor, scores: Tensor) -> Tensor:
        """N x t, the probability of each class."""
        if self.classifier is None:
            return (scores.square() / -2).softmax(dim=1)
        if not self.posterior:
            return scores.softmax(dim=1)
        with torch.inference_mode(), self._evaluating():
            outputs: Tensor = self._encoder.head(features.to(self.device))
            return F.linear(outputs.float(), *self.classifier).softmax(dim=1).cpu()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the weights, the anchors or the preprocessing."""
        setup: dict[str, Any] = {"encoder": self._encoder.spec, "preprocessing": self.preprocessing.to_json()}
        setup |= {name: True for name in ("posterior", "normalize") if getattr(self, name)}
        return _digest(setup, self._tensors())[:16]

    @property
    def encoder_fingerprint(self) -> str:
        """64 hexadecimal digits that change whenever features do: with the backbone, its weights or the preprocessing.

        Not with the head and the anchors: models over one frozen backbone share it.
        """
        spec = {name: value for name, value in self._encoder.spec.items() if name not in ("dim", "head")}
        prefix, state = "backbone.", self._encoder.state_dict()
        tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        return _digest({"backbone": spec, "preprocessing": self.preprocessing.to_json()}, tensors)

    def save(self, path: str | Path) -> None:
        """Save as a folder, all or nothing; a Kedge model at ``path`` is replaced, anything else is not."""
        description: dict[str, Any] = {
            "encoder": self._encoder.spec,
            "dim": self.dim,
            "width": self.width,
            "classes": list(self.classes),
            "loss": self.loss,
            "preprocessing": self.preprocessing.to_json(),
            "posterior": self.posterior,
            "normalize": self.normalize,
            "fingerprint": self.fingerprint,
        }
        if self.calibration is not None:
            description["calibration"] = self.calibration.to_json()
        if self.text_source is not None:
            description["text"] = self.text_source
        write_folder(path, description, self._tensors())

    @classmethod
    def pretrained(cls, name: str = "auto", weights: str | Path = "default") -> Self:
        """A pretrained encoder as a model without training: an embedding is its features, of length 1.

        ``name`` is ``timm:<model>`` or ``hf:<model>``, whose weights say how images are prepared for them, or ``auto``:
        EfficientNet-Lite0, whose weights the extra ``pretrained`` brings. ``weights`` as in ``build_encoder``.
        """
        name = DEFAULT_ENCODER if name == "auto" else name
        if not name.startswith((TIMM, HF)):
            raise ConfigError(f"name must be auto, {TIMM}<model> or {HF}<model>; found {name!r}.")
        preprocessing = pretrained_preprocessing(name, weights)
        encoder = build_encoder(name, head="none", weights=weights, image_size=preprocessing.size)
        return cls(
            encoder.eval(), anchors=None, classes=(), preprocessing=preprocessing, loss="none", normalize=True
        ).to("auto")

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device = "auto", engine: str | None = None, *, lazy: bool = False
    ) -> Self:
        """Open a model folder, or a run folder that holds one. ``engine`` as in `engine`.

        No code in it is run, nothing is fetched from a network, and no memory is taken for what it does not hold. With
        ``lazy`` the network is built, and an error of it raised, when it is first needed: cached features need none.
        """
        target, inference = _device(device), Inference(engine)
        folder, description = read_description(path)
        tensors = read_weights(folder, description)
        prefix = "encoder."
        state = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        weight = tensors.get("classifier.weight")
        with wrap_misfits(path):
            spec, width = description["encoder"], description.get("width", 0)
            is_eager = not lazy or not width  # earlier releases did not write it
            model = cls(
                build_stored(spec, state) if is_eager else StoredEncoder(path, spec, width, state),
                anchors=tensors.get("anchors"),
                classes=description["classes"],
                preprocessing=Preprocessing.from_json(description["preprocessing"]),
                classifier=None if weight is None else (weight, tensors["classifier.bias"]),
                loss=description["loss"],
                posterior=bool(description.get("posterior", False)),
                normalize=bool(description.get("normalize", False)),
                calibration=Calibration.from_json(description.get("calibration")),
            )
            model.text_source = description.get("text")
        model._inference = inference
        return model.to(target)

    save_pretrained = hub.save_pretrained
    """Save as a folder that the Hugging Face Hub understands too, with a model card; ``load`` opens it."""

    push_to_hub = hub.push_to_hub
    """Upload the model and its card to the Hugging Face Hub as ``user/repo``, in one commit; returns its address."""

    from_pretrained = classmethod(hub.from_pretrained)
    """Open a model folder or ``user/repo`` of the Hugging Face Hub, of which only the model is fetched, once."""

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"encoder.{name}": tensor for name, tensor in self._encoder.state_dict().items()}
        if self._anchors is not None:
            tensors["anchors"] = self._anchors
        if self.classifier is not None:
            tensors["classifier.weight"], tensors["classifier.bias"] = self.classifier
        return tensors

    def _own(self, what: str, values: Tensor, *shape: int) -> Tensor:
        """A float32 copy of ``values`` beside the encoder, which must have ``shape``."""
        if tuple(values.shape) != shape:
            expected, found = shape_text(shape), shape_text(values.shape)
            raise ConfigError(f"{what} must be {expected} (classes, then dim); found {found}.")
        if not bool(torch.isfinite(values).all()):
            raise ConfigError(f"{what} must be finite; found NaN or infinity: the training may have diverged.")
        return values.detach().to(self.device, torch.float32, copy=True).contiguous()


def _digest(setup: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of plain values and tensors."""
    digest = hashlib.sha256(json.dumps(setup, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _device(device: Any) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; found {device!r}.") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not available on this machine; pass auto or cpu.")
    return target
