"""A run on disk: create, open, resume and check it."""
