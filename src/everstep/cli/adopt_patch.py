"""Applies a plan to a script with libcst, which keeps every comment and blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.metadata import ExpressionContextProvider, MetadataWrapper, PositionProvider

from everstep.cli.adopt_plan import Place, Plan
from everstep.errors import ConfigError


def patch(source: bytes, plan: Plan) -> bytes:
    """Return the source with the edits of a plan, and with the import of everstep.

    Raises:
        ConfigError: an edit has no place, as of two statements in one line.
    """
    patcher = _Patcher(plan)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise ConfigError(f"libcst cannot parse it: {error}; install a newer libcst") from error
    made = MetadataWrapper(module).visit(patcher)
    wanted = {at for edits in vars(plan).values() if isinstance(edits, dict) for at in edits} - {None}
    if missed := wanted - patcher.visited:
        raise ConfigError(
            f"line {min(missed)[0]} could not be changed; give each statement a line of its own"
        )
    at = 0
    for number, statement in enumerate(made.body):
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Import | cst.ImportFrom):
            at = number + 1
        elif isinstance(statement, cst.FunctionDef | cst.ClassDef):
            break
    return made.with_changes(body=[*made.body[:at], *_statements(["import everstep"]), *made.body[at:]]).bytes


def _statements(texts: Sequence[str]) -> list[Any]:
    return [statement for text in texts for statement in cst.parse_module(text + "\n").body]


class _Patcher(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider, ExpressionContextProvider)

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.visited = plan, set[Place | None]()
        self._functions: list[Place | None] = [None]
        self._quotes: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            self._functions.append(self._place(node))
        elif isinstance(node, cst.FormattedString):
            self._quotes.append(node.start[-1])
        return super().on_visit(node)

    def on_leave(self, original: Any, updated: Any) -> Any:
        if isinstance(original, cst.FunctionDef):
            self._functions.pop()
        elif isinstance(original, cst.FormattedString):
            self._quotes.pop()
        if isinstance(original, cst.Name):
            return self._renamed(original, updated)
        if isinstance(original, cst.SimpleStatementSuite) and any(
            self._place(each) in edits
            for each in original.body
            for edits in (self.plan.before, self.plan.around)
        ):
            lines = [cst.SimpleStatementLine([each]) for each in updated.body]
            return cst.IndentedBlock(
                [n for old, line in zip(original.body, lines, strict=True) for n in self._beside(old, line)]
            )
        if isinstance(original, cst.Call):
            given = [
                cst.Arg(keyword=cst.Name(name), value=cst.Name(name), equal=_EQUAL)
                for name in (
                    each.partition("=")[0] for each in self.plan.arguments.get(self._place(original), ())
                )
            ]
            return updated.with_changes(args=[*updated.args, *given]) if given else updated
        if isinstance(original, cst.FunctionDef) and (
            names := self.plan.parameters.get(self._place(original))
        ):
            more = [cst.Param(cst.Name(name)) for name in names]
            star = (
                cst.ParamStar()
                if updated.params.star_arg is cst.MaybeSentinel.DEFAULT
                else updated.params.star_arg
            )
            params = updated.params.with_changes(
                star_arg=star, kwonly_params=[*updated.params.kwonly_params, *more]
            )
            return updated.with_changes(params=params)
        if isinstance(original, cst.For | cst.While):
            updated = self._loop(original, updated)
        if isinstance(original, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            nodes = self._beside(original, updated)
            return nodes[0] if len(nodes) == 1 else cst.FlattenSentinel(nodes)
        return updated

    def _place(self, node: cst.CSTNode) -> Place:
        start = self.get_metadata(PositionProvider, node).start
        self.visited.add((start.line, start.column))
        return start.line, start.column

    def _renamed(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        line = self.plan.renamed.get(self._functions[-1], {}).get(original.value)
        is_name = self.get_metadata(ExpressionContextProvider, original, None) is not None
        if line is None or not is_name or self._place(original)[0] < line:
            return updated
        quote = "'" if '"' in self._quotes else '"'
        return cst.parse_expression(f"carried[{quote}{original.value}{quote}]")

    def _loop(self, original: Any, updated: Any) -> Any:
        at = self._place(original)
        first, last = self.plan.first.get(at, []), self.plan.last.get(at, [])
        body = updated.body.with_changes(body=[*_statements(first), *updated.body.body, *_statements(last)])
        if (header := self.plan.headers.get(at)) is None:
            return updated
        (made,) = _statements([f"{header}\n    pass"])
        return made.with_changes(body=body, leading_lines=updated.leading_lines, orelse=updated.orelse)

    def _beside(self, original: cst.CSTNode, updated: Any) -> list[Any]:
        """Return the statements that stand for one, whose comments stay before them all."""
        at = self._place(original)
        if text := self.plan.instead.get(at):
            updated = updated.with_changes(body=_statements([text])[0].body)
        above = updated.leading_lines
        if block := self.plan.around.get(at):
            (outer,) = _statements([block])
            updated = outer.visit(_Fill(updated.with_changes(leading_lines=[])))
        nodes = [
            *_statements(self.plan.before.get(at, [])),
            updated,
            *_statements(self.plan.after.get(at, [])),
        ]
        nodes[0] = nodes[0].with_changes(leading_lines=above)
        nodes[1:] = [each.with_changes(leading_lines=[]) if each is updated else each for each in nodes[1:]]
        return nodes


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


class _Fill(cst.CSTTransformer):
    """Puts a statement at the place of `...` in a block."""

    def __init__(self, statement: Any) -> None:
        super().__init__()
        self._statement = statement

    def leave_SimpleStatementLine(self, original_node: cst.SimpleStatementLine, updated_node: Any) -> Any:
        is_place = isinstance(original_node.body[0], cst.Expr) and isinstance(
            original_node.body[0].value, cst.Ellipsis
        )
        return self._statement if is_place else updated_node
