"""Models on the Hugging Face Hub, and the folders it understands: a model's own files, `config.json` and a card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kedge.errors import ConfigError, DownloadError, KedgeError, ModelError, ServiceError
from kedge.model.folder import KIND, kedge_version

if TYPE_CHECKING:
    from kedge.model.model import Model

__all__ = ["fetched", "push_to_hub", "save_pretrained"]

_MODEL = ("weights.safetensors", "model.json")
"""In this order: a description never stands beside weights that are older than it says."""
_CONFIG, _CARD = "config.json", "README.md"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_METHODS = {"brute_force": "brute force", "label_lists": "label lists", "anchor_lists": "anchor lists"}
_CLASSES_SHOWN = 50


def save_pretrained(
    model: Model,
    folder: str | Path,
    *,
    name: str | None = None,
    metrics: str | Path | None = None,
    license: str | None = None,
) -> None:
    """Write the model, a `config.json` and, where there is no `README.md` yet, a card; other files are left alone.

    `name` is what the card calls the model by, `metrics` a run's folder or its `metrics.json`, for the card.
    """
    target = Path(folder).expanduser().resolve()
    measured = None if metrics is None else _read_metrics(model, Path(metrics).expanduser())
    card = _card(model, name or target.name, measured, license)
    config = json.dumps(_config(model), indent=2, ensure_ascii=False) + "\n"
    if target.is_file() or not _ours(target / _MODEL[1]):
        raise ModelError(f"{target} holds something else than a Kedge model: choose another folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # All is written before the first file gets its name, so that a full disk changes nothing.
        with TemporaryDirectory(prefix=f".{target.name}.", suffix=".saving", dir=target.parent) as place:
            staging = Path(place, "model")
            model.save(staging)
            (staging / _CONFIG).write_text(config, encoding="utf-8")
            (staging / _CARD).write_text(card, encoding="utf-8")
            target.mkdir(exist_ok=True)
            for file in _files(card=not (target / _CARD).exists()):
                (staging / file).replace(target / file)
    except OSError as error:
        raise ModelError(f"model {target} could not be saved ({error.strerror or error}).") from error


def fetched(
    name: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
) -> Path:
    """The folder of a model: the one called so or, where there is none, `user/repo` of the Hub in its cache."""
    here = Path(name).expanduser()
    if isinstance(name, Path) or here.exists() or not _NAME.fullmatch(name):
        return here
    hub = _hub()
    with _explained(hub, name, DownloadError, f"there is no folder {name} here, and as a model of the Hub it"):
        folder = Path(
            hub.snapshot_download(
                name, revision=revision, cache_dir=cache_dir, token=token, allow_patterns=list(_MODEL), **_agent()
            )
        )
    missing = [file for file in _MODEL if not (folder / file).is_file()]
    if missing:
        raise ModelError(f"{name} on the Hugging Face Hub is no Kedge model: it holds no {missing[-1]}.")
    return folder


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
    """Put the model on the Hub in one commit, whose address it returns; a card that is there stays as it is."""
    if not _NAME.fullmatch(repo_id):
        raise ConfigError(f"repo_id must be user/name or organisation/name; found {repo_id!r}.")
    hub = _hub()
    with TemporaryDirectory() as place, _explained(hub, repo_id, ServiceError, f"model {repo_id}"):
        save_pretrained(model, place, name=repo_id, metrics=metrics, license=license)
        api = hub.HfApi(token=token, **_agent())
        api.create_repo(repo_id, private=private, exist_ok=True)
        files = _files(card=not api.file_exists(repo_id, _CARD))
        # One commit, and not a folder's upload, which may become several: weights and description belong together.
        commit = api.create_commit(
            repo_id,
            [hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=Path(place, file)) for file in files],
            commit_message=commit_message or f"Kedge model {model.fingerprint}",
        )
    return str(commit.commit_url)


def _files(*, card: bool) -> tuple[str, ...]:
    return (*_MODEL, _CONFIG, *((_CARD,) if card else ()))


# ------------------------------------------------------------------ what goes beside the model


def _config(model: Model) -> dict[str, Any]:
    """What pages and tools look for in a `config.json`; Kedge itself reads `model.json`."""
    return {
        "library_name": "kedge",
        "model_type": "kedge",
        "architecture": model.encoder.name,
        "num_features": model.dim,
        "num_classes": len(model.classes),
        "image_size": model.preprocessing.size,
        "loss": model.loss,
        "fingerprint": model.fingerprint,
    }


def _card(model: Model, name: str, metrics: dict[str, Any] | None, license: str | None) -> str:
    import yaml

    tags = ["kedge", "image-retrieval", "metric-learning", model.encoder.name.rpartition(":")[2], model.loss]
    front: dict[str, Any] = {} if license is None else {"license": license}
    front |= {"library_name": "kedge", "pipeline_tag": "image-feature-extraction", "tags": tags}
    if metrics is not None:
        front["model-index"] = [{"name": _title(name), "results": [_result(metrics)]}]
    shown = ", ".join(_code(each) for each in model.classes[:_CLASSES_SHOWN])
    more = len(model.classes) - _CLASSES_SHOWN
    size = model.preprocessing.size
    use = json.dumps(name, ensure_ascii=False)
    text = f"""# {_title(name)}

