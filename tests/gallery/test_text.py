"""Search by text, from Python and from the command line; the oracle is transformers itself."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.encoders import backbones, build_encoder
from kedge.encoders.transformers import read_config
from kedge.errors import ConfigError, WeightsError
from kedge.gallery import Gallery, anchors, ranking
from kedge.images import Preprocessing
from kedge.model import Model

transformers = pytest.importorskip("transformers")
Towers = Callable[[str], Any]
KINDS = ("clip", "siglip")
TEXT = "a photo of a red car"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module", params=KINDS)
def towers(request: pytest.FixtureRequest, two_towers: Towers) -> Any:
    return two_towers(request.param)


@pytest.fixture(scope="module")
def untrained(towers: Any, colour_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery whose embeddings are the features."""
    gallery = Gallery.create(tmp_path_factory.mktemp("untrained") / "g", Model.pretrained(towers.name))
    gallery.add(colour_photos)
    return gallery.path


@pytest.fixture(scope="module")
def trained(towers: Any, colour_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery that keeps features beside the embeddings of a trained head."""
    folder = tmp_path_factory.mktemp("trained")
    named = ["encoder=huggingface", f"encoder.name={towers.name}", "recipe.epochs=2", "logger=none"]
    model = kedge.train(colour_photos, overrides=named, folder=folder / "run")
    gallery = Gallery.create(folder / "g", model)
    gallery.add(colour_photos)
    gallery.optimize()
    return gallery.path


def check_hits(towers: Any, gallery: Gallery, hits: list[Any], text: str = TEXT) -> None:
    """The hits are the nearest by transformers' own cosines, at their distance."""
    items = {id: gallery.item(id).path for id in gallery.ids()}
    cosines = dict(zip(items, towers.cosines(text, list(items.values())), strict=True))
    assert np.ptp(list(cosines.values())) > 0.01
    expected = sorted(cosines, key=cosines.__getitem__, reverse=True)[: len(hits)]
    assert [hit.id for hit in hits] == expected
    distances = [np.sqrt(2 - 2 * cosines[id]) for id in expected]
    np.testing.assert_allclose([hit.distance for hit in hits], distances, atol=1e-4)


@pytest.mark.parametrize("which", ["untrained", "trained"])
def test_hits_are_those_of_the_library_itself(which: str, towers: Any, request: pytest.FixtureRequest) -> None:
    gallery = Gallery.open(request.getfixturevalue(which))
    assert gallery.takes_text
    assert bool(gallery.features) == (which == "trained")
    for text in (TEXT, "black and white stripes"):
        result = gallery.search_text(text, k=7)
        check_hits(towers, gallery, result.hits, text)
        assert (result.rank, result.anchors, result.unknown) == ("looks", [], None)
        assert gallery.search_text(text, 7, "brute_force").hits == result.hits
    reds = gallery.search_text(TEXT, k=3, where="label = 'red'")
    everything = [hit for hit in gallery.search_text(TEXT, k=30) if hit.label == "red"]
    assert reds.hits == everything[:3]


@pytest.mark.parametrize("which", ["untrained", "trained"])
def test_two_stages_search_some_lists_of_a_large_gallery(
    which: str,
    towers: Any,
    colour_photos: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (anchors, ranking):
        monkeypatch.setattr(module, "EXACT_ITEMS", 10)
    gallery = Gallery.create(tmp_path / "g", Gallery.open(request.getfixturevalue(which)).model)
    gallery.add(colour_photos)
    gallery.optimize()
    every = gallery.search_text(TEXT, 30, "brute_force").hits
    some = gallery.search_text(TEXT, 30).hits
    assert len(every) == 30
    assert 0 < len(some) < 30  # one list of five
    assert some == [hit for hit in every if hit.id in {hit.id for hit in some}]


def test_the_command_line(
    towers: Any, untrained: Path, trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for folder in (untrained, trained):
        page = tmp_path / "hits.html"
        arguments = ["search", str(folder), "--text", TEXT, "-k", "4"]
        outcome = CliRunner().invoke(app, [*arguments, "--json"])
        answer = json.loads(outcome.stdout)
        gallery = Gallery.open(folder)
        check_hits(towers, gallery, [kedge.gallery.Hit(*list(hit.values())[1:6]) for hit in answer["hits"]])
        assert (answer["rank"], answer["unknown"]) == ("looks", None)
        outcome = CliRunner().invoke(app, [*arguments, "--html", str(page)])
        assert "by looks" in outcome.stdout
        assert TEXT in page.read_text(encoding="utf-8")
    assert "Pass images" in refused("search", str(trained))
    assert "Pass images" in refused("search", str(trained), "x.png", "--text", "x")
    assert "must not be empty" in refused("search", str(trained), "--text", " ")
    assert "--runner local" in refused("search", str(trained), "--text", "x", "--runner", "ray")


def test_long_texts_are_cut_off_as_the_tokenizer_does(towers: Any, trained: Path) -> None:
    gallery = Gallery.open(trained)
    long = " ".join([TEXT] * 50)
    check_hits(towers, gallery, gallery.search_text(long, k=5).hits, long)
    model = gallery.model
    assert model is not None
    two = model.embed_text([TEXT, long])
    torch.testing.assert_close(two, torch.cat([model.embed_text(TEXT), model.embed_text(long)]))
    torch.testing.assert_close(two.norm(dim=1), torch.ones(2))
    assert model.embed_text([]).shape == (0, model.width)


def test_models_fetch_nothing_before_the_first_text(
    towers: Any, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(towers.folder, moved)
    model = Model.pretrained(f"hf:{moved}")
    assert model.text_source == f"hf:{moved}"
    model.save(tmp_path / "model")
    expected = model.embed_text(TEXT)
    moved.rename(tmp_path / "elsewhere")
    again = Model.load(tmp_path / "model", device="cpu")
    assert again.fingerprint == model.fingerprint
    with pytest.raises(ConfigError, match=r"moved .* is gone: put it back, or .*text_source"):
        again.embed_text(TEXT)
    again.text_source = f"hf:{tmp_path / 'elsewhere'}"
    assert torch.equal(again.embed_text(TEXT), expected)
    again.save(tmp_path / "model")
    assert torch.equal(Model.load(tmp_path / "model", device="cpu").embed_text(TEXT), expected)
    model.save_pretrained(tmp_path / "for-the-hub")  # where a folder of this machine means nothing
    assert str(moved) not in (tmp_path / "for-the-hub" / "model.json").read_text()
    (tmp_path / "elsewhere" / "tokenizer.json").unlink()
    broken = Model.load(tmp_path / "model", device="cpu")
    with pytest.raises(WeightsError, match=r"text tower in .* cannot be read"):
        broken.embed_text(TEXT)


def test_a_download_is_found_in_the_cache(towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    commit = "0" * 40
    kept = tmp_path / "models--someone--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    shutil.copytree(towers.folder, kept / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = Model.pretrained("hf:someone/tiny")
    assert model.text_source == f"hf:someone/tiny@{commit}"
    assert torch.equal(model.embed_text(TEXT), Model.pretrained(towers.name).embed_text(TEXT))
    for file in (kept / "snapshots" / commit).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"text tower of hf:someone/tiny.*hf download someone/tiny.*text_source"):
        Model.pretrained("hf:someone/tiny").embed_text(TEXT)


def test_a_trained_model_as_weights_keeps_its_text_tower(towers: Any, trained: Path) -> None:
    source = f"hf:{towers.folder}"
    encoder = build_encoder(towers.name, weights=trained / "model")
    assert encoder.text_source == source
    assert build_encoder(towers.name, weights=None).text_source is None
    assert build_encoder(towers.name, weights=towers.folder).text_source == source


def test_models_of_clip_from_before_open_as_they_were(
    two_towers: Towers, colour_photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their features are what CLIP pools, before the projection into the space of texts."""
    towers = two_towers("clip")
    config = {key: value for key, value in read_config(towers.folder).items() if key != "projected"}
    with monkeypatch.context() as before:
        before.setattr(backbones, "read_config", lambda folder: config)
        encoder = build_encoder(towers.name, weights="default", head="none").eval()
    encoder.text_source = None
    old = Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(size=32), normalize=True)
    old.save(tmp_path / "old")
    assert "projected" not in (tmp_path / "old" / "model.json").read_text()
    again = Model.load(tmp_path / "old", device="cpu")
    files = sorted(colour_photos.rglob("*.png"))[:3]
    assert again.width == 24
    inputs = torch.stack([torch.from_numpy(np.array(Image.open(file))).movedim(2, 0) for file in files]) / 256
    with torch.inference_mode():
        pooled = transformers.CLIPModel.from_pretrained(towers.folder).eval().vision_model(inputs).pooler_output
    torch.testing.assert_close(again.embed(files), torch.nn.functional.normalize(pooled))
    assert torch.equal(again.embed(files), old.embed(files))
    assert build_encoder(towers.name, weights=tmp_path / "old").width == 24
    with pytest.raises(ConfigError, match="no text tower"):
        again.embed_text(TEXT)


def test_those_without_a_text_tower_say_so(
    two_towers: Towers, colour_photos: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", head="none", image_size=32).eval()
    model = Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(size=32), normalize=True)
    gallery = Gallery.create(tmp_path / "g", model)
    gallery.add(sorted(colour_photos.rglob("*.png"))[:2])
    assert not gallery.takes_text
    assert "resnet10 has no text tower" in refused("search", str(tmp_path / "g"), "--text", TEXT)
    vectors = Gallery.create(tmp_path / "vectors", dim=4)
    with pytest.raises(ConfigError, match="without a model"):
        vectors.search_text(TEXT)
    # One that was trained without a head holds embeddings that no text is compared with.
    model = Model.pretrained(two_towers("siglip").name)
    model.normalize = False
    plain = Gallery.create(tmp_path / "plain", model)
    with pytest.raises(ConfigError, match="keeps no features"):
        plain.search_text(TEXT)
    with pytest.raises(ConfigError, match="text must not be empty"):
        model.embed_text(["a", ""])
    with pytest.raises(ConfigError, match="text_source must be"):
        model.text_source = "openai/clip"
    model.text_source = two_towers("clip").name
    with pytest.raises(ConfigError, match="another model"):
        model.embed_text(TEXT)
    model.text_source = f"hf:{tmp_path}"
    with pytest.raises(ConfigError, match="configuration"):
        model.embed_text(TEXT)


def test_fine_tuning_leaves_the_space_of_texts(two_towers: Towers, stripes: Path, tmp_path: Path) -> None:
    name = f"encoder.name={two_towers('siglip').name}"
    data = ["dataset=arrays", f"dataset.path={stripes}", "encoder=huggingface", name]
    how = ["recipe=kedge", "recipe.epochs=1", "recipe.batch_size=32", "recipe.size=32", "logger=none"]
    model = kedge.train(overrides=[*data, *how], folder=tmp_path / "run")
    assert model.text_source is None
    with pytest.raises(ConfigError, match="trained away from it"):
        model.embed_text(TEXT)
