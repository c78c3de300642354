"""The folder of a run that is recorded: new, or one that is resumed."""

import os
from dataclasses import replace

from epk_gp.core.model import functionalize_like
from epk_gp.storage.run import RunStart, create_run, is_run, resume_run
from epk_gp.storage.schema import module_names
from epk_gp.storage.training_state import TrainingState
from epk_gp.storage.writer import Storage, thinning_header
from epk_gp.recording.history import CommitSchedule
from epk_gp.recording.history import RunHistory
from epk_gp.recording.setup import TrainingSetup


def open_folder(
    folder: str | os.PathLike[str],
    setup: TrainingSetup,
    history: RunHistory,
    training: TrainingState,
    storage: Storage,
    *,
    resume: bool,
) -> tuple[TrainingSetup, RunHistory, CommitSchedule]:
    """Create a run's folder; or, if it holds a run to resume, bring everything to its last commit.

    Args:
        folder: The folder.
        setup: The training.
        history: The run before its first step.
        training: The objects whose state is stored with the run; those of a resumed run get the state they had there.
        storage: How often steps are committed.
        resume: Continue the run that the folder holds, if it holds one.

    Returns:
        Setup and history, as they are after the last commit, and the schedule of the commits.

    Raises:
        FileExistsError: The folder holds something else.
        BlockingIOError: Another process records there.
        OSError: The folder cannot be written.
        ValueError: The run that is resumed is damaged, or another one.
    """
    net, model = setup.net, setup.model
    full = (
        setup.header()
        | thinning_header(storage, folder)
        | {"compression": storage.compression, "check_every": setup.rules.check_every}
    )
    full["modules"] = module_names(net)
    if resume and is_run(folder):
        recorded, writer = resume_run(folder, full, net, setup.loss, training, output=model.signature.output)
        setup = replace(setup, model=functionalize_like(model, net))
        end = recorded.states[recorded.num_steps].to(setup.y.device)
        history = RunHistory(end, recorded.digest, recorded.steps, setup.statistics())
    else:
        last = history.last
        writer = create_run(
            folder, RunStart(full, setup.data(), last.end, history.digest(0), last.statistics), training
        )
    return setup, history, CommitSchedule(writer, storage, history, training)
