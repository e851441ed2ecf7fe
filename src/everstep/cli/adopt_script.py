"""What a training script consists of, by its syntax: who calls whom, which loops train, what objects are."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While
_SAME_OBJECT = {"to", "cuda", "cpu", "double", "float", "half", "train", "eval", "requires_grad_"}
"""Methods of a module that return the module."""
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "DDP", "compile", "AveragedModel", "deepcopy"}
_PROGRESS_BARS = {"tqdm", "track", "trange"}


def dotted(node: ast.AST) -> str:
    """Return "optimizer", "self.model", "torch.optim.Adam"; "" for anything that is no chain of names."""
    if isinstance(node, ast.Attribute):
        inside = dotted(node.value)
        return inside and f"{inside}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(call: ast.AST) -> str:
    """Return "Adam" of `torch.optim.Adam(...)`, "backward" of `loss(x).backward()`; "" of no call."""
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else dotted(function) if function else ""


def within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and all that is in them, in the order of the source, but for the bodies of functions."""
    for node in nodes:
        yield node
        if not isinstance(node, Function | ast.Lambda):
            yield from within(ast.iter_child_nodes(node))


def calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in within(nodes) if isinstance(node, ast.Call))


def without_bar(data: ast.expr) -> ast.expr:
    """Return what a progress bar shows: E of `tqdm(E)`."""
    is_bar = last_name(data) in _PROGRESS_BARS - {"trange"} and isinstance(data, ast.Call) and data.args
    return data.args[0] if is_bar else data  # type: ignore[attr-defined]


def counted(loop: Loop) -> tuple[str, str | None] | None:
    """Return first number and end of a loop over range() or count(), as source; None for other loops."""
    data = without_bar(loop.iter) if isinstance(loop, ast.For) else None
    name = last_name(data) if data is not None else ""
    if not isinstance(data, ast.Call) or name not in ("range", "trange", "count"):
        return None
    numbers = [ast.unparse(each) for each in data.args]
    if name == "count":
        return (numbers or ["0"])[0], None
    return None if len(numbers) > 2 else (numbers[0] if len(numbers) == 2 else "0", numbers[-1])


