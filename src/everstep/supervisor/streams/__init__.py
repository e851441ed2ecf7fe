"""Data of a run: passes, positions, generators, quarantined batches."""
