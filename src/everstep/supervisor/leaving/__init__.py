"""End of a start: exit, ending, rollback or retry."""
