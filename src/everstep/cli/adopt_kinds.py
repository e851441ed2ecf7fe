"""What a variable of a training script holds: state, a plain value, a record, or what only tells of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from everstep.cli.adopt_flow import VIEWS, Flow
from everstep.cli.adopt_names import (
    COMPREHENSIONS,
    SAME_OBJECT,
    Names,
    Variable,
    called,
    dotted,
    inside,
    parameters,
    passed,
    root,
    same_object,
)

OPTIMIZERS = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adagrad", "Adamax", "RMSprop", "LBFGS"}
GENERATORS = {"RandomState", "default_rng", "Generator", "Random"}
TRACKERS = {"mlflow": "start_run", "trackio": "init", "wandb": "init"}
"""Services that log a run, with what opens one."""
WRAPPED = {"zip", "map", "filter", "chain", "cycle", "islice", "iter", "tqdm"}
_ITERATORS = WRAPPED - {"tqdm"} | {"enumerate", "reversed", "count"}
_STATE = {*OPTIMIZERS, *GENERATORS, "GradScaler", "DataParallel", "AveragedModel"}
_STATE_METHODS = {"parameters", "state_dict", "load_state_dict", "zero_grad", "train", "eval", "step"}
_PLAIN = {"list", "dict", "set", "deque", "defaultdict", "Counter", "int", "float", "zeros", "len", "max"}
_PLAIN |= {"OrderedDict"}
_ARRAY = re.compile(
    r"(np|numpy|torch)\.(random\.)?(?!load|compile|device|no_grad|set_|is_)([a-z_]+|[A-Za-z]*Tensor)"
)
_CLOCKS = {"time", "perf_counter", "now"}
_REPORTERS = {*_CLOCKS, "DataLoader", "random_split", "SummaryWriter", "tqdm", "open", "writer", "device"}
"""Clocks, data (which everstep opens at its place), and what only tells of the training, perhaps twice."""
_LOGGER = re.compile("(logger|writer|visdom|bar)$", re.IGNORECASE)
_LOSS = re.compile("criteri|loss_?f|_loss$", re.IGNORECASE)
_SCHEDULER = re.compile("sched", re.IGNORECASE)
_DECORATORS = {"property", "staticmethod", "classmethod", "abstractmethod", "torch.no_grad"}
_NO_RECORD = {"__getattr__", "__getattribute__", "__setattr__", "state_dict", "load_state_dict"}
"""Methods that say that an object's attributes are not all, or that they are more than that."""
_SAME_ITEMS = re.compile(
    "list|tuple|dict|OrderedDict|enumerate|zip|reversed|sorted|next|getattr|values|items|get|from_numpy|asarray"
    "|chunk|split|unbind|(named_)?(parameters|modules|children)|Variable"
)
"""What gives the very objects of which it is made, and those of a module."""
_FILLING = {"append", "appendleft", "add", "insert", "extend", "update", "setdefault"}
_MODULES = re.compile(r"nn\.|optim\.|Module")
_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.UnaryOp, ast.BinOp)
_HOLDING: tuple[type[ast.AST], ...] = (ast.Subscript, ast.Starred, ast.NamedExpr, ast.Tuple, ast.List)
_HOLDING += (ast.Set, ast.Dict, ast.IfExp, ast.BoolOp, *COMPREHENSIONS)
"""What has the very objects of which it is made."""


