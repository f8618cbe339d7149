"""`kedge export`: a model or a gallery's vectors, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kedge.gallery import Gallery
    from kedge.model import Model

_MODELS = (".onnx", ".pt2")
_VECTORS = (".parquet", ".npz", ".faiss")
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
    private: Annotated[bool, typer.Option("--private", help="With hf://: for you alone, if it is new.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Carry a model or a gallery's vectors to other tools; the target's ending says which."""
    from kedge.errors import ConfigError

    ending = _ending(target)
    if anchors and ending not in _MODELS:
        raise ConfigError(f"--anchors is for {' and '.join(_MODELS)} files; found {target}: leave it out.")
    if private and ending != _HUB:
        raise ConfigError(f"--private is for {_HUB}USER/NAME; found {target}: leave it out.")
    if ending != _HUB and not overwrite and _taken(Path(target).expanduser()):
        raise ConfigError(f"{target} is there already: pass --overwrite to replace it, or choose another name.")
    if ending in _VECTORS:
        said = _export_vectors(_gallery(thing, target), target, overwrite=overwrite)
    else:
        said = _export_model(thing, target, ending, anchors=anchors, private=private)
    typer.echo(said)


def _ending(target: str) -> str:
    """The target's ending, `hf://`, or nothing for a folder."""
    from kedge.errors import ConfigError

    if target.startswith(_HUB):
        return _HUB
    ending = "" if target.endswith(("/", "\\")) or Path(target).is_dir() else Path(target).suffix.lower()
    if ending not in ("", *_MODELS, *_VECTORS):
        raise ConfigError(
            f"TARGET must end in one of {', '.join((*_MODELS, *_VECTORS))}, or in / for a folder; found {target}."
        )
    return ending


def _taken(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _is_gallery(thing: str) -> bool:
    from kedge.io import is_url

    return is_url(thing) or Path(thing).expanduser().joinpath("gallery.json").is_file()


def _gallery(thing: str, target: str) -> Gallery:
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery

    if not _is_gallery(thing) and Path(thing).expanduser().is_dir():
        raise ConfigError(f"{target} is for a gallery's vectors, but {thing} is no gallery: kedge index makes one.")
    return Gallery.open(thing)


def _model(thing: str) -> Model:
    """A run's or a model's own, or the one that a gallery was made with."""
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery
    from kedge.model import Model

    if not _is_gallery(thing):
        return Model.load(thing, device="cpu")
    model = Gallery.open(thing).model
    if model is None:
        raise ConfigError(f"{thing} was made without a model: export its vectors, as {' or '.join(_VECTORS)}.")
    return model


def _export_vectors(gallery: Gallery, target: str, *, overwrite: bool) -> str:
    from kedge.interop import export_gallery

    export_gallery(gallery, target, overwrite=overwrite)
    how = {
        ".parquet": f'pandas.read_parquet("{target}")',
        ".npz": f'numpy.load("{target}")',
        ".faiss": f'faiss.read_index("{target}")',
    }[Path(target).suffix.lower()]
    return f"{target}: {len(gallery):,} vectors of {gallery.dim} numbers; {how}"


def _export_model(thing: str, target: str, ending: str, *, anchors: bool, private: bool) -> str:
    from kedge.interop import export_onnx, export_program

    model = _model(thing)
    measured = Path(thing).expanduser() / "metrics.json"
    metrics = measured if measured.is_file() else None
    what = f"{model.encoder.name}, {model.dim} numbers, {len(model.classes):,} classes"
    if ending == _HUB:
        name = target.removeprefix(_HUB)
        address = model.push_to_hub(name, private=private or None, metrics=metrics)
        return f'{address}: {what}; kedge.Model.from_pretrained("{name}")'
    if ending == "":
        model.save_pretrained(target, metrics=metrics)
        return f'{target}: {what}; kedge.Model.from_pretrained("{target}"), and its card is {Path(target, "README.md")}'
    if ending == ".onnx":
        export_onnx(model, target, anchors=anchors)
        how = f'onnxruntime.InferenceSession("{target}").run(None, {{"pixels": batch}})'
    else:
        export_program(model, target, anchors=anchors)
        how = f'torch.export.load("{target}").module()(batch)'
    size = model.preprocessing.size
    return f"{target}: {what}; {how}, batch: uint8, B x 3 x {size or 'H'} x {size or 'W'}"
