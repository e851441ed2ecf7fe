"""PyTorch.  Importing this room imports no torch; importing one of its modules does."""
