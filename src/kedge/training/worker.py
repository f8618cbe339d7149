"""One of the processes of a run: `python -m kedge.training.worker JOB`, as `launching` starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from kedge.distributed import record_failure


def main(place: Path) -> None:
    """Do the job that lies in `place`; what goes wrong is for the launcher to tell."""
    job = json.loads((place / "job.json").read_text())
    sys.path[:] = job["path"]  # a loss of the user's is found where the user's program found it
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        _train(place, Path(job["folder"]), resume=job["resume"])
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        record_failure(error)
        sys.exit(2)


def _train(place: Path, folder: Path, *, resume: bool) -> None:
    from kedge.config.compose import load_config
    from kedge.training.launching import PLACE, SETTINGS
    from kedge.training.layout import layout_of
    from kedge.training.run import run_here
    from kedge.training.settings import Settings

    # The launcher wrote it, of a configuration that it composed or checked.
    config = load_config(place / SETTINGS, trust=True)
    found, _ = run_here(config, folder, layout_of(Settings.from_config(config), resumed=resume), resume=resume)
    if os.environ["LOCAL_RANK"] == "0":
        (place / PLACE).write_text(str(found))


def _end_with(parent: int) -> None:
    """A killed launcher cannot ask its workers to stop."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
