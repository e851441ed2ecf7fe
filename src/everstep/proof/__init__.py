"""Proof that two runs are equal."""
