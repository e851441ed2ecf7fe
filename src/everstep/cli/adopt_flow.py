"""What statements of a script read, assign and change in place, also through functions and other names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

from everstep.cli.adopt_names import Variable, assignments, called, dotted, inside, parameters, passed, root
from everstep.first_use import FirstUse

if TYPE_CHECKING:
    from everstep.cli.adopt_kinds import Script

_PURE = re.compile(
    "size|dim|item|view|to|cuda|cpu|float|long|keys|items|values|get|format|join|mean|sum|split|argmax|max|min|eq"
    "|numpy|narrow|detach|reshape|flatten|(un)?squeeze|transpose|permute|t|clone|index|(view|type|expand)_as"
    "|contiguous|is_available|startswith|endswith|upper|[lr]strip|parameters|named_parameters|modules|children"
)
"""Methods that leave their object as it is, if their result is used."""
_MATHS = re.compile(
    "expand|repeat|flip|chunk|sub|mul|div|pow|abs|exp|log|sqrt|norm|clamp|round|any|all|matmul|b?mm|topk|(arg)?sort"
    "|gather|ne|gt|lt|ge|le|bool|int|half|double|type|numel|nelement|tolist|astype|copy|count|replace|strip|lower"
    "|(log_)?softmax|sigmoid|tanh|relu|std|var"
)
"""The same of tensors, arrays and strings; of another object they may be anything."""
_CHANGING = re.compile(
    "next|shuffle|heap(push|pop|replace|pushpop)|insort(_left|_right)?|at|copyto|put_along_axis|fill_diagonal"
)
"""Functions that change their argument."""
VIEWS = re.compile("view(_as)?|reshape|flatten|(un)?squeeze|t|transpose|permute|narrow|detach|numpy")
"""Methods whose result is a part of their tensor."""
_PARTS = {"get", "setdefault", "values", "items"}
_OPTIONS = {"lr", "momentum", "weight_decay", "betas", "eps"}
"""Settings of an optimizer's group: to assign one changes no other object."""


