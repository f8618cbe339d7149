from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from kedge.errors import ImageError
from kedge.images import fetch_image, is_url


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((6, 4, 3), 200, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/picture.png")
            self.end_headers()
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
        elif self.path in ("/picture.png", "/text.jpg"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png() if self.path == "/picture.png" else b"no picture")
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_picture_behind_an_address(host: str) -> None:
    assert fetch_image(f"{host}/picture.png").size == (4, 6)
    assert fetch_image(f"{host}/moved").size == (4, 6)


def test_what_is_not_there_or_no_picture(host: str) -> None:
    with pytest.raises(ImageError, match=f"{host}/gone.png cannot be fetched: Not Found"):
        fetch_image(f"{host}/gone.png")
    with pytest.raises(ImageError, match=f"{host}/text.jpg cannot be read: it is not an image"):
        fetch_image(f"{host}/text.jpg")
    with pytest.raises(ImageError, match="holds more than 10 bytes"):
        fetch_image(f"{host}/picture.png", max_bytes=10)
    with pytest.raises(ImageError, match="cannot be fetched"):
        fetch_image("http://127.0.0.1:1/x.png")
    with pytest.raises(ImageError, match="cannot be fetched"):
        fetch_image("http://[::1/x.png")


def test_only_the_web(host: str) -> None:
    with pytest.raises(ImageError, match="is not an http"):
        fetch_image("file:///etc/passwd")
    with pytest.raises(ImageError, match="cannot be fetched: unknown url type: ftp"):
        fetch_image(f"{host}/away")
    assert is_url("HTTPS://example.org/a.png")
    assert not is_url("a.png")
