"""Models on the Hugging Face Hub, and the folders it understands: a model's own files, `config.json` and a model card.

`huggingface_hub.ModelHubMixin` is not used: it would be imported with every model, saves file by file instead of all or
nothing, and replaces a card that is on the Hub already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kedge.encoders.transformers import HF
from kedge.errors import ConfigError, DownloadError, KedgeError, ModelError, ServiceError, first_line
from kedge.model.io import DESCRIPTION, WEIGHTS, is_model

if TYPE_CHECKING:
    import torch
    from huggingface_hub import EvalResult

    from kedge.model.model import Model

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]

_MODEL = (WEIGHTS, DESCRIPTION)
"""In this order: a description never stands beside weights that are older than it says."""
_CONFIG, _CARD = "config.json", "README.md"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_METHODS = {"brute_force": "brute force", "label_lists": "label lists", "anchor_lists": "anchor lists"}
_CLASSES_SHOWN = 50


def save_pretrained(
    model: Model,
    path: str | Path,
    *,
    name: str | None = None,
    metrics: str | Path | None = None,
    license: str | None = None,
) -> None:
    """Write the model, a `config.json` and, where there is no `README.md` yet, a card; other files are left alone.

    `name` is what the card calls the model by, `metrics` a run's folder or its `metrics.json`, for the card.
    """
    target = Path(path).expanduser().resolve()
    card = _model_card(model, name or target.name, metrics, license)
    config = json.dumps(_config(model), indent=2, ensure_ascii=False) + "\n"
    if target.is_file() or ((target / DESCRIPTION).exists() and not is_model(target)):
        raise ModelError(f"{target} holds something other than a Kedge model; choose another folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # All is written before the first file gets its name, so that a full disk changes nothing.
        with TemporaryDirectory(prefix=f".{target.name}.", suffix=".saving", dir=target.parent) as scratch:
            staging = Path(scratch, "model")
            model.save(staging)
            _forget_local_text(staging / DESCRIPTION)
            (staging / _CONFIG).write_text(config, encoding="utf-8")
            (staging / _CARD).write_text(card, encoding="utf-8")
            target.mkdir(exist_ok=True)
            for file in (*_MODEL, _CONFIG, _CARD):
                if file != _CARD or not (target / _CARD).exists():
                    (staging / file).replace(target / file)
    except OSError as error:
        raise ModelError(f"model {target} could not be saved ({error.strerror or error}).") from error


def from_pretrained(
    cls: type[Model],
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    device: str | torch.device = "auto",
    engine: str | None = None,
) -> Model:
    """Open a model folder or ``user/repo`` of the Hugging Face Hub, of which only the model is fetched, once."""
    folder = Path(name_or_path).expanduser()
    if isinstance(name_or_path, str) and not folder.exists() and _REPO_ID.fullmatch(name_or_path):
        import huggingface_hub as hub

        options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "token": token}
        with _hub_errors(DownloadError, f"there is no folder {name_or_path} here, and as a model of the Hub it"):
            folder = Path(hub.snapshot_download(name_or_path, allow_patterns=list(_MODEL), **options))
        if not (folder / DESCRIPTION).is_file():
            raise ModelError(f"{name_or_path} on the Hugging Face Hub is not a Kedge model: it has no {DESCRIPTION}.")
    return cls.load(folder, device, engine)


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
    metrics: str | Path | None = None,
    license: str | None = None,
) -> str:
    """Upload the model to the Hub in one commit, whose address it returns; a card that is there stays as it is."""
    if not _REPO_ID.fullmatch(repo_id):
        raise ConfigError(f"repo_id must be user/name or organisation/name; found {repo_id!r}.")
    import huggingface_hub as hub

    with TemporaryDirectory() as scratch, _hub_errors(ServiceError, f"model {repo_id}"):
        save_pretrained(model, scratch, name=repo_id, metrics=metrics, license=license)
        api = hub.HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if api.file_exists(repo_id, _CARD):
            Path(scratch, _CARD).unlink()
        title = commit_message or f"Kedge model {model.fingerprint}"
        return str(api.upload_folder(repo_id=repo_id, folder_path=scratch, commit_message=title).commit_url)


def _forget_local_text(file: Path) -> None:
    """Leave a text tower's local folder out of a model's description: it means nothing elsewhere."""
    description = json.loads(file.read_bytes())
    if Path(description.get("text", "").removeprefix(HF)).is_absolute():
        del description["text"]
        file.write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(model: Model) -> dict[str, Any]:
    """What pages and tools look for in a `config.json`; Kedge itself reads `model.json`."""
    return {
        "library_name": "kedge",
        "model_type": "kedge",
        "architecture": model.encoder_name,
        "num_features": model.dim,
        "num_classes": len(model.classes),
        "image_size": model.preprocessing.size,
        "loss": model.loss,
        "fingerprint": model.fingerprint,
    }


def _model_card(model: Model, name: str, metrics: str | Path | None, license: str | None) -> str:
    from huggingface_hub import ModelCardData

    title = " ".join(name.replace("\\", "/").rstrip("/").rpartition("/")[2].split()) or "model"
    results, section = (None, "") if metrics is None else _results(model, Path(metrics).expanduser())
    data = ModelCardData(
        license=license,
        library_name="kedge",
        pipeline_tag="image-feature-extraction",
        tags=["kedge", "image-retrieval", "metric-learning", model.encoder_name.rpartition(":")[2], model.loss],
        model_name=title,
        eval_results=results,
    )
    classes = ", ".join(_code(each) for each in model.classes[:_CLASSES_SHOWN])
    if (more := len(model.classes) - _CLASSES_SHOWN) > 0:
        classes += f", and {more:,} more in `model.json`"
    size = model.preprocessing.size
    return (
        (files("kedge.model") / "card.md")
        .read_text(encoding="utf-8")
        .format(
            data=data.to_yaml(),
            title=title,
            encoder=_code(model.encoder_name),
            loss=_code(model.loss),
            dim=model.dim,
            images="any size" if size is None else f"{size} x {size} pixels",
            count=len(model.classes),
            fingerprint=model.fingerprint,
            name=json.dumps(name, ensure_ascii=False),
            use='name = model.classify("one.jpg")'
            if model.classes
            else 'gallery = kedge.Gallery.create("gallery", model)',
            classes=classes or "none",
            results=section,
        )
    )


def _results(model: Model, path: Path) -> tuple[list[EvalResult], str]:
    """What `kedge evaluate` measured of this model, for the card's metadata and for its text."""
    from huggingface_hub import EvalResult

    file = path / "metrics.json" if path.is_dir() else path
    try:
        metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        dataset, measured = str(metrics["meta"]["dataset"]), metrics["meta"]["model_fingerprint"]
        scores = [
            (kind, f"{name} ({method})", float(metrics[key][name]))
            for key, method in _METHODS.items()
            for kind, name in (("mean_average_precision", "mAP"), ("precision_at_20", "P@20"))
        ]
        scores.append(("accuracy", "accuracy", float(metrics["accuracy"])))
        queries = int(metrics["queries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as metrics; run kedge evaluate first.") from error
    if measured != model.fingerprint:
        raise ConfigError(
            f"metrics {file} are those of the model {measured}, found {model.fingerprint}: run kedge evaluate again."
        )
    task: dict[str, Any] = {"task_type": "image-feature-extraction", "task_name": "Image retrieval"}
    task |= {"dataset_type": dataset, "dataset_name": dataset}
    results = [
        EvalResult(**task, metric_type=kind, metric_name=name, metric_value=value) for kind, name, value in scores
    ]
    rows = "".join(f"| {name} | {value:.3f} |\n" for _, name, value in scores)
    return results, f"\n## Results\n\n{queries:,} queries of {_code(dataset)}.\n\n| | |\n|---|---|\n{rows}"


def _code(text: str) -> str:
    """Text as Markdown code, whatever characters it holds."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "¦") + "`"


@contextmanager
def _hub_errors(kind: type[KedgeError], subject: str) -> Iterator[None]:
    """One sentence in place of an error of the Hub's client."""
    from huggingface_hub import errors

    login = "log in with `hf auth login`, or pass token="
    offline = "is neither in the cache nor within reach: connect to the network, or copy it and pass the folder's path"
    sentences: dict[type[Exception], str] = {
        errors.GatedRepoError: f"is gated: accept its terms on its page, then {login}",
        errors.RepositoryNotFoundError: f"is not there, or private: check the name, or {login}",
        errors.RevisionNotFoundError: "has no such revision: name a branch, a tag or a commit",
        errors.LocalEntryNotFoundError: offline,
        errors.OfflineModeIsEnabled: offline,
    }
    try:
        yield
    except KedgeError:
        raise
    except Exception as error:  # the client's versions raise errors of several libraries
        unknown = f"failed ({first_line(error)}): check the network, and who you are ({login})"
        sentence = next((text for known, text in sentences.items() if isinstance(error, known)), unknown)
        raise kind(f"{subject} {sentence}.") from error
