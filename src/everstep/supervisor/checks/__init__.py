"""What a run checks about its program, its data and itself."""
