"""PyTorch; the names for users are in `everstep.torch`."""
