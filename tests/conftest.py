"""Makes the helpers beside it (`tiny_runs`) importable from every folder of tests."""
