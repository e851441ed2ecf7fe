"""Runs that other programs have recorded, brought into run directories (`everstep import`)."""
