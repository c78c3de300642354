"""A run on disk: create, resume, open, check and export it.

    create_run        make a folder with the header, the data and the initial weights of a run
    resume_run        check that a run is the same, and restore weights, optimizer and random numbers of its last commit
    load_trajectory   open a run for reading
    check_run         read every file of a run and compare it with what was committed
    Storage           how often steps are committed, and which weight states are kept

The first two return a `RunWriter`, whose `append` is one commit. The format is described in docs/format.md. Nothing is
pickled, opening a run executes nothing, and the content of a file is checked before it is used.

The files, from the lowest level: `files` (atomic writes, checksums, tensors by name, partial sums), `schema` (header,
data and journal), `rows` (data that do not fit into memory), `training_state` (optimizer, schedulers, generators),
`chunks` (states, steps and forward passes), `writer` (locks and commits), `run` (also checks). Start reading at `run`;
the package imports `core` and `optimizers`.
"""
