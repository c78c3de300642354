"""The certificate of a report: that of all its attributions together, in plain words."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from epk_gp.kernel_machine.attribute import CertifiedTerms
from epk_gp.kernel_machine.certification import describe_findings, larger
from epk_gp.kernel_machine.influence import Influence
from epk_gp.quadrature.rules import QuadratureStatus


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


def describe_certificate(
    certificate: Certificate, outputs: int, rounding: float, influence: Influence | None = None
) -> dict[str, Any]:
    """Return what a report says of the certificate.

    Args:
        certificate: Of all explained outputs.
        outputs: How many there are.
        rounding: Largest term of rounding that they are shown with.
        influence: What stands beside the contributions, if anything does; it has a certificate of its own.
    """
    findings = certificate.findings
    explained = "the explained output" if outputs == 1 else f"each of the {outputs} explained outputs"
    if findings:
        sentences = [
            f"NOT CERTIFIED. The terms of {explained} are not shown to be what training added to it: do not rely on "
            "them.",
            *(f"{finding[0].upper()}{finding[1:]}." for finding in findings),
            "Check the run with epk-gp verify, or explain it with the adaptive rule.",
        ]
    else:
        sentences = [
            f"Certified: the terms of {explained}, added to its value before training, give the trained network's "
            f"output up to {certificate.max_error:.1e}. Rounding and quadrature allow "
            f"{certificate.error_tolerance:.1e}.",
            "Every recorded step was computed again from the training data: the largest difference of a weight is "
            f"{certificate.max_step_mismatch:.1e}, {certificate.mismatch_ratio:.2g} times what rounding explains"
            + (f" (in step {certificate.worst_step})." if certificate.worst_step >= 0 else "."),
            "What is added along each step, or each stretch of several, was compared with the change of the network's "
            f"output over it: the largest difference is {certificate.max_residual:.1e}, at most "
            f"{certificate.residual_ratio:.2g} times what tolerance and rounding allow.",
        ]
    sentences.append(
        "The certificate concerns the sums. A contribution says what a sample added during this training; it does not "
        "say what training without the sample would give."
    )
    if influence is not None:
        words = "certified" if influence.certified else f"NOT CERTIFIED: {'; '.join(influence.findings)}"
        sentences.append(f"The influence beside the contributions is {words}.")
    rows = [
        ["sum of all terms against the network's output", certificate.max_error, certificate.error_tolerance],
        ["recorded steps against steps from the training data, relative to rounding", certificate.mismatch_ratio, 1],
        ["quadrature of a step, relative to tolerance and rounding", certificate.residual_ratio, 1],
    ]
    texts = [[name, f"{value:.2g}", f"{limit:.2g}"] for name, value, limit in rows]
    texts.append(["largest term of rounding that is shown", f"{rounding:.2g}", "shown as a term of its own"])
    return {"certified": not findings, "sentences": sentences, "rows": texts}
