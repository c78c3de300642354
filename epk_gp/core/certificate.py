"""The warning of results that their own certificate does not support, and how warnings name the caller's line."""

import sys
import warnings


class CertificateWarning(UserWarning):
    """A result that its own certificate does not support, or a run that cannot have one."""


def warn_uncertified(message: str) -> None:
    """Emit a `CertificateWarning` at the line outside the package that led to it."""
    warn_caller(message, CertificateWarning)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Emit a warning at the line outside the package that led to it."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while (outer := frame.f_back) is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, outer
    warnings.warn(message, category, stacklevel=level)
