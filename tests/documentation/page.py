"""Runs the blocks of one page in their order, in the directory it is started in.

    python page.py STEPS.json

Python blocks share one namespace, as in a session; shell blocks run under `bash -e`, and where one of them leaves the
directory, the rest of the page follows. A server is started, waited for and kept until the page ends.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def main(path: str) -> int:
    """0 where every block ran."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sys.path[0] = ""
    servers: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for step in content["steps"]:
            started = time.perf_counter()
            _take(step, content["page"], namespace, servers)
            print(f"-- {content['page']}:{step['line']} {time.perf_counter() - started:.1f} s", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        print(f"{content['page']}:{step['line']}: this block failed:\n{step['code']}", file=sys.stderr)
        code = 1
    for server in servers:
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=30) != 0:
            print(f"{content['page']}: the server ended with {server.returncode}", file=sys.stderr)
            code = 1
    return code


def _take(step: dict[str, Any], page: str, namespace: dict[str, Any], servers: list[subprocess.Popen[bytes]]) -> None:
    if step["title"]:
        file = Path(step["title"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(step["code"], encoding="utf-8")
    elif step["language"] == "python":
        # As many empty lines before it as in the page, so that a traceback names its line.
        exec(compile("\n" * step["line"] + step["code"], page, "exec"), namespace)
    elif step["how"] == "server":
        servers.append(subprocess.Popen(shlex.split(step["code"], comments=True)))
        _wait_for(servers[-1], f"http://127.0.0.1:{step['port']}/api/v1/ready")
    else:
        place = Path("..", f"{Path.cwd().name}.directory").resolve()
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", f"{step['code']}\npwd > '{place}'"], check=True)
        os.chdir(place.read_text().strip())


def _wait_for(server: subprocess.Popen[bytes], address: str) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise RuntimeError(f"The server ended with {server.returncode}.")
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except urllib.error.HTTPError as error:
            if error.code == 401:  # it is there, and wants a key
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{address} does not answer.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
