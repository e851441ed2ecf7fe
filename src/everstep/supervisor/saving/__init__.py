"""State of a run, and its saves: the main thread decides and copies, the writer thread writes."""
