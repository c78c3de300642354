"""Adapters: a recorded run and its uncertainty under the names that other libraries call, one file for each library.

Start with `scores`, which says what the numbers are. A file imports its library when it is imported itself, and only
where the library asks for its own classes.
"""