class Flow(FirstUse[Variable]):
    """What statements may read before they assign it (`read`), may assign, and may change in place.

    Args:
        outside: variables that have a value before a loop, so that lines may find an old one.
        own_calls: in a method "self.other", whose changes are its own.
    """

    def __init__(
        self, script: Script, outside: Iterable[Variable] = (), own_calls: Iterable[str] = ()
    ) -> None:
        super().__init__(outside)
        self._script, self._own_calls, self._changed = script, {*own_calls}, set[Variable]()
        self._parts, self._held = set[tuple[Variable, Variable]](), set[tuple[Variable, Variable]]()
        """A variable, and another of which it may be a part; a collection, and what it holds."""
        self._filled, self._views = set[Variable](), set[Variable]()
        """Collections in which an item is replaced; names of which `x += 1` may change a tensor."""

    def follow(self, node: Any, sure: set[Variable]) -> set[Variable] | None:
        if isinstance(node, ast.For):
            is_data = called(node.iter) == "range" or "backward" in map(called, ast.walk(node))
            self._share(node.target, node.iter, is_view=not is_data)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            variable = {self._script.variable(node.target)}
            self.read |= variable - sure
            self._changed |= variable & self._views
        for target, value in assignments(node):
            is_option = isinstance(target, ast.Subscript) and getattr(target.slice, "value", "") in _OPTIONS
            choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            for each in getattr(value, "values", choices) if not is_option else ():
                is_item = isinstance(each, ast.Subscript)
                is_view = is_item and not isinstance(getattr(each.slice, "value", 0), str)
                is_view |= VIEWS.fullmatch(called(each)) is not None
                is_name = isinstance(each, ast.Name | ast.Attribute)
                if is_view or is_item or is_name or called(each) in _PARTS:
                    self._share(target, root(each), is_view)
        return super().follow(node, sure)

    def use(self, node: Any, sure: set[Variable]) -> set[Variable]:
        """Note what a target or an expression reads and changes; return what it assigns."""
        script, assigned, is_sum = self._script, set[Variable](), isinstance(node, ast.AugAssign)
        for part in ast.walk(node) if not isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            is_name = isinstance(part, ast.Name | ast.Attribute)
            function = script.definition(dotted(part), ast.FunctionDef) if is_name else None
            if function is not None:
                self.enter(*function, sure)
            elif isinstance(part, ast.Name) and part.id not in script.symbols:
                is_read = isinstance(part.ctx, ast.Load)
                self.read |= {script.variable(part)} - sure if is_read else set()
                assigned |= set() if is_read else {script.variable(part)}
            elif isinstance(part, ast.Attribute) and (variable := script.holder(part)) is not None:
                self.read |= {variable} - sure if script.is_beside(variable) else set()
            is_target = isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load)
            changed: list[Any] = [part] if is_target else []
            changed += self._changed_by(part) if isinstance(part, ast.Call) else []
            is_filled = isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and not is_sum
            for variable in (script.holder(each, is_target) for each in changed):
                if variable is not None:
                    (self._filled if is_filled else self._changed).add(variable)
                    self.read |= {variable} - sure
        self.assigned |= assigned
        return assigned

    def _changed_by(self, call: ast.Call) -> list[Any]:
        """Return the call, whose object it may change (an object that is called may count its calls).

        With its argument, if it changes this one, as `shuffle(order)` does; `x.copy_(y)` leaves y as it is.
        """
        script, name, top = self._script, called(call), root(call)
        is_pure = bool(_MATHS.fullmatch(name)) and not script.is_object(top)
        is_pure = is_pure or (bool(_PURE.fullmatch(name)) and not script.is_own_object(top))
        if isinstance(call.func, ast.Attribute):
            is_pure &= not self._call_method(call) and not isinstance(script.parents[call], ast.Expr)
        is_pure &= isinstance(call.func, ast.Attribute)
        # each epoch calls set_epoch() again
        changed: list[Any] = [call] * (
            not (is_pure or dotted(call) in self._own_calls or name == "set_epoch")
        )
        is_changing = _CHANGING.fullmatch(name) is not None
        # clip_grad_norm_(parameters) changes gradients alone, which no state has
        is_in_place = name.endswith("_") and not name.startswith("clip_grad_")
        is_in_place &= dotted(call).partition(".")[0] in script.symbols
        return changed + call.args[: is_changing or is_in_place]

    def _call_method(self, call: ast.Call) -> bool:
        """Note what methods of this name change of their arguments; return whether one changes its object."""
        is_changing = False
        for owner, method in self._script.methods.get(called(call), ()):
            is_bound = "staticmethod" not in map(dotted, method.decorator_list)
            names = owner.changed_by(method)
            is_changing |= is_bound and bool(names & {each.arg for each in method.args.args[:1]})
            for name, value in passed(call, method, int(is_bound)):
                if name in names:
                    self._change(value)
        return is_changing

    def _share(self, target: ast.expr, value: ast.expr, is_view: bool) -> None:
        """Note that a change of the target is one of what is read in a value."""
        script, is_held = self._script, isinstance(target, ast.Attribute | ast.Subscript)
        inner = {*map(script.variable, inside(root(target) if is_held else target, kind=ast.Name))}
        names = [each for each in inside(value, kind=ast.Name) if each.id not in script.symbols]
        (self._held if is_held else self._parts).update(product(inner, map(script.variable, names)))
        self._views |= inner if is_view and not is_held else set()

    @property
    def changed(self) -> set[Variable]:
        """What may be changed in place, also through a part of it."""
        variables, pairs = {*self._changed}, self._parts | self._held
        variables |= {whole for part, whole in self._parts if part in self._filled}
        while more := {whole for part, whole in pairs if part in variables} - variables:
            variables |= more
        return variables | self._filled

    def enter(self, owner: Script, function: Any, sure: set[Variable]) -> None:
        """Note what a function, here or beside, reads and changes of other scopes, and of its arguments."""
        if function in owner.open:
            return
        owner.open.append(function)
        inner, within, wraps, body = Flow(owner), {*ast.walk(function)}, list[Any](), function.body
        if isinstance(function, ast.FunctionDef):  # `f = counted(f)` is a decorator, too
            wraps = [*function.decorator_list, *owner.values(Variable(owner.tree, function.name))]
        inner.run([ast.Expr(body)] if isinstance(function, ast.Lambda) else body, {*parameters(function)})
        keeps, changed = any(map(owner.keeps, wraps)), inner.changed
        owner.open.pop()
        outer = {each for each in inner.read | inner.assigned | changed if each.scope not in within}
        self.read |= inner.read & outer - sure
        self.assigned |= inner.assigned & outer
        self._changed |= changed & outer
        for parameter, value in self._script.passed_arguments:
            if parameter in changed:
                self._change(value)
        args, held = function.args, {Variable(owner.tree, function.name)} if keeps else set[Variable]()
        pairs = [*zip(reversed([*args.posonlyargs, *args.args]), reversed(args.defaults), strict=False)]
        for argument, value in [*pairs, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
            if Variable(function, argument.arg) in changed and not isinstance(value, ast.Constant | None):
                is_named = isinstance(value, ast.Name | ast.Attribute)
                own = Variable(owner.tree, getattr(function, "name", ""))
                held |= {*filter(None, [owner.holder(value) if is_named else own])}
        self._changed, self.read = self._changed | held, self.read | held

    def _change(self, value: ast.expr) -> None:
        """Note that a function changes what it is given."""
        inner: Any = [value.value] if isinstance(value, ast.Starred) else getattr(value, "elts", [])
        for part in inner:
            self._change(part)
        if (variable := self._script.holder(value)) is not None:
            self._changed.add(variable)
