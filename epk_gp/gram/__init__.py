"""Gram blocks of the exact path kernel."""
