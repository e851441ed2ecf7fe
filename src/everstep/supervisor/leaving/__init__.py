"""How a start ends: exit, ending, or another try."""
