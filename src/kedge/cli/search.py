"""`kedge search`: the items of a gallery that are most like an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import kedge
from kedge.cli.options import AddressOption, GalleryArgument, check_runner, line_console
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.gallery import Result
    from kedge.gallery.gallery import Method, Rank

_ALL = 2**31
"""More lists than there are."""


def search(
    gallery: GalleryArgument,
    query: Annotated[str | None, typer.Argument(help="An image, or the id of an item; none with --text.")] = None,
    text: Annotated[
        str | None, typer.Option(help="What to look for in words, where the encoder has a text tower (CLIP, SigLIP).")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="How many hits.")] = 20,
    probes: Annotated[int, typer.Option(help="How many lists are searched: those of the nearest anchors.")] = 1,
    method: Annotated[str, typer.Option(help="two_stage, or brute_force over all items.")] = "two_stage",
    rank: Annotated[
        str, typer.Option(help="auto, class (as trained) or looks (whatever the label); auto: looks where it is new.")
    ] = "auto",
    where: Annotated[str | None, typer.Option(help="Only items that match, such as \"label = 'cat'\".")] = None,
    at_least: Annotated[int, typer.Option(help="Search more lists until they hold so many items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    url: Annotated[bool, typer.Option("--url", help="The query may be an http(s) address, which is fetched.")] = False,
    runner: Annotated[
        str, typer.Option(help="local, or ray: over several processes, for a gallery no machine holds.")
    ] = "local",
    address: AddressOption = None,
) -> None:
    """Find the items that are most like an image."""
    check_runner(runner, address=address)
    if (query is None) == (text is None):
        raise ConfigError('Give a query: an image, the id of an item, or --text "a photo of a red car".')
    if text is not None and runner != "local":
        raise ConfigError("--text is for --runner local: several processes search by class.")
    opened = kedge.Gallery.open(gallery)
    parsed = None if query is None else _parse_query(query)
    if parsed is None:
        result = opened.search_text(text or "", k, cast("Method", method), where)
    elif runner == "local":
        result = opened.search(
            parsed, k, cast("Method", method), probes, at_least, where, rank=cast("Rank", rank), allow_url=url
        )
    else:
        if at_least:
            raise ConfigError("--at-least is for --runner local: say with --probes how many lists are searched.")
        if rank == "looks":
            raise ConfigError("--rank looks is for --runner local: several processes search by class.")
        from kedge.ray import search_with_ray

        vector, _, exclude_id = opened.query_vectors(parsed, allow_url=url)
        lists = probes if method == "two_stage" else _ALL
        [result] = search_with_ray(opened, vector[None], k, lists, where, exclude_id=exclude_id, address=address)
    if html is not None:
        from kedge.gallery.html import search_page, write_page

        write_page(search_page(opened, parsed, result, words=text), html)
    if as_json:
        hits = [{"rank": rank, **hit._asdict()} for rank, hit in enumerate(result, start=1)]
        how = {"rank": result.rank, "anchors": result.anchors, "unknown": result.unknown}
        content = {"hits": hits, **how, "seconds": result.seconds}
        typer.echo(json.dumps(content, indent=2))
    elif not result.hits:
        why = "no item matches --where" if where else "the lists that were searched are empty"
        typer.echo(f"Nothing was found: {why}.")
    else:
        _print(result)
    if html is not None:
        typer.echo(f"The page with the images: {html}", err=True)


def _parse_query(text: str) -> Path | str | int:
    from kedge.images import is_url

    if is_url(text):
        return text
    if Path(text).exists() or not (text.isascii() and text.isdigit()):
        return Path(text).expanduser()
    if len(text) > 18:  # beyond any id
        raise ConfigError(f"There is no item {text}, and no such file.")
    return int(text)


def _print(result: Result) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    console = line_console()
    numbers = [Column(name, justify="right") for name in ("rank", "distance", "id")]
    label, path = (Column(name, overflow="fold") for name in ("label", "path"))
    table = Table(numbers[0], numbers[1], label, numbers[2], path, box=None, pad_edge=False, header_style="bold")
    for rank, hit in enumerate(result, start=1):
        texts = (f"{rank}", f"{hit.distance:.4g}", hit.label or "", f"{hit.id}", hit.path or "")
        table.add_row(*(Text(_printable(text)) for text in texts))
    console.print(table)
    how = f"by looks: {result.anchors[0]}, which came after training" if result.anchors else "by looks"
    if result.rank == "class":
        names = ", ".join(name if name is not None else "unnamed" for name in result.anchors[:3])
        more = f" and {len(result.anchors) - 3:,} more" if len(result.anchors) > 3 else ""
        how = f"by class: {names}{more}" if any(result.anchors) else "by distance"
    note = " · unknown: unlike every trained class" if result.unknown else ""
    console.print(Text(_printable(f"{how} · searched in {result.seconds * 1000:.2f} ms{note}"), style="dim"))


def _printable(text: str) -> str:
    """Control characters escaped, which would steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
