"""Puts a plain PyTorch script under a `TrainLoop` by edits of its text; nothing of it is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from everstep.cli.adopt_script import OPTIMIZERS, Flow, Script, Variable, called, dotted

_Loop = ast.For | ast.While
_Way = tuple[Any, tuple[ast.Call, ...]]
"""A loop, and the calls of functions of the script on the way to it."""
_WRAPPED = {"zip", "map", "filter", "chain", "cycle", "islice", "iter"}
_KEPT = "what goes from one step or epoch to the next"


class _Refused(Exception):
    """What no patch can do: a node, and what to write by hand."""


class Patch:
    """A script under a `TrainLoop`, or the reasons why it is not.

    Args:
        source: text of the script.
        name: of the run, below runs/.
        seed: seed to set after the imports; None: the script seeds itself.

    Attributes:
        refused: lines that stand in the way, why, and what to write by hand; then `text` is empty.
        text: the patched script.

    Raises:
        SyntaxError: the source is not Python.
    """

    def __init__(self, source: str, name: str, seed: int | None = None) -> None:
        self._source, self._name, self._seed = source.encode(), name, seed
        self._edits: list[tuple[int, int, str]] = []
        self.refused: list[tuple[int, str]] = []
        self.text, self.script = "", Script(source)
        self._known = {each.id for each in self.script.names} | self.script.imported
        self._loop, kept = (f"{each}{'_' * (each in self._known)}" for each in ("loop", "kept"))
        try:
            self._find_loops()
            self._check_leaving()
            self._find_carried()
            self._write(kept, self._find_state())
        except _Refused as error:
            self._refuse(*error.args)
        if not self.refused:
            pieces, at = [], 0
            for start, end, text in sorted(self._edits, key=lambda edit: edit[0]):
                pieces += [self._source[at:start], text.encode()]
                at = end
            self.text = b"".join([*pieces, self._source[at:]]).decode()
            compile(self.text, name, "exec")

    def _refuse(self, node: Any, words: str) -> None:
        self.refused.append((node.lineno, words))

    # ------------------------------------------------------------------------------- the loops

    def _reached(self, nodes: list[Any]) -> Iterator[Any]:
        """Yield what is in nodes, and in the functions of the script that they name."""
        todo, seen = [*nodes], set[ast.AST]()
        while todo:
            for node in ast.walk(todo.pop()):
                yield node
                function = self.script.functions.get(node.id) if isinstance(node, ast.Name) else None
                if function is not None and function not in seen:
                    seen.add(function)
                    todo.append(function)

    def _trains(self, node: ast.AST) -> bool:
        return any(called(each) == "backward" for each in self._reached([node]))

    def _inner(self, nodes: list[Any], calls: tuple[ast.Call, ...] = ()) -> Iterator[_Way]:
        """Yield the nearest loops that train."""
        for node in nodes:
            if isinstance(node, _Loop) and self._trains(node):
                yield node, calls
                continue
            function = self.script.functions.get(dotted(node)) if isinstance(node, ast.Call) else None
            if function is not None and len(calls) < 3:
                yield from self._inner(function.body, (*calls, node))  # type: ignore[arg-type]
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from self._inner([*ast.iter_child_nodes(node)], calls)

    def _find_loops(self) -> None:
        """Find the loop over epochs, that over steps (perhaps the same), and the call between them."""
        script = self.script
        if "everstep" in self._known:
            raise _Refused(script.tree.body[0], "the script uses everstep already: drill it")
        training = [each for each in script.nodes if isinstance(each, _Loop) and self._trains(each)]
        below = {inner for loop in training for inner, _ in self._inner(loop.body)}
        outer = [each for each in training if each not in below]
        if not outer:
            raise _Refused(script.tree.body[0], "no loop calls backward(): wrap the one that trains by hand")
        for another in outer[1:]:
            raise _Refused(
                another, "another loop that trains: give each loop a TrainLoop and a run directory"
            )
        ways: list[_Way] = [*self._inner(outer[0].body)]
        is_range = isinstance(outer[0], ast.For) and called(_unbarred(outer[0].iter)) in ("range", "trange")
        if not ways or not is_range:
            ways = [(outer[0], ())]  # each of its rounds is a step
        for other, _ in ways[1:]:
            raise _Refused(
                other, "an epoch trains in several loops: give each iter_steps() a name= of its own"
            )
        self._epochs, (self._steps, calls) = outer[0], ways[0]
        for each in {self._epochs, self._steps}:
            is_apart = (
                isinstance(each, ast.For) and not each.orelse and each.body[0].lineno > _last_line(each.iter)
            )
            if isinstance(each, ast.While):
                raise _Refused(
                    each, "`while` trains: use a Supervisor, and sv.advance() at the end of a round"
                )
            if script.nearest(each, ast.ClassDef) or not is_apart or len(calls) > 1:
                raise _Refused(each, "the loop is in a class, two calls deep, has an else or only one line")
        self._call, node = next(iter(calls), None), self._epochs
        self._home, self._inside = (script.nearest(e, ast.FunctionDef) for e in (self._epochs, self._steps))
        if self._call is not None and len(script.calls_of(self._inside)) > 1:
            raise _Refused(
                self._inside, f"{self._inside.name}() is called in other places, too, where no run is"
            )
        while node is not None:  # a loop that runs more than once in a process would be one run
            function, around = script.nearest(node, ast.FunctionDef), script.nearest(node, _Loop)
            if around is not None and script.nearest(around, ast.FunctionDef) is function:
                raise _Refused(around, "trains several models: give each its own TrainLoop and run directory")
            calls = () if function is None else script.calls_of(function)  # type: ignore[assignment]
            if function is not None and len(calls) != 1:
                raise _Refused(
                    function, f"{function.name}() is called {len(calls)} times: each is a run of its own"
                )
            node = next(iter(calls), None)  # type: ignore[assignment]

    def _check_leaving(self) -> None:
        for node in self._reached([self._epochs]):
            if dotted(node) == "torch.load" and isinstance(node, ast.Call):
                self._refuse(
                    node, "the loop reads a file that may be newer than the checkpoint: keep it in state="
                )
        for node in self.script.nodes:
            if called(node) in ("spawn", "init_process_group"):
                self._refuse(node, "several processes: see docs/guide/processes.md")
            in_step = self._steps in self.script.above(node)
            loop = self._steps if in_step else self._epochs
            is_ours = in_step or self._epochs in self.script.above(node)
            own = [self.script.nearest(each, ast.FunctionDef) for each in (node, loop)]
            is_break = isinstance(node, ast.Break) and self.script.nearest(node, _Loop) is loop
            if is_ours and (is_break or (isinstance(node, ast.Return | ast.Yield) and own[0] is own[1])):
                self._refuse(
                    node, f"leaves the loop: call {self._loop}.request_stop(), and let the round end"
                )

    # ---------------------------------------------------------------------------- the variables

    def _find_carried(self) -> None:
        """Find the variables that go from one round to the next, or out of the loop."""
        script, epochs, steps = self.script, self._epochs, self._steps
        inside = {*ast.walk(epochs), *(ast.walk(self._inside) if self._call is not None else ())}
        stores = [each for each in script.names if not isinstance(each.ctx, ast.Load)]
        outside = {script.variable(each) for each in stores if each not in inside}
        step, epoch, tail, after = (Flow(script, outside) for _ in range(4))
        head, rest = script.beside(steps, epochs if self._call is None else self._inside)
        sure = step.round(steps, set())
        epoch.round(epochs, set())
        tail.run([] if steps is epochs else rest, set())
        after.run(script.beside(epochs, self._home)[1], set())
        self._epoch, self._carried = epoch, set[Variable]()
        moved = step.read & (step.assigned | step.changed) | epoch.read & (epoch.assigned | epoch.changed)
        moved |= ((step.assigned - sure) | step.changed) & tail.read
        moved |= (epoch.assigned | epoch.changed) & after.read
        moved |= {each for each in epoch.assigned if each.scope is None and self._home is not None}
        for each in sorted(moved, key=lambda each: each.name):
            self._carry(each, each in step.changed | epoch.changed, each in step.assigned | epoch.assigned)
        for node in (each for top in head for each in ast.walk(top) if isinstance(each, ast.Assign)):
            flow = Flow(script)
            flow.run([node], set())
            late = any(each in self._carried or script.kind(each) == "state" for each in flow.read)
            if (
                steps is not epochs
                and late
                and (used := flow.assigned & (step.read | tail.read) - self._carried)
            ):
                words = "is made of the state at the head of an epoch, which runs again in its middle: keep it in state="
                self._refuse(node, f"`{min(each.name for each in used)}` {words}")

    def _carry(self, variable: Variable, changed: bool, assigned: bool) -> None:
        """Keep a variable in the state, or say why not."""
        script, (scope, name) = self.script, variable
        kind, first = script.kind(variable), script.first(variable)
        targets = [each for loop in (self._epochs, self._steps) for each in ast.walk(loop.target)]
        if (
            not isinstance(scope, ast.FunctionDef | None)
            or kind == "reporter"
            or (kind == "state" and not assigned)
        ):
            return
        if kind == "state":
            self._refuse(first, f"`{name}` is made anew in the loop: make it before, and put it into state=")
        elif any(isinstance(each, ast.Name) and script.variable(each) == variable for each in targets):
            self._refuse(
                first, f"`{name}` counts rounds and is read after them: use {self._loop}.epoch or .step there"
            )
        elif (
            isinstance(first, ast.FunctionDef)
            or first is None
            or name in {each.name for each in self._carried}
        ):
            self._refuse(
                first or self._epochs,
                f"`{name}` changes in the loop, and is an argument or not alone of its name: rename it",
            )
        elif kind != "plain" and changed:
            self._refuse(
                first,
                f"`{name}` may change in the loop: give it state_dict() and load_state_dict(), and put it into state=",
            )
        else:
            self._carried.add(variable)

    def _find_state(self) -> list[str]:
        """Find what the loop uses and a step may change: models, optimizers, schedulers, generators."""
        script = self.script
        used = {each for each in self._epoch.read if script.kind(each) == "state"}
        for value in [value for each in used for value in script.values(each)]:
            if isinstance(value, ast.Call) and called(value) in OPTIMIZERS and value.args:
                used |= self._trained(value.args[0])
        for each in used:
            first = script.first(each)
            choice = (
                None
                if isinstance(first, ast.FunctionDef)
                else script.nearest(first, (ast.If, ast.FunctionDef))
            )
            if each.scope not in (None, self._home) or (
                each.scope is self._home and first.lineno > self._epochs.lineno
            ):
                self._refuse(
                    first,
                    f"`{each.name}` is not known before the epochs: make it there, or write state= by hand",
                )
            elif (
                isinstance(choice, ast.If)
                and not choice.orelse
                and "__name__" not in ast.unparse(choice.test)
            ):
                self._refuse(
                    first, f"`{each.name}` is made under a condition: put it into state= under the same"
                )
        if not used and not self.refused:
            self._refuse(self._epochs, "the model and the optimizer were not found: wrap the loop by hand")
        return [each.name for each in sorted(used, key=lambda each: script.first(each).lineno)]

    def _trained(self, parameters: ast.expr) -> set[Variable]:
        """Return the objects of which an optimizer gets the parameters."""
        script, found = self.script, set[Variable]()
        for name in (each for each in ast.walk(parameters) if isinstance(each, ast.Name)):
            variable = script.variable(name)
            if script.kind(variable) == "state":
                found.add(variable)
            elif isinstance(variable.scope, ast.FunctionDef | None) and name.id not in self._known:
                inner = [self._trained(value) for value in script.values(variable) if value is not None]
                if not any(inner):
                    self._refuse(
                        name,
                        f"the optimizer trains `{name.id}`, which is no module: put it into state= by hand",
                    )
                found = found.union(*inner)
        return found

    # ---------------------------------------------------------------------------------- the edits

    def _at(self, line: int, column: int = 0) -> int:
        return sum(map(len, self._source.splitlines(keepends=True)[: line - 1])) + column

    def _end(self, node: Any) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def _text(self, first: Any, last: Any = None) -> str:
        return self._source[self._at(first.lineno, first.col_offset) : self._end(last or first)].decode()

    def _replace(self, first: Any, last: Any, text: str) -> None:
        self._edits.append((self._at(first.lineno, first.col_offset), self._end(last), text))

    def _insert(self, at: int, text: str) -> None:
        self._edits.append((at, at, text))

    def _line_before(self, node: ast.stmt, depth: str, text: str) -> None:
        start = self._at(node.lineno)
        indent = self._source[start : start + node.col_offset].decode()
        self._insert(start, f"{depth}{indent}{text}\n")

    def _write_head(self, kept: str) -> None:
        """Import everstep, and seed, below the imports at the top."""
        body, lines = self.script.tree.body, ["import everstep"]
        is_end = [isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.If) for node in body]
        imports = [
            n for n in body[: [*is_end, True].index(True)] if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        if self._seed is not None:
            modules = {"random": "", "np": "random.", "numpy": "random.", "torch": "manual_"}
            known = [name for name in modules if name in self.script.imported]
            lines += [f"{name}.{modules[name]}seed({self._seed})" for name in known]
        elif not re.search("manual_seed|set_seed|seed_everything", self._source.decode()):
            words = "nothing seeds torch, so no run is repeatable: give --seed 0, or seed before the model is made"
            self._refuse(self._epochs, words)
        if self._carried:
            lines[:0], lines[2:2] = ["import types"], ["", f"{kept} = types.SimpleNamespace()  # {_KEPT}"]
        at = self._at((imports[-1].end_lineno or 1) + 1) if imports else 0
        self._insert(at, "\n".join(lines) + "\n")

    def _write(self, kept: str, state: list[str]) -> None:
        epochs, steps, loop, script = self._epochs, self._steps, self._loop, self.script
        home, inner = self._home, self._inside
        self._write_head(kept)
        headers = {
            node for each in (epochs, steps) for top in (each.target, each.iter) for node in ast.walk(top)
        }
        for name in script.names:
            if (variable := script.variable(name)) in self._carried:
                if self._text(name) != name.id or name in headers:
                    self._refuse(
                        name, f"`{name.id}` could not be replaced here: read it from another variable"
                    )
                self._replace(name, name, f"{kept}.{variable.name}")
        start = self._at(epochs.lineno)
        indent = self._source[start : start + epochs.col_offset].decode()
        unit = "\t" if "\t" in indent else "    "
        entries = [f'"{name}": {name}' for name in state] + [f'"{kept}": vars({kept})'] * bool(self._carried)
        limit, first = self._limit()
        arguments = [f'"runs/{self._name}"', f"{{{', '.join(entries)}}}", f"max_epoch={limit}"]
        lines = [f"with everstep.TrainLoop({', '.join(arguments)}) as {loop}:"]
        if len(indent + lines[0]) > 100:
            lines = ["with everstep.TrainLoop(", *(f"{unit}{each}," for each in arguments), f") as {loop}:"]
        if epochs is steps:
            lines.append(f"{unit}for _ in {loop}.iter_epochs():")
        self._insert(start, "".join(f"{indent}{line}\n" for line in lines))
        depth = unit * (2 if epochs is steps else 1)
        if epochs is not steps:
            target = self._text(epochs.target)
            self._replace(epochs.target, epochs.iter, f"{target} in {loop}.iter_epochs()")
            if first != "1" and target in {
                each.id for each in script.names if isinstance(each.ctx, ast.Load)
            }:
                shift = f"{target} -= 1" if first == "0" else f"{target} += {first} - 1"
                self._line_before(epochs.body[0], depth, f"{shift}  # iter_epochs() counts from 1")
        self._write_steps(depth if inner is home else "")
        if home is not None and self._call is not None and home not in script.above(inner):
            for node, after in ((inner, self._at(inner.lineno)), (self._call, self._end(self._call.func))):
                at = self._source.index(b"(", after) + 1
                is_empty = self._source[at:].lstrip().startswith(b")")
                self._insert(at, loop if is_empty else f"{loop}, ")
        texts = [n for n in ast.walk(epochs) if isinstance(n, ast.JoinedStr | ast.Constant) and n.end_lineno]
        inside = {line for each in texts for line in range(each.lineno + 1, (each.end_lineno or 0) + 1)}
        for line in range(epochs.lineno, (epochs.end_lineno or 0) + 1):
            is_blank = not self._source[self._at(line) : self._at(line + 1)].strip()
            if not is_blank and line not in inside:
                self._insert(self._at(line), depth)

    def _limit(self) -> tuple[str, str]:
        """Return how many epochs there are, and the number of the first, as source."""
        if self._epochs is self._steps:
            return "1", "1"
        numbers = _unbarred(self._epochs.iter).args
        if len(numbers) == 1:
            return self._text(numbers[0]), "0"
        (first, end), last = map(self._text, numbers[:2]), numbers[1]
        if len(numbers) > 2 or not isinstance(self._epochs.target, ast.Name):
            self._refuse(self._epochs, "epochs are counted by other steps than 1: count them from 0")
        elif first == "1" and isinstance(last, ast.BinOp) and ast.unparse(last).endswith(" + 1"):
            return self._text(last.left), first
        return f"len(range({first}, {end}))", first

    def _write_steps(self, depth: str) -> None:
        steps, loop, data = self._steps, self._loop, self._steps.iter
        index, batch, bar, start = "", steps.target, None, "0"
        while called(data) in ("tqdm", "enumerate") and isinstance(data, ast.Call) and data.args:
            if called(data) == "tqdm":
                bar = data
            elif isinstance(batch, ast.Tuple) and len(batch.elts) == 2:
                index, batch = self._text(batch.elts[0]), batch.elts[1]
                start = (
                    "".join(map(self._text, [*data.args[1:], *(each.value for each in data.keywords)])) or "0"
                )
            data = data.args[0]
        values = self.script.values(self.script.variable(data)) if isinstance(data, ast.Name) else []
        if called(data) in _WRAPPED or any(called(value) in {*_WRAPPED, "tqdm"} for value in values):
            self._refuse(
                data, f"{ast.unparse(data)} hides the place in its data: give iter_steps() the data itself"
            )
        text, target = f"{loop}.iter_steps({self._text(data)})", self._text(batch)
        if bar is not None:
            shown = bar.args[0]
            text = (
                self._source[
                    self._at(bar.lineno, bar.col_offset) : self._at(shown.lineno, shown.col_offset)
                ].decode()
                + text
            )
            text += self._source[self._end(shown) : self._end(bar)].decode()
        if isinstance(batch, ast.Tuple) and not target.startswith("("):
            target = f"({target})"
        self._replace(steps.target, steps.iter, f"_, {target} in {text}")
        if index in {each.id for each in self.script.names if isinstance(each.ctx, ast.Load)}:
            more = "" if start == "0" else f" + {start}"
            self._line_before(steps.body[0], depth, f"{index} = {loop}.batch_index{more}")


def _unbarred(data: Any) -> Any:
    """Return what a progress bar shows: E of `tqdm(E)`."""
    return data.args[0] if called(data) == "tqdm" and data.args else data


def _last_line(node: ast.expr) -> int:
    return node.end_lineno or node.lineno
