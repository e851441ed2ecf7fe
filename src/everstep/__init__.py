"""everstep: training loops whose runs survive anything, to the bit."""
