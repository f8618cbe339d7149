from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

from kedge.encoders import DEFAULT_ENCODER, build_encoder, pretrained_preprocessing
from kedge.errors import ConfigError, ImageError, KedgeError, ModelError, WeightsError
from kedge.images import Preprocessing
from kedge.model import Classification, Model
from kedge.model.io import StoredEncoder

CLASSES = ("ant", "bee", "cat")
DIM = 6


def make(
    seed: int = 0,
    *,
    classifier: bool = False,
    size: int | None = 16,
    anchors: bool = True,
    posterior: bool = False,
    normalize: bool = False,
) -> Model:
    torch.manual_seed(seed)
    encoder = build_encoder("resnet10", dim=DIM, stem="imagenet", head="bounded")
    nn.init.normal_(encoder.head.linear.weight)
    encoder.train()(torch.rand(16, 3, 16, 16))  # running statistics worth saving
    return Model(
        encoder.eval(),
        anchors=torch.randn(3, DIM) if anchors else None,
        classes=CLASSES,
        preprocessing=Preprocessing(size=size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3)),
        classifier=nn.Linear(DIM, 3) if classifier else None,
        loss="cross_entropy" if classifier and not posterior else "cam",
        posterior=posterior,
        normalize=normalize,
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return make()


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def naive(model: Model, image: Image.Image) -> torch.Tensor:
    inputs = torch.from_numpy(model.preprocessing.to_pixels(image)).float()[None] / 256
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (model.preprocessing.mean, model.preprocessing.std))
    with torch.no_grad():
        return model.encoder.eval()((inputs - mean) / std)


def test_every_kind_of_picture_embeds_the_same(model: Model, pixels: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    image = Image.fromarray(pixels)
    image.save(path)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    kinds = [str(path), path, image, Image.open(path), pixels, tensor, tensor[None]]
    expected = naive(model, image)
    for kind in kinds:
        found = model.embed(kind)
        assert found.shape == (1, DIM)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)
    mixed = model.embed([*kinds, torch.stack([tensor, tensor])], batch_size=4)
    torch.testing.assert_close(mixed, expected.expand(9, DIM), rtol=1e-4, atol=1e-4)


def test_order_survives_batches_and_generators(model: Model) -> None:
    pictures = torch.randint(0, 256, (23, 3, 16, 16), dtype=torch.uint8)
    expected = torch.cat([model.embed_pixels(each[None]) for each in pictures])
    for batch_size in (1, 5, 23, 64):
        for images in (pictures, list(pictures), (each for each in pictures)):
            torch.testing.assert_close(model.embed(images, batch_size=batch_size), expected, rtol=1e-4, atol=1e-4)
    assert model.embed([]).shape == (0, DIM)
    assert model.classify([]) == []


@pytest.mark.parametrize("head", ["bounded", "unit"])
def test_flip_tta_makes_an_image_and_its_mirror_image_the_same(head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=DIM, stem="imagenet", head=head).eval()
    nn.init.normal_(encoder.head.linear.weight)
    images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    found = {}
    for flip_tta in (False, True):
        preprocessing = Preprocessing(size=16, flip_tta=flip_tta)
        Model(encoder, anchors=None, classes=CLASSES, preprocessing=preprocessing).save(tmp_path / str(flip_tta))
        model = Model.load(tmp_path / str(flip_tta), device="cpu")
        found[flip_tta] = [model.embed_pixels(each) for each in (images, images.flip(-1))]
    torch.testing.assert_close(*found[True])
    assert not torch.allclose(*found[False], atol=1e-3)
    if head == "bounded":
        torch.testing.assert_close(found[True][0], sum(found[False]) / 2)
    else:
        torch.testing.assert_close(found[True][0].norm(dim=1), torch.ones(4))
    # An earlier Kedge, which knows nothing of it, can still open a model without.
    assert "mirror" not in (tmp_path / "False/model.json").read_text()


