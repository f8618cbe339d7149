"""Takes the pictures of the pages in docs/screenshots: desktop and phone, light and dark.

    python docs/screenshots.py

Everything is made of the bundled sample, in a folder that is gone afterwards: some labels are made wrong and an image
is copied, a model is trained, indexed and evaluated, a gallery searched, audited and served.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent / "screenshots"
QUERY = "queries/Ankle boot/001.png"
DEVICES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
    },
}
COMMANDS = (
    "train photos/ --folder run",
    "evaluate run --against queries/",
    "index photos/ --model run --gallery gallery --thumbnails 256",
    f"search gallery '{QUERY}' -k 12 --html hits.html",
    "audit gallery --html audit.html",
)


def main() -> None:
    """Make what there is to see, and look at it."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        desk = Path(scratch)
        kedge = f"{sys.executable} -m kedge"
        subprocess.run(f"{kedge} sample", shell=True, cwd=desk, check=True)
        spoil(desk / "photos")
        for command in COMMANDS:
            subprocess.run(f"{kedge} {command}", shell=True, cwd=desk, check=True)
        shutil.copy(desk / "run/against_confusion.png", FOLDER / "confusion.png")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        serve = [*kedge.split(), "serve", "gallery", "--port", "0"]
        with subprocess.Popen(serve, cwd=desk, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                address = server.stderr.readline().removeprefix("The page: ").strip()
                for scheme in ("light", "dark"):
                    for device, options in DEVICES.items():
                        name, context = f"{device}-{scheme}", {"color_scheme": scheme, **options}
                        for file in ("hits", "audit"):
                            page = browser.new_context(**context).new_page()
                            page.goto((desk / f"{file}.html").as_uri())
                            save(page, f"{name}-{file}")
                        take(browser.new_context(**context).new_page(), address, str(desk / QUERY), name)
            finally:
                server.terminate()
        browser.close()


def spoil(photos: Path) -> None:
    """Three wrong labels, and a copy of an image in another size."""
    for name, wrong in {"Sneaker": "Dress", "Trouser": "Sandal", "Coat": "Ankle boot"}.items():
        (photos / name / "007.png").replace(photos / wrong / f"{name}.png")
    with Image.open(photos / "Coat/011.png") as image:
        image.resize((40, 40)).save(photos / "Coat/copy.jpg")


def take(page: Page, address: str, query: str, name: str) -> None:
    """The page before a query, its results and the map."""
    for _ in range(100):  # until the gallery is open
        try:
            page.goto(address)
            break
        except Exception:
            time.sleep(0.2)
    page.get_by_test_id("starter").first.wait_for()
    save(page, f"{name}-start")
    page.get_by_test_id("file").set_input_files(query)
    page.get_by_test_id("hit").first.wait_for()
    if name.startswith("desktop"):
        page.get_by_test_id("method-both").check(force=True)
        page.get_by_test_id("results-brute_force").wait_for()
    save(page, f"{name}-results")
    page.get_by_test_id("view-map").click()
    page.locator("[data-testid=map][data-ready=true]").wait_for()
    page.get_by_test_id("map").scroll_into_view_if_needed()
    save(page, f"{name}-map")


def save(page: Page, name: str) -> None:
    """Once nothing moves any more."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)
    print(path, f"{path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
