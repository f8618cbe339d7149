"""`python -m kedge` is the `kedge` command."""

from kedge.cli import run

run()
