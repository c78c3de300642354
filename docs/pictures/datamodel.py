"""Run the code of docs/capabilities/datamodel.md, write what it prints below it, and draw its picture."""

import json

from quickstart import HERE, run, with_outputs, words_of

from epk_gp.plots import save_figure

PAGE = HERE.parent / "capabilities" / "datamodel.md"


def main() -> None:
    """Write outputs and picture."""
    page = PAGE.read_text()
    names, printed = run(page)
    PAGE.write_text(with_outputs(page, printed))
    figure = names["figure"]
    save_figure(figure, HERE / "datamodel.svg", description=json.dumps(words_of(figure)))


if __name__ == "__main__":
    main()