def test_grey_and_upright(model: Model, pixels: np.ndarray, tmp_path: Path) -> None:
    grey = pixels[..., 0]
    torch.testing.assert_close(model.embed(grey), model.embed(np.stack([grey] * 3, axis=-1)))
    path = tmp_path / "turned.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(path, exif=exif)
    torch.testing.assert_close(model.embed(Image.open(path)), model.embed(path))
    assert not torch.allclose(model.embed(path), model.embed(pixels))


def test_sizes_may_differ_where_pictures_stay_as_they_are() -> None:
    model = make(size=None)
    pictures = [torch.randint(0, 256, (3, side, 16), dtype=torch.uint8) for side in (16, 16, 24, 16)]
    expected = torch.cat([model.embed_pixels(each[None]) for each in pictures])
    torch.testing.assert_close(model.embed(pictures), expected, rtol=1e-4, atol=1e-4)


def test_embedding_leaves_training_alone() -> None:
    model = make()
    model.encoder.train()
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    picture = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    embedding = model.embed(picture)
    assert model.encoder.training
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())
    torch.testing.assert_close(embedding, naive(model, Image.fromarray(picture.permute(1, 2, 0).numpy())))
    embedding.requires_grad_().sum().backward()  # a normal tensor, not one of inference mode


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (np.zeros((4, 5, 4), np.uint8), ["uint8", "4 x 5 x 4"]),
        (np.zeros((2, 4, 5, 3), np.uint8), ["2 x 4 x 5 x 3"]),
        (np.zeros((4, 5, 3), np.float32), ["float32"]),
        (np.zeros((0, 5, 3), np.uint8), ["0 x 5 x 3"]),
        (torch.zeros(4, 5, 3, dtype=torch.uint8), ["3 x H x W", "4 x 5 x 3"]),
        (torch.zeros(3, 4, 5), ["float32"]),
        (7, ["int"]),
        ([None], ["image 0", "NoneType"]),
    ],
)
def test_wrong_pictures(model: Model, picture: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        model.embed(picture)
    assert all(word in str(caught.value) for word in words)


def test_unreadable_pictures(model: Model, pixels: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    Image.fromarray(pixels).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageError, match=r"cut\.png"):
        model.embed([pixels, path, pixels])
    with pytest.raises(ImageError, match="image 1 "):
        model.embed([pixels, Image.open(path)])
    with pytest.raises(ImageError, match=r"none\.jpg"):
        model.embed(tmp_path / "none.jpg")
    with pytest.raises(ConfigError, match="batch_size"):
        model.embed(pixels, batch_size=0)
    with pytest.raises(ConfigError, match="uint8"):
        model.embed_pixels(torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_are_minus_distances(model: Model, dtype: torch.dtype) -> None:
    embeddings = torch.randn(50, DIM).to(dtype)
    scores = model.scores(embeddings)
    distances = (embeddings.double()[:, None] - model.anchors.double()).square().sum(-1).sqrt()
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(-scores.double(), distances, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.scores(embeddings), scores)


def test_scores_far_from_the_origin() -> None:
    """Distances through matrix products would lose all digits here."""
    model = make()
    model.anchors = 10_000 + torch.tensor([[0.0], [0.01], [0.03]]).expand(3, DIM).contiguous()
    embeddings = model.anchors + 0.002
    assert model.scores(embeddings).argmax(1).tolist() == [0, 1, 2]


def test_classify_equals_naive(model: Model) -> None:
    pictures = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    model = make()
    model.anchors = model.embed(pictures[:3]) + 0.01
    embeddings = model.embed(pictures)
    nearest = [min(range(3), key=lambda j: float((e - model.anchors[j]).norm())) for e in embeddings]
    assert len(set(nearest)) == 3
    assert model.classify(pictures) == [CLASSES[j] for j in nearest]
    prediction = model.predict(pictures)
    assert prediction.indices.tolist() == nearest
    torch.testing.assert_close(prediction.scores, model.scores(embeddings))
    assert prediction.names == model.classify(pictures)


def test_one_image_has_one_class_and_a_confidence(tmp_path: Path) -> None:
    model, pixels = make(), torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    arrays = [image.permute(1, 2, 0).numpy() for image in pixels]
    Image.fromarray(arrays[0]).save(tmp_path / "one.png")
    several = model.classify(arrays)
    assert several == model.classify(pixels) == list(model.classify(iter(arrays)))
    for one in (arrays[0], pixels[0], Image.fromarray(arrays[0]), tmp_path / "one.png", str(tmp_path / "one.png")):
        found = model.classify(one)
        assert isinstance(found, str)
        assert found == several[0]
        assert found.confidence == pytest.approx(several[0].confidence, abs=1e-5)
    assert model.classify([arrays[0]]) == several[:1]
    again = pickle.loads(pickle.dumps(several[0]))
    assert (again, again.confidence) == (several[0], several[0].confidence)
    assert json.loads(json.dumps(several)) == several
    assert repr(Classification("cat", 0.25)) == "Classification('cat', confidence=0.250)"


def test_the_confidence_is_the_probability_of_the_class() -> None:
    images = [Image.fromarray(one) for one in np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)]
    pixels = torch.stack([torch.tensor(np.array(image)).permute(2, 0, 1) for image in images])
    for model in (make(), make(classifier=True), make(classifier=True, posterior=True)):
        outputs = torch.cat([naive(model, image) for image in images])
        if model.classifier is None:
            distances = torch.stack([(outputs - anchor).norm(dim=1) for anchor in model.anchors], dim=1)
            weights = (-(distances**2) / 2).exp()
        else:
            weights = (outputs @ model.classifier[0].T + model.classifier[1]).exp()
        prediction = model.predict(pixels)
        expected = (weights / weights.sum(dim=1, keepdim=True))[torch.arange(len(pixels)), prediction.indices]
        torch.testing.assert_close(prediction.confidences, expected, rtol=1e-4, atol=1e-5)
        assert [found.confidence for found in model.classify(pixels)] == prediction.confidences.tolist()


def test_the_repr_of_a_model_is_short() -> None:
    shown = repr(make())
    assert shown.startswith("Model(resnet10, 3 classes (")
    assert f"dim={DIM}" in shown
    assert len(shown) < 200


def test_scores_of_a_classifier() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(DIM, 3)
    encoder = make().encoder
    embeddings = torch.randn(9, DIM)
    for classifier in (linear, (linear.weight, linear.bias)):
        model = Model(
            encoder,
            anchors=None,
            classes=CLASSES,
            preprocessing=Preprocessing(size=16),
            classifier=classifier,
        )
        torch.testing.assert_close(model.scores(embeddings), linear(embeddings).detach())
    bare = nn.Linear(DIM, 3, bias=False)
    model = Model(encoder, anchors=None, classes=CLASSES, preprocessing=Preprocessing(), classifier=bare)
    torch.testing.assert_close(model.scores(embeddings), bare(embeddings).detach())


def test_bad_parts(model: Model) -> None:
    def build(**changes: object) -> Model:
        parts = {
            "anchors": torch.zeros(3, DIM),
            "classes": CLASSES,
            "preprocessing": Preprocessing(),
            **changes,
        }
        return Model(model.encoder, **parts)

    with pytest.raises(ConfigError, match=r"anchors must be 3 x 6 .*; found 3 x 5"):
        build(anchors=torch.zeros(3, 5))
    with pytest.raises(ConfigError, match="finite"):
        build(anchors=torch.full((3, DIM), torch.nan))
    with pytest.raises(ConfigError, match="classifier weight must be 3 x 6"):
        build(classifier=nn.Linear(DIM, 4))
    with pytest.raises(ConfigError, match="differ"):
        build(classes=["ant", "ant", "bee"])
    with pytest.raises(ConfigError, match="N x 6"):
        model.scores(torch.zeros(DIM))
    with pytest.raises(ConfigError, match="neither anchors nor a classifier"):
        build(anchors=None).classify(np.zeros((4, 4), np.uint8))
    for device in ("gpu", "cuda:99", "auto:1"):
        with pytest.raises(ConfigError, match=device):
            model.to(device)


@pytest.mark.parametrize(("classifier", "anchors"), [(False, True), (True, True), (True, False), (False, False)])
def test_roundtrip(tmp_path: Path, classifier: bool, anchors: bool) -> None:
    model = make(classifier=classifier, anchors=anchors)
    model.encoder.to(memory_format=torch.channels_last)
    model.save(tmp_path / "deep" / "model")
    again = Model.load(tmp_path / "deep" / "model", device="cpu")
    assert sorted(each.name for each in (tmp_path / "deep" / "model").iterdir()) == [
        "model.json",
        "weights.safetensors",
    ]
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["model"]
    assert (again.classes, again.preprocessing, again.loss) == (
        model.classes,
        model.preprocessing,
        model.loss,
    )
    assert again.encoder.spec == model.encoder.spec
    assert not again.encoder.training
    assert again.fingerprint == model.fingerprint
    model.encoder.to(memory_format=torch.contiguous_format)
    pictures = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(again.embed(pictures), model.embed(pictures))
    if classifier or anchors:
        assert again.classify(pictures) == model.classify(pictures)
    assert (again.anchors is None) == (not anchors)


@pytest.mark.parametrize(("posterior", "normalize"), [(True, False), (True, True), (False, True)])
def test_embeddings_as_expected_anchors_and_of_length_one(tmp_path: Path, posterior: bool, normalize: bool) -> None:
    plain = make(classifier=posterior)
    model = make(classifier=posterior, posterior=posterior, normalize=normalize)
    pictures = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    wanted, anchors = plain.embed(pictures), plain.anchors
    assert anchors is not None
    if posterior:
        assert plain.classifier is not None
        weight, bias = plain.classifier
        wanted = (wanted @ weight.T + bias).softmax(dim=1) @ anchors
    if normalize:
        wanted, anchors = (each / each.norm(dim=1, keepdim=True) for each in (wanted, anchors))
    model.save(tmp_path / "model")
    for each in (model, Model.load(tmp_path / "model", device="cpu")):
        torch.testing.assert_close(each.embed(pictures), wanted)
        torch.testing.assert_close(each.anchors, anchors)
        # Classes are those of the nearest anchor in the space of the embeddings.
        assert each.predict(pictures).indices.tolist() == torch.cdist(wanted, anchors).argmin(1).tolist()
        assert each.fingerprint == model.fingerprint != plain.fingerprint


def test_embeddings_that_cannot_be_projected() -> None:
    with pytest.raises(ConfigError, match="posterior=True needs anchors and a classifier"):
        make(posterior=True)
    with pytest.raises(ConfigError, match="a classifier reads embeddings as they are"):
        make(classifier=True, normalize=True)


def test_roundtrip_of_timm(tmp_path: Path) -> None:
    encoder = build_encoder("timm:resnet10t", dim=DIM).eval()
    model = Model(encoder, anchors=torch.randn(3, DIM), classes=CLASSES, preprocessing=Preprocessing(size=32))
    model.save(tmp_path / "model")
    picture = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    assert torch.equal(Model.load(tmp_path / "model", device="cpu").embed(picture), model.embed(picture))


@pytest.mark.parametrize("head", ["none", "linear", "bounded", "batchnorm", "unit"])
def test_a_lazy_model_builds_its_network_when_it_is_needed(head: str, tmp_path: Path) -> None:
    encoder = build_encoder("timm:resnet10t", dim=None if head == "none" else DIM, head=head).eval()
    model = Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(size=32), loss="none")
    model.save(tmp_path / "model")
    lazy = Model.load(tmp_path / "model", device="cpu", lazy=True)
    features = torch.rand(5, model.width)
    assert torch.equal(lazy.embed_features(features), model.embed_features(features))
    for name in ("dim", "width", "has_features", "fingerprint", "encoder_fingerprint", "device", "encoder_name"):
        assert getattr(lazy, name) == getattr(model, name)
    assert repr(lazy) == repr(model)
    assert isinstance(lazy._encoder, StoredEncoder)
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(lazy.embed(pictures), model.embed(pictures))
    assert lazy.engine == model.engine
    assert lazy.encoder is lazy.encoder


