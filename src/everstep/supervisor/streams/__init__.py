"""Data of a run: passes, positions, generators, quarantined batches; what a stream itself need not know."""
