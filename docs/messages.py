"""Prints every message that the package can show: errors, warnings, output and help texts, by file.

python docs/messages.py [WORD]        only those that contain WORD
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kedge"
SHOWS = {"echo", "print", "warn", "warning", "error", "info", "Option", "Argument", "confirm", "prompt", "exit"}
SHOWS |= {"HTTPException", "error_response"}
"""Functions and methods whose texts a user reads; so are those of every exception, and of a command's docstring."""


def main(word: str = "") -> None:
    """Print them."""
    total = 0
    for path in sorted(SOURCE.rglob("*.py")):
        found = [(line, text) for line, text in sorted(messages(path)) if word.lower() in text.lower()]
        if found:
            print(f"\n{path.relative_to(SOURCE)}")
        for line, text in found:
            print(f"{line:5}  {text}")
        total += len(found)
    print(f"\n{total} messages")


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each message in a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := called(node.func)) and (name in SHOWS or name.endswith("Error")):
            yield from ((part.lineno, text) for part in [*node.args, *keywords(node)] if " " in (text := shown(part)))
        elif isinstance(node, ast.FunctionDef) and path.parent.name == "cli" and not node.name.startswith("_"):
            lines = (ast.get_docstring(node) or "").splitlines()
            yield node.lineno, " / ".join(line for line in lines if line)


def keywords(node: ast.Call) -> list[ast.expr]:
    """Named arguments that hold texts."""
    return [keyword.value for keyword in node.keywords if keyword.arg in (None, "help", "purpose", "message")]


def called(function: ast.expr) -> str:
    """The last name of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def shown(node: ast.expr) -> str:
    """A text with its placeholders in braces; empty where it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (
            value.value if isinstance(value, ast.Constant) else "{" + ast.unparse(value.value) + "}"
            for value in node.values
        )
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp):
        return shown(node.left) + shown(node.right)
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, (shown(node.body), shown(node.orelse))))
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:2])
