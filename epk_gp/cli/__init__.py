"""The command line, `epk-gp`."""

from epk_gp.cli import attribute, demo, export, gram, info, record, uncertainty, verify  # importing registers a command
from epk_gp.cli.app import main

__all__ = ["attribute", "demo", "export", "gram", "info", "main", "record", "uncertainty", "verify"]
