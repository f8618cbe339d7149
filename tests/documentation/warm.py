"""`kedge` and `python` for the documentation's blocks, without the seconds that importing torch takes each time.

    python warm.py serve SOCKET            imports everything once, and forks a process for each command
    python warm.py call SOCKET kedge …     runs one there, with the directory, variables and streams of the caller
    python warm.py call SOCKET python …

What runs is the real command line, in a process of its own; only the imports are shared.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from types import FrameType

HEAVY = (
    "torch",
    "torchvision",
    "hydra",
    "lance",
    "matplotlib",
    "kedge.cli",
    "kedge.training",
    "kedge.evaluation",
    "kedge.gallery",
    "kedge.audit",
    "kedge.serving.app",
    "kedge.reproduce.experiments",
)


def serve(path: str) -> None:
    """Fork for each caller, for ever."""
    for name in HEAVY:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            caller, _ = listener.accept()
            with caller:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _look_after(caller)


def _look_after(caller: socket.socket) -> None:
    """Run the caller's command in a child, tell its number, and how it ended."""
    content, streams, _, _ = socket.recv_fds(caller, 1 << 20, 3)
    asked = json.loads(content)
    child = os.fork()
    if child == 0:
        caller.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(asked["command"], asked["directory"], asked["variables"])
    caller.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        caller.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(command: list[str], directory: str, variables: dict[str, str]) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        program, *sys.argv = command
        sys.path[0] = ""
        sys.path[1:1] = [place for place in variables.get("PYTHONPATH", "").split(":") if place]
        if program == "kedge":
            sys.argv.insert(0, "kedge")
            from kedge.cli import main

            main()
        elif sys.argv[0] == "-m":
            sys.argv.pop(0)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def call(path: str, command: list[str]) -> int:
    """Hand a command over and wait for it; signals go to it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        asked = {"command": command, "directory": os.getcwd(), "variables": dict(os.environ)}  # noqa: PTH109
        socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
        answers = server.makefile()
        child = int(answers.readline())

        def forward(number: int, frame: FrameType | None) -> None:
            os.kill(child, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        code = int(answers.readline() or 1)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))
