"""Search by text through the API, the client and the page in a real browser; the oracle is transformers itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright
from starlette.testclient import TestClient

import kedge
from kedge.encoders import build_encoder
from kedge.encoders.pretrained import pretrained_preprocessing
from kedge.errors import ServiceError
from kedge.gallery import Gallery
from kedge.model import Model
from kedge.serving.app import create_app

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TEXT = "a photo of a red car"
Towers = Callable[[str], Any]
Serving = Callable[..., AbstractContextManager[Any]]
expect.set_options(timeout=20_000)


@pytest.fixture(scope="module", params=["clip", "siglip"])
def towers(request: pytest.FixtureRequest, two_towers: Towers) -> Any:
    return two_towers(request.param)


@pytest.fixture(scope="module")
def gallery(towers: Any, colour_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """CLIP as it is, without training; SigLIP under a head, whose features are kept beside the embeddings."""
    model = Model.pretrained(towers.name)
    if towers.kind == "siglip":
        torch.manual_seed(0)
        encoder = build_encoder(towers.name, weights="default", dim=8).eval()
        setup = pretrained_preprocessing(towers.name)
        model = Model(encoder, anchors=torch.randn(3, 8), classes=["blue", "green", "red"], preprocessing=setup)
    made = Gallery.create(tmp_path_factory.mktemp("text") / "photos", model, thumbnails=32)
    made.add(colour_photos)
    made.optimize()
    return made


@pytest.fixture(scope="module")
def address(gallery: Gallery, serving_in_thread: Serving) -> Iterator[str]:
    with serving_in_thread(gallery.path) as server:
        yield server.url


def nearest(towers: Any, gallery: Gallery, count: int, text: str = TEXT) -> list[int]:
    """The items whose cosine with a text is highest, by transformers."""
    ids = gallery.ids()
    cosines = dict(zip(ids, towers.cosines(text, [gallery.item(id).path for id in ids]), strict=True))
    return sorted(ids, key=cosines.__getitem__, reverse=True)[:count]


def client_of(path: Path) -> TestClient:
    return TestClient(create_app(path), base_url="http://localhost/api/v1")


def test_the_client_and_the_api(towers: Any, gallery: Gallery, address: str) -> None:
    client = kedge.Client(address)
    assert client.info()["text"] is True
    answer = client.search_text(TEXT, k=9)
    [search] = answer["searches"]
    assert [hit["id"] for hit in search["hits"]] == nearest(towers, gallery, 9)
    assert [hit["distance"] for hit in search["hits"]] == gallery.search_text(TEXT, 9).distances
    assert (answer["rank"], answer["unknown"], answer["nearest"], answer["place"]) == ("looks", None, [], None)
    both = client.search_text(TEXT, k=9, method="both", labels=["red", "gr'en"])["searches"]
    assert [search["method"] for search in both] == ["two_stage", "brute_force"]
    assert both[0]["hits"] == both[1]["hits"]
    assert {hit["label"] for hit in both[0]["hits"]} == {"red"}
    long = " ".join([TEXT] * 30)
    [search] = client.search_text(long, k=3)["searches"]
    assert [hit["id"] for hit in search["hits"]] == nearest(towers, gallery, 3, long)
    for text, words in (("", "text: "), ("   ", "The text is empty"), ("x" * 1001, "text: ")):
        with pytest.raises(ServiceError, match=words):
            client.search_text(text)


def test_a_gallery_without_a_text_tower_says_so(built: Path) -> None:
    with client_of(built) as api:
        assert api.get("/info").json()["text"] is False
        answer = api.get("/search", params={"text": TEXT})
        assert answer.status_code == 409
        assert answer.json()["error"] == "This gallery cannot be searched by text: its encoder has no text tower."


def test_a_text_tower_that_is_gone_is_one_sentence(
    two_towers: Towers, colour_photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(two_towers("clip").folder, tmp_path / "copy")
    made = Gallery.create(tmp_path / "g", Model.pretrained(f"hf:{copy}"))
    made.add(colour_photos / "red")
    shutil.rmtree(copy)
    with client_of(made.path) as api:
        answer = api.get("/search", params={"text": TEXT})
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text
        assert "text tower cannot be loaded" in answer.json()["error"]
        assert api.get(f"/items/{made.ids()[0]}/similar").status_code == 200
    assert f"{copy} with this model's text tower is gone" in caplog.text


# ---------------------------------------------------------------------- the page

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
on_page = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    contexts = []

    def start(address: str, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": DESKTOP} | options))
        contexts.append(context)
        page = context.new_page()
        page.goto(address)
        page.get_by_test_id("starter").first.wait_for()
        return page

    yield start
    for context in contexts:
        context.close()


def shown_ids(page: Page) -> list[int]:
    return [int(hit.get_attribute("data-id") or -1) for hit in page.get_by_test_id("hit").all()]


@on_page
def test_a_text_on_the_page(open_page: Callable[..., Page], towers: Any, gallery: Gallery, address: str) -> None:
    page = open_page(address)
    box = page.get_by_role("textbox", name="Describe what to find")
    box.fill("   ")
    box.press("Enter")
    expect(page.locator("#asked")).to_be_hidden()
    box.fill(TEXT)
    box.press("Enter")
    expect(page.locator("#asked-title")).to_have_text(TEXT)
    expect(page.get_by_test_id("hit")).to_have_count(20)
    assert shown_ids(page) == nearest(towers, gallery, 20)
    expect(page.locator("#asked-text")).to_contain_text("Your text · encoded in")
    expect(page).to_have_url(re.compile(rf"\?text={re.escape(quote_plus(TEXT))}$"))
    for name in ("anchor-chip", "unknown", "rank-auto", "probes"):
        expect(page.get_by_test_id(name)).to_be_hidden()
    page.reload()
    expect(page.get_by_test_id("hit")).to_have_count(20)
    assert shown_ids(page) == nearest(towers, gallery, 20)
    expect(box).to_have_value(TEXT)
    page.get_by_test_id("view-map").click()
    expect(page.get_by_test_id("map")).to_have_attribute("data-ready", "true")
    expect(page.get_by_test_id("map")).to_have_attribute("data-query", "false")
    page.get_by_test_id("view-results").click()
    page.get_by_test_id("hit-search").first.click()
    expect(page).to_have_url(re.compile(r"\?item=\d+$"))
    expect(box).to_have_value("")
    page.go_back()
    expect(page.locator("#asked-title")).to_have_text(TEXT)
    expect(box).to_have_value(TEXT)


@on_page
def test_no_box_without_a_text_tower(open_page: Callable[..., Page], built: Path, serving_in_thread: Serving) -> None:
    with serving_in_thread(built) as server:
        page = open_page(server.url)
        expect(page.get_by_test_id("text")).to_be_hidden()
        page.goto(f"{server.url}/?text=a+red+car")
        expect(page.get_by_test_id("error")).to_contain_text("has no text tower")


@on_page
@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_everybody_can_use_the_box(
    open_page: Callable[..., Page], address: str, scheme: str, size: ViewportSize
) -> None:
    phone = {"has_touch": size is PHONE, "is_mobile": size is PHONE}
    page = open_page(address, viewport=size, color_scheme=scheme, reduced_motion="reduce", **phone)
    for text in ("", TEXT):
        if text:
            page.get_by_test_id("text").fill(text)
            page.keyboard.press("Enter")
            expect(page.get_by_test_id("hit")).to_have_count(20)
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        page.wait_for_timeout(500)
        found = Axe().run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert not serious, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
