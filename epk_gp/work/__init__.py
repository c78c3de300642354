"""Execution of long computations: pieces, partial sums on disk, executors and progress, for any computation.

A pass defines its pieces and the computation of one piece (`run.Work`); `run.run` does the rest. It imports nothing of
the passes. Start reading at `run`.
"""
