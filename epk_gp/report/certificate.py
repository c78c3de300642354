"""The certificate of several attributions together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from epk_gp.kernel_machine.attribute import CertifiedTerms
from epk_gp.kernel_machine.certification import describe_findings, larger
from epk_gp.quadrature.status import QuadratureStatus


@dataclass(frozen=True)
class Certificate:
    """The certificates of several attributions as one: the worst number of each kind. Fields as in `CertifiedTerms`."""

    max_error: float
    error_tolerance: float
    max_residual: float
    residual_ratio: float
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    evaluations: float
    statuses: Mapping[QuadratureStatus, int]
    unexplained_share: float = 0.0
    run_findings: tuple[str, ...] = ()

    @classmethod
    def of(cls, result: CertifiedTerms) -> "Certificate":
        """Return the certificate of one attribution."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(cls)})

    def merged(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both: an error stands beside the tolerance that it was held against."""
        shares = [c.max_error / c.error_tolerance for c in (self, other)]
        sums = self if larger(*shares) is shares[0] else other
        steps = self if larger(self.mismatch_ratio, other.mismatch_ratio) is self.mismatch_ratio else other
        names = ("max_residual", "residual_ratio", "max_step_mismatch", "evaluations", "unexplained_share")
        return Certificate(
            max_error=sums.max_error,
            error_tolerance=sums.error_tolerance,
            mismatch_ratio=steps.mismatch_ratio,
            worst_step=steps.worst_step,
            statuses=Counter(self.statuses) + Counter(other.statuses),
            run_findings=self.run_findings or other.run_findings,
            **{name: larger(getattr(self, name), getattr(other, name)) for name in names},
        )

    @property
    def findings(self) -> list[str]:
        """Why it is none, with numbers; empty if the attributions are certified."""
        return describe_findings(self)
