"""Downloads that fail with one sentence, soon: whether a server is there is asked first, and a stall ends them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kedge.errors import WeightsError, first_line

__all__ = ["CONNECT_SECONDS", "fetching", "reach"]

CONNECT_SECONDS = 5.0
STALL_SECONDS = 30.0


@contextmanager
def fetching(what: str, advice: str) -> Iterator[None]:
    """One sentence where a download fails or stalls: those of torch.hub have no timeout of their own."""
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(STALL_SECONDS)
        yield
    except Exception as error:  # the network and the hubs raise errors of many kinds; all mean the same here
        raise WeightsError(f"{what} ({first_line(error)}); {advice}.") from error
    finally:
        socket.setdefaulttimeout(before)


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
