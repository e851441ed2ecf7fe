"""Which loops of a script train, what goes from round to round, and what no patch of them can keep safely."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from everstep.cli.adopt_flow import Flow
from everstep.cli.adopt_kinds import GENERATORS, OPTIMIZERS, Script
from everstep.cli.adopt_names import Variable, called, dotted, inside, parameters, same_object
from everstep.first_use import LOOPS

_PAGES = {
    "accelerate": "docs/recipes/huggingface.md#accelerate",
    "lightning": "docs/recipes/lightning.md",
    "pytorch_lightning": "docs/recipes/lightning.md",
    "transformers": "docs/coming-from/lightning-hf.md",
}
"""By package the page that shows its programs under a loop."""


class Refused(Exception):
    """Nothing further can be analysed; the reasons are in `Training.refused`."""


class Training:
    """The loop of a script over epochs, that over steps (perhaps the same), and the variables of these.

    Attributes:
        refused: lines that stand in the way, why, and what to write by hand.
        is_nested: whether there are loops that train in the loop that trains.
        outside: lines of other loops that train, which stay as they are.
        guessed: entries of the state that may be none.
    """

    def __init__(self, source: str, folder: Path | None, is_coarse: bool) -> None:
        self.script, self.is_nested, self.is_coarse = Script(source, folder), False, is_coarse
        self.refused, self.outside, self.guessed = set[tuple[int, str]](), list[int](), list[str]()
        self.carried, self.records, self.breaks = set[Variable](), set[Variable](), list[Any]()
        self.made = set[Variable]()
        """The records that a resume makes anew, after the checkpoint was opened."""
        self.losses = dict[Variable, list[Any]]()
        """What is read after the loop alone, with the calls of its `backward()`."""
        known = {each.id for each in self.script.names} | self.script.imported
        self.loop, self.kept = (each + "_" * (each in known) for each in ("loop", "kept"))

    def refuse(self, node: Any, problem: str) -> None:
        self.refused.add((node.lineno, problem))

    def give_up(self, node: Any, problem: str) -> NoReturn:
        self.refuse(node, problem)
        raise Refused

    def _reached(self, node: ast.AST) -> Iterator[Any]:
        """Yield what is in a node, and in the functions of the script that it names."""
        tops = [node]
        for each in (each for top in tops for each in ast.walk(top)):  # tops grow
            yield each
            function = self.script.functions.get(getattr(each, "id", ""))
            tops += [function] if function is not None and function not in tops else []

    def _inner(self, nodes: list[Any], way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the nearest loops that train, each with the calls of functions on the way to it."""
        for node in nodes:
            if node in self._training:
                yield node, way
                continue
            function = self.script.functions.get(dotted(node)) if isinstance(node, ast.Call) else None
            if function is not None and len(way) < 3:
                yield from self._inner(function.body, (*way, node))
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from self._inner([*ast.iter_child_nodes(node)], way)

    def find_loops(self) -> None:
        """Find the loop over epochs, that over steps, and the call between them."""
        script = self.script
        first = next(iter(script.tree.body), ast.Pass(lineno=1))
        self._training = {
            each for each in script.all(LOOPS) if "backward" in map(called, self._reached(each))
        }
        below = {inner for loop in self._training for inner, _ in self._inner(loop.body)}
        outer: list[Any] = sorted(self._training - below, key=lambda each: each.lineno)
        if "everstep" in script.imported:
            self.give_up(first, "this script uses everstep already: change its loop by hand")
        for package, page in _PAGES.items():
            if package in script.packages and (package == "accelerate" or not outer):
                reason = f"{package} runs a part of the training: write the loop by hand, as in {page}"
                self.give_up(script.packages[package], reason)
        if not outer:
            self.give_up(first, "no loop here calls backward(): write a TrainLoop or Trainer by hand")
        self.outside = [each.lineno for each in outer[1:]]
        ways: list[tuple[Any, tuple[Any, ...]]] = [*self._inner(outer[0].body)]
        self.is_nested = bool(ways and is_range(outer[0]))
        if not self.is_nested or self.is_coarse:
            ways = [(outer[0], ())]  # each of its rounds is a step
        if len(ways) > 1:
            self.give_up(ways[1][0], "a second loop that trains in an epoch: write the TrainLoop by hand")
        self.epochs, (self.steps, calls) = outer[0], ways[0]
        for loop in (self.epochs, self.steps):
            if isinstance(loop, ast.While):
                self.give_up(loop, "`while` trains: write `for i in range(n)`, or use a Supervisor by hand")
            rest = script.source[script.end(loop.iter) : script.below(loop.iter)].partition(b"#")[0].strip()
            reasons = {
                "is in a class: move it into a function": script.nearest(loop, ast.ClassDef),
                "has an `else`: move these lines below the loop": loop.orelse,
                "is two calls away from the loop over epochs: call its function there": len(calls) > 1,
                "has more in its first line than `for x in data:`": rest != b":",
            }
            for reason in (reason for reason, holds in reasons.items() if holds):
                self.give_up(loop, f"this loop {reason}")
        self.call = next(iter(calls), None)
        self.home, self.inside = (script.nearest(e, ast.FunctionDef) for e in (self.epochs, self.steps))
        self._head, self._rest = list[ast.stmt](), list[ast.stmt]()
        if self.steps is not self.epochs:
            self._head, self._rest = script.beside(self.steps, self.inside if self.call else self.epochs)
        for call in calls:
            before, after = script.beside(call, self.epochs)
            self._head, self._rest = [*self._head, *before], [ast.Expr(call), *self._rest, *after]

    def _is_chosen(self, node: ast.AST) -> bool:
        """Return whether an `if` decides on a line, here or at each call of its function."""
        script, home = self.script, self.script.nearest(node, ast.FunctionDef)
        choices = [each for each in script.above(node) if isinstance(each, ast.If)]
        calls = script.calls_of(home) if home is not None else []
        is_here = any("__name__" not in ast.unparse(each.test) for each in choices)
        return is_here or (bool(calls) and all(map(self._is_chosen, calls)))

    def check_loops(self) -> None:
        """Refuse what leaves the loops, runs them twice, or reads what no checkpoint has."""
        script, is_nested = self.script, self.steps is not self.epochs or self.is_coarse
        for node in script.nodes:
            home = script.nearest(node, ast.FunctionDef)
            above = [loop for loop in (self.epochs, self.steps) if loop in script.above(node)]
            leaves = isinstance(node, ast.Return | ast.Yield)
            leaves = leaves and any(script.nearest(loop, ast.FunctionDef) is home for loop in above)
            # with a status it is an error, which a start of the plain script meets again, too
            leaves |= called(node) in ("exit", "quit") and bool(above) and not getattr(node, "args", ())
            if is_nested and isinstance(node, ast.Break) and script.nearest(node, LOOPS) is self.epochs:
                self.breaks.append(node)
            elif leaves:
                remedy = f"take it out, adopt the script, and call {self.loop}.request_stop() in its place"
                self.refuse(node, f"ends the training early: {remedy}")
            elif called(node) in ("spawn", "init_process_group") and not self._is_chosen(node):
                self.refuse(node, "this starts several processes: see docs/guide/processes.md")
            elif isinstance(node, ast.Nonlocal):
                self.refuse(node, "`nonlocal` assigns a variable of another function: use a dictionary")
            elif isinstance(node, ast.Global) and script.nearest(node, ast.ClassDef):
                self.refuse(node, "a method assigns a global variable: assign it in the loop")
        inside: ast.AST = self.steps
        while (function := script.nearest(inside, ast.FunctionDef)) is not None:
            if not (calls := script.calls_of(function)):
                break  # of another file
            if len(calls) != 1 or function in script.above(calls[0]):
                times = f"{function.name}() trains, and this file calls it {len(calls)} times"
                problem = f"{times}: call it once, as each call needs a run directory of its own"
                self.give_up(function, problem)
            inside = calls[0]
        for node in self._reached(self.epochs):
            if dotted(node) == "torch.load":
                self.refuse(node, "may read a file newer than a resume's state: keep it in a variable")
            elif called(node) in OPTIMIZERS:
                self.refuse(node, "an optimizer is made anew in the loop: make it once, before the loop")
            elif called(node) == "add_param_group":
                self.refuse(node, "a resume begins with the first groups: make all above the loop")
            elif dotted(node).rpartition(".")[2] in ("lru_cache", "cache") and isinstance(node, ast.expr):
                self.refuse(node, "what it keeps is no state: take it out")

    def find_carried(self) -> None:
        """Find the variables that go from one round to the next, or out of the loop."""
        script, epochs, steps = self.script, self.epochs, self.steps
        within = {*inside(epochs, self.inside if self.call else None)}
        outside = {script.variable(each) for each in script.stores if each not in within}
        step, epoch, tail, after = (Flow(script, outside) for _ in range(4))
        sure = step.round(steps, set()) or set()
        epoch.round(epochs, set())
        tail.run(self._rest, set())
        after.run(script.beside(epochs, self.home)[1], set())
        self._used = {each for each in epoch.read if not script.is_beside(each)}
        index = steps.target if called(shown(steps.iter)) == "enumerate" else None
        is_counter = steps is not epochs or is_range(epochs)
        counters = [*[epochs.target] * is_counter, *getattr(index, "elts", [])[:1]]
        self._counters: list[Any] = [each for each in counters if isinstance(each, ast.Name)]
        assigned, changed = step.assigned | epoch.assigned, step.changed | epoch.changed
        in_step, in_epoch = step.assigned | step.changed, epoch.assigned | epoch.changed
        in_loop = step.read & in_step | tail.read & (in_step - sure)
        moved = in_loop | in_epoch & (epoch.read | after.read)
        moved |= {each for each in epoch.assigned if each.scope is script.tree and self.home is not None}
        read = script.unseen.read | epoch.read | after.read
        unseen = script.unseen.assigned | script.unseen.changed
        plain = {e for e in unseen if script.kind(e) == "plain" or e.name in script.classes}
        moved |= {each for each in plain if each.scope is script.tree}
        # an engine of another package is taken for one that stays as it is, if only methods use it
        beside = in_epoch | {e for e in unseen if script.kind(e) or not script.is_made_elsewhere(e)}
        beside = beside & read | {each for each in read if script.is_drawn(each)}
        moved |= {each for each in beside if script.is_beside(each)}
        for each in sorted(moved, key=lambda each: each.name):
            if each not in in_loop and (calls := self._backward_calls(each)):
                self.losses[each] = calls
            else:
                self._carry(each, each in changed, each in assigned)
        for name in (each for each in script.stores if (record := script.variable(each)) in self.records):
            given = inside(*script.values(record), kind=ast.Name | ast.Call)
            is_choice = isinstance(script.nearest(name, (ast.If, ast.FunctionDef)), ast.If)
            if name in within or is_choice or record.scope not in (script.tree, self.home):
                self.made.add(record)
            if name in within and (record in after.read or "state" in map(script.kind_of, given)):
                self.refuse(name, f"`{record.name}` is made in the loop: make it above the loop")
        data = Flow(script)
        data.run([ast.Expr(steps.iter)] if steps is not epochs else [], set())
        self._check_head(step.read | tail.read, data.read)
        for call in (each for each in inside(*self._head) if called(each) == "append"):
            for item in (each for each in call.args[:1] if script.is_of(each, *self.carried & step.changed)):
                self.refuse(call, f"`{item.id}` would come back as two: append it below the steps")

    def _check_head(self, read: set[Variable], data: set[Variable]) -> None:
        """Refuse what the head of an epoch makes of later values, if it is made anew there by a resume."""
        script, kept = self.script, self.carried | self.records
        later = kept - {*map(script.variable, self._counters)}
        flows = [(node, Flow(script)) for node in self._head]
        for node, flow in flows:
            flow.run([node], set())
        late = {e for _, flow in flows for e in flow.read if e in later or script.kind(e) == "state"}
        while more := {v for _, f in flows if f.read & late for v in f.assigned | f.changed} - late:
            late |= more
        for node, flow in flows:
            made = flow.assigned | flow.changed if flow.read & late else set[Variable]()
            used = made & (read | data) - kept
            is_data = {each for each in used if "DataLoader" in map(called, script.values(each))}
            used = {e for e in used if script.kind(e) not in ("reporter", "state", "function")} | is_data
            if used:
                name, problem = min(each.name for each in used), "is made of values that steps change"
                remedy = "a resume would find later ones: see docs/guide/exactness.md"
                self.refuse(node, f"`{name}` {problem}; {remedy}")
        drawn = {e for e in data if any(called(same_object(v)) in GENERATORS for v in script.values(e))}
        late |= {each for each in data if each in later or script.kind(each) == "state"}
        problem = "of which a resume would find a later value"
        for name in (each.name for each in late & data - drawn):
            self.refuse(self.steps, f"the data is made of `{name}`, {problem}")

    def _backward_calls(self, variable: Variable) -> list[Any]:
        """Return the lines `loss.backward()`, if this is the last that the loop does with a loss."""
        script, epochs = self.script, self.epochs
        within, calls = {*ast.walk(epochs)}, list[Any]()
        for name in (each for each in script.names if script.variable(each) == variable):
            method: Any = script.parents.get(name)
            statement = script.nearest(script.parents.get(method, method), ast.AST)
            is_backward = getattr(method, "attr", "") == "backward" and isinstance(statement, ast.Expr)
            if name in within and is_backward:
                calls.append(statement)
            elif name not in within and not (name.lineno > epochs.lineno and isinstance(name.ctx, ast.Load)):
                return []
        stores = [each.lineno for each in script.stores_of(variable)]
        return calls if calls and max(stores) < min(each.lineno for each in calls) else []

    def _carry(self, variable: Variable, changed: bool, assigned: bool) -> None:
        """Make a variable that goes on an attribute of `kept`, or an entry of the state, or refuse it."""
        script, (scope, name) = self.script, variable
        kind, first = script.kind(variable), script.first(variable)
        is_left_out = kind == "reporter" or (kind == "function" and not assigned)
        if script.is_beside(variable) or (scope is script.tree and name in script.symbols):
            file, owner = script.modules[scope].file, script.definition(name, ast.AST)
            node = owner[1] if owner and not file else script.packages.get(file.stem if file else name)
            place = f"`{name}` of {file.name}" if file else f"`{name}`"
            problem = "changes in the loop, and no checkpoint has it: make it a variable of this script"
            return None if is_left_out else self.refuse(node or self.epochs, f"{place} {problem}")
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            return
        is_argument = isinstance(scope, ast.FunctionDef) and variable in parameters(scope)
        stores = [e for e in script.stores_of(variable) if e is not first or is_argument]
        values = [same_object(script.stored_value(each)) for each in stores]  # of `net = net.train()`
        made = [*map(same_object, script.values(variable))]
        calls = [e for e in made if isinstance(e, ast.Call) and "state_dict" not in ast.unparse(e)]
        calls = [e for e in calls if called(e) in ("deepcopy", "partial", "Path") or called(e)[:1].isupper()]
        objects = [each for each in calls if script.kind_of(each) in ("", "object", "function")]
        targets = inside(self.epochs.target, self.steps.target)
        has_namesake = name in {each.name for each in self.carried | self.records}
        items = [] if any(map(script.is_array, made)) else script.items_of(variable)  # an array has copies
        is_replaced = (assigned or script.is_stored_in(variable)) and "DataLoader" in map(called, made)
        if kind == "reporter" and is_replaced:
            problem = "changes in the loop, and a resume would begin with the first: make one for all epochs"
        elif is_left_out:
            return
        elif kind == "state" and assigned and not all(script.is_of(each, variable) for each in values):
            problem = "is made anew in the loop: make it once, before the loop"
        elif kind == "state" or (kind == "record" and is_argument and scope is not self.home):
            return  # it is the caller's
        elif kind == "record" and not has_namesake:
            self.records.add(variable)
            return
        elif name not in {e.id for e in self._counters} and any(script.is_of(e, variable) for e in targets):
            problem = f"is a batch and is read after the loop: in it, write `last = {name}`; read `last`"
        elif is_argument or has_namesake or not isinstance(first, ast.Name):
            problem = "changes in the loop, and is an argument or has a namesake: copy it to a new name first"
        elif kind == "function":
            problem = "is a function, and a checkpoint has none: keep a number or a name that chooses it"
        elif any(map(script.is_view_of_weights, [*made, *items])):
            problem = "has weights that change: write copy.deepcopy(net.state_dict()), or w.detach().clone()"
        elif (kind != "plain" and changed) or objects or any(map(script.variable_beside, made)):
            problem = "may change unseen in the loop: assign a module, a number or a list here, on its own"
        else:
            self.carried.add(variable)
            return
        self.refuse(first, f"`{name}` {problem}")

    @property
    def is_kept(self) -> bool:
        return bool(self.carried | self.made | self.losses.keys())

    @property
    def counters(self) -> list[ast.Name]:
        """The targets that count rounds, of those that go on."""
        return [each for each in self._counters if each.id in {kept.name for kept in self.carried}]

    def find_state(self) -> list[str]:
        """Find what the loop uses and a step may change: models, optimizers, schedulers, generators."""
        script = self.script
        used = {each for each in self._used if script.kind(each) == "state"}
        for value in [value for each in used for value in script.values(each)]:
            if isinstance(value, ast.Call) and called(value) in OPTIMIZERS and value.args:
                used |= self._trained(value.args[0])
        made = {name: same_object(script.stored_value(name)) for name in script.stores}
        generators = {name: call for name, call in made.items() if called(call) in GENERATORS}
        for name, variable in ((each, script.variable(each)) for each in generators):
            is_above = name.lineno < self.epochs.lineno and variable.scope is self.home
            used |= {variable} if variable.scope is script.tree or is_above or self.is_coarse else set()
        if self.is_coarse:
            self._check_data({*generators.values()})
        for each in used:
            first = script.first(each)
            choice: Any = None if first is each.scope else script.nearest(first, (ast.If, ast.FunctionDef))
            is_choice = isinstance(choice, ast.If) and not choice.orelse
            is_above = each.scope is self.home and first.lineno <= self.epochs.lineno
            if each.scope is not script.tree and not is_above:
                self.refuse(first, f"`{each.name}` is made out of sight of the loop: make it just above it")
            elif is_choice and "__name__" not in ast.unparse(choice.test):
                self.refuse(first, f"`{each.name}` is made under an `if`: add an `else` that makes it, too")
        if not used:
            self.refuse(self.epochs, "no model or optimizer of this loop was found: write it by hand")
        self.guessed = sorted(each.name for each in used & script.guessed)
        entries = list[str]()
        for each in sorted(used, key=lambda each: (script.first(each).lineno, each.name)):
            values = script.values(each)
            choices = [*values, *(e.orelse for e in values if isinstance(e, ast.IfExp))]
            is_none = any(isinstance(e, ast.Constant) and e.value is None for e in choices)
            entries.append(f'"{each.name}": {each.name}{f" if {each.name} is not None else {{}}" * is_none}')
        return entries

    def _check_data(self, generators: set[ast.expr | None]) -> None:
        """Refuse data that keeps anything but generators with a name, as everstep does not open it here."""
        script = self.script
        for used in (e for e in self._used if any(map(script.is_iterator, script.values(e)))):
            self.refuse(
                script.first(used), f"`{used.name}` goes on from epoch to epoch: make it in the epoch"
            )
        for call in script.calls:
            owner = script.definition(dotted(call))
            workers = [each.value for each in call.keywords if each.arg == "persistent_workers"]
            is_unnamed = call not in generators and "random_split" not in map(called, script.above(call))
            if owner is not None and owner[0].is_data_that_changes(owner[1]):
                self.refuse(call, f"{called(call)} changes as it is read: shuffle by the DataLoader alone")
            elif any(ast.unparse(each) != "False" for each in workers):
                self.refuse(call, "its workers go on from epoch to epoch: take out persistent_workers")
            elif called(call) in GENERATORS and is_unnamed:
                self.refuse(call, "no name has this generator: assign it to one above the loop")

    def _trained(self, given: ast.AST) -> set[Variable]:
        """Return the objects whose parameters an optimizer gets, by their names or in a list."""
        variables, script = set[Variable](), self.script
        groups = inside(given, kind=ast.Dict)
        pairs = [pair for each in groups for pair in zip(each.keys, each.values, strict=True)]
        options = inside(*(value for key, value in pairs if getattr(key, "value", "") != "params"))
        for name in (each for each in inside(given, kind=ast.Name) if each not in options):
            variable = script.variable(name)
            names = map(script.variable, inside(*script.values(variable), kind=ast.Name))
            inner = {each for each in (variable, *names) if script.kind(each) == "state"}
            # not `p` of `[p for n in k for p in n]`
            if isinstance(variable.scope, ast.FunctionDef) or variable.scope is script.tree:
                if name.id not in script.symbols and not inner:
                    self.refuse(
                        name, f"the optimizer trains `{name.id}`: put it into a torch.nn.ParameterList"
                    )
                variables |= {variable} & inner or inner
        return variables


def shown(data: Any) -> Any:
    """Return what a progress bar shows: E of `tqdm(E)`."""
    return data.args[0] if called(data) == "tqdm" and data.args else data


def is_range(loop: Any) -> bool:
    """Return whether a loop counts its rounds."""
    return isinstance(loop, ast.For) and called(shown(loop.iter)) in ("range", "trange")
