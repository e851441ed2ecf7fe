"""The index over many runs: a replica of their journals that can be asked.

The journals are the truth.  What is here was shipped from them, can be deleted at any time, and is
made again by `everstep sync`.  This package imports SQLAlchemy only in the modules that need it, and
a training process only in a thread, after its first step.
"""
