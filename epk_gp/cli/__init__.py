"""The command line, `epk-gp`. Start reading at `app`: its table says in which module each command is.

`options` holds the options that commands share; `data` and `networks` read and write what lies in files; the other
modules hold a command each, or a few that belong together. Commands may import everything else of the package.
"""

from epk_gp.cli.app import main

__all__ = ["main"]
