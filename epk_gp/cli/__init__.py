"""The command line, `epk-gp`."""

from epk_gp.cli import attribute, demo, export, gram, record, uncertainty, verify  # each adds its commands to the app
from epk_gp.cli.app import main

__all__ = ["attribute", "demo", "export", "gram", "main", "record", "uncertainty", "verify"]
