"""What a person sees of the output in a terminal."""

from __future__ import annotations

import re


def screen(output: str) -> list[str]:
    """What a person sees in the end: the lines, colours left out."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", output):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1])
        elif token == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif token == "\x1b[K":
            lines[row] = lines[row][:column]
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return lines
