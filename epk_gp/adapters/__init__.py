"""Adapters: scores of a recorded run under the names that captum, cleanlab and dattri call, one file for each library.

Start with `scores`, which says what the numbers are. Only `cleanlab` imports its library.
"""
