"""PyTorch: a file for each thing that a resume would lose without it; names for users: `everstep.torch`."""
