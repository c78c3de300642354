"""Pieces of a computation on workers: what each needs in a folder, what each computed as a verified file."""