class Script:
    """A parsed script.  A scope is a function, or None: the module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        declared = (node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal))
        self.shared = {name for node in declared for name in node.names}
        self._trains: dict[ast.AST, bool] = {}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self._parents.get(node)) is not None:
            yield (node := above)

    def scope(self, node: ast.AST) -> Function | None:
        return next((each for each in self.above(node) if isinstance(each, Function)), None)

    def body(self, scope: Function | None) -> list[ast.stmt]:
        return self.tree.body if scope is None else scope.body

    def class_of(self, scope: ast.AST | None) -> ast.ClassDef | None:
        above = self.above(scope) if scope is not None else iter(())
        return next((each for each in above if isinstance(each, ast.ClassDef)), None)

    def called(self, call: ast.Call) -> Function | None:
        """Return the function of the script that is called, if there is only one that it can be."""
        name = last_name(call)
        inside = None if isinstance(call.func, ast.Name) else self.class_of(call)
        found = [each for each in self.functions if each.name == name]
        if dotted(call.func) == f"self.{name}":
            found = [each for each in found if self.class_of(each) is inside]
        elif isinstance(call.func, ast.Name):
            found = [each for each in found if self.class_of(each) is None]
        else:
            found = [
                each for each in found if self.class_of(each) and not self._is_module(self.class_of(each))
            ]
        return found[0] if len(found) == 1 else None

    def calls_of(self, function: Function) -> list[ast.Call]:
        every = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return [call for call in every if self.called(call) is function]

    # ------------------------------------------------------------------------------------ loops

    def trains(self, node: ast.AST) -> bool:
        """Whether `backward()` is called in it, or in functions that it calls or defines."""
        if node not in self._trains:
            self._trains[node] = False  # of a function that calls itself
            self._trains[node] = any(
                last_name(call) == "backward"
                or ((function := self.called(call)) is not None and self.trains(function))
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
            )
        return self._trains[node]

    def updates(self, node: ast.AST) -> bool:
        """Whether an optimizer steps in it, or in functions that it calls."""
        left, seen = [node], set[ast.AST]()
        while left:
            seen.add(now := left.pop())
            for call in (each for each in ast.walk(now) if isinstance(each, ast.Call)):
                receiver, function = dotted(call.func).rpartition(".")[0].lower(), self.called(call)
                if last_name(call) == "step" and ("opt" in receiver or "scaler" in receiver):
                    return True
                if function is not None and function not in seen:
                    left.append(function)
        return False

    def inner(self, loop: Loop) -> list[tuple[Loop, tuple[ast.Call, ...]]]:
        """Return the nearest loops below that train, each with the calls on the way to it."""
        found: list[tuple[Loop, tuple[ast.Call, ...]]] = []

        def look(nodes: Iterable[ast.AST], way: tuple[ast.Call, ...]) -> None:
            for node in nodes:
                if isinstance(node, Loop) and self.trains(node):
                    found.append((node, way))
                    continue
                function = self.called(node) if isinstance(node, ast.Call) and len(way) < 4 else None
                if function is not None and self.trains(function):
                    look(function.body, (*way, node))  # type: ignore[arg-type]
                if not isinstance(node, Function):
                    look(ast.iter_child_nodes(node), way)

        look(loop.body, ())
        return found

    @cached_property
    def outermost(self) -> list[Loop]:
        """The loops that train and that no other such loop reaches."""
        training = [node for node in ast.walk(self.tree) if isinstance(node, Loop) and self.trains(node)]
        below = {each for loop in training for each, _ in self.inner(loop)}
        return [loop for loop in training if loop not in below]

    def evaluates(self, call: ast.Call, in_steps: bool) -> bool:
        """Whether a function is called that evaluates: by `eval()`, or outside steps without gradients."""
        function = self.called(call)
        if function is None or self.trains(function):
            return False
        names = {last_name(each) for each in ast.walk(function)}
        names |= {dotted(each).rpartition(".")[2] for each in function.decorator_list}
        return "eval" in names or (not in_steps and bool(names & {"no_grad", "inference_mode"}))

    # ---------------------------------------------------------------------------------- objects

    @cached_property
    def values(self) -> dict[tuple[object, str], list[tuple[int, ast.expr | None]]]:
        """Scope and name -> line and value of each assignment; names of `self` are in their class."""
        found = defaultdict(list)
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name, value in self._pairs(target, node.value):
                    found[self.home(name, self.scope(node)), name].append((node.lineno, value))
        return dict(found)

    def home(self, name: str, scope: Function | None) -> object:
        return self.class_of(scope) if name.startswith("self.") else scope

    def _pairs(self, target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
        if not isinstance(target, ast.Tuple | ast.List):
            yield dotted(target), value
            return
        function = self.called(value) if isinstance(value, ast.Call) else None
        if function is not None:  # names of what it returns, looked up there
            returned = [node.value for node in within(function.body) if isinstance(node, ast.Return)]
            value = returned[-1] if returned else None
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [None] * len(target.elts)
        for part, each in zip(target.elts, parts, strict=False):
            yield dotted(part), each

    def kind(self, name: str, scope: Function | None, depth: int = 0) -> str | None:
        """Return what a name is: "model", "optimizer", "scheduler", "scaler", or None for anything else."""
        values = self.values.get((self.home(name, scope), name), [])
        for _, value in values:
            if value is not None and (kind := self._kind_of_value(value, depth)):
                return kind
        arguments = [] if scope is None else [each.arg for each in parameters(scope)]
        if not values and name in arguments and scope is not None and depth < 4:
            for call in self.calls_of(scope):
                given = dict(bound(call, scope)).get(name)
                if given is not None and (kind := self.kind(dotted(given), self.scope(call), depth + 1)):
                    return kind
        elif not values and scope is not None and not name.startswith("self."):
            return self.kind(name, None, depth + 1)
        used = self._methods(name, scope, 0)
        if {"step", "zero_grad"} <= used:
            return "optimizer"
        if "step" in used and "sched" in name:
            return "scheduler"
        return "model" if used & {"parameters", "named_parameters"} else None

    def _kind_of_value(self, value: ast.expr, depth: int) -> str | None:
        while last_name(value) in _SAME_OBJECT and isinstance(value.func, ast.Attribute):  # type: ignore[attr-defined]
            value = value.func.value  # type: ignore[attr-defined]
        if isinstance(value, ast.Name) and depth < 4:
            return self.kind(value.id, self.scope(value), depth + 1)
        if not isinstance(value, ast.Call):
            return None
        name, path = last_name(value), dotted(value.func)
        if name.endswith(("LR", "schedule_with_warmup", "WarmRestarts")) or "lr_scheduler" in path:
            return "scheduler"
        if name.endswith(("LRScheduler", "LROnPlateau")):
            return "scheduler"
        if name == "GradScaler":
            return "scaler"
        if name in ("Adam", "AdamW", "SGD", "LBFGS", "RMSprop", "Adadelta", "Adagrad") or "optim." in path:
            return "optimizer"
        if name in _WRAPPERS and value.args and depth < 4:
            return self._kind_of_value(value.args[0], depth + 1)
        if any(self._is_module(each) for each in ast.walk(self.tree) if getattr(each, "name", "") == name):
            return "model"
        function = self.called(value)
        if function is not None and depth < 4:
            returned = [node.value for node in within(function.body) if isinstance(node, ast.Return)]
            return next(
                (kind for each in returned if each and (kind := self._kind_of_value(each, depth + 1))), None
            )
        return None

    def _is_module(self, node: ast.AST | None) -> bool:
        """Whether it is a class of this script that is a torch module."""
        if not isinstance(node, ast.ClassDef):
            return False
        bases = {dotted(base).rpartition(".")[2] for base in node.bases}
        others = (
            each for each in ast.walk(self.tree) if getattr(each, "name", "") in bases and each is not node
        )
        return "Module" in bases or any(self._is_module(each) for each in others)

    def _methods(self, name: str, scope: Function | None, depth: int) -> set[str]:
        """Return the names of the methods that are called on it, also in functions that get it."""
        found = set()
        for call in calls(self.body(scope)):
            receiver, _, method = dotted(call.func).rpartition(".")
            if receiver == name:
                found.add(method)
            function = self.called(call)
            if function is not None and depth < 3:
                for parameter, given in bound(call, function):
                    if dotted(given) == name:
                        found |= self._methods(parameter, function, depth + 1)
        return found


def parameters(function: Function | None) -> list[ast.arg]:
    if function is None:
        return []
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def bound(call: ast.Call, function: Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function of the script with the arguments of a call."""
    names = [each.arg for each in parameters(function)]
    yield from zip(names[names[:1] == ["self"] :], call.args, strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg)
