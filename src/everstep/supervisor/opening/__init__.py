"""Opening of a run: its directory is locked, a checkpoint is chosen, compared and restored."""