def test_a_lazy_model_tells_what_does_not_fit(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    picture = torch.zeros(3, 16, 16, dtype=torch.uint8)
    for width, words in ((10**12, "far larger network"), (256, "size mismatch"), (-1, "cannot be opened")):
        (tmp_path / "model" / "model.json").write_text(json.dumps(description | {"width": width}))
        with pytest.raises(ModelError, match=words):
            Model.load(tmp_path / "model", device="cpu", lazy=True)
    other = description["encoder"] | {"name": "resnet18"}
    (tmp_path / "model" / "model.json").write_text(json.dumps(description | {"encoder": other}))
    lazy = Model.load(tmp_path / "model", device="cpu", lazy=True)
    with pytest.raises(ModelError, match="lacks"):
        lazy.embed(picture)
    del description["width"]  # as earlier releases wrote it
    (tmp_path / "model" / "model.json").write_text(json.dumps(description))
    assert torch.equal(Model.load(tmp_path / "model", lazy=True, device="cpu").embed(picture), model.embed(picture))


def test_fingerprint_tells_models_apart() -> None:
    model, other = make(0), make(0)
    assert len(model.fingerprint) == 16
    assert model.fingerprint == other.fingerprint
    other.preprocessing = Preprocessing(size=17)
    assert model.fingerprint != other.fingerprint
    assert make(1).fingerprint != model.fingerprint
    first = model.fingerprint
    with torch.no_grad():
        model.anchors[0, 0] += 1
    assert model.fingerprint != first


def test_run_folder(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "run" / "model")
    (tmp_path / "run" / "metrics.json").write_text("{}")
    assert Model.load(tmp_path / "run", device="cpu").fingerprint == model.fingerprint
    assert Model.load(str(tmp_path / "run")).fingerprint == model.fingerprint


def test_save_replaces_models_only(model: Model, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    model.save(target)
    other = make(5)
    other.save(target)
    assert Model.load(target, device="cpu").fingerprint == other.fingerprint
    link = tmp_path / "link"
    link.symlink_to(target)
    model.save(link)
    assert link.is_symlink()
    assert Model.load(target, device="cpu").fingerprint == model.fingerprint
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"notes\.txt"):
        other.save(target)
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "model.json").write_text('{"kind": "someone else"}')
    with pytest.raises(ModelError, match="photos"):
        model.save(photos)
    with pytest.raises(ModelError, match="is a file"):
        model.save(photos / "model.json")
    assert (photos / "model.json").read_text() == '{"kind": "someone else"}'
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "model", "photos"]


