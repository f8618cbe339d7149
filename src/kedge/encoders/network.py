"""Whether a server is there, asked before something is fetched from it: libraries may wait for minutes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from urllib.error import HTTPError
from urllib.request import Request, urlopen

__all__ = ["CONNECT_SECONDS", "reach"]

CONNECT_SECONDS = 5.0


def reach(url: str, timeout: float = CONNECT_SECONDS) -> None:
    """Raise unless a server answers within ``timeout`` seconds, whatever it says."""
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=timeout).close()
            answer.set_result(None)
        except HTTPError:
            answer.set_result(None)
        except Exception as error:
            answer.set_exception(error)

    # In a thread, because looking up a host name heeds no timeout and can hang for minutes.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer.result(timeout)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout:g} seconds") from error
