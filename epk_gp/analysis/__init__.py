"""Numbers of the paper's figures: maps over planes through the data."""