def test_full_disk(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    model.save(target)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match="the disk is full"):
            make(3).save(target)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert Model.load(target, device="cpu").fingerprint == model.fingerprint


def test_save_that_fails_or_dies_at_the_last_step(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    model.save(target)
    rename = Path.rename

    def refuse(self: Path, to: Path) -> Path:
        if self.name.endswith(".saving"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(ModelError, match="Permission denied"):
            make(3).save(target)
    assert Model.load(target, device="cpu").fingerprint == model.fingerprint

    class Killed(BaseException):
        pass

    def die(self: Path, to: Path) -> Path:
        if self.name.endswith(".saving"):
            raise Killed
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(Killed):
            make(3).save(target)
    assert not target.exists()
    assert Model.load(target, device="cpu").fingerprint == model.fingerprint
    assert Model.load(tmp_path, device="cpu").fingerprint == model.fingerprint
    other = make(4)
    other.save(target)
    assert Model.load(target, device="cpu").fingerprint == other.fingerprint
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_missing_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Model folder .*nowhere does not exist"):
        Model.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="not a Kedge model"):
        Model.load(tmp_path)
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ModelError, match="not a Kedge model"):
        Model.load(tmp_path)
    with pytest.raises(ModelError, match="not a Kedge model"):
        Model.load(tmp_path / "model.json")
    with pytest.raises(ConfigError, match="gpu"):
        Model.load(tmp_path, device="gpu")


