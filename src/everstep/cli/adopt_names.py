"""Whose a name in a training script is, where it gets its values, and what defines it: here, or beside it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.Lambda, *COMPREHENSIONS)
SAME_OBJECT = {"to", "cuda", "cpu", "float", "double", "half", "train", "eval", "manual_seed"}


class Variable(NamedTuple):
    """A name, and the function, class or module that it is local to."""

    scope: ast.AST
    name: str


def inside(*tops: ast.AST | None, kind: Any = ast.AST) -> list[Any]:
    """Return all nodes of a kind in these."""
    return [node for top in tops if top is not None for node in ast.walk(top) if isinstance(node, kind)]


def parameters(function: ast.FunctionDef | ast.Lambda) -> list[Variable]:
    return [Variable(function, each.arg) for each in inside(function.args, kind=ast.arg)]


def passed(
    call: ast.Call, function: ast.FunctionDef | None = None, skipped: int = 0
) -> list[tuple[str, Any]]:
    """Return what a call gives, with the names of the parameters of a function."""
    names = [each.arg for each in function.args.args[skipped:]] if function else [""] * len(call.args)
    return [*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]


def dotted(node: ast.AST | None) -> str:
    """Return "torch.optim.Adam" of these names and of a call of them."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return dotted(node.func) if isinstance(node, ast.Call) else node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST | None) -> str:
    """Return "Adam" of `torch.optim.Adam(...)`; "" of no call."""
    return dotted(node).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def root(node: Any) -> Any:
    """Return `net` of `net.layers[0](x)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def same_object(value: ast.expr | None) -> ast.expr | None:
    """Return `net` of `net.to(device).train()`, and what a method as `normal_()` has changed."""
    while isinstance(value, ast.Call):
        if called(value) == "Variable" and value.args:
            value = value.args[0]
        elif called(value) in SAME_OBJECT or called(value).endswith("_"):
            value = getattr(value.func, "value", None)
        else:
            break
    return value


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment with their values: `a, b = [], 0` has three."""
    pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
    for target, value in pairs:  # which grows
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            is_starred = any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))
            if len(target.elts) == len(value.elts) and not is_starred:
                pairs += zip(target.elts, value.elts, strict=True)
    return pairs


