"""What the documents promise: every block runs, every link leads somewhere, every figure is a benchmark's.

A block is a fence of three backticks with a language. What is done with it:

    python              runs, in one process with the other Python blocks of its page
    bash                runs under `bash -e`, in the same directory
    yaml, json          is read; with a title="file", written to that file (Python too), for the blocks after it
    text                is output, and left alone

Two marks, comments in the line above the fence, change that:

    <!-- block: server -->              a server that runs for ever: started, waited for, stopped when the page ends
    <!-- block: parsed, it needs … -->  cannot run here. Its commands are still parsed by the real command line, its
                                        overrides composed, its extras looked up, its imports made.

PARSED below says how many of these each page has, so that none slips in. The tutorial runs first, in an empty
directory; other pages begin in a copy of what it leaves, and with query.jpg and other.jpg, which stand for a reader's
own pictures. To save time, SHORTER makes training short; each of its replacements must be of use somewhere.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOOLS = Path(__file__).parent / "documentation"
PAGES = sorted(str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
TUTORIAL = "docs/tutorial.md"
FIRST_HOUR = DOCS / "first-hour.md"
QUERY, STRANGER = "queries/Sneaker/000.png", "strangers/Bag/000.png"
"""Images of the tutorial, which docs/transcript.py replaces by real photos."""
LANGUAGES = {"python", "bash", "yaml", "json", "text"}

PARSED: dict[str, int] = {
    "README.md": 2,
    "docs/how-to/add-a-loss.md": 1,
    "docs/how-to/add-an-encoder.md": 1,
    "docs/how-to/data.md": 3,
    "docs/how-to/exports.md": 1,
    "docs/how-to/few-pictures.md": 1,
    "docs/how-to/train.md": 2,
    "docs/how-to/unlabelled.md": 1,
    "docs/reproduce.md": 2,
    "docs/scale.md": 8,
    "docs/serve.md": 2,
    "docs/tutorial.md": 1,
}

SHORTER = {
    "kedge train photos/ --folder runs/photos\n": "kedge train photos/ --folder runs/photos recipe.epochs=1\n",
    'kedge.train("photos/")': 'kedge.train("photos/", overrides=["recipe.epochs=1"])',
    "recipe.epochs=3": "recipe.epochs=1",
    "kedge sample\n": "kedge sample --pictures 12 --queries 10\n",
}
FRESH = {"README.md"}
"""Pages that begin with pictures alone."""
PORT = "127.0.0.1:8000"
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)
MARK = re.compile(r"<!-- block: (?P<how>server|parsed), ?(?P<why>[^>]*) -->\s*$|<!-- block: (?P<alone>server) -->\s*$")


class Block(NamedTuple):
    """One fence of a page."""

    page: str
    line: int
    language: str
    title: str
    how: str
    why: str
    code: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        above = text[: fence.start()]
        mark = MARK.search(above[-400:].rstrip("\n") + "\n")
        how, why = ((mark["how"] or mark["alone"]), (mark["why"] or "").strip()) if mark else ("run", "")
        title = re.search(r'title="([^"]+)"', fence["rest"])
        code = textwrap.dedent(fence["code"])
        found.append(Block(page, above.count("\n") + 1, fence["language"], title[1] if title else "", how, why, code))
    return found


def commands(block: Block) -> list[str]:
    """The commands of a shell block, without comments."""
    if block.language != "bash":
        return []
    lines = block.code.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


# ---------------------------------------------------------------------- what holds for every page


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    found = blocks(page)
    fences = len(re.findall(r"^ *```", (ROOT / page).read_text(encoding="utf-8"), re.M))
    assert 2 * len(found) == fences, "a fence is not closed"
    for block in found:
        assert block.language in LANGUAGES, f"{page}:{block.line}: a block of {block.language or 'no language'}"
        assert block.how != "parsed" or block.why.startswith("it needs "), f"{page}:{block.line}: say what it needs"
    marks = (ROOT / page).read_text(encoding="utf-8").count("<!-- block:")
    assert marks == sum(block.how != "run" for block in found), f"{page} has a mark that is above no block"
    parsed = sum(block.how == "parsed" for block in found)
    assert parsed == PARSED.get(page, 0), f"{page} has {parsed} blocks that only are parsed"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, part = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if part and file.suffix == ".md":
            assert part in anchors(file), f"{page} links to {target}"


def anchors(file: Path) -> set[str]:
    """The parts of a page that can be linked to."""
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+?)(?: *\{[^}]*\})?$", text, re.M)
    slugs = {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()) for title in titles
    }
    return slugs | set(re.findall(r"\{ *#([\w-]+)", text)) | set(re.findall(r"^::: ([\w.]+)", text, re.M))


def test_what_makes_training_short_is_of_use() -> None:
    code = "".join(block.code for page in PAGES for block in blocks(page))
    assert all(long in code for long in SHORTER)


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """MkDocs' own tags are of no interest here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    Loader.add_multi_constructor("!", lambda *_: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def files(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for child in node.values() if isinstance(node, dict) else node:
                yield from files(child)

    listed = list(files(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    silent = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=silent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    for page in DOCS.rglob("*.md"):
        text = (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*>", text)
        fetched += re.findall(r"<link\b[^>]*\bhref=\"?(?:https?:)?//[^>]*>", text)
        assert not fetched, f"{page}: {fetched}"
        assert "arithmatex" not in text, f"{page}: an equation was not drawn"
    from typer.testing import CliRunner

    from kedge.cli import app

    commands = (tmp_path / "site/reference/cli.html").read_text(encoding="utf-8")
    for verb in app.registered_commands:
        assert f"kedge {verb.name}" in commands
        shown = CliRunner().invoke(app, [str(verb.name), "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
        for option in set(re.findall(r"--[a-z][\w-]+", shown)) - {"--help"}:
            assert option in commands, f"kedge {verb.name} {option}"


def test_tables_are_those_of_the_benchmarks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_of_results_is_marked() -> None:
    for page in {*DOCS.rglob("*.md")} - {DOCS / "results.md"}:
        lines = page.read_text(encoding="utf-8").splitlines()
        for above, line in itertools.pairwise(lines):
            if "mAP" in line and line.startswith("|") and not above.startswith("|"):
                assert above.startswith("<!-- results: "), line


# ---------------------------------------------------------------------- blocks that cannot run here

OTHERS = {"curl", "export", "first=$(scontrol", "python", "ray", "sed", "source", "srun", "cd"}
"""Commands that are not ours: bash checks how they are written, and no more."""


@pytest.mark.parametrize("page", [page for page in PAGES if page in PARSED])
def test_what_cannot_run_is_parsed(page: str) -> None:
    for block in blocks(page):
        if block.how == "parsed" and block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.code], check=True)
            for line in block.code.replace("\\\n", " ").splitlines():
                check_command(shlex.split(line, comments=True))
        elif block.how == "parsed" and block.language == "python":
            check_names(ast.parse(block.code, f"{page}:{block.line}"))


def check_command(words: list[str]) -> None:
    """Refuse a command that Kedge would refuse before it looks at any data."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    if "kedge" in words and words[0] in ("torchrun", "srun", "python"):
        words = words[words.index("kedge") :]
    if words[0] == "kedge":
        check_verb(words[1], words[2:])
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), words
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(words[1:]) <= set(targets), words
    else:
        assert words[0] in OTHERS, words


def check_verb(verb: str, words: list[str]) -> None:
    from typer.main import get_group

    from kedge.cli import app
    from kedge.config.compose import compose, expand

    if verb == "--version":
        return
    if verb != "train":
        get_group(app).commands[verb].make_context(verb, list(words))
        return
    flags = {word for word in words if word in ("-m", "--multirun")}
    for option in ("--folder", "--resume"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    overrides = [word for word in words if word not in flags]
    if overrides and "=" not in overrides[0]:
        overrides = ["dataset=folder", f"dataset.path={overrides[0]}", *overrides[1:]]
    for job in expand(overrides) if flags else [overrides]:
        compose(job)


def check_names(tree: ast.Module) -> None:
    """What a block imports from Kedge, and what it says of `kedge`, is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kedge"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kedge":
            assert hasattr(importlib.import_module("kedge"), node.attr), f"kedge has no {node.attr}"


@pytest.mark.parametrize("page", ["README.md", TUTORIAL])
def test_the_first_hour_has_every_command(page: str) -> None:
    shown = FIRST_HOUR.read_text(encoding="utf-8")
    for block in blocks(page):
        for command in commands(block):
            pattern = re.escape(command)
            for name in (QUERY, STRANGER):
                pattern = pattern.replace(re.escape(name), name.split("/")[0] + r"/\S+")
            assert re.search(rf"^(\$ |- `){pattern}(    #|`)", shown, re.M), f"run docs/transcript.py again: {command}"
        if block.language == "python":
            for line in filter(str.strip, block.code.splitlines()):
                pattern = re.escape(line).replace(re.escape(QUERY), r"queries/\S+")
                assert re.search(rf"^(>>>|\.\.\.) {pattern}$", shown, re.M), f"run docs/transcript.py again: {line}"


def test_the_commands_of_the_first_hour_are_still_understood() -> None:
    shown = FIRST_HOUR.read_text(encoding="utf-8")
    found = re.findall(r"^\$ (kedge .+?)    #", shown, re.M)
    assert len(found) > 15
    for command in found:
        check_command(shlex.split(command))
    assert not re.search(r"/tmp/|/home/|/root/|Traceback", shown)


# ---------------------------------------------------------------------- blocks that run


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory, two_towers: Callable[[str], Any]) -> Iterator[dict[str, str]]:
    """An environment where `kedge` and `python` start at once, without a network or a screen.

    All that is in a cache is a small model, which stands for OpenAI's CLIP.
    """
    place = tmp_path_factory.mktemp("docs")
    cached, commit = place / "huggingface/hub/models--openai--clip-vit-base-patch32", "0" * 40
    shutil.copytree(two_towers("clip").folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    for name in ("kedge", "python"):
        shim = place / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {TOOLS / "warm.py"} call {place / "warm"} {name} "$@"\n')
        shim.chmod(0o755)
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "HOME": str(place),
        "TORCH_HOME": str(place / "torch"),
        "KEDGE_DATA": str(place / "data"),
        "HF_HOME": str(place / "huggingface"),
        "MPLBACKEND": "agg",
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "no_proxy": "127.0.0.1",
    }
    server = subprocess.Popen(
        [sys.executable, str(TOOLS / "warm.py"), "serve", str(place / "warm")],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield environment
    server.kill()
    server.wait()
    shutil.rmtree(place, ignore_errors=True)


def run_page(page: str, desk: Path, environment: dict[str, str]) -> None:
    """Run what can run of a page, in `desk`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    steps = []
    for block in blocks(page):
        if block.how == "parsed" or (block.language not in ("python", "bash") and not block.title):
            continue
        code = block.code.replace(PORT, f"127.0.0.1:{port}")
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        if block.how == "server":
            code = f"{code.strip()} --port {port}"
        steps.append({**block._asdict(), "code": code, "port": port})
    plan = desk.parent / f"{desk.name}.json"
    plan.write_text(json.dumps({"page": page, "steps": steps}), encoding="utf-8")
    command = ["python", str(TOOLS / "page.py"), str(plan)]
    done = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    print(done.stdout, done.stderr)


@pytest.fixture(scope="session")
def tutorial(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory as the tutorial leaves it."""
    desk = tmp_path_factory.mktemp("tutorial")
    run_page(TUTORIAL, desk, variables)
    for name, kind in {"query.jpg": "Sneaker", "other.jpg": "Dress"}.items():
        with Image.open(desk / f"queries/{kind}/000.png") as picture:
            picture.save(desk / name)
    yield desk
    shutil.rmtree(desk, ignore_errors=True)


@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL])
def test_every_block_runs(page: str, tutorial: Path, variables: dict[str, str], tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.code), dict), f"{page}:{block.line}"
        elif block.language == "json":
            json.loads(block.code)
    if any(block.language in ("python", "bash") and block.how != "parsed" for block in blocks(page)):
        made = shutil.ignore_patterns("runs", "gallery", "by-looks", "*.html", "*.csv") if page in FRESH else None
        run_page(page, Path(shutil.copytree(tutorial, tmp_path / "desk", ignore=made)), variables)
        shutil.rmtree(tmp_path / "desk", ignore_errors=True)


def test_the_tutorial_leaves_what_it_promises(tutorial: Path) -> None:
    scores = json.loads((tutorial / "runs/photos/metrics.json").read_text(encoding="utf-8"))
    assert 0 < scores["brute_force"]["mAP"] <= 1
    assert "data:image" in (tutorial / "hits.html").read_text(encoding="utf-8")
    assert (tutorial / "gallery/calibration.json").exists()
