"""`python -m kedge` is the `kedge` command."""

from kedge.cli import main

main()
