"""Takes the pictures of the pages in docs/screenshots, a server's and a search's: desktop and phone, light and dark.

python docs/screenshots.py GALLERY QUERY.png        such as those that kedge demo leaves
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
from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parent / "screenshots"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}


def main(gallery: str, query: str) -> None:
    """Serve the gallery and look at it; then search it and look at the page that leaves."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder, "hits.html")
        search = [sys.executable, "-m", "kedge", "search", gallery, query, "-k", "12", "--html", str(page)]
        subprocess.run(search, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for device, options in {"desktop": DESKTOP, "phone": PHONE}.items():
                context = browser.new_context(color_scheme=scheme, **options)  # type: ignore[arg-type]
                shown = context.new_page()
                shown.goto(page.as_uri())
                save(shown, f"{device}-{scheme}-hits")
                context.close()
        browser.close()
    command = [sys.executable, "-m", "kedge", "serve", gallery, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = server.stderr.readline().removeprefix("The page: ").strip()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                taken(browser, address, query, "desktop", DESKTOP, scheme)
                taken(browser, address, query, "phone", PHONE, scheme)
            browser.close()
    finally:
        server.terminate()
        server.wait()


def taken(browser: Browser, address: str, query: str, device: str, options: dict[str, Any], scheme: Any) -> None:
    """The page before a query, its results and the map."""
    context = browser.new_context(color_scheme=scheme, **options)
    page = context.new_page()
    for _ in range(100):  # until the gallery is open
        try:
            page.goto(address)
            break
        except Exception:
            time.sleep(0.2)
    page.get_by_test_id("starter").first.wait_for()
    save(page, f"{device}-{scheme}-start")
    page.get_by_test_id("file").set_input_files(query)
    page.get_by_test_id("hit").first.wait_for()
    if device == "desktop":
        page.get_by_test_id("method-both").check(force=True)
        page.get_by_test_id("results-brute_force").wait_for()
    save(page, f"{device}-{scheme}-results")
    page.get_by_test_id("view-map").click()
    page.locator("[data-testid=map][data-ready=true]").wait_for()
    page.get_by_test_id("map").scroll_into_view_if_needed()
    save(page, f"{device}-{scheme}-map")
    context.close()


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
    main(*sys.argv[1:])
