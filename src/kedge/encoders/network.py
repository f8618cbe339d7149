"""Whether a server is there, asked before something is fetched from it: libraries may wait for minutes."""

from __future__ import annotations

import threading
from urllib.error import HTTPError
from urllib.request import Request, urlopen

__all__ = ["CONNECT_SECONDS", "reach"]

CONNECT_SECONDS = 5.0


def reach(url: str, timeout: float = CONNECT_SECONDS) -> None:
    """Raise unless a server answers within ``timeout`` seconds, whatever it says."""
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=timeout).close()
            outcome.append(None)
        except HTTPError:
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    # In a thread, because looking up a host name heeds no timeout and can hang for minutes.
    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(timeout)
    if not outcome:
        raise TimeoutError(f"no answer within {timeout:g} seconds")
    if outcome[0] is not None:
        raise outcome[0]
