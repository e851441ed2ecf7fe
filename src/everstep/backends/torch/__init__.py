"""PyTorch; the names for users are in `everstep.torch`.

What torch needs beyond its `state_dict`s is here, a file for each thing that a resume would lose without it.
"""
