"""`kedge export` and `kedge import`: models and vectors for other tools, and vectors of other tools as a gallery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import kedge
from kedge.cli.options import ListsOption, PrecisionOption
from kedge.errors import ConfigError
from kedge.io import is_url

_MODELS = (".onnx", ".pt2")
_VECTORS = {".parquet": "pandas.read_parquet", ".npz": "numpy.load", ".faiss": "faiss.read_index"}
"""Suffix → what reads such a file."""
_HUB = "hf://"


def export(
    thing: Annotated[str, typer.Argument(help="A run, a model or a gallery.")],
    target: Annotated[
        str,
        typer.Argument(
            help="A model: FILE.onnx, FILE.pt2 (torch.export), a FOLDER for the Hugging Face Hub, or hf://USER/NAME to "
            "put it there. A gallery's vectors: FILE.parquet, FILE.npz or FILE.faiss."
        ),
    ],
    anchors: Annotated[
        bool, typer.Option("--anchors", help="In .onnx and .pt2 also: the scores of all classes, by their anchors.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="With hf://: make a new repository private.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file or folder.")] = False,
) -> None:
    """Export a model or a gallery's vectors for other tools; the target's suffix says which."""
    from kedge.interop import export_gallery, export_onnx, export_program

    is_hub = target.startswith(_HUB)
    suffix = "" if is_hub or target.endswith(("/", "\\")) or Path(target).is_dir() else Path(target).suffix.lower()
    if suffix not in ("", *_MODELS, *_VECTORS):
        raise ConfigError(
            f"TARGET must end in one of {', '.join((*_MODELS, *_VECTORS))}, or in / for a folder; found {target}."
        )
    if anchors and suffix not in _MODELS:
        raise ConfigError(f"--anchors only applies to {' and '.join(_MODELS)} files, found {target}; leave it out.")
    if private and not is_hub:
        raise ConfigError(f"--private only applies to {_HUB}USER/NAME, found {target}; leave it out.")
    path = Path(target).expanduser()
    taken = any(path.iterdir()) if path.is_dir() else path.exists()
    if not is_hub and not overwrite and taken:
        raise ConfigError(f"{target} already exists; pass --overwrite to replace it, or choose another name.")
    folder = Path(thing).expanduser()
    is_gallery = is_url(thing) or (folder / "gallery.json").is_file()
    if suffix in _VECTORS:
        if not is_gallery and folder.is_dir():
            raise ConfigError(f"{target} is for vectors, but {thing} is not a gallery; make one with kedge index.")
        gallery = kedge.Gallery.open(thing)
        export_gallery(gallery, target, overwrite=overwrite)
        typer.echo(f'{target}: {len(gallery):,} vectors of {gallery.dim} numbers; {_VECTORS[suffix]}("{target}")')
        return
    model = kedge.Gallery.open(thing).model if is_gallery else kedge.Model.load(thing, device="cpu")
    if model is None:
        raise ConfigError(f"{thing} has no model; export its vectors as {' or '.join(_VECTORS)}.")
    metrics = folder / "metrics.json" if (folder / "metrics.json").is_file() else None
    size = model.preprocessing.size
    batch = f"batch: uint8, B x 3 x {size or 'H'} x {size or 'W'}"
    if is_hub:
        name = target.removeprefix(_HUB)
        target = model.push_to_hub(name, private=private or None, metrics=metrics)
        usage = f'kedge.Model.from_pretrained("{name}")'
    elif suffix == "":
        model.save_pretrained(target, metrics=metrics)
        usage = f'kedge.Model.from_pretrained("{target}"), and its card is {Path(target, "README.md")}'
    elif suffix == ".onnx":
        export_onnx(model, target, anchors=anchors)
        usage = f'onnxruntime.InferenceSession("{target}").run(None, {{"pixels": batch}}), {batch}'
    else:
        export_program(model, target, anchors=anchors)
        usage = f'torch.export.load("{target}").module()(batch), {batch}'
    typer.echo(f"{target}: {model.encoder_name}, {model.dim} numbers, {len(model.classes):,} classes; {usage}")


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A file that export_gallery wrote, or anyone's vectors: Parquet (a file or a folder), .npz, .npy, "
            ".faiss or .index."
        ),
    ],
    gallery: Annotated[Path, typer.Option(help="The gallery's folder, which must not exist yet.")],
    model: Annotated[
        Path | None, typer.Option(help="The run or model that made the vectors, to search images.")
    ] = None,
    vectors: Annotated[str | None, typer.Option(help="The column or array of vectors.")] = None,
    labels: Annotated[str | None, typer.Option(help="The column or array of labels.")] = None,
    paths: Annotated[str | None, typer.Option(help="The column or array of paths.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Without labels: number of k-means centres to route by.")] = None,
    lists: ListsOption = None,
    precision: PrecisionOption = None,
) -> None:
    """Make a gallery of a file of vectors."""
    from kedge.interop import import_gallery

    del precision
    columns: dict[str, Any] = {"vectors": vectors, "labels": labels, "paths": paths, "anchors": anchors, "lists": lists}
    imported = import_gallery(gallery, source, model=None if model is None else kedge.Model.load(model), **columns)
    lists_count = len(imported.snapshot().anchors)
    typer.echo(f"{gallery}: {len(imported):,} items with {imported.dim} numbers each, in {lists_count:,} lists.")
