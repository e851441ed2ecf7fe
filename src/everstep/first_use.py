"""What statements may read before they set it: what the rounds of a loop leave to one another.

`everstep adopt` asks this of all variables of a plain script, a run of each variable of its program.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

LOOPS = (ast.For, ast.While)
T = TypeVar("T")


class FirstUse(ABC, Generic[T]):
    """Follows statements on all ways through them; a subclass says what expressions read and set.

    A loop inside counts as one that has a round.

    Attributes:
        read: what is read on some way before it is set.
        assigned: what is set on some way.
        outside: what has a value before a loop, which it keeps if the loop has no round.
    """

    def __init__(self, outside: Iterable[T] = ()) -> None:
        self.read, self.assigned, self.outside = set[T](), set[T](), {*outside}
        self._ends: list[list[set[T]]] = []
        """For each loop that is followed what is set at its `break` and `continue`."""

    @abstractmethod
    def use(self, node: Any, sure: set[T]) -> set[T]:
        """Note what an expression or a simple statement reads and sets; return what it sets."""

    def run(self, parts: Iterable[ast.AST], sure: set[T]) -> set[T] | None:
        """Follow statements; return what is set on every way after them, None if none goes on."""
        for part in parts:
            if (assigned := self.follow(part, sure)) is None:
                return None
            sure = assigned
        return sure

    def run_as_round(self, parts: Iterable[ast.AST], sure: set[T]) -> set[T] | None:
        """Follow statements; return what is set after them, and where they go on to another round."""
        self._ends.append([])
        assigned, ends = self.run(parts, sure), self._ends.pop()
        ends += [] if assigned is None else [assigned]
        return set.intersection(*ends) if ends else None

    def round(self, loop: ast.For | ast.While, sure: set[T]) -> set[T] | None:
        """Follow one round of a loop; return what is set after it."""
        sure = sure | (self.use(loop.target, sure) if isinstance(loop, ast.For) else set())
        return self.run_as_round(loop.body, sure)

    def follow(self, node: Any, sure: set[T]) -> set[T] | None:
        ways: list[set[T] | None] = []
        if isinstance(node, ast.If):
            self.use(node.test, sure)
            ways = [self.run(node.body, sure), self.run(node.orelse, sure)]
        elif isinstance(node, ast.Try):  # a handler may begin before the first line has set anything
            ways = [self.run([*node.body, *node.orelse], sure)]
            ways += [self.run(filter(None, (each.type, *each.body)), sure) for each in node.handlers]
        if ways:
            branches = [each for each in ways if each is not None]
            return self.run(getattr(node, "finalbody", []), set.intersection(*branches)) if branches else None
        if isinstance(node, LOOPS):
            self.use(node.iter if isinstance(node, ast.For) else node.test, sure)
            return self.run(node.orelse, sure | ((self.round(node, sure) or set()) - self.outside))
        if isinstance(node, ast.With | ast.AsyncWith):
            return self.run(node.body, sure.union(*(self.use(each, sure) for each in node.items)))
        sure = sure | self.use(node, sure)
        if isinstance(node, ast.Break | ast.Continue) and self._ends:
            self._ends[-1].append(sure)
        return None if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Raise) else sure
