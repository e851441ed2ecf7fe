"""What commands, the page, the report and notebooks tell of runs."""
