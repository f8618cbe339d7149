"""`kedge search`: the items of a gallery that are most like a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kedge.gallery import Result
    from kedge.gallery.gallery import Method

__all__ = ["register"]

_ALL = 2**31
"""More lists than there are."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("search")(search)


def search(
    gallery: Annotated[str, typer.Argument(help="The gallery's folder or address (s3://…).")],
    query: Annotated[str, typer.Argument(help="A picture, or the id of an item.")],
    k: Annotated[int, typer.Option("-k", help="How many hits.")] = 20,
    probes: Annotated[int, typer.Option(help="How many lists are searched: those of the nearest anchors.")] = 1,
    method: Annotated[str, typer.Option(help="two_stage, or brute_force over all items.")] = "two_stage",
    where: Annotated[str | None, typer.Option(help="Only items that match, such as \"label = 'cat'\".")] = None,
    at_least: Annotated[int, typer.Option(help="Search more lists until they hold so many items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the pictures to this file.")] = None,
    url: Annotated[bool, typer.Option("--url", help="The query may be an http(s) address, which is fetched.")] = False,
    runner: Annotated[
        str, typer.Option(help="local, or ray: over several processes, for a gallery no machine holds.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster, such as ray-head:6379; default: one is started here.")
    ] = None,
) -> None:
    """Find the items that are most like a picture."""
    from kedge.cli.index import check_runner
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery

    check_runner(runner, address=address)
    opened = Gallery.open(gallery)
    wanted = _query(query)
    if runner == "local":
        result = opened.search(wanted, k, cast("Method", method), probes, at_least, where, allow_url=url)
    else:
        if at_least:
            raise ConfigError("--at-least is for --runner local: say with --probes how many lists are searched.")
        from kedge.ray import search_with_ray

        vector, without = opened.query_vector(wanted, allow_url=url)
        lists = probes if method == "two_stage" else _ALL
        [result] = search_with_ray(opened, vector[None], k, lists, where, exclude_id=without, address=address)
    if html is not None:
        from kedge.gallery.html import search_page, write_page

        write_page(search_page(opened, wanted, result), html)
    if as_json:
        hits = [{"rank": rank, **hit._asdict()} for rank, hit in enumerate(result, start=1)]
        found = {"hits": hits, "anchors": result.anchors, "unknown": result.unknown, "seconds": result.seconds}
        typer.echo(json.dumps(found, indent=2))
    elif not result.hits:
        typer.echo("Nothing was found: the lists that were searched hold no such item; more --probes search more.")
    else:
        _print(result)
    if html is not None:
        typer.echo(f"The page with the pictures: {html}", err=True)


def _query(given: str) -> Path | str | int:
    from kedge.errors import ConfigError
    from kedge.images import is_url

    if is_url(given):
        return given
    if Path(given).exists() or not (given.isascii() and given.isdigit()):
        return Path(given).expanduser()
    if len(given) > 18:  # beyond any id
        raise ConfigError(f"There is no item {given}, and no such file.")
    return int(given)


def _print(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # one line per hit for whatever reads it
    table = Table("rank", "distance", "label", "id", "path", box=None, pad_edge=False, header_style="bold")
    for column in (0, 1, 3):
        table.columns[column].justify = "right"
    for column in (2, 4):
        table.columns[column].overflow = "fold"
    for rank, hit in enumerate(result, start=1):
        texts = (f"{rank}", f"{hit.distance:.4g}", hit.label or "", f"{hit.id}", hit.path or "")
        table.add_row(*(Text(_printable(text)) for text in texts))
    console.print(table)
    names = ", ".join(name if name is not None else "unnamed" for name in result.anchors[:3])
    more = f" and {len(result.anchors) - 3:,} more" if len(result.anchors) > 3 else ""
    note = " · unknown: far from every anchor" if result.unknown else ""
    console.print(Text(_printable(f"searched {names}{more} in {result.seconds * 1000:.2f} ms{note}"), style="dim"))


def _printable(text: str) -> str:
    """Without anything that would steer the terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
