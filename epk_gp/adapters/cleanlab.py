"""cleanlab: suspicious labels as Datalab's issues."""

from typing import Any

from epk_gp.analysis.labels import label_errors
from epk_gp.core.trajectory import Trajectory

try:
    import pandas as pd
    from cleanlab.datalab.internal.issue_manager import IssueManager
except ModuleNotFoundError as error:
    raise ImportError(f"this adapter must find its library: {error}. Run `pip install cleanlab`.") from error


def label_issues(trajectory: Trajectory, **options: Any) -> pd.DataFrame:
    """Return `epk_gp.label_errors` with the columns of `Datalab.get_issues("label")`, one row per training point.

    `is_label_issue` is true if the process expects another class; `label_score` is 1 minus the suspicion: from 0 to 1,
    smaller is worse, as in cleanlab. It is a rank, not the probability of the label.

    Args:
        trajectory: Run of a classifier.
        options: Further arguments of `epk_gp.label_errors`.

    Raises:
        TypeError, ValueError: As in `epk_gp.label_errors`.
    """
    found = label_errors(trajectory, **options)
    given = trajectory.targets[found.points]
    columns = {
        "is_label_issue": found.predicted != given.to(found.predicted),
        "label_score": 1 - found.scores,
        "given_label": given,
        "predicted_label": found.predicted,
    }
    arrays = {name: values.cpu().numpy() for name, values in columns.items()}
    return pd.DataFrame(arrays, index=found.points.cpu().numpy())


class EPKLabelIssues(IssueManager):  # type: ignore[misc]  # the library may be missing
    """The same table as an issue manager of Datalab, with the name "epk_label".

    Register it with cleanlab's `register`, and call `lab.find_issues(issue_types={"epk_label": {"trajectory": run}})`.
    """

    description = "Labels that a process on all other labels, and the course of training, do not expect."
    issue_name = "epk_label"

    def find_issues(self, trajectory: Trajectory, **options: Any) -> None:
        """Judge the labels of all training points, which must be the Datalab's in their order.

        Raises:
            TypeError, ValueError: As in `label_issues`; or the Datalab has other points or labels than the run.
        """
        found, lab = label_issues(trajectory, **options), self.datalab
        given = found["given_label"].sort_index()
        labels = [list(lab.labels), [lab.class_names[c] for c in lab.labels]] if lab.has_labels else [list(given)]
        if list(given.index) != [*range(len(lab.data))] or list(given) not in labels:
            raise ValueError("the Datalab must hold the run's points and class numbers, in their order: got others.")
        names = {"is_label_issue": f"is_{self.issue_name}_issue", "label_score": self.issue_score_key}
        self.issues = found[[*names]].rename(columns=names)
        self.summary = self.make_summary(score=float(found["label_score"].mean()))
        self.info = {"given_label": found["given_label"], "predicted_label": found["predicted_label"]}