def test_damaged_weights(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    weights = tmp_path / "model" / "weights.safetensors"
    content = weights.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (b"", content[:100], content[:-1], bytes(flipped)):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"weights\.safetensors is damaged"):
            Model.load(tmp_path / "model", device="cpu")
    weights.unlink()
    with pytest.raises(ModelError, match=r"lacks its weights\.safetensors"):
        Model.load(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 7, "kedge": "9.1"}, ["version 7", "kedge 9.1", "up to 2", "upgrade"]),
        ({"format": "new"}, ["damaged", "format"]),
        ({"classes": ["ant", "bee"]}, ["anchors"]),
        ({"classes": None}, []),
        (
            {"encoder": {"name": "resnet10", "dim": 9, "stem": "imagenet", "head": "bounded"}},
            ["head.linear.weight"],
        ),
        ({"encoder": {"name": "resnet99", "dim": 9, "stem": "imagenet", "head": "bounded"}}, ["resnet99"]),
        ({"encoder": {"name": ["resnet10"]}}, []),
        ({"encoder": 3}, []),
        ({"preprocessing": {"size": 16, "tilt": 3}}, ["tilt"]),
        ({"preprocessing": None}, []),
        ({"weights": None}, ["damaged"]),
    ],
)
def test_changed_description(model: Model, tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    model.save(tmp_path / "model")
    file = tmp_path / "model" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelError) as caught:
        Model.load(tmp_path / "model", device="cpu")
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind": "kedge-model"}'])
def test_damaged_description(model: Model, tmp_path: Path, text: bytes) -> None:
    model.save(tmp_path / "model")
    (tmp_path / "model" / "model.json").write_bytes(text)
    with pytest.raises(KedgeError, match=r"model\.json is damaged"):
        Model.load(tmp_path / "model", device="cpu")


