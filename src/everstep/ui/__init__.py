"""Page over many runs: it answers a browser on this machine, and only reads."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Folder of the page's files."""
