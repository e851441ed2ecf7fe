"""State of a run, and its saves."""
