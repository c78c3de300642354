"""The run as a whole: accuracy over the points, figures with their tables, suspicious labels, the map."""

from typing import Any

from epk_gp.report.certainty import Certainty
from epk_gp.report.request import ReportRequest


def overview(request: ReportRequest, sure: Certainty) -> dict[str, Any]:
    """Return what a report says of all points and of the run."""
    true = request.true_classes
    accuracy = None if true is None else float((request.predicted == true).double().mean())
    return {"accuracy": accuracy, "count": len(request.X), "figures": [], "suspects": None, "map": None}


def samples_of_overview(content: dict[str, Any]) -> set[int]:
    """Return every training sample that the overview names."""
    named = set() if content["suspects"] is None else {row[0] for row in content["suspects"]["rows"]}
    behind = [] if content["map"] is None else content["map"]["behind"]
    return named | {index for cell in behind for index in cell}
