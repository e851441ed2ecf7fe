"""Index over many runs: a replica of their journals that can be searched.

The journals are the truth.  The index is shipped from them, can be deleted at any time, and is made again
by `everstep sync`.  Only the modules that need SQLAlchemy import it; a training process imports it in a
thread, after the first step.
"""
