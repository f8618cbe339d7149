"""What the site makes while it is built: the reference of the command line and of the configuration, and equations.

Nothing of it is kept in a file that could grow old.
"""

from __future__ import annotations

import html
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import matplotlib as mpl
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.textpath import TextPath

CONFIG = Path(__file__).parents[2] / "src/kedge/config"
COMMANDS, CONFIGURATION = "<!-- commands -->", "<!-- configuration -->"
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
_SIZE = 100.0


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page asks for."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if CONFIGURATION in markdown:
        markdown = markdown.replace(CONFIGURATION, configuration())
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """Draw the equations: no script has to be fetched, or run."""
    return _EQUATION.sub(lambda found: drawn(html.unescape(found[2]).strip(), block=found[1] == "div"), content)


# ---------------------------------------------------------------------- the command line


def commands() -> str:
    """A section for every verb, from the same declarations as `--help`."""
    from kedge.cli import app

    return "\n\n".join(_verb(str(verb.name), verb.callback) for verb in app.registered_commands)


def _verb(name: str, function: Any) -> str:
    from typer.models import ArgumentInfo

    hints = get_type_hints(function, include_extras=True)
    usage, rows = [], []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if get_origin(hint) is not Annotated:  # Typer's context, which stands for all overrides
            usage.append("[OVERRIDES]…")
            continue
        kind, about = get_args(hint)[:2]
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(about, ArgumentInfo):
            shown = parameter.name.upper() + "…" * (list in _parts(kind))
            usage.append(shown if needed else f"[{shown}]")
        else:
            # In an annotation, Typer keeps the first name in the place of the default.
            first = (about.default,) if isinstance(about.default, str) else ()
            shown = ", ".join((*first, *(about.param_decls or ()))) or f"--{parameter.name.replace('_', '-')}"
            shown += "" if bool in _parts(kind) else f" {about.metavar or _metavar(kind)}"
        default = "required" if needed else "" if parameter.default in (None, False) else f"`{parameter.default}`"
        rows.append(f"| `{shown}` | {_cell(about.help)} | {default} |")
    described = _paragraphs(inspect.getdoc(function))
    table = "\n".join(["| | what it says | default |", "|---|---|---|", *rows])
    return f"## kedge {name}\n\n```text\nkedge {name} [OPTIONS] {' '.join(usage)}\n```\n\n{described}\n\n{table}"


def _parts(kind: Any) -> set[Any]:
    """The plain types in `list[str] | None` and the like."""
    return {get_origin(kind) or kind} | {part for inner in get_args(kind) for part in _parts(inner)}


def _metavar(kind: Any) -> str:
    names = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return next(name for plain, name in names.items() if plain in _parts(kind))


def _paragraphs(text: str | None) -> str:
    """The help; examples become a block."""
    parts = [part.strip() for part in (text or "").split("\n\n")]
    examples = [part for part in parts if part.startswith(("kedge ", "torchrun "))]
    prose = "\n\n".join(part for part in parts if part not in examples)
    shown = "\n".join(re.sub(r" {2,}", "   # ", one) for one in examples)
    return prose + (f"\n\n```bash\n{shown}\n```" if examples else "")


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------------- the configuration


def configuration() -> str:
    """The files themselves, with their comments."""
    shown = [_file(CONFIG / "train.yaml", "The whole")]
    for group in ("trainer", "recipe", "loss", "encoder", "dataset", "logger"):
        files = sorted((CONFIG / group).glob("*.yaml"))
        if files:
            shown += [f"## `{group}=`", *(_tab(file, group) for file in files)]
    return "\n\n".join(shown)


def _file(path: Path, title: str) -> str:
    return f"## {title}\n\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def _tab(path: Path, group: str) -> str:
    code = "\n".join(f"    {line}" for line in path.read_text(encoding="utf-8").rstrip().splitlines())
    return f'=== "{path.stem}"\n\n    ```yaml title="{group}={path.stem}"\n{code}\n    ```'


# ---------------------------------------------------------------------- equations


@cache
def drawn(source: str, *, block: bool) -> str:
    """An equation as SVG in the size and colour of the text around it."""
    font = FontProperties(size=_SIZE)
    with mpl.rc_context({"mathtext.fontset": "stix"}):
        shown = source.replace(r"\frac", r"\dfrac") if block else source
        text = f"${shown}$"
        width, height, depth, *_ = MathTextParser("path").parse(text, dpi=72, prop=font)
        path = TextPath((0, 0), text, prop=font)
    segments = []
    for points, code in path.iter_segments(simplify=False, curves=True):
        numbers = " ".join(f"{value:.0f}" if i % 2 == 0 else f"{-value:.0f}" for i, value in enumerate(points))
        segments.append({1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}[int(code)] + ("" if code == 79 else numbers))
    em = 1.12 / _SIZE  # as large as the letters of the text look
    top = height - depth if depth < height else height
    kind = "math math-block" if block else "math"
    lift = "" if block else f"vertical-align:{-depth * em:.3f}em;"
    return (
        f'<svg class="{kind}" role="img" aria-label="{html.escape(source, quote=True)}" '
        f'style="width:{width * em:.3f}em;height:{(top + depth) * em:.3f}em;{lift}" '
        f'viewBox="0 {-top:.0f} {width:.0f} {top + depth:.0f}"><path d="{"".join(segments)}"/></svg>'
    )
