"""The experiments of the paper: what to run, and how to show what came of it."""
