"""The data of a run: passes, positions, generators, quarantined batches."""
