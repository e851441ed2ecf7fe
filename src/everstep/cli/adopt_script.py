"""What a training script consists of, by its syntax: whose a name is, what it holds, what crosses a round."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

LOOPS = (ast.For, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SAME_OBJECT = {"to", "cuda", "cpu", "float", "double", "half", "train", "eval", "manual_seed"}
OPTIMIZERS = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adagrad", "Adamax", "RMSprop", "LBFGS"}
GENERATORS = {"RandomState", "default_rng", "Generator", "Random"}
_STATE = {*OPTIMIZERS, *GENERATORS, "GradScaler", "DataParallel", "AveragedModel"}
_STATE_METHODS = {"parameters", "state_dict", "load_state_dict", "zero_grad", "train", "eval", "step"}
_PLAIN = {"list", "dict", "set", "deque", "defaultdict", "Counter", "int", "float", "zeros", "len", "max"}
_PLAIN |= {"OrderedDict"}
_ARRAY = re.compile(
    r"(np|numpy|torch)\.(random\.)?(?!load|compile|device|no_grad|set_|is_)([a-z_]+|[A-Za-z]*Tensor)"
)
_CLOCKS = {"time", "perf_counter", "now"}
_REPORTERS = _CLOCKS | {"DataLoader", "random_split", "SummaryWriter", "tqdm", "open"}
_REPORTERS |= {"writer", "device"}
_LOGGER = re.compile("(logger|writer|visdom|bar)$", re.IGNORECASE)
_LOSS = re.compile("criteri|loss_?f|_loss$", re.IGNORECASE)
_SCHEDULER = re.compile("sched", re.IGNORECASE)
"""Clocks, data (which everstep opens at its place), and what only tells of the training, perhaps twice."""
_PURE = re.compile(
    "size|dim|item|view|to|cuda|cpu|float|long|keys|items|values|get|format|join|mean|sum|split|argmax|max|min|eq"
    "|numpy|narrow|detach|reshape|flatten|(un)?squeeze|transpose|permute|t|clone|index|(view|type|expand)_as"
    "|contiguous|is_available|startswith|endswith|upper|[lr]strip|parameters|named_parameters|modules|children"
)
"""Methods that leave their object as it is, if their result is used."""
_DECORATORS = {"property", "staticmethod", "classmethod", "abstractmethod", "torch.no_grad"}
_ITERATORS = {"iter", "zip", "map", "filter", "enumerate", "reversed", "count", "cycle", "chain", "islice"}
_MATHS = re.compile(
    "expand|repeat|flip|chunk|sub|mul|div|pow|abs|exp|log|sqrt|norm|clamp|round|any|all|matmul|b?mm|topk|(arg)?sort"
    "|gather|ne|gt|lt|ge|le|bool|int|half|double|type|numel|nelement|tolist|astype|copy|count|replace|strip|lower"
    "|(log_)?softmax|sigmoid|tanh|relu|std|var"
)
"""The same of tensors, arrays and strings; of another object they may be anything."""
_NO_RECORD = {"__getattr__", "__getattribute__", "__setattr__", "state_dict", "load_state_dict"}
"""Methods that say that an object's attributes are not all, or that they are more than that."""
_CHANGING = {"next", "shuffle", "heappush", "heappop", "heapreplace", "heappushpop", "insort", "insort_left"}
_CHANGING |= {"insort_right", "at", "copyto", "put_along_axis", "fill_diagonal"}
"""Functions that change their argument."""

TRACKERS = {"mlflow": "start_run", "trackio": "init", "wandb": "init"}
"""Services that log a run, with what opens one."""
_OPTIONS = {"lr", "momentum", "weight_decay", "betas", "eps"}
"""Settings of an optimizer's group: to assign one changes no other object."""
_VIEWS = re.compile("view(_as)?|reshape|flatten|(un)?squeeze|t|transpose|permute|narrow|detach|numpy")
"""Methods whose result is a part of their tensor."""
_SAME_ITEMS = re.compile(
    "list|tuple|dict|OrderedDict|enumerate|zip|reversed|sorted|next|getattr|values|items|get|from_numpy|asarray"
    "|chunk|split|unbind|(named_)?(parameters|modules|children)|Variable"
)
"""What gives the very objects of which it is made, and those of a module."""
_FILLING = {"append", "appendleft", "add", "insert", "extend", "update", "setdefault"}
_MODULES = ("nn.", "optim.", "Module")
_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.UnaryOp, ast.BinOp)
_HOLDING: tuple[type[ast.AST], ...] = (ast.Subscript, ast.Starred, ast.NamedExpr, ast.Tuple, ast.List)
_HOLDING += (ast.Set, ast.Dict, ast.IfExp, ast.BoolOp, *_COMPREHENSIONS)
"""What has the very objects of which it is made."""
_PARTS = {"get", "setdefault", "values", "items"}
WRAPPED = {"zip", "map", "filter", "chain", "cycle", "islice", "iter", "tqdm"}
DRAWS = {
    "torch": "manual_seed|set_seed|seed_everything",
    r"(?<!torch\.)(?<!self\.)\brandom\.(?!seed|[gs]et_?state|default_rng|[A-Z])\w+\(": r"random\.seed\(",
}
"""What draws random numbers, and what seeds it: regular expressions."""


class Variable(NamedTuple):
    """A name, and the function or class that it is local to; None: the script; or a module beside it."""

    scope: ast.AST | None
    name: str


def parameters(function: ast.FunctionDef | ast.Lambda) -> list[Variable]:
    return [Variable(function, each.arg) for each in ast.walk(function.args) if isinstance(each, ast.arg)]


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


