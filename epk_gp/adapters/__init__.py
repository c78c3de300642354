"""Adapters: scores of a recorded run in the interfaces of captum, cleanlab and dattri, whose names they have.

`scores` has those of captum and dattri; only `cleanlab` imports its library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from epk_gp.adapters.scores import EPKAttributor as EPKAttributor
from epk_gp.adapters.scores import EPKInfluence as EPKInfluence

if TYPE_CHECKING:
    from epk_gp.adapters.cleanlab import EPKLabelIssues as EPKLabelIssues
    from epk_gp.adapters.cleanlab import label_issues as label_issues

__all__ = ["EPKAttributor", "EPKInfluence", "EPKLabelIssues", "label_issues"]


def __getattr__(name: str) -> object:
    """Import the adapter of cleanlab when it is first used (PEP 562): nobody else needs that library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    adapter: object = getattr(import_module("epk_gp.adapters.cleanlab"), name)
    return adapter


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)
