"""Adapters: scores of a recorded run in the interfaces of captum, cleanlab and dattri, whose names they have.

`scores` has those of captum and dattri; only `cleanlab` imports its library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epk_gp.adapters.cleanlab import EPKLabelIssues as EPKLabelIssues
    from epk_gp.adapters.cleanlab import label_issues as label_issues
    from epk_gp.adapters.scores import EPKAttributor as EPKAttributor
    from epk_gp.adapters.scores import EPKInfluence as EPKInfluence

# name of the adapter: its module
_ADAPTERS = {
    "EPKAttributor": "scores",
    "EPKInfluence": "scores",
    "EPKLabelIssues": "cleanlab",
    "label_issues": "cleanlab",
}
__all__ = [*_ADAPTERS]


def __getattr__(name: str) -> object:
    """Import an adapter when it is first used (PEP 562): nobody needs the libraries of all of them."""
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    adapter: object = getattr(import_module(f"epk_gp.adapters.{_ADAPTERS[name]}"), name)
    return adapter


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)