def test_files_say_what_they_hold(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    assert description["format"] == 2
    assert description["classes"] == list(CLASSES)
    assert description["dim"] == DIM
    assert description["fingerprint"] == model.fingerprint
    tensors = safetensors.torch.load_file(tmp_path / "model" / "weights.safetensors")
    assert torch.equal(tensors["anchors"], model.anchors)


# ---------------------------------------------------------------------- without training


def test_pretrained_embeds_as_timm_does(weights_package: Path, tmp_path: Path, pixels: np.ndarray) -> None:
    model = Model.pretrained()
    assert (model.classes, model.anchors, model.has_features) == ((), None, False)
    assert model.preprocessing == pretrained_preprocessing(DEFAULT_ENCODER)
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    state = torch.load(weights_package, weights_only=True).values()
    network.load_state_dict(dict(zip(network.state_dict(), state, strict=False)))
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    with torch.no_grad():
        expected = nn.functional.normalize(network(transform(Image.fromarray(pixels))[None]))
    torch.testing.assert_close(model.embed(pixels), expected, rtol=0, atol=2e-3)
    vectors = model.vectors(pixels)
    torch.testing.assert_close(nn.functional.normalize(vectors.features), vectors.embeddings)
    model.save(tmp_path / "model")
    again = Model.load(tmp_path / "model")
    assert again.fingerprint == model.fingerprint
    assert not again.has_features
    assert torch.equal(again.embed(pixels), model.embed(pixels))


def test_pretrained_refuses(no_weights: None, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"kedge\[pretrained\]"):
        Model.pretrained()
    with pytest.raises(ConfigError, match="name must be auto, timm:<model> or hf:<model>; found 'resnet18'"):
        Model.pretrained("resnet18")
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other\.pth does not fit encoder timm:resnet10t"):
        Model.pretrained("timm:resnet10t", weights=tmp_path / "other.pth")


def test_features_are_a_space_of_their_own_behind_a_head() -> None:
    assert make().has_features
    assert make(classifier=True, posterior=True).has_features
    encoder = build_encoder("resnet10", stem="imagenet", head="none")
    plain = Model(encoder, anchors=None, classes=CLASSES, preprocessing=Preprocessing(16))
    assert not plain.has_features
