"""What every page has in common: its frame, its colours, and pictures that are in it as small copies."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from kedge.errors import ConfigError, PictureError
from kedge.gallery.pictures import make_thumbnail
from kedge.images import read_image

__all__ = ["frame", "picture", "text", "write_page"]

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --paper: light-dark(#f6f6f4, #161719);
  --card: light-dark(#fff, #212327);
  --ink: light-dark(#1d1e20, #ececec);
  --soft: light-dark(#63666b, #a2a6ad);
  --line: light-dark(#dedfe0, #34373c);
  --hole: light-dark(#ececea, #2a2c31);
  --good: light-dark(#12703f, #6bd19b);
  --warn: light-dark(#a33a12, #f0a07a);
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
ol {{ list-style: none; display: grid; gap: 16px; margin: 0; padding: 0; }}
.hole {{ display: grid; place-items: center; padding: 16px; color: var(--soft); text-align: center; font-size: 13px; }}
.row {{ display: flex; justify-content: space-between; gap: 8px; }}
{style}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def frame(title: str, style: str, body: str) -> str:
    """A whole page that needs nothing else; `body` is HTML, `title` is not yet."""
    return _FRAME.format(title=text(title), style=style.strip(), body=body.strip())


def write_page(page: str, path: str | Path) -> None:
    """Write a page to a file."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another path.") from error


def picture(path: str | None, side: int, *, kept: bytes | None = None) -> str:
    """A small copy inside the page, of the file or of what was kept of it; words where there is none."""
    if path is None:
        return '<div class="hole">no picture</div>'
    try:
        content = kept or make_thumbnail(read_image(path), side)
    except PictureError:
        return '<div class="hole">the picture cannot be read any more</div>'
    data = base64.b64encode(content).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{text(Path(path).name)}" loading="lazy">'


def text(value: str) -> str:
    """Any text, safe inside HTML."""
    # A file name may hold bytes that are no text; they must not break the page.
    return escape(value.encode("utf-8", "replace").decode())
