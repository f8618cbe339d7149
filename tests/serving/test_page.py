"""The page in a real browser."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect, sync_playwright

from kedge.gallery import Gallery

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CLASSES = ["checked", "level", "slanted", "upright"]
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}

Serving = Callable[..., AbstractContextManager[Any]]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
expect.set_options(timeout=20_000)

DROP = """([zone, content]) => {
    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], 'dropped.png', { type: 'image/png' }));
    for (const kind of ['dragenter', 'dragover', 'drop']) {
        zone.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
    }
}"""
PASTE = """(content) => {
    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], 'pasted.png', { type: 'image/png' }));
    document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(built: Path, serving_in_thread: Serving) -> Iterator[str]:
    with serving_in_thread(built) as server:
        yield server.url


@pytest.fixture(scope="module")
def own_address(
    built: Path, serving_in_thread: Serving, key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    own_gallery = Path(shutil.copytree(built, tmp_path_factory.mktemp("own") / "gallery"))
    with serving_in_thread(own_gallery, writable=True, key=key) as server:
        yield server.url


class Watched:
    """A page whose console and requests are watched."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": DESKTOP} | options))
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = address

    def close(self) -> None:
        self.context.close()
        elsewhere = [url for url in self.requests if not url.startswith((self.address, "blob:", "data:"))]
        assert not elsewhere
        # A browser itself notes every refusal of the server as an error.
        own = [text for text in self.complaints if "the server responded with a status of" not in text]
        assert not own


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    opened: list[Watched] = []

    def start(address: str, path: str = "/", **options: Any) -> Page:
        watched = Watched(browser, address, **options)
        opened.append(watched)
        watched.page.goto(address + path)
        watched.page.locator("[data-testid=starter]:visible, [data-testid=key]:visible").first.wait_for()
        return watched.page

    yield start
    for one in opened:
        one.close()


def at(page: Page | Locator, name: str) -> Locator:
    return page.get_by_test_id(name)


def drop(page: Page, picture: bytes) -> None:
    page.evaluate(DROP, [at(page, "drop").element_handle(), base64.b64encode(picture).decode()])


def labels(page: Page | Locator) -> list[str | None]:
    return [one.get_attribute("data-label") for one in at(page, "hit").all()]


def test_a_dropped_picture_shows_its_class_first(open_page: Open, address: str, query: Callable[..., bytes]) -> None:
    page = open_page(address)
    for label in CLASSES:
        drop(page, query(label))
        expect(at(page, "anchor-chip").first).to_contain_text(label)
        expect(at(page, "hit")).to_have_count(20)
        assert labels(page) == [label] * 20
        expect(at(page, "query-picture")).to_be_visible()


def test_a_picture_is_pasted_or_chosen(
    open_page: Open, address: str, query: Callable[..., bytes], stripe_files: Path
) -> None:
    page = open_page(address)
    page.evaluate(PASTE, base64.b64encode(query("level")).decode())
    expect(at(page, "hit").first).to_have_attribute("data-label", "level")
    at(page, "file").set_input_files(next((stripe_files / "test/checked").iterdir()))
    expect(at(page, "hit").first).to_have_attribute("data-label", "checked")


def test_clicking_through_and_back(open_page: Open, address: str) -> None:
    page = open_page(address)
    at(page, "starter").first.click()
    expect(at(page, "hit")).to_have_count(20)
    first = page.url
    chosen = at(page, "hit").nth(3).get_attribute("data-id")
    at(page, "hit").nth(3).get_by_test_id("hit-search").click()
    expect(page).not_to_have_url(first)
    expect(page.locator(f'[data-testid="hit"][data-id="{chosen}"]')).to_have_count(0)
    page.go_back()
    expect(page.locator(f'[data-testid="hit"][data-id="{chosen}"]')).to_have_count(1)
    page.reload()
    expect(page.locator(f'[data-testid="hit"][data-id="{chosen}"]')).to_have_count(1)


def test_controls_act_at_once(open_page: Open, address: str, query: Callable[..., bytes]) -> None:
    page = open_page(address)
    drop(page, query("level"))
    expect(at(page, "hit")).to_have_count(20)
    at(page, "k").fill("7")
    expect(at(page, "hit")).to_have_count(7)
    at(page, "method-brute_force").check(force=True)
    at(page, "label-filter").fill("slan")
    at(page, "label-option").first.click()
    expect(at(page, "label-chip")).to_have_count(1)
    expect(at(page, "hit").first).to_have_attribute("data-label", "slanted")
    assert set(labels(page)) == {"slanted"}


def test_hits_are_ranked_by_class_or_by_looks(
    open_page: Open, address: str, query: Callable[..., bytes], black_picture: bytes
) -> None:
    page = open_page(address)
    drop(page, query("level"))
    expect(at(page, "ranked")).to_have_text("Ranked by class: level")
    at(page, "rank-auto").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(at(page, "rank-looks")).to_be_checked()
    expect(at(page, "ranked")).to_have_text("Ranked by looks, of any class")
    expect(at(page, "probes")).to_be_hidden()
    at(page, "hit-search").first.click()
    expect(page).to_have_url(re.compile(r"item=\d+&rank=looks$"))
    expect(at(page, "ranked")).to_have_text("Ranked by looks, of any class")
    page.reload()
    expect(at(page, "rank-looks")).to_be_checked()
    expect(at(page, "ranked")).to_have_text("Ranked by looks, of any class")
    at(page, "rank-class").check(force=True)
    expect(at(page, "ranked")).to_have_text("Ranked by class: level")
    at(page, "rank-auto").check(force=True)
    at(page, "file").set_input_files({"name": "black.png", "mimeType": "image/png", "buffer": black_picture})
    expect(at(page, "unknown")).to_be_visible()
    expect(at(page, "ranked")).to_have_text(re.compile("Ranked by class: "))


def test_lists_without_a_class_are_nobodys_anchors(open_page: Open, serving_in_thread: Serving, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "plain", dim=4)
    names = [f"{number}.jpg" for number in range(60)]
    gallery.add_embeddings(np.random.default_rng(0).normal(size=(60, 4)), paths=names)
    with serving_in_thread(gallery.path) as server:
        page = open_page(server.url, "/?rank=looks&probes=3")  # of another gallery
        at(page, "starter").first.click()
        expect(page.locator(".lists")).to_have_text("Looked into 3 lists")
        for name in ("rank-auto", "label-filter", "ranked", "anchor-chip"):
            expect(at(page, name)).to_be_hidden()
        assert "rank" not in page.url
        expect(at(page, "about")).to_contain_text("k-means")
        check_accessibility(page)
        nameless = re.compile("anchor|unnamed|no label|null", re.IGNORECASE)
        assert not nameless.search(page.locator("main").inner_text())
        at(page, "view-map").click()
        expect(at(page, "map")).to_have_attribute("data-query", "true")
        expect(page.locator("#map-summary")).to_have_text(
            "60 pictures. The query is the ringed cross. Its hits are ringed."
        )
        expect(at(page, "legend")).to_be_hidden()
        assert not nameless.search(page.locator("main").inner_text())


def test_both_ways_side_by_side(open_page: Open, address: str, query: Callable[..., bytes]) -> None:
    page = open_page(address)
    drop(page, query("upright"))
    at(page, "method-both").check(force=True)
    for method in ("two_stage", "brute_force"):
        expect(at(at(page, f"results-{method}"), "hit")).to_have_count(20)
        expect(at(page, f"time-{method}")).to_contain_text("s")
    assert set(labels(at(page, "results-two_stage"))) == {"upright"}


def test_an_anchor_shows_typical_pictures(open_page: Open, address: str, query: Callable[..., bytes]) -> None:
    page = open_page(address)
    drop(page, query("checked"))
    at(page, "anchor-chip").nth(1).click()
    dialog = at(page, "anchor-dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button")).not_to_have_count(0)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_the_map_shows_the_query(open_page: Open, address: str, query: Callable[..., bytes]) -> None:
    page = open_page(address)
    drop(page, query("slanted"))
    expect(at(page, "hit")).to_have_count(20)
    at(page, "view-map").click()
    drawn = at(page, "map")
    expect(drawn).to_have_attribute("data-ready", "true")
    expect(drawn).to_have_attribute("data-query", "true")
    colours = drawn.evaluate(
        """(canvas) => {
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            const found = new Set();
            for (let at = 0; at < data.length; at += 4) found.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
            return found.size;
        }"""
    )
    assert colours > 20
    box = drawn.bounding_box()
    assert box is not None
    for x, y in product(range(10, int(box["width"]), 24), range(10, int(box["height"]), 24)):
        page.mouse.move(box["x"] + x, box["y"] + y)
        if at(page, "map-tip").is_visible():  # somewhere is an item
            break
    expect(at(page, "map-tip")).to_be_visible()


def test_a_text_file_is_an_error_that_is_shown(open_page: Open, address: str, tmp_path: Path) -> None:
    page = open_page(address)
    text = tmp_path / "notes.txt"
    text.write_text("no picture")
    at(page, "file").set_input_files(text)
    expect(at(page, "error")).to_contain_text("image")
    at(page, "file").set_input_files({"name": "x.png", "mimeType": "image/png", "buffer": b"no picture either"})
    expect(at(page, "error")).to_contain_text("cannot be read")


def test_adding_and_removing(own_address: str, open_page: Open, key: str, query: Callable[..., bytes]) -> None:
    page = open_page(own_address, f"/#key={key.replace(' ', '%20')}")
    drop(page, query("level"))
    expect(at(page, "hit")).to_have_count(20)
    assert key not in page.url
    at(page, "add").click()
    at(page, "add-label").fill("level")
    at(page, "add-confirm").click()
    expect(at(page, "message")).to_contain_text("dded")
    expect(at(page, "about")).to_contain_text("161")
    drop(page, query("level", 1))
    drop(page, query("level"))
    added = page.locator('[data-testid="hit"][data-id="160"]')
    expect(added).to_have_count(1)
    expect(added).to_contain_text("dropped.png")
    added.hover()
    at(added, "hit-remove").click()
    at(page, "remove-confirm").click()
    expect(added).to_have_count(0)
    expect(at(page, "about")).to_contain_text("160")


def test_whoever_has_no_key_is_asked_for_it(own_address: str, open_page: Open, key: str) -> None:
    page = open_page(own_address)
    at(page, "key").fill("something else entirely")
    at(page, "key-submit").click()
    expect(at(page, "key")).to_be_visible()
    at(page, "key").fill(key)
    at(page, "key-submit").click()
    expect(at(page, "starter").first).to_be_visible()


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("light", DESKTOP, id="desktop-light"),
        pytest.param("dark", PHONE, id="phone-dark"),
        pytest.param("dark", DESKTOP, id="desktop-dark", marks=pytest.mark.soak),
        pytest.param("light", PHONE, id="phone-light", marks=pytest.mark.soak),
    ],
)
def test_everybody_can_use_it(
    open_page: Open, address: str, query: Callable[..., bytes], scheme: str, size: ViewportSize
) -> None:
    on_phone = {"has_touch": size is PHONE, "is_mobile": size is PHONE}
    # Colours are looked at where they have come to rest.
    page = open_page(address, viewport=size, color_scheme=scheme, reduced_motion="reduce", **on_phone)
    expect(at(page, "starter").first).to_be_visible()
    check_accessibility(page)
    drop(page, query("level"))
    expect(at(page, "hit")).to_have_count(20)
    check_accessibility(page)
    at(page, "anchor-chip").first.click()
    expect(at(page, "anchor-dialog")).to_be_visible()
    check_accessibility(page)
    page.keyboard.press("Escape")
    at(page, "view-map").click()
    expect(at(page, "map")).to_have_attribute("data-ready", "true")
    check_accessibility(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def check_accessibility(page: Page) -> None:
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.wait_for_timeout(500)
    found = Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert not serious, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious]
