"""Whether the integrals that an adaptive rule's nodes come from did what they were asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from epk_gp.core.show import warn_uncertified
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.status import QuadratureStatus


@final
@dataclass(eq=False)
class IntegrationCheck:
    """Count integrals over a step whose status says that they are not the change of the outputs.

    Gram blocks have no certificate of their own: their nodes are those on which the adaptive rule integrated the
    network's outputs. Sums stay on the device until `warn` reads them.
    """

    total: int = 0
    _found: dict[QuadratureStatus, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, integral: Integral) -> None:
        """Count one step's integrals."""
        self.total += len(integral.status)
        for status in QuadratureStatus:
            if status.is_supported:
                continue
            has_it = integral.status == status
            count, residual = has_it.sum(), (integral.residual * has_it).nan_to_num(0.0).amax()
            if status in self._found:
                count, residual = count + self._found[status][0], residual.maximum(self._found[status][1])
            self._found[status] = (count, residual)

    def state(self) -> dict[str, Tensor]:
        """Return the counts as tensors: numbers of integrals, and of each status its number and largest residual."""
        rows = [(int(count), float(residual)) for count, residual in self._found.values()]
        return {
            "integrals": torch.tensor(self.total, dtype=torch.int64),
            "integrals.status": torch.tensor([int(status) for status in self._found], dtype=torch.int64),
            "integrals.count": torch.tensor([count for count, _ in rows], dtype=torch.int64),
            "integrals.residual": torch.tensor([residual for _, residual in rows], dtype=torch.float64),
        }

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the counts of a piece that was computed elsewhere (`state`)."""
        self.total += int(state["integrals"])
        found = (state[f"integrals.{name}"] for name in ("status", "count", "residual"))
        for number, count, residual in zip(*found, strict=True):
            status = QuadratureStatus(int(number))
            if status in self._found:
                before = self._found[status]
                count, residual = count.to(before[0]) + before[0], residual.to(before[1]).maximum(before[1])
            self._found[status] = (count, residual)

    def warn(self) -> None:
        """Emit one `CertificateWarning` if there is something to say."""
        found = [(status, int(count), float(residual)) for status, (count, residual) in self._found.items()]
        found = [entry for entry in found if entry[1]]
        if not found:
            return
        reasons = ", ".join(f"{count} {status.name}" for status, count, _ in found)
        message = (
            f"the adaptive rule must integrate the outputs' change over each step: {sum(entry[1] for entry in found)} "
            f"of {self.total} integrals of a point over a step did not ({reasons}; largest residual "
            f"{max(entry[2] for entry in found):.2g}), so that nodes, and kernel values, are not exact. See "
            "QuadratureStatus, and epk_gp.reconstruct for the certificate."
        )
        warn_uncertified(message)
