"""Writes docs/first-hour.md: every command of README and tutorial, run in a terminal, with what the terminal showed.

    python docs/transcript.py FOLDER --about "12 breeds of cats and dogs" --query queries/pug/1.jpg \
        --stranger strangers/beagle/1.jpg

FOLDER holds photos/, queries/ and strangers/ with class folders, as the tutorial wants them. Each page runs in a copy
of it. Blocks that are marked as needing something (see tests/test_docs.py) are listed and not run, except for
--version and --plan. `kedge sample` runs in a folder of its own.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kedge.reproduce.machine import describe  # noqa: E402
from test_docs import FIRST_HOUR, QUERY, STRANGER, TUTORIAL, blocks, commands  # noqa: E402

COLUMNS, PYTHON_COLUMNS = 100, 140
"""Lines that are typed into Python must not be wrapped."""
PROMPTS = (">>> ", "... ")
PAGES = {"README.md": "README", TUTORIAL: "The tutorial"}
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")


class Terminal:
    """A program in a pseudo-terminal, and all it has written."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str], columns: int = COLUMNS) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._bytes = b""
        self._typed = 0

    @property
    def output(self) -> str:
        """With its control sequences."""
        return self._bytes.decode(errors="replace")

    def read_until(self, *ends: str) -> None:
        """Until the output ends with one of these, or without any, until the program ends."""
        while len(self._bytes) == self._typed or not any(self.output.endswith(end) for end in ends):
            select.select([self._master], [], [])
            try:
                part = os.read(self._master, 1 << 16)
            except OSError:  # the program has ended
                part = b""
            if not part:
                break
            self._bytes += part

    def type(self, text: str) -> None:
        """As if at the keyboard."""
        self._typed = len(self._bytes)
        os.write(self._master, text.encode())

    def close(self) -> None:
        """Wait for the program; refuse one that failed."""
        self.read_until()
        os.close(self._master)
        if code := self._process.wait():
            raise SystemExit(f"{self._process.args} ended with {code}:\n{screen(self.output)}")


def screen(output: str) -> str:
    """What a terminal shows at the end: lines overwritten by progress bars are gone, colours too."""
    lines, row, column, position = [""], 0, 0, 0
    while position < len(output):
        character = output[position]
        if control := CONTROL.match(output, position):
            position = control.end()
            count = int(control[1]) if (control[1] or "").isdigit() else 1
            if control[2] == "A":
                row = max(0, row - count)
            elif control[2] == "K":
                lines[row] = "" if control[1] == "2" else lines[row][:column]
            elif control[2] == "D":
                column = max(0, column - count)
            elif control[2] == "C":
                column += count
            continue
        position += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif character == "\b":
            column = max(0, column - 1)
        elif character >= " ":
            lines[row] = f"{lines[row]:{column}s}"[:column] + character + lines[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def main() -> None:
    """Run both pages and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--about", required=True, help="what the photos are")
    parser.add_argument("--query", required=True, help="a photo below queries/")
    parser.add_argument("--stranger", required=True, help="a photo below strangers/")
    given = parser.parse_args()
    names = {QUERY: given.query, STRANGER: given.stranger}
    with tempfile.TemporaryDirectory() as scratch:
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KEDGE_DATA": f"{scratch}/data",
            "TERM": "xterm-256color",
            "HF_HUB_OFFLINE": "1",
        }
        sections, seconds, skipped = [], 0.0, []
        for page, title in PAGES.items():
            desk = Path(scratch, Path(page).stem, "photographs")
            shutil.copytree(given.folder, desk)
            if page == "README.md":
                shutil.copy(desk / given.query, desk / "query.jpg")
                shutil.copy(desk / given.stranger, desk / "other.jpg")
            sections.append(f"## {title}")
            for part in play(page, desk, variables, names):
                if isinstance(part, float):
                    seconds += part
                elif part.startswith("- "):
                    skipped.append(part)
                else:
                    sections.append(part.replace(f"{desk}/", "").replace(str(desk), "."))
        machine = describe()
    about = f"""Every command of the README and of [the tutorial](tutorial.md), in their order, with what the terminal
        showed, on {given.about}. Of a progress bar only its end is left. The machine had {machine["cores"]} cores and
        no network ({machine["cpu"]}, torch {machine["torch"]}), and a load average of {os.getloadavg()[2]:.0f} by other
        work; the seconds stand behind each command, {seconds:.0f} in all. The photos are not part of Kedge.
        `python docs/transcript.py` wrote this page."""
    head = f"# A first hour, as it went\n\n{textwrap.fill(' '.join(about.split()), 120)}"
    tail = ["## Not run here", *skipped]
    FIRST_HOUR.write_text("\n\n".join([head, *sections, tail[0], "\n".join(tail[1:])]) + "\n", encoding="utf-8")
    print(f"{FIRST_HOUR}: {seconds:.0f} s of commands")


def play(page: str, desk: Path, variables: dict[str, str], names: dict[str, str]) -> Iterator[str | float]:
    """The parts of the document, the seconds of each command, and as list items what was not run."""
    headings = {
        number: line.removeprefix("## ")
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1)
        if line.startswith("## ")
    }
    shown, python = "", None
    for block in blocks(page):
        heading = next((name for line, name in reversed(headings.items()) if line < block.line), "")
        parts: list[str] = []
        if block.language == "python":
            started = time.perf_counter()
            command = "" if python else "$ python\n"
            if python is None:
                python = Terminal([sys.executable, "-q"], desk, variables, PYTHON_COLUMNS)
                python.read_until(PROMPTS[0])
            parts.append(command + type_in(python, replace(block.code, names)))
            yield time.perf_counter() - started
        for command in commands(block):
            command = replace(command, names)
            if block.how == "parsed" and not re.search(r"--version|--plan", command):
                yield f"- `{command}`: {block.why}"
                continue
            started = time.perf_counter()
            folder = desk if command != "kedge sample" else desk.parent
            terminal = Terminal(["bash", "-c", command], folder, variables)
            if block.how == "server":
                terminal.read_until("Ctrl-C to stop.\r\n")
                time.sleep(3)
                terminal.type("\x03")
            terminal.close()
            took = time.perf_counter() - started
            yield took
            parts.append(f"$ {command}    # {took:.1f} s\n{screen(terminal.output)}".rstrip())
            print(parts[-1], flush=True)
        if parts:
            if heading and heading != shown:
                yield f"### {heading}"
                shown = heading
            yield "```text\n" + "\n\n".join(parts) + "\n```"
    if python:
        python.type("exit()\n")
        python.close()


def replace(text: str, names: dict[str, str]) -> str:
    """The text with other file names."""
    for name, other in names.items():
        text = text.replace(name, other)
    return text


def type_in(python: Terminal, code: str) -> str:
    """The block typed into an interactive Python, which waits at its prompt before and after."""
    begin = len(python.output) - len(PROMPTS[0])
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        own = lines[statement.lineno - 1 : statement.end_lineno]
        for line in [*own, *([""] if isinstance(statement, ast.For) else [])]:
            python.type(line + "\n")
            python.read_until(*PROMPTS)
    shown = screen(python.output[begin:].removesuffix(PROMPTS[0]))
    print(shown, flush=True)
    if "Traceback" in shown:
        raise SystemExit("A Python block failed.")
    return shown


if __name__ == "__main__":
    main()
