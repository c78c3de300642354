"""How a long computation is carried out: pieces, partial sums on disk, executors and progress; whatever is computed.

A pass states what its pieces are and how one is computed (`run.Work`); `run.run` does the rest. It imports nothing of
the passes. Start reading at `run`.
"""
