"""Checks of the program, of its data, and of steps that run again: they warn or raise, and change nothing."""