class Script(Names):
    """A parsed script, or a module beside it, with what its variables hold."""

    def __init__(self, source: str, folder: Path | None = None, *module: Any) -> None:
        super().__init__(source, folder, *module)
        self._changed_by = dict[ast.FunctionDef, set[str]]()
        self._kinds = dict[ast.ClassDef, str]()
        self.guessed = set[Variable]()
        """Loss functions and schedulers from elsewhere, which are taken for state."""
        self.open: list[object] = []
        """What is being looked at: a function that calls itself is looked at once."""

    def kind(self, variable: Variable) -> str:
        """Return what a variable holds: "state", "plain", "record", "reporter", "function"; "" if unknown.

        A record is an object of a class of the script's own whose attributes are all that it keeps.
        A reporter only tells of the training, or stays as it is.
        """
        if self.is_beside(variable) and variable.scope in self.modules:
            return self.modules[variable.scope].kind(variable)
        if variable in self.open:
            return "plain"
        self.open.append(variable)
        values, aliases = self.values(variable), self.aliases(variable)
        kinds = {self.kind_of(value) for value in values}
        methods = [each.func for each in self.calls if called(each) in _STATE_METHODS]
        receivers = [each.value for each in methods if isinstance(each, ast.Attribute)]
        is_state = "state" in kinds or any(self.is_of(each, *aliases) for each in receivers)
        self.open.pop()
        if "object" in kinds or ("constant" in kinds and self.is_stored_in(variable)):
            return ""
        kinds = {"reporter" if each == "constant" else each for each in kinds}
        if kinds == {"reporter"} and called(values[0]).endswith("Loss"):
            return "state" if self.is_stored_in(variable) else "reporter"
        if kinds == {"plain"}:
            items = [each for each in self.items_of(variable) if called(each)[:1].isupper()]
            kinds = {self.kind_of(each) for each in items} - {"state"} or kinds
            kinds = {{"record": "", "constant": "reporter"}.get(each, each) for each in kinds}
        if "" in kinds <= {"", "plain"} and self._is_named_as_state(variable):
            return "state"
        is_list = any(isinstance(each, ast.List | ast.Dict) for each in values)
        if kinds == {"", "plain"} and is_list and not any(called(each)[:1].isupper() for each in values):
            kinds = {"plain"}  # `h = []`, or one from a file; what is neither is an error at the start
        if "writer" in kinds:
            return "reporter" if len(kinds) == 1 and self._answers_nothing(variable) else ""
        if "record" in kinds:  # to save what a clock has measured would make any two runs differ
            return "" if len(kinds) > 1 else "reporter" if self._is_timer(variable) else "record"
        return "state" if is_state else "reporter" if "reporter" in kinds else min(kinds, default="")

    def kind_of(self, value: ast.expr | None) -> str:
        value = same_object(value)
        if isinstance(value, ast.Call) and self.keeps(value):
            return ""
        if (returned := self.returned(value)) is not None:
            return self.kind_of(returned)
        beside = self.holder(value) if isinstance(value, ast.Name | ast.Attribute) else None
        if beside is not None and self.is_beside(beside):
            kind = self.kind(beside)
            return kind if self.variable_beside(value) or kind in ("reporter", "function") else ""
        if isinstance(value, ast.Name):
            is_function = value.id in self.functions or value.id in self.imported
            return "function" if is_function else self.kind(self.variable(value))
        if isinstance(value, ast.IfExp):  # `torch.cuda.FloatTensor if cuda else torch.FloatTensor`
            kinds = {self.kind_of(value.body), self.kind_of(value.orelse)} - {"plain"}  # or None
            return kinds.pop() if kinds in ({"function"}, {"reporter"}) else ""
        package, name = dotted(value).partition(".")[0], called(value)
        is_librarys = package in self.imported or getattr(value, "attr", "") == "apply"
        is_function = isinstance(value, ast.Lambda) or (isinstance(value, ast.Attribute) and is_librarys)
        if is_function or name in ("partial", "namedtuple"):
            return "function"
        arguments = [item for _, item in passed(value)] if isinstance(value, ast.Call) else []
        if isinstance(value, ast.Call) and (owner := self.definition(dotted(value))) is not None:
            given = [e for e in arguments if isinstance(e, ast.Name | ast.Attribute | ast.Lambda)]
            is_plain = {self.kind_of(each) for each in given} <= {"", "plain", "state"}
            if kind := owner[0]._kind_of_objects(owner[1]):
                return kind if kind != "record" or is_plain else "object"
        if name == "SimpleNamespace":
            return "record"
        is_known = TRACKERS.get(dotted(value).rpartition(".")[0]) == name or dotted(value) == "re.compile"
        parts = inside(value) if isinstance(value, ast.BinOp) else [value]
        is_known |= name.endswith("Loss") or any(called(each) in _REPORTERS for each in parts)
        if is_known or _LOGGER.search(name):
            return "reporter"
        is_module = name[:1].isupper() and _MODULES.search(dotted(value))
        if name in _STATE or name.endswith(("LR", "LROnPlateau")) or is_module:
            return "state"
        inner: list[Any] = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        if isinstance(value, COMPREHENSIONS):
            inner = [getattr(value, "elt", getattr(value, "value", None))]
        named = arguments if name == "dict" else inner
        kinds = {self.kind_of(each) for each in named if isinstance(each, ast.Name | ast.Call | ast.Lambda)}
        if kinds == {"function"}:
            return "function"
        if "record" in kinds and inner:
            return "record" if len(kinds) == 1 else ""
        types = _PLAIN | {"str", "bool"}
        if name == "defaultdict" and not all(getattr(each, "id", "") in types for each in arguments):
            return ""
        every = inside(*inner, *arguments, kind=ast.Call)
        made = {each: self.kind_of(each) for each in every if called(each)[:1].isupper()}
        is_unknown = {*made.values()} & {"record", "object"} or any(not made.get(each, " ") for each in inner)
        if is_unknown or any(isinstance(each, ast.Name) and self.kind_of(each) == "state" for each in inner):
            return ""
        return "plain" if name in _PLAIN or self.is_array(value) or isinstance(value, _LITERALS) else ""

    def items_of(self, variable: Variable) -> list[ast.expr]:
        """Return what is put into a list or a dictionary, also by functions that get it."""
        pairs = [(each.func, item) for each in self.calls if called(each) in _FILLING for item in each.args]
        pairs += [(k, v) for k, v in self.assigned.items() if isinstance(k, ast.Subscript)]
        sums = self.all(ast.AugAssign)  # `h += [w]`; `n += w` makes a number
        pairs += [(e.target, e.value) for e in sums if isinstance(e.value, ast.List | ast.ListComp)]
        aliases = self.aliases(variable)
        return [item for place, item in pairs if self.is_of(root(place), *aliases)]

    def is_view_of_weights(self, value: Any, is_part: bool = False) -> bool:
        """Return whether a value has weights that go on changing: `net.state_dict()`, `w.data`.

        Args:
            is_part: whether a tensor of what the value is would be one.
        """
        value, parts = self.returned(value) or value, list[Any]()
        if isinstance(value, ast.Name) and (variable := self.variable(value)) not in self.open:
            if self.kind(variable) == "state":
                return is_part
            self.open.append(variable)
            loops = self.all(ast.For | ast.comprehension)
            loops = [e for e in loops if any(self.is_of(part, variable) for part in ast.walk(e.target))]
            parts = [*self.values(variable), *self.items_of(variable), *(each.iter for each in loops)]
            is_view = any(self.is_view_of_weights(each, is_part) for each in parts)
            self.open.pop()
            return is_view
        if isinstance(value, ast.Attribute):
            is_part |= value.attr in ("data", "weight", "bias")
            return is_part and self.is_view_of_weights(value.value, True)
        if isinstance(value, ast.Call):
            is_same = called(value) in SAME_OBJECT - _STATE_METHODS
            is_view = is_same or any(each.fullmatch(called(value)) for each in (VIEWS, _SAME_ITEMS))
            # `net.embedding().weight`; what has arguments, as `net.loss(x)`, makes a new tensor
            is_got = is_part and not value.args
            if isinstance(value.func, ast.Attribute) and (is_view or is_got):
                parts, is_part = [value.func.value], True
            calls = inside(value, kind=ast.Call)
            copied = inside(*(each for each in calls if called(each) == "deepcopy"))
            if "state_dict" in map(called, {*calls}.difference(copied)):
                return True
            parts += [item for _, item in passed(value)] if is_view else []
        elif isinstance(value, _HOLDING) or isinstance(getattr(value, "right", None), ast.List):
            items = getattr(value, "values", [*ast.iter_child_nodes(value)])
            parts = [each for each in items if each is not getattr(value, "key", None)]
        return any(self.is_view_of_weights(each, is_part) for each in parts)

    def is_array(self, value: ast.expr | None) -> bool:
        """Return whether a value is an array of NumPy or torch."""
        value = same_object(value)
        return isinstance(value, ast.Call) and _ARRAY.fullmatch(dotted(value)) is not None

    def is_stored_in(self, variable: Variable) -> bool:
        """Return whether the script assigns an attribute or an item of what a variable holds."""
        places = self.all(ast.Attribute | ast.Subscript)
        return any(self.is_of(root(e), variable) for e in places if not isinstance(e.ctx, ast.Load))

    def _values_of(self, name: ast.AST) -> list[ast.expr | None]:
        return self.values(self.variable(name)) if isinstance(name, ast.Name) else []

    def is_own_object(self, name: ast.AST) -> bool:
        """Return whether a name may hold an object of the script's own that changes, or a queue."""
        made = inside(*self._values_of(name), kind=ast.Call)
        is_queue = any(called(each).endswith("Queue") for each in made)
        return is_queue or any(self.kind_of(each) in ("record", "object", "writer") for each in made)

    def is_object(self, name: ast.AST) -> bool:
        """Return whether a name may hold an object of a class that is not torch's."""
        made = [e for e in map(same_object, self._values_of(name)) if called(e)[:1].isupper()]
        return any(dotted(each).partition(".")[0] not in ("torch", "Variable", "autograd") for each in made)

    def _made_of(self, value: ast.expr | None, depth: int = 0) -> Iterator[ast.expr | None]:
        """Yield what a name may hold, with the names that a function got it by."""
        if isinstance(value, ast.Name) and depth < 5:
            for each in self._values_of(value):
                yield from self._made_of(each, depth + 1)
        else:
            yield value

    def is_iterator(self, value: ast.expr | None) -> bool:
        """Return whether a value is read once: of `zip`, or of a function with a `yield`."""
        function: Any = self.functions.get(dotted(value)) if isinstance(value, ast.Call) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            owners = [self.definition(dotted(made)) for made in self._made_of(value.func.value)]
            parts = [each for owner in owners if owner is not None for each in owner[1].body]
            function = next((e for e in parts if getattr(e, "name", "") == value.func.attr), function)
        is_wrapped = called(value) in WRAPPED - {"tqdm"} or isinstance(value, ast.GeneratorExp)
        return is_wrapped or bool(inside(function, kind=ast.Yield | ast.YieldFrom))

    def is_drawn(self, variable: Variable) -> bool:
        """Return whether a variable holds a generator or an iterator, which reads change."""
        owner, values = self.modules.get(variable.scope, self), self.values(variable)
        made = [same_object(owner.returned(each) or each) for each in values]
        is_iterator = any(map(owner.is_iterator, values))
        return is_iterator or any(called(each) in GENERATORS | _ITERATORS for each in made)

    def is_made_elsewhere(self, variable: Variable) -> bool:
        """Return whether what a variable holds is made by another package."""
        owner, values = self.modules.get(variable.scope, self), self.values(variable)
        return bool(values) and all(called(e) and not owner.definition(dotted(e), ast.AST) for e in values)

    def _answers_nothing(self, variable: Variable) -> bool:
        """Return whether a script only calls methods of an object, and leaves their results."""
        aliases, own = self.aliases(variable), {*self.functions.values()}
        given = {id(value) for parameter, value in self.passed_arguments if parameter.scope in own}
        reads = [each for each in self.names if isinstance(each.ctx, ast.Load) and id(each) not in given]
        reads = [each for each in reads if self.variable(each) in aliases]
        are_methods = all(isinstance(self.parents[each], ast.Attribute) for each in reads)
        return are_methods and all(isinstance(self.nearest(each, ast.stmt), ast.Expr) for each in reads)

    def _is_named_as_state(self, variable: Variable) -> bool:
        """Return whether a variable is named as a scheduler, or as a loss function and called."""
        is_loss = _LOSS.search(variable.name) and any(self.is_of(each.func, variable) for each in self.calls)
        is_state = bool(is_loss or _SCHEDULER.search(variable.name))
        self.guessed |= {variable} if is_state else set()
        return is_state

    def _is_timer(self, variable: Variable) -> bool:
        """Return whether methods of what a variable holds are given what a clock says, and nothing else."""
        verdicts = set[bool]()
        for call in (each for each in self.calls if each.args and self.is_of(root(each.func), variable)):
            parts = inside(call.args[0])
            parts += inside(*(value for each in parts for value in self._values_of(each)))
            verdicts.add(len(call.args) == 1 and any(called(part) in _CLOCKS for part in parts))
        return verdicts == {True}

    def changed_by(self, function: ast.FunctionDef) -> set[str]:
        """Return the names of the parameters that a function may change."""
        if function not in self._changed_by:
            self._changed_by[function] = set()  # while it is looked at
            flow = Flow(self)
            flow.run(function.body, {*parameters(function)})
            self._changed_by[function] = {each.name for each in flow.changed if each.scope is function}
        return self._changed_by[function]

    def keeps(self, decorator: Any) -> bool:
        """Return whether a decorator, or a function that makes one, keeps values from call to call."""
        if dotted(decorator).rpartition(".")[2] in ("lru_cache", "cache"):
            return True
        owner = self.definition(dotted(decorator), (ast.FunctionDef, ast.ClassDef))
        if owner is None or isinstance(owner[1], ast.ClassDef):
            return owner is not None and isinstance(self.parents.get(decorator), ast.FunctionDef)
        functions, flow = inside(owner[1], kind=ast.FunctionDef), Flow(owner[0])
        for inner in functions[1:]:
            flow.run(inner.body, {*parameters(inner)})
            flow.assigned = {each for each in flow.assigned if each.scope is not inner}
        changed = flow.changed - {each for function in functions for each in parameters(function)}
        return any(each.scope in functions for each in flow.assigned | changed)

    @cached_property
    def unseen(self) -> Flow:
        """What hooks and methods of classes read, assign and change, here and in the modules beside."""
        flow = Flow(self)
        for owner in (each for name, each in self.methods.items() if name != "__init__"):
            for method in owner:
                flow.enter(*method, set())
        for script in self.modules.values():
            hooks = [(script, each) for each in script.all(ast.Lambda)]
            calls = {call.func for call in script.calls}
            named = [each for each in script.all(ast.Name | ast.Attribute) if each not in calls]
            found = [script.definition(dotted(each), ast.FunctionDef) for each in named]
            for hook in (*hooks, *(each for each in found if each is not None)):
                flow.enter(*hook, set())
        return flow

    def is_data_that_changes(self, node: ast.ClassDef) -> bool:
        """Return whether a class draws from a generator of its own, or is data and assigns its attributes."""
        if not GENERATORS.isdisjoint(map(called, ast.walk(node))):
            return True
        names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        is_data = any(dotted(each).endswith(("Dataset", "Sampler", "DataLoader")) for each in node.bases)
        for method in self._methods_of(node) if is_data or names & {"__getitem__", "__iter__"} else ():
            own = {each.arg for each in method.args.args[:1]}
            parts = inside(method, kind=ast.Attribute | ast.Subscript)
            if any(getattr(root(e), "id", "") in own and not isinstance(e.ctx, ast.Load) for e in parts):
                return True
        return False

    def _methods_of(self, node: ast.ClassDef) -> list[ast.FunctionDef]:
        """Return the methods of a class that may run after an object was made."""
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        used = self.main.methods_in_use
        names = {each for each in methods if each in used or each.startswith("__")} - {"__init__"}
        more = names
        while more := {called(e) for name in more for e in ast.walk(methods[name])} & methods.keys() - names:
            names |= more
        return [methods[name] for name in names]

    def _kind_of_objects(self, node: ast.ClassDef) -> str:
        if node not in self._kinds:
            self._kinds[node] = "object"  # while the class is looked at
            self._kinds[node] = self._kind_of_class(node)
        return self._kinds[node]

    def _kind_of_class(self, node: ast.ClassDef) -> str:
        """Return what objects of a class are.

        "state": modules, and what says what its state is; "record": they keep plain attributes alone;
        "constant": no method in use changes them; "writer": they have a file, too; "object": of another kind;
        "": unknown.
        """
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        rest = [each for each in node.body if each not in methods and not isinstance(each, ast.Pass)]
        values = [getattr(each, "value", None) for each in rest]  # of its attributes, and its docstring
        names, bases = {each.name for each in methods}, [dotted(each) for each in node.bases]
        if any(map(_MODULES.search, bases)) or {"state_dict", "load_state_dict"} <= names:
            return "state"
        is_known = all(each == "object" or each.endswith("Dataset") for each in bases)
        if node.keywords or node.decorator_list or not is_known:
            return ""
        if names & _NO_RECORD or not all(isinstance(each, ast.Constant) for each in values):
            return "object"
        changing, kept = set[ast.AST](), list[ast.AST]()
        for method in methods:
            me = next(iter(parameters(method)), Variable(method, ""))
            flow = Flow(self, own_calls={f"{me.name}.{name}" for name in names})
            flow.run(method.body, {*parameters(method)})
            if any(each.scope is self.tree for each in flow.assigned | flow.changed):
                return "object"
            # state outside the object: a decorator may keep some, and a default value is there once
            defaults = [each for each in (*method.args.defaults, *method.args.kw_defaults) if each]
            keeps = not all(isinstance(each, ast.Constant | ast.Name | ast.Attribute) for each in defaults)
            if not {*map(dotted, method.decorator_list)} <= _DECORATORS or (keeps and flow.changed - {me}):
                return "object"
            changing |= {method} if me in flow.changed else set()
            lines = inside(method, kind=ast.Assign | ast.AnnAssign | ast.AugAssign)
            kept += [*method.args.defaults, *(each.value for each in lines if each.value is not None)]
        is_changed = changing & {*self._methods_of(node)}
        parts = inside(*kept)
        # an iterator, or an object of an own class: a method may change it through other names
        within = [each for each in parts if not isinstance(self.parents[each], ast.Assign | ast.AnnAssign)]
        owners = [self.definition(dotted(each)) for each in parts if isinstance(each, ast.Call)]
        kinds = {owner[0]._kind_of_objects(owner[1]) for owner in owners if owner is not None}
        is_hidden = any(called(each) in self.classes for each in within) or kinds & {"record", "object"}
        if is_hidden or any(called(each) in _ITERATORS for each in kept):
            return "object"
        writes = any(called(each) in _REPORTERS or _LOGGER.search(called(each)) for each in parts)
        kind = "writer" if writes else "object" if any(map(self._is_object, parts)) else "record"
        return kind if is_changed else "constant"

    def _is_object(self, node: ast.AST) -> bool:
        """Return whether a part of a value is surely no plain value: a function, a file, a model."""
        above, name = self.parents[node], called(node)
        if name == "deepcopy" and isinstance(node, ast.Call):
            return called(node.args[0] if node.args else None) != "state_dict"
        if name == "state_dict":
            return called(above) != "deepcopy"
        if isinstance(node, ast.Call):
            is_class = name[:1].isupper() and name not in _PLAIN | OPTIMIZERS
            return name in ("open", "iter") or is_class
        is_used = isinstance(above, ast.Attribute) or getattr(above, "func", None) is node
        return isinstance(node, ast.Lambda) or (getattr(node, "id", "") in self.symbols and not is_used)
