"""Wake-ups from outside the main thread: signals, the clock, periodic functions.

They only leave a wish and lower the next due step; the main thread acts at a boundary, where state is whole.
"""
