"""`kedge serve`: a gallery as a web page and an HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.options import GalleryArgument
from kedge.console import stderr
from kedge.deps import require


def serve(
    gallery: GalleryArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    writable: Annotated[
        bool, typer.Option("--writable", help="Allow adding and removing images, with the API key.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the API key that every request must send; or set KEDGE_KEY.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name under which the server is reached, such as pictures.example.org."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Another site whose pages may call the API, such as https://example.org.")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder whose image files may be shown; can be repeated. Thumbnails and uploads are always shown."
        ),
    ] = None,
    max_upload: Annotated[int, typer.Option(min=1, help="Maximum size of an image in MiB.")] = 20,
    connections_per_address: Annotated[
        int, typer.Option(min=1, help="Maximum open connections per client address; a proxy counts as one.")
    ] = 512,
    waiting: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests; excess requests get 429.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Maximum images per batch (encoder and search).")] = 32,
    memory: Annotated[
        int, typer.Option(min=64, help="MiB of memory for the gallery, beside the system's file cache.")
    ] = 1024,
) -> None:
    """Serve a gallery as a web page and an HTTP API."""
    import os
    import secrets

    # Before torch is loaded: the encoder's threads share the cores with those that read, search and answer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from kedge.serving.settings import Settings, read_key

    server = require("kedge.serving.app", extra="serve", purpose="kedge serve")
    key = read_key(key_file)
    generated = writable and key is None
    settings = Settings(
        key=secrets.token_urlsafe(24) if generated else key,
        writable=writable,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        images=tuple(images or ()),
        max_bytes=max_upload * 2**20,
        connections_per_address=connections_per_address,
        concurrency=waiting,
        batch=batch,
        memory=memory * 2**20,
    )
    server.serve(gallery, settings, host=host, port=port, generated=generated, console=stderr())