An image encoder for retrieval with learnable class anchors, trained with Kedge.

| | |
|---|---|
| encoder | {_code(model.encoder.name)} |
| loss | {_code(model.loss)} |
| embedding | {model.dim} numbers, compared by Euclidean distance |
| pictures | {"any size" if size is None else f"{size} x {size} pixels"} |
| classes | {len(model.classes):,} |
| fingerprint | `{model.fingerprint}` |

## How to use it

```python
import kedge

model = kedge.Model.from_pretrained({use})  # pip install 'kedge[hub]'
vectors = model.embed(["one.jpg", "two.jpg"])  # 2 x {model.dim}, float32
{'names = model.classify("one.jpg")' if model.classes else 'gallery = kedge.Gallery.create("gallery", model)'}
```

## Classes

{shown or "none"}{f", and {more:,} more in `model.json`" if more > 0 else ""}
"""
    if metrics is not None:
        text += f"\n## Measured\n\n{_table(metrics)}"
    return f"---\n{yaml.safe_dump(front, allow_unicode=True, sort_keys=False)}---\n\n{text}"


def _read_metrics(model: Model, path: Path) -> dict[str, Any]:
    file = path / "metrics.json" if path.is_dir() else path
    try:
        metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for method in _METHODS:
            float(metrics[method]["mAP"]), float(metrics[method]["P@20"])
        float(metrics["accuracy"]), int(metrics["queries"]), str(metrics["meta"]["dataset"])
        measured = metrics["meta"]["model_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"metrics {file} cannot be read as what kedge evaluate writes: run it first.") from error
    if measured != model.fingerprint:
        raise ConfigError(
            f"metrics {file} are those of the model {measured}, found {model.fingerprint}: run kedge evaluate again."
        )
    return metrics


def _result(metrics: Mapping[str, Any]) -> dict[str, Any]:
    dataset = str(metrics["meta"]["dataset"])
    scores = [
        {"type": kind, "name": f"{name} ({how})", "value": float(metrics[method][name])}
        for method, how in _METHODS.items()
        for kind, name in (("mean_average_precision", "mAP"), ("precision_at_20", "P@20"))
    ]
    accuracy = {"type": "accuracy", "name": "accuracy", "value": float(metrics["accuracy"])}
    return {
        "task": {"type": "image-feature-extraction", "name": "Image retrieval"},
        "dataset": {"type": dataset, "name": dataset},
        "metrics": [*scores, accuracy],
    }


def _table(metrics: Mapping[str, Any]) -> str:
    meta = metrics["meta"]
    rows = "".join(
        f"| {how} | {metrics[method]['mAP']:.3f} | {metrics[method]['P@20']:.3f} |\n"
        for method, how in _METHODS.items()
    )
    return (
        f"{metrics['queries']:,} queries of {_code(str(meta['dataset']))}; classification accuracy "
        f"{metrics['accuracy']:.3f}.\n\n| search | mAP | P@20 |\n|---|---|---|\n{rows}"
    )


def _code(text: str) -> str:
    """A name as it is, whatever Markdown would make of it."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "¦") + "`"


def _title(name: str) -> str:
    return " ".join(name.replace("\\", "/").rstrip("/").rpartition("/")[2].split()) or "model"


def _ours(description: Path) -> bool:
    """Whether a folder's `model.json`, if there is one, is a Kedge model's."""

    try:
        content = json.loads(description.read_bytes())
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


# ------------------------------------------------------------------ the Hub


def _hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ConfigError("The Hugging Face Hub needs huggingface_hub: pip install 'kedge[hub]'.") from error
    return huggingface_hub


def _agent() -> dict[str, str]:
    return {"library_name": "kedge", "library_version": kedge_version()}


@contextmanager
def _explained(hub: ModuleType, name: str, kind: type[KedgeError], what: str) -> Iterator[None]:
    """One sentence instead of what the Hub's client says."""
    errors = hub.errors
    login = "log in with `hf auth login`, or pass token="
    try:
        yield
    except KedgeError:
        raise
    except errors.GatedRepoError as error:
        raise kind(f"{what} is gated: accept its terms on {name}'s page, then {login}.") from error
    except errors.RepositoryNotFoundError as error:
        raise kind(f"{what} is not there, or private: check the name, or {login}.") from error
    except errors.RevisionNotFoundError as error:
        raise kind(f"{what} has no such revision: name a branch, a tag or a commit of {name}.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise kind(
            f"{what} is neither in the cache nor within reach: connect to the network, or copy its folder here and "
            "pass the folder's path."
        ) from error
    except Exception as error:  # the client's versions raise errors of several libraries
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise kind(f"{what} is refused: {login} of someone who may.") from error
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise kind(f"{what} failed ({said.rstrip('.')}): check the network and try again.") from error
