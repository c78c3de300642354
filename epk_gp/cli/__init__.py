"""The command line, `epk-gp`."""

from epk_gp.cli import commands, gram_commands, process_commands  # importing them registers the commands
from epk_gp.cli.app import main

__all__ = ["commands", "gram_commands", "main", "process_commands"]
