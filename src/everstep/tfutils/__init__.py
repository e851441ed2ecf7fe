"""Runs from the parameter trees of tfutils, for its users: docs/coming-from/tfutils.md.

A tree is translated into a task, streams and services for a `Trainer`.  No room below imports this room.
"""
