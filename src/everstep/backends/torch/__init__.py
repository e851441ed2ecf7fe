"""backends/torch."""
