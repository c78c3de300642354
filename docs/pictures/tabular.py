"""Draw docs/pictures/tabular_map.png: scores of a classifier over two columns of the diabetes table (seconds)."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import epk_gp as epk
from epk_gp.analysis.maps import column_plane, uncertainty_on_plane
from epk_gp.plots import save_figure
from epk_gp.plots.maps import map_figure


def main() -> None:
    """Fit the classifier of docs/capabilities/tabular.md, and draw its map."""
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    X, X_new, y, y_new = train_test_split(X, y, test_size=142, random_state=0)
    course, course_new = (np.where(values > 140, "fast", "slow") for values in (y, y_new))
    classifier = epk.EPKClassifier(random_state=0).fit(X, course)
    judged = classifier.uncertain_classifier(X_new, course_new)
    names = {"sex": {1: "sex 1", 2: "sex 2"}}
    plane = column_plane(judged, "bmi", "sex", categories=names, extent={"bmi": (15, 50)})
    figure = map_figure(uncertainty_on_plane(judged, plane), validation=X_new)
    save_figure(figure, Path(__file__).with_name("tabular_map.png"), palette=True)


if __name__ == "__main__":
    main()
