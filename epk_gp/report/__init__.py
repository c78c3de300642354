"""A report of a run: one HTML file that opens from the disk."""