class Names:
    """The syntax of a script, or of a module beside it.

    Args:
        folder: that of the script, where modules are looked for.
        file: of the module.
        main: the script.
    """

    def __init__(
        self, source: str, folder: Path | None = None, file: Path | None = None, main: Any = None
    ) -> None:
        self.tree, self._folder, self.file = ast.parse(source), folder, file
        self.main: Any = main or self
        self._read = dict[Path, Self | None]()
        self.source = source.encode()
        self._lines = [0, *accumulate(map(len, self.source.splitlines(keepends=True)))]
        """The place in the source at which each line begins."""
        self.nodes = inside(self.tree)
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls: list[ast.Call] = self.all(ast.Call)
        self.names: list[ast.Name] = self.all(ast.Name)
        self.stores = [each for each in self.names if not isinstance(each.ctx, ast.Load)]
        self.read_names = {each.id for each in self.names if isinstance(each.ctx, ast.Load)}
        every = [each for each in self.all(ast.FunctionDef) if not self.nearest(each, ast.ClassDef)]
        names = [each.name for each in every]
        self.functions = {each.name: each for each in every if names.count(each.name) == 1}
        self.classes = {each.name: each for each in self.all(ast.ClassDef)}
        self.assigned = {target: value for node in self.nodes for target, value in assignments(node)}
        for target, value in [*self.assigned.items()]:
            parts = self.returned(value)
            if isinstance(target, ast.Tuple) and isinstance(parts, ast.Tuple):
                self.assigned |= zip(target.elts, parts.elts, strict=False)
        imports = self.all(ast.Import | ast.ImportFrom)
        self._imports = [
            (node, alias, [node.module or ""] if isinstance(node, ast.ImportFrom) else list[str]())
            for node in imports
            for alias in node.names
        ]
        self.imported = {(alias.asname or alias.name).split(".")[0] for _, alias, _ in self._imports}
        paths = [(node, "".join(source) or alias.name) for node, alias, source in self._imports]
        self.packages = {path.split(".")[0]: node for node, path in paths}
        self._bound = {*names, *(each.arg for each in self.all(ast.arg)), *(each.id for each in self.stores)}
        self._definitions = dict[str, tuple[Self, Any] | None]()
        self._variables = dict[ast.Name, Variable]()

    def all(self, kind: Any) -> list[Any]:
        """Return all nodes of a kind."""
        return [node for node in self.nodes if isinstance(node, kind)]

    def at(self, line: int, column: int = 0) -> int:
        return self._lines[min(line, len(self._lines)) - 1] + column

    def start(self, node: Any) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.at(node.end_lineno, node.end_col_offset)

    def below(self, node: Any) -> int:
        """Return where the line after a node begins."""
        return self.at((node.end_lineno or 0) + 1)

    def text(self, node: Any) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.parents.get(node)) is not None:
            yield (node := above)

    def nearest(self, node: ast.AST, kind: Any) -> Any:
        return next((each for each in self.above(node) if isinstance(each, kind)), None)

    def beside(self, node: ast.AST, top: ast.AST | None) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Return the statements before and after a statement, in all blocks from it up to `top`."""
        before, after = list[ast.stmt](), list[ast.stmt]()
        for above in self.above(node):
            for block in (getattr(above, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and node in block:
                    before += block[: block.index(node)]
                    after += block[block.index(node) + 1 :]
                    if isinstance(above, ast.Try) and block is above.body:
                        handlers = [line for each in above.handlers for line in each.body]
                        after += [*above.orelse, *handlers, *above.finalbody]
            if above is top:
                break
            node = above
        return before, after

    @cached_property
    def _locals(self) -> dict[ast.AST, set[str]]:
        names: dict[ast.AST, set[str]] = {node: set() for node in self.all(_SCOPES)}
        for node in (*self.stores, *self.all((ast.arg, ast.FunctionDef, ast.ClassDef, ast.ExceptHandler))):
            if (home := self.nearest(node, _SCOPES)) is not None:
                names[home].add(getattr(node, "id", getattr(node, "arg", getattr(node, "name", ""))))
        for outer in self.all(ast.Global | ast.Nonlocal):
            if self.nearest(outer, _SCOPES) in names:
                names[self.nearest(outer, _SCOPES)] -= {*outer.names}
        return names

    def variable(self, name: ast.Name) -> Variable:
        """Return whose a name is."""
        if name not in self._variables:
            variable = self.variable_beside(name) or Variable(self.tree, name.id)
            for node in self.above(name):
                in_class = isinstance(node, ast.ClassDef) and self.parents[name] in node.body
                if in_class or name.id in self._locals.get(node, ()):
                    variable = Variable(node, name.id)
                    break
            self._variables[name] = variable
        return self._variables[name]

    def is_beside(self, variable: Variable) -> bool:
        """Return whether a variable is one of another module."""
        return isinstance(variable.scope, ast.Module) and variable.scope is not self.tree

    def is_of(self, node: Any, *variables: Variable) -> bool:
        """Return whether a node is the name of one of these variables."""
        return isinstance(node, ast.Name) and self.variable(node) in variables

    def stores_of(self, variable: Variable) -> list[ast.Name]:
        return [each for each in self.stores if each.id == variable.name and self.variable(each) == variable]

    def variable_beside(self, node: Any, kind: Any = ast.Name) -> Variable | None:
        """Return the variable of a module beside the script that `rng` or `other.rng` is."""
        owner = self.definition(dotted(node), kind) if isinstance(node, ast.Name | ast.Attribute) else None
        if owner is None or owner[0] is self:
            return None
        return Variable(owner[0].tree, getattr(owner[1], "id", getattr(owner[1], "name", "")))

    def holder(self, node: Any, is_target: bool = False) -> Variable | None:
        """Return the variable `net` of `net.layers[0](x)`, `Log` of `Log.losses.append(x)`."""
        parts = int(is_target)
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            kinds = (ast.Name, ast.ClassDef) if parts > 1 else ast.Name
            if (variable := self.variable_beside(node, kinds)) is not None:
                return variable
            if parts > 1 and (getattr(node, "attr", "") == "__class__" or called(node) == "type"):
                owner = self.nearest(node, ast.ClassDef)
                return Variable(self.tree, owner.name) if owner is not None else None
            parts += isinstance(node, ast.Attribute)
            node = node.func if isinstance(node, ast.Call) else node.value
        if not isinstance(node, ast.Name):
            return None
        if parts > 1 and (owner := self.variable_beside(node, ast.ClassDef)) is not None:
            return owner
        variable, is_class = self.variable(node), parts > 1 and node.id in self.classes
        method: Any = variable.scope
        is_method = "classmethod" in map(dotted, getattr(method, "decorator_list", ()))
        if parts > 1 and is_method and variable == parameters(method)[0]:
            return Variable(self.tree, self.nearest(method, ast.ClassDef).name)
        is_builtin = variable.scope is self.tree and node.id not in self._top and hasattr(builtins, node.id)
        return variable if is_target or is_class or not (is_builtin or node.id in self.symbols) else None

    @cached_property
    def symbols(self) -> set[str]:
        """Names that are no variables."""
        stored = {each.id for each in self.stores}
        names = self.imported | {*dir(builtins)} - stored | self.read_names - self._bound
        names = {each for each in names if each in stored or self.definition(each, ast.Name) is None}
        return names | self.functions.keys() | self.classes.keys()

    def first(self, variable: Variable) -> Any:
        """Return where a variable is first assigned; its function if it is an argument."""
        default: Any = self.tree.body[0] if variable.scope is self.tree else variable.scope
        return min(self.stores_of(variable), key=lambda each: each.lineno, default=default)

    def values(self, variable: Variable) -> list[ast.expr | None]:
        """Return what is assigned to a variable; None where that is not one value."""
        if self.is_beside(variable):
            return self.modules[variable.scope].values(variable)
        given = [value for parameter, value in self.passed_arguments if parameter == variable]
        return [*given, *map(self.stored_value, self.stores_of(variable))]

    def stored_value(self, name: ast.Name) -> ast.expr | None:
        node: Any = self.parents[name]
        if name in self.assigned or isinstance(node, ast.Starred):
            return self.assigned.get(name)
        return getattr(node, "value", getattr(node, "context_expr", None))

    def returned(self, value: ast.expr | None) -> ast.expr | None:
        """Return what a call of a function of the script returns, if one line of it does."""
        function = self.functions.get(dotted(value)) if isinstance(value, ast.Call) else None
        lines = inside(function, kind=ast.Return | ast.Yield)
        lines = [each for each in lines if self.nearest(each, ast.FunctionDef) is function]
        return lines[0].value if len(lines) == 1 and isinstance(lines[0], ast.Return) else None

    def calls_of(self, function: ast.FunctionDef) -> list[ast.Call]:
        return [each for each in self.calls if getattr(each.func, "id", "") == function.name]

    @cached_property
    def passed_arguments(self) -> list[tuple[Variable, ast.expr]]:
        """The parameters of functions of the script and beside it, with what each call here gives them."""
        owners = [(call, self.definition(dotted(call), ast.FunctionDef)) for call in self.calls]
        pairs = [(owner[1], passed(call, owner[1])) for call, owner in owners if owner is not None]
        return [(Variable(function, name), value) for function, given in pairs for name, value in given]

    def aliases(self, variable: Variable) -> set[Variable]:
        """Return a variable, and the parameters of functions that get it."""
        aliases = {variable}
        while more := {k for k, value in self.passed_arguments if self.is_of(value, *aliases)} - aliases:
            aliases |= more
        return aliases

    @cached_property
    def modules(self) -> dict[ast.AST, Self]:
        """The script, and the modules beside it that these import, by their trees."""
        scripts = [self]
        for script in scripts:  # which grows
            for node, alias, source in script._imports:
                for path in (source, [*source, alias.name]):
                    scripts += [each for each in script._files(node, path) if each not in scripts]
        return {each.tree: each for each in scripts}

    def _files(self, node: ast.Import | ast.ImportFrom, source: Sequence[str]) -> list[Self]:
        """Return the module "a.b" beside the script, as a file and as a package."""
        if self._folder is None or not "".join(source):
            return []
        own, above = [*self.file.parents] if self.file else [self._folder], getattr(node, "level", 0)
        folders = own[above - 1 : above] if above else [self._folder, own[0]]
        stems = [Path(folder, *".".join(filter(None, source)).split(".")) for folder in folders]
        paths = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")]
        return [each for path in paths if (each := self.main.module(path)) is not None]

    def module(self, file: Path) -> Self | None:
        if file not in self._read:
            self._read[file] = None
            with suppress(OSError, SyntaxError, ValueError):  # another package's
                self._read[file] = type(self)(file.read_text(encoding="utf-8"), self._folder, file, self)
        return self._read[file]

    @cached_property
    def _top(self) -> dict[str, Any]:
        stores = {e.id: e for e in self.stores if not self.nearest(e, (*_SCOPES, ast.ClassDef))}
        return stores | self.functions | self.classes

    def definition(self, path: str, kind: Any = ast.ClassDef) -> tuple[Self, Any] | None:
        """Find what "Meter" or "utils.Meter" is, in the script or in a module beside it."""
        if path not in self._definitions:
            self._definitions[path] = None  # while it is looked for
            self._definitions[path] = self._find(path)
        owner = self._definitions[path]
        return owner if owner is not None and isinstance(owner[1], kind) else None

    def _find(self, path: str) -> tuple[Self, Any] | None:
        if path in self._top:
            return self, self._top[path]
        for node, alias, source in self._imports:
            known, rest = alias.asname or alias.name, ""
            if source and "." not in path and known in (path, "*"):
                rest = path if known == "*" else alias.name
            elif path.startswith(f"{known}."):
                source, rest = [*source, alias.name], path.removeprefix(f"{known}.")
            for script in self._files(node, source) if rest else ():
                if (owner := script.definition(rest, ast.AST)) is not None:
                    return owner
        return None

    @cached_property
    def methods(self) -> dict[str, list[tuple[Self, ast.FunctionDef]]]:
        """The methods of classes of the script and beside it, by their names."""
        methods = dict[str, list[tuple[Self, ast.FunctionDef]]]()
        for script in self.modules.values():
            for each in script.all(ast.FunctionDef):
                if script.nearest(each, ast.ClassDef):
                    methods.setdefault(each.name, []).append((script, each))
        return methods

    @cached_property
    def methods_in_use(self) -> frozenset[str]:
        """Names of methods that are called of anything but `self`."""
        names = set[str]()
        for script in self.modules.values():
            for node in script.all(ast.Attribute):
                method = script.nearest(node, ast.FunctionDef)
                is_method = method is not None and script.nearest(method, ast.AST) in script.classes.values()
                own = {each.arg for each in method.args.args[:1]} if is_method else ()
                names |= {node.attr} if getattr(node.value, "id", "") not in own else set()
        return frozenset(names)