def _root(node: Any) -> Any:
    """Return `net` of `net.layers[0](x)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def same_object(value: ast.expr | None) -> ast.expr | None:
    """Return `net` of `net.to(device).train()`, and what a method as `normal_()` has changed."""
    while isinstance(value, ast.Call):
        if called(value) == "Variable" and value.args:
            value = value.args[0]
        elif called(value) in _SAME_OBJECT or called(value).endswith("_"):
            value = getattr(value.func, "value", None)
        else:
            break
    return value


def assignments(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment with their values: `a, b = [], 0` has three."""
    pairs = [(target, node.value) for target in node.targets]
    for target, value in pairs:  # which grows
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            is_starred = any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))
            if len(target.elts) == len(value.elts) and not is_starred:
                pairs += zip(target.elts, value.elts, strict=True)
    return pairs


@cache
def _module(file: Path, root: Path) -> Script | None:
    with suppress(OSError, SyntaxError, ValueError):  # another package's
        return Script(file.read_text(encoding="utf-8"), root, file)
    return None


class Script:
    """A parsed script, or a module beside it.

    Args:
        folder: that of the script, where modules are looked for.
        file: of the module.
    """

    def __init__(self, source: str, folder: Path | None = None, file: Path | None = None) -> None:
        self.tree, self._folder, self.file = ast.parse(source), folder, file
        self.nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names = [node for node in self.nodes if isinstance(node, ast.Name)]
        self.stores = [each for each in self.names if not isinstance(each.ctx, ast.Load)]
        self.read_names = {each.id for each in self.names if isinstance(each.ctx, ast.Load)}
        every = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        every = [each for each in every if not self.nearest(each, ast.ClassDef)]
        names = [each.name for each in every]
        self.functions = {each.name: each for each in every if names.count(each.name) == 1}
        self.classes = {each.name: each for each in self.nodes if isinstance(each, ast.ClassDef)}
        self._assigned = {k: v for n in self.nodes if isinstance(n, ast.Assign) for k, v in assignments(n)}
        for target, value in [*self._assigned.items()]:
            parts = self.returned(value)
            if isinstance(target, ast.Tuple) and isinstance(parts, ast.Tuple):
                self._assigned |= zip(target.elts, parts.elts, strict=False)
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self._imports = [(node, each) for node in imports for each in node.names]
        self.imported = {(each.asname or each.name).split(".")[0] for _, each in self._imports}
        self.packages = {
            (getattr(node, "module", None) or each.name).split(".")[0]: node for node, each in self._imports
        }
        arguments = [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        self._bound = {*names, *arguments, *(each.id for each in self.stores)}
        self._definitions = dict[str, tuple[Script, Any] | None]()
        self._changed_by = dict[ast.FunctionDef, set[str]]()
        self._kinds = dict[tuple[ast.ClassDef, frozenset[str]], str]()
        self.guessed = set[Variable]()
        """Loss functions and schedulers from elsewhere, which are taken for state."""
        self.open: list[object] = []
        """What is being looked at: a function that calls itself is looked at once."""

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self._parents.get(node)) is not None:
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
        names: dict[ast.AST, set[str]] = {node: set() for node in self.nodes if isinstance(node, _SCOPES)}
        binding = (ast.arg, ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)
        bound: list[ast.AST] = [*self.stores, *(each for each in self.nodes if isinstance(each, binding))]
        for node in bound:
            if (home := self.nearest(node, _SCOPES)) is not None:
                names[home].add(getattr(node, "id", getattr(node, "arg", getattr(node, "name", ""))))
        for outer in self.nodes:
            if isinstance(outer, ast.Global | ast.Nonlocal) and self.nearest(outer, _SCOPES) in names:
                names[self.nearest(outer, _SCOPES)] -= {*outer.names}
        return names

    def variable(self, name: ast.Name) -> Variable:
        """Return whose a name is."""
        for node in self.above(name):
            in_class = isinstance(node, ast.ClassDef) and self._parents[name] in node.body
            if in_class or name.id in self._locals.get(node, ()):
                return Variable(node, name.id)
        return self.variable_beside(name) or Variable(None, name.id)

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
                return Variable(None, owner.name) if owner is not None else None
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
            return Variable(None, self.nearest(method, ast.ClassDef).name)
        is_builtin = variable.scope is None and node.id not in self._top and hasattr(builtins, node.id)
        return variable if is_target or is_class or not (is_builtin or node.id in self.symbols) else None

    @cached_property
    def symbols(self) -> set[str]:
        """Names that are no variables."""
        stored = {each.id for each in self.stores}
        names = self.imported | {*dir(builtins)} - stored | self.read_names - self._bound
        names = {each for each in names if each in stored or self.definition(each, ast.Name) is None}
        return names | self.functions.keys() | self.classes.keys()

    def calls_of(self, function: ast.FunctionDef) -> list[ast.Call]:
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        return [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == function.name]

    @cached_property
    def passed_arguments(self) -> list[tuple[Variable, ast.expr]]:
        """The parameters of functions of the script and beside it, with what each call here gives them."""
        arguments = list[tuple[Variable, ast.expr]]()
        for call in (node for node in self.nodes if isinstance(node, ast.Call)):
            if (owner := self.definition(dotted(call), ast.FunctionDef)) is not None:
                arguments += [(Variable(owner[1], k), value) for k, value in passed(call, owner[1])]
        return arguments

    # ------------------------------------------------------------------------------ what it holds

    def first(self, variable: Variable) -> Any:
        """Return where a variable is first assigned; its function if it is an argument."""
        stores = [each for each in self.stores if self.variable(each) == variable]
        return min(stores, key=lambda each: each.lineno, default=variable.scope or self.tree.body[0])

    def values(self, variable: Variable) -> list[ast.expr | None]:
        """Return what is assigned to a variable; None where that is not one value."""
        if isinstance(variable.scope, ast.Module):
            return self.modules[variable.scope].values(Variable(None, variable.name))
        assigned = [self.stored_value(each) for each in self.stores if self.variable(each) == variable]
        return [value for parameter, value in self.passed_arguments if parameter == variable] + assigned

    def stored_value(self, name: ast.Name) -> ast.expr | None:
        node: Any = self._parents[name]
        if name in self._assigned or isinstance(node, ast.Starred):
            return self._assigned.get(name)
        return getattr(node, "value", getattr(node, "context_expr", None))

    def _methods(self, variable: Variable) -> set[str]:
        """Return the methods that are called of what a variable holds, also in functions that get it."""
        calls = [node.func for node in self.nodes if isinstance(node, ast.Call)]
        pairs = [(each.value, each.attr) for each in calls if isinstance(each, ast.Attribute)]
        receivers, names = (
            [(node, name) for node, name in pairs if isinstance(node, ast.Name)],
            self._aliases(variable),
        )
        return {name for node, name in receivers if self.variable(node) in names}

    def _aliases(self, variable: Variable) -> set[Variable]:
        """Return a variable, and the parameters of functions that get it."""
        names = [
            (parameter, value) for parameter, value in self.passed_arguments if isinstance(value, ast.Name)
        ]
        aliases = {variable}
        while more := {parameter for parameter, value in names if self.variable(value) in aliases} - aliases:
            aliases |= more
        return aliases

    def kind(self, variable: Variable) -> str:
        """Return what a variable holds: "state", "plain", "record", "reporter", "function"; "" if unknown.

        A record is an object of a class of the script's own whose attributes are all that it keeps.
        A reporter only tells of the training, or stays as it is.
        """
        if isinstance(variable.scope, ast.Module) and variable.scope in self.modules:
            owner = self.modules[variable.scope]
            owner.methods_in_use = self.methods_in_use
            return owner.kind(Variable(None, variable.name))
        if variable in self.open:
            return "plain"
        self.open.append(variable)
        kinds = {self.kind_of(value) for value in self.values(variable)}
        is_state = "state" in kinds or self._methods(variable) & _STATE_METHODS
        self.open.pop()
        if "object" in kinds or ("constant" in kinds and self.is_stored_in(variable)):
            return ""
        kinds = {"reporter" if each == "constant" else each for each in kinds}
        if kinds == {"reporter"} and called(self.values(variable)[0]).endswith("Loss"):
            return "state" if self.is_stored_in(variable) else "reporter"
        if kinds == {"plain"}:
            items = [each for each in self.items_of(variable) if called(each)[:1].isupper()]
            kinds = {self.kind_of(each) for each in items} - {"state"} or kinds
            kinds = {{"record": "", "constant": "reporter"}.get(each, each) for each in kinds}
        if "" in kinds <= {"", "plain"} and self._is_named_as_state(variable):
            return "state"
        values = self.values(variable)
        is_list = any(isinstance(each, ast.List | ast.Dict) for each in values)
        if kinds == {"", "plain"} and is_list and not any(called(each)[:1].isupper() for each in values):
            kinds = {"plain"}  # `h = []`, or one from a file; what is neither is an error at the start
        if "writer" in kinds:
            return "reporter" if len(kinds) == 1 and self._answers_nothing(variable) else ""
        if "record" in kinds:  # to save what a clock has measured would make any two runs differ
            return "" if len(kinds) > 1 else "reporter" if self._is_timer(variable) else "record"
        return "state" if is_state else "reporter" if "reporter" in kinds else min(kinds, default="")

    def items_of(self, variable: Variable) -> list[ast.expr]:
        """Return what is put into a list or a dictionary, also by functions that get it."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and called(node) in _FILLING]
        pairs = [(each.func, item) for each in calls for item in each.args]
        pairs += [(k, v) for k, v in self._assigned.items() if isinstance(k, ast.Subscript)]
        sums = [
            each for each in self.nodes if isinstance(each, ast.AugAssign)
        ]  # `h += [w]`; `n += w` makes a number
        pairs += [
            (each.target, each.value) for each in sums if isinstance(each.value, ast.List | ast.ListComp)
        ]
        names = self._aliases(variable)
        roots = [(_root(place), item) for place, item in pairs]
        return [item for root, item in roots if isinstance(root, ast.Name) and self.variable(root) in names]

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
            parts = [*self.values(variable), *self.items_of(variable), *self._iterables(variable)]
            is_view = any(self.is_view_of_weights(each, is_part) for each in parts)
            self.open.pop()
            return is_view
        if isinstance(value, ast.Attribute):
            is_part |= value.attr in ("data", "weight", "bias")
            return is_part and self.is_view_of_weights(value.value, True)
        if isinstance(value, ast.Call):
            is_same = called(value) in _SAME_OBJECT - _STATE_METHODS
            is_view = is_same or any(each.fullmatch(called(value)) for each in (_VIEWS, _SAME_ITEMS))
            # `net.embedding().weight`; what has arguments, as `net.loss(x)`, makes a new tensor
            is_got = is_part and not value.args
            if isinstance(value.func, ast.Attribute) and (is_view or is_got):
                parts, is_part = [value.func.value], True
            copied = {
                each for copy in ast.walk(value) if called(copy) == "deepcopy" for each in ast.walk(copy)
            }
            if any(called(each) == "state_dict" for each in {*ast.walk(value)} - copied):
                return True
            parts += [*value.args, *(each.value for each in value.keywords)] if is_view else []
        elif isinstance(value, _HOLDING) or isinstance(getattr(value, "right", None), ast.List):
            items = getattr(value, "values", [*ast.iter_child_nodes(value)])
            parts = [each for each in items if each is not getattr(value, "key", None)]
        return any(self.is_view_of_weights(each, is_part) for each in parts)

    def _iterables(self, variable: Variable) -> list[ast.expr]:
        """Return the data of the loops and comprehensions whose rounds assign a variable."""
        loops = [node for node in self.nodes if isinstance(node, ast.For | ast.comprehension)]
        names = [(each.iter, name) for each in loops for name in ast.walk(each.target)]
        return [data for data, e in names if isinstance(e, ast.Name) and self.variable(e) == variable]

    def is_array(self, value: ast.expr | None) -> bool:
        """Return whether a value is an array of NumPy or torch."""
        value = same_object(value)
        return isinstance(value, ast.Call) and _ARRAY.fullmatch(dotted(value)) is not None

    def is_stored_in(self, variable: Variable) -> bool:
        """Return whether the script assigns an attribute or an item of what a variable holds."""
        targets = [each for each in self.nodes if isinstance(each, ast.Attribute | ast.Subscript)]
        roots = [_root(each) for each in targets if not isinstance(each.ctx, ast.Load)]
        return any(isinstance(each, ast.Name) and self.variable(each) == variable for each in roots)

    def is_own_object(self, name: ast.AST) -> bool:
        """Return whether a name may hold an object of the script's own that changes, or a queue."""
        values = self.values(self.variable(name)) if isinstance(name, ast.Name) else []
        made = [part for each in values if each for part in ast.walk(each) if isinstance(part, ast.Call)]
        is_queue = any(called(each).endswith("Queue") for each in made)
        return is_queue or any(self.kind_of(each) in ("record", "object", "writer") for each in made)

    def _made_of(self, value: ast.expr | None, depth: int = 0) -> Iterator[ast.expr | None]:
        """Yield what a name may hold, with the names that a function got it by."""
        if isinstance(value, ast.Name) and depth < 5:
            for each in self.values(self.variable(value)):
                yield from self._made_of(each, depth + 1)
        else:
            yield value

    def is_iterator(self, value: ast.expr | None) -> bool:
        """Return whether a value is read once: of `zip`, or of a function with a `yield`."""
        function: Any = self.functions.get(dotted(value)) if isinstance(value, ast.Call) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            for made in self._made_of(value.func.value):
                owner = self.definition(dotted(made))
                for each in owner[1].body if owner is not None else ():
                    is_it = isinstance(each, ast.FunctionDef) and each.name == value.func.attr
                    function = each if is_it else function
        inside = ast.walk(function or ast.Pass())
        is_wrapped = called(value) in WRAPPED - {"tqdm"} or isinstance(value, ast.GeneratorExp)
        return is_wrapped or any(isinstance(each, ast.Yield | ast.YieldFrom) for each in inside)

    def is_object(self, name: ast.AST) -> bool:
        """Return whether a name may hold an object of a class that is not torch's."""
        values = self.values(self.variable(name)) if isinstance(name, ast.Name) else []
        made = [each for each in map(same_object, values) if called(each)[:1].isupper()]
        return any(dotted(each).partition(".")[0] not in ("torch", "Variable", "autograd") for each in made)

    def holds_state(self, record: Variable) -> bool:
        """Return whether an object was given a model or an optimizer."""
        parts = [part for value in self.values(record) if value for part in ast.walk(value)]
        return any(isinstance(part, ast.Name | ast.Call) and self.kind_of(part) == "state" for part in parts)

    def _answers_nothing(self, variable: Variable) -> bool:
        """Return whether a script only calls methods of an object, and leaves their results."""
        names, own = self._aliases(variable), {*self.functions.values()}
        given = {id(value) for parameter, value in self.passed_arguments if parameter.scope in own}
        reads = [each for each in self.names if isinstance(each.ctx, ast.Load) and id(each) not in given]
        methods = [self._parents[each] for each in reads if self.variable(each) in names]
        statements = [self.nearest(each, ast.stmt) for each in methods if isinstance(each, ast.Attribute)]
        return len(statements) == len(methods) and all(isinstance(each, ast.Expr) for each in statements)

    def _is_named_as_state(self, variable: Variable) -> bool:
        """Return whether a variable is named as a scheduler, or as a loss function and called."""
        calls = [node.func for node in self.nodes if isinstance(node, ast.Call)]
        names = [each for each in calls if isinstance(each, ast.Name) and each.id == variable.name]
        is_loss = any(self.variable(each) == variable for each in names) and _LOSS.search(variable.name)
        is_state = bool(is_loss or _SCHEDULER.search(variable.name))
        self.guessed |= {variable} if is_state else set()
        return is_state

    def returned(self, value: ast.expr | None) -> ast.expr | None:
        """Return what a call of a function of the script returns, if one line of it does."""
        function = self.functions.get(dotted(value)) if isinstance(value, ast.Call) else None
        inside = ast.walk(function) if function is not None else ()
        lines = [each for each in inside if isinstance(each, ast.Return | ast.Yield)]
        lines = [each for each in lines if self.nearest(each, ast.FunctionDef) is function]
        return lines[0].value if len(lines) == 1 and isinstance(lines[0], ast.Return) else None

    def _is_timer(self, variable: Variable) -> bool:
        """Return whether methods of what a variable holds are given what a clock says, and nothing else."""
        verdicts = set[bool]()
        for call in (node for node in self.nodes if isinstance(node, ast.Call) and node.args):
            root = _root(call.func)
            if not isinstance(root, ast.Name) or self.variable(root) != variable:
                continue
            parts = [part for part in ast.walk(call.args[0])]
            values = [self.values(self.variable(each)) for each in parts if isinstance(each, ast.Name)]
            parts += [part for each in values for value in each if value for part in ast.walk(value)]
            verdicts.add(len(call.args) == 1 and any(called(part) in _CLOCKS for part in parts))
        return verdicts == {True}

    def kind_of(self, value: ast.expr | None) -> str:
        value = same_object(value)
        if isinstance(value, ast.Call) and self.keeps(value):
            return ""
        if (returned := self.returned(value)) is not None:
            return self.kind_of(returned)
        beside = self.holder(value) if isinstance(value, ast.Name | ast.Attribute) else None
        if beside is not None and isinstance(beside.scope, ast.Module):
            kind = self.kind(beside)
            return kind if self.variable_beside(value) or kind in ("reporter", "function") else ""
        if isinstance(value, ast.Name):
            is_function = value.id in self.functions or value.id in self.imported
            return "function" if is_function else self.kind(self.variable(value))
        if isinstance(value, ast.IfExp):  # `torch.cuda.FloatTensor if cuda else torch.FloatTensor`
            kinds = {self.kind_of(value.body), self.kind_of(value.orelse)} - {"plain"}  # or None
            return kinds.pop() if kinds in ({"function"}, {"reporter"}) else ""
        is_librarys = (
            dotted(value).partition(".")[0] in self.imported or getattr(value, "attr", "") == "apply"
        )
        name, parts = called(value), ast.walk(value) if isinstance(value, ast.BinOp) else [value]
        is_function = isinstance(value, ast.Attribute) and is_librarys
        if is_function or isinstance(value, ast.Lambda) or name in ("partial", "namedtuple"):
            return "function"
        arguments = [item for _, item in passed(value)] if isinstance(value, ast.Call) else []
        if isinstance(value, ast.Call) and (owner := self.definition(dotted(value))) is not None:
            given = [e for e in arguments if isinstance(e, ast.Name | ast.Attribute | ast.Lambda)]
            is_plain = {self.kind_of(each) for each in given} <= {"", "plain", "state"}
            kind = owner[0]._kind_of_objects(owner[1], self.methods_in_use)
            if kind:
                return kind if kind != "record" or is_plain else "object"
        if name == "SimpleNamespace":
            return "record"
        is_known = TRACKERS.get(dotted(value).rpartition(".")[0]) == name or dotted(value) == "re.compile"
        if (
            is_known
            or name.endswith("Loss")
            or _LOGGER.search(name)
            or any(called(each) in _REPORTERS for each in parts)
        ):
            return "reporter"
        is_module = any(part in dotted(value) for part in _MODULES)
        if name in _STATE or name.endswith(("LR", "LROnPlateau")) or (is_module and name[:1].isupper()):
            return "state"
        inner: list[Any] = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        if isinstance(value, _COMPREHENSIONS):
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
        every: list[Any] = [part for each in (*inner, *arguments) for part in ast.walk(each)]
        objects = [each for each in every if called(each)[:1].isupper()]
        is_unknown = any(self.kind_of(each) == "" for each in objects if each in inner)
        if is_unknown or {self.kind_of(each) for each in objects} & {"record", "object"}:
            return ""
        if any(isinstance(each, ast.Name) and self.kind_of(each) == "state" for each in inner):
            return ""
        return "plain" if name in _PLAIN or self.is_array(value) or isinstance(value, _LITERALS) else ""

    @cached_property
    def modules(self) -> dict[ast.AST, Script]:
        """The script, and the modules beside it that these import, by their trees."""
        scripts = [self]
        for script in scripts:  # which grows
            for node, alias in script._imports:
                source = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for path in (source, [*source, alias.name]):
                    scripts += [each for each in script._files(node, path) if each not in scripts]
        return {each.tree: each for each in scripts}

    def _files(self, node: ast.Import | ast.ImportFrom, source: Sequence[str]) -> list[Script]:
        """Return the module "a.b" beside the script, as a file and as a package."""
        if self._folder is None or not "".join(source):
            return []
        own, above = [*self.file.parents] if self.file else [self._folder], getattr(node, "level", 0)
        folders = own[above - 1 : above] if above else [self._folder, own[0]]
        stems = [Path(folder, *".".join(filter(None, source)).split(".")) for folder in folders]
        paths = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")]
        files = [_module(each, self._folder) for each in paths]
        return [each for each in files if each is not None]

    @cached_property
    def _top(self) -> dict[str, Any]:
        stores = {e.id: e for e in self.stores if not self.nearest(e, (*_SCOPES, ast.ClassDef))}
        return stores | self.functions | self.classes

    def definition(self, path: str, kind: Any = ast.ClassDef) -> tuple[Script, Any] | None:
        """Find what "Meter" or "utils.Meter" is, in the script or in a module beside it."""
        if path not in self._definitions:
            self._definitions[path] = None  # while it is looked for
            self._definitions[path] = self._find(path)
        owner = self._definitions[path]
        return owner if owner is not None and isinstance(owner[1], kind) else None

    def _find(self, path: str) -> tuple[Script, Any] | None:
        if path in self._top:
            return self, self._top[path]
        for node, alias in self._imports:
            known, rest = alias.asname or alias.name, ""
            source = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if source and "." not in path and known in (path, "*"):
                rest = path if known == "*" else alias.name
            elif path.startswith(f"{known}."):
                source, rest = [*source, alias.name], path.removeprefix(f"{known}.")
            for script in self._files(node, source) if rest else ():
                if (owner := script.definition(rest, ast.AST)) is not None:
                    return owner
        return None

    @cached_property
    def methods(self) -> dict[str, list[tuple[Script, ast.FunctionDef]]]:
        """The methods of classes of the script and beside it, by their names."""
        methods = dict[str, list[tuple[Script, ast.FunctionDef]]]()
        for script in self.modules.values():
            for each in script.nodes:
                if isinstance(each, ast.FunctionDef) and script.nearest(each, ast.ClassDef):
                    methods.setdefault(each.name, []).append((script, each))
        return methods

    def is_made_elsewhere(self, variable: Variable) -> bool:
        """Return whether what a variable holds is made by another package."""
        owner, values = self.modules.get(variable.scope or self.tree, self), self.values(variable)
        return bool(values) and all(called(e) and not owner.definition(dotted(e), ast.AST) for e in values)

    def is_drawn(self, variable: Variable) -> bool:
        """Return whether a variable holds a generator or an iterator, which reads change."""
        owner, values = self.modules.get(variable.scope or self.tree, self), self.values(variable)
        made = [same_object(owner.returned(each) or each) for each in values]
        is_iterator = any(map(owner.is_iterator, values))
        return is_iterator or any(called(each) in GENERATORS | _ITERATORS for each in made)

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
        if owner is not None and isinstance(owner[1], ast.ClassDef):
            return self.nearest(decorator, ast.AST) is not None and isinstance(
                self._parents[decorator], ast.FunctionDef
            )
        inside = [*ast.walk(owner[1])] if owner is not None else []
        functions = [each for each in inside if isinstance(each, ast.FunctionDef)]
        flow = Flow(owner[0] if owner is not None else self)
        for inner in functions[1:]:
            flow.run(inner.body, {*parameters(inner)})
            flow.assigned = {each for each in flow.assigned if each.scope is not inner}
        changed = flow.changed - {each for function in functions for each in parameters(function)}
        return any(each.scope in functions for each in flow.assigned | changed)

    @cached_property
    def unseen(self) -> Flow:
        """What hooks and methods of classes read, assign and change, here and in the modules beside."""
        flow = Flow(self)
        for name, owners in self.methods.items():
            for owner in owners if name != "__init__" else ():
                flow.enter(*owner, set())
        for script in self.modules.values():
            for function in (each for each in script.nodes if isinstance(each, ast.Lambda)):
                flow.enter(script, function, set())
            calls = {id(node.func) for node in script.nodes if isinstance(node, ast.Call)}
            for node in (each for each in script.nodes if isinstance(each, ast.Name | ast.Attribute)):
                hook = script.definition(dotted(node), ast.FunctionDef) if id(node) not in calls else None
                if hook is not None:
                    flow.enter(*hook, set())
        return flow

    def is_data_that_changes(self, node: ast.ClassDef, used: frozenset[str]) -> bool:
        """Return whether a class draws from a generator of its own, or is data and assigns its attributes."""
        if any(called(part) in GENERATORS for part in ast.walk(node)):
            return True
        names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        is_data = any(dotted(each).endswith(("Dataset", "Sampler", "DataLoader")) for each in node.bases)
        for method in self._methods_of(node, used) if is_data or names & {"__getitem__", "__iter__"} else ():
            own = {each.arg for each in method.args.args[:1]}
            parts = [each for each in ast.walk(method) if isinstance(each, ast.Attribute | ast.Subscript)]
            if any(getattr(_root(e), "id", "") in own and not isinstance(e.ctx, ast.Load) for e in parts):
                return True
        return False

    def _methods_of(self, node: ast.ClassDef, used: frozenset[str]) -> list[ast.FunctionDef]:
        """Return the methods of a class that may run after an object was made."""
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        names = {each for each in methods if each in used or each.startswith("__")} - {"__init__"}
        while (
            more := {called(part) for name in names for part in ast.walk(methods[name])}
            & methods.keys() - names
        ):
            names |= more
        return [methods[name] for name in names]

    @cached_property
    def methods_in_use(self) -> frozenset[str]:
        """Names of methods that are called of anything but `self`."""
        names = set[str]()
        nodes: list[tuple[Script, Any]] = [
            (script, node) for script in self.modules.values() for node in script.nodes
        ]
        for script, node in (pair for pair in nodes if isinstance(pair[1], ast.Attribute)):
            method = script.nearest(node, ast.FunctionDef)
            is_method = method is not None and script.nearest(method, ast.AST) in script.classes.values()
            own = method.args.args[:1] if is_method else []
            names |= {node.attr} if getattr(node.value, "id", "") not in {each.arg for each in own} else set()
        return frozenset(names)

    def _kind_of_objects(self, node: ast.ClassDef, used: frozenset[str]) -> str:
        if (node, used) not in self._kinds:
            self._kinds[node, used] = "object"  # while the class is looked at
            self._kinds[node, used] = self._kind_of_class(node, used)
        return self._kinds[node, used]

    def _kind_of_class(self, node: ast.ClassDef, used: frozenset[str]) -> str:
        """Return what objects of a class are.

        "state": modules, and what says what its state is; "record": they keep plain attributes alone;
        "constant": no method in use changes them; "writer": they have a file, too; "object": of another kind;
        "": unknown.

        Args:
            used: names of the methods in use.
        """
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        rest = [each for each in node.body if each not in methods and not isinstance(each, ast.Pass)]
        values = [getattr(each, "value", None) for each in rest]  # of its attributes, and its docstring
        names, bases = {each.name for each in methods}, [dotted(each) for each in node.bases]
        is_module = any(part in base for base in bases for part in _MODULES)
        if is_module or {"state_dict", "load_state_dict"} <= names:
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
            if any(each.scope is None for each in flow.assigned | flow.changed):
                return "object"
            # state outside the object: a decorator may keep some, and a default value is there once
            defaults = [each for each in (*method.args.defaults, *method.args.kw_defaults) if each]
            keeps = not all(isinstance(each, ast.Constant | ast.Name | ast.Attribute) for each in defaults)
            if not {*map(dotted, method.decorator_list)} <= _DECORATORS or (keeps and flow.changed - {me}):
                return "object"
            changing |= {method} if me in flow.changed else set()
            lines = [e for e in ast.walk(method) if isinstance(e, ast.Assign | ast.AnnAssign | ast.AugAssign)]
            kept += [*method.args.defaults, *(each.value for each in lines if each.value is not None)]
        is_changed = changing & {*self._methods_of(node, used)}
        parts = [part for each in kept for part in ast.walk(each)]
        is_plain = not any(self._is_object(each) for each in parts)
        # an iterator, or an object of an own class: a method may change it through other names
        within = [each for each in parts if not isinstance(self._parents[each], ast.Assign | ast.AnnAssign)]
        owners = [self.definition(dotted(each)) for each in parts if isinstance(each, ast.Call)]
        kinds = {owner[0]._kind_of_objects(owner[1], used) for owner in owners if owner is not None}
        is_hidden = any(called(each) in self.classes for each in within) or kinds & {"record", "object"}
        if is_hidden or any(called(each) in _ITERATORS for each in kept):
            return "object"
        writes = any(called(each) in _REPORTERS or _LOGGER.search(called(each)) for each in parts)
        return "constant" if not is_changed else "writer" if writes else "record" if is_plain else "object"

    def _is_object(self, node: ast.AST) -> bool:
        """Return whether a part of a value is surely no plain value: a function, a file, a model."""
        if isinstance(node, ast.Call):
            name = called(node)
            if name == "deepcopy":
                return called(node.args[0] if node.args else None) != "state_dict"
            if name == "state_dict":
                return called(self._parents[node]) != "deepcopy"
            is_class = name[:1].isupper() and name not in _PLAIN | OPTIMIZERS
            return name in ("open", "iter") or is_class
        above = self._parents[node]
        is_used = isinstance(above, ast.Attribute) or getattr(above, "func", None) is node
        return isinstance(node, ast.Lambda) or (getattr(node, "id", "") in self.symbols and not is_used)


