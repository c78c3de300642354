"""Adapters: scores of a recorded run in the interfaces of captum, cleanlab and dattri, one file per library.

Start with `scores`, which defines the numbers. Only `cleanlab` imports its library.
"""
