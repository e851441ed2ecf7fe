"""End of a start: exit, ending, rollback or retry; every way out goes through here, so all close alike."""
