"""PyTorch.  What users need of it is `everstep.torch`."""
