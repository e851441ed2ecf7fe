"""Wake-ups from outside the main thread: signals, the clock, periodic functions."""