class Flow:
    """What statements may read before they assign it (`read`), may assign, and may change in place.

    Args:
        outside: variables that have a value before a loop, so that lines may find an old one.
        own_calls: in a method "self.other", whose changes are its own.
    """

    def __init__(
        self, script: Script, outside: Iterable[Variable] = (), own_calls: Iterable[str] = ()
    ) -> None:
        self._script, self._outside, self.own_calls = script, {*outside}, {*own_calls}
        self.read, self.assigned, self._changed = set[Variable](), set[Variable](), set[Variable]()
        self._ends: list[list[set[Variable]]] = []
        self._parts, self._held = set[tuple[Variable, Variable]](), set[tuple[Variable, Variable]]()
        """A variable, and another of which it may be a part; a collection, and what it holds."""
        self._filled, self._views = set[Variable](), set[Variable]()
        """Collections in which an item is replaced; names of which `x += 1` may change a tensor."""

    def run(self, body: Sequence[ast.stmt], sure: set[Variable]) -> set[Variable] | None:
        """Follow statements; return what is surely assigned after them, None if they leave."""
        for node in body:
            if (assigned := self._statement(node, sure)) is None:
                return None
            sure = assigned
        return sure

    def round(self, loop: ast.For | ast.While, sure: set[Variable]) -> set[Variable]:
        """Follow one round of a loop; return what is surely assigned after it."""
        sure = sure | (self._store(loop.target, sure) if isinstance(loop, ast.For) else set())
        self._ends.append([])
        assigned, ends = self.run(loop.body, sure), self._ends.pop()
        return set.intersection(*(ends if assigned is None else [*ends, assigned]) or [sure])

    def _statement(self, node: ast.stmt, sure: set[Variable]) -> set[Variable] | None:
        ways: list[set[Variable] | None] = []
        if isinstance(node, ast.If):
            self._store(node.test, sure)
            ways = [self.run(node.body, sure), self.run(node.orelse, sure)]
        elif isinstance(node, ast.Try):
            ways = [self.run([*node.body, *node.orelse], sure)]
            ways += [self.run(each.body, sure) for each in node.handlers]
        if ways:
            branches = [each for each in ways if each is not None]
            return self.run(getattr(node, "finalbody", []), set.intersection(*branches)) if branches else None
        if isinstance(node, ast.For | ast.While):
            self._store(node.iter if isinstance(node, ast.For) else node.test, sure)
            if isinstance(node, ast.For):
                is_data = any(called(each) == "backward" for each in ast.walk(node))
                self._share(node.target, node.iter, is_view=not is_data and called(node.iter) != "range")
            return self.run(node.orelse, sure | (self.round(node, sure) - self._outside))
        if isinstance(node, ast.With):
            return self.run(node.body, sure.union(*(self._store(each, sure) for each in node.items)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal):
            return sure
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.read |= {self._script.variable(node.target)} - sure
            self._changed |= {self._script.variable(node.target)} & self._views
        assigned = self._store(node, sure)
        for target, value in assignments(node) if isinstance(node, ast.Assign) else ():
            is_option = isinstance(target, ast.Subscript) and getattr(target.slice, "value", "") in _OPTIONS
            choices = [getattr(value, name) for name in ("body", "orelse") if isinstance(value, ast.IfExp)]
            for each in choices or getattr(value, "values", [value]) if not is_option else ():
                is_view = _VIEWS.fullmatch(called(each)) is not None
                if isinstance(each, ast.Subscript):
                    is_view = not isinstance(getattr(each.slice, "value", 0), str)
                if (
                    is_view
                    or isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
                    or called(each) in _PARTS
                ):
                    self._share(target, _root(each), is_view)
        sure = sure if isinstance(node, ast.Match) else sure | assigned
        if isinstance(node, ast.Break | ast.Continue) and self._ends:
            self._ends[-1].append(sure)
        return None if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Raise) else sure

    def _store(self, top: ast.AST, sure: set[Variable]) -> set[Variable]:
        """Note what a target or an expression reads and changes; return what it assigns."""
        script, assigned = self._script, set[Variable]()
        for node in ast.walk(top):
            is_name = isinstance(node, ast.Name | ast.Attribute)
            function = script.definition(dotted(node), ast.FunctionDef) if is_name else None
            if function is not None:
                self.enter(*function, sure)
            elif isinstance(node, ast.Name) and node.id not in script.symbols:
                is_read = isinstance(node.ctx, ast.Load)
                self.read |= {script.variable(node)} - sure if is_read else set()
                assigned |= set() if is_read else {script.variable(node)}
            elif isinstance(node, ast.Attribute) and (variable := script.holder(node)) is not None:
                self.read |= {variable} - sure if isinstance(variable.scope, ast.Module) else set()
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            is_changing = self._call_method(node) if isinstance(node, ast.Call) and is_method else False
            is_target = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
            is_maths = bool(_MATHS.fullmatch(called(node))) and not script.is_object(_root(node))
            is_pure = is_maths or (
                bool(_PURE.fullmatch(called(node))) and not script.is_own_object(_root(node))
            )
            is_pure = (
                is_pure
                and is_method
                and not is_changing
                and not isinstance(script.nearest(node, ast.AST), ast.Expr)
            )
            is_pure |= isinstance(node, ast.Call) and dotted(node) in self.own_calls
            is_pure |= called(node) == "set_epoch"  # which each epoch calls again
            # an object that is called may count its calls
            changed: list[Any] = [node] if is_target or (isinstance(node, ast.Call) and not is_pure) else []
            is_in_place = called(node) in _CHANGING or called(node).endswith("_")
            # clip_grad_norm_(parameters) changes gradients alone, which no state has
            if isinstance(node, ast.Call) and is_in_place and not called(node).startswith("clip_grad_"):
                # as shuffle(order) does; x.copy_(y) leaves y as it is
                is_function = dotted(node).partition(".")[0] in script.symbols
                changed += node.args[:1] if is_function or called(node) in _CHANGING else []
            is_item = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
            is_filled = is_item and not isinstance(top, ast.AugAssign)
            for variable in (script.holder(each, is_target) for each in changed):
                if variable is not None:
                    (self._filled if is_filled else self._changed).add(variable)
                    self.read |= {variable} - sure
        self.assigned |= assigned
        return assigned

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
        is_held = isinstance(target, ast.Attribute | ast.Subscript)
        tops = (_root(target) if is_held else target, value)
        names = [[each for each in ast.walk(top) if isinstance(each, ast.Name)] for top in tops]
        inner = {self._script.variable(each) for each in names[0]}
        outer = {self._script.variable(each) for each in names[1] if each.id not in self._script.symbols}
        pairs = {(one, other) for one in inner for other in outer}
        self._held |= pairs if is_held else set()
        self._parts |= set() if is_held else pairs
        self._views |= inner if is_view and not is_held else set()

    @property
    def changed(self) -> set[Variable]:
        """What may be changed in place, also through a part of it."""
        variables, filled = {*self._changed}, self._filled
        pairs = self._parts | self._held
        variables |= {whole for part, whole in self._parts if part in filled}
        while more := {whole for part, whole in pairs if part in variables} - variables:
            variables |= more
        return variables | filled

    def enter(self, owner: Script, function: Any, sure: set[Variable]) -> None:
        """Note what a function, here or beside, reads and changes of other scopes, and of its arguments."""
        script, tree = self._script, None if owner is self._script else owner.tree
        if function in owner.open:
            return
        owner.open.append(function)
        inner, inside = Flow(owner), {*ast.walk(function)}
        is_lambda, wraps = isinstance(function, ast.Lambda), list[Any]()
        inner.run([ast.Expr(function.body)] if is_lambda else function.body, {*parameters(function)})
        if not is_lambda:  # `f = counted(f)` is a decorator, too
            wraps = [*function.decorator_list, *owner.values(Variable(None, function.name))]
        keeps, changed = any(map(owner.keeps, wraps)), inner.changed
        owner.open.pop()
        outer = {each for each in inner.read | inner.assigned | changed if each.scope not in inside}
        lifted = {each: Variable(each.scope or tree, each.name) for each in outer}
        self.read |= {lifted[each] for each in inner.read & outer} - sure
        self.assigned |= {lifted[each] for each in inner.assigned & outer}
        self._changed |= {lifted[each] for each in changed & outer}
        for parameter, value in script.passed_arguments:
            if parameter in changed:
                self._change(value)
        args, held = function.args, {Variable(tree, function.name)} if keeps else set[Variable]()
        pairs = [*zip(reversed([*args.posonlyargs, *args.args]), reversed(args.defaults), strict=False)]
        for argument, value in [*pairs, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
            if Variable(function, argument.arg) in changed and not isinstance(value, ast.Constant | None):
                is_named = isinstance(value, ast.Name | ast.Attribute)
                default = owner.holder(value) if is_named else Variable(tree, getattr(function, "name", ""))
                held |= {Variable(default.scope or tree, default.name)} if default else set()
        self._changed |= held
        self.read |= held

    def _change(self, value: ast.expr) -> None:
        """Note that a function changes what it is given."""
        inner: Any = [value.value] if isinstance(value, ast.Starred) else getattr(value, "elts", [])
        for part in inner:
            self._change(part)
        if (variable := self._script.holder(value)) is not None:
            self._changed.add(variable)
