"""Public training recipes, small, as their users write them: only the recorder's lines are put in (`# recorder`)."""
