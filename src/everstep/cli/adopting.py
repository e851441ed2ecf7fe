"""The command `adopt`: puts a plain PyTorch script under a `TrainLoop` by edits of its text.

Nothing of the script is executed, unless it is compared with its patched form.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import click

from everstep.cli import common as cli
from everstep.cli.adopt_script import (
    DRAWS,
    GENERATORS,
    LOOPS,
    OPTIMIZERS,
    TRACKERS,
    WRAPPED,
    Flow,
    Script,
    Variable,
    called,
    dotted,
    same_object,
)


@cli.command()
def adopt_command(
    script: Path = cli.argument(type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    output: Path | None = cli.option(
        cli.PATH, "File for the patched script; it must not exist.", "-o --output"
    ),
    seed: int | None = cli.option(int, "Seed to set, for a script that sets none."),
    by_epoch: bool = cli.flag("Make each epoch one step, whatever is in it."),
    drill: bool = cli.flag("Run both scripts, compare each update, and drill the patched one."),
    args: tuple[str, ...] = cli.argument("[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED),
) -> None:
    """Put SCRIPT, a plain PyTorch training script, under a TrainLoop, and show the diff.

    \b
      everstep adopt train.py
      everstep adopt train.py -o adopted.py --drill -- --epochs 2

    SCRIPT is only parsed, and stays as it is.  What no patch can do safely is named with its line, and then
    nothing is written.  With --drill both scripts are executed, with the arguments after --.

    Exit status: 0 patched, 1 not patched, or the patched script trains differently; with --drill then that
    of everstep drill.
    """
    from everstep.cli.proving import drill_command

    if drill and output is None:
        raise click.UsageError("--drill executes the patched script; give it a place: -o FILE")
    if output is not None and (output.exists() or not output.absolute().parent.is_dir()):
        raise click.UsageError(f"-o {output}: give a file that does not exist, in a folder that exists")
    try:
        source = script.read_text(encoding="utf-8")
        patch = patched(source, script.stem, seed, script.parent, by_epoch)
    except SyntaxError as error:
        raise click.UsageError(f"{script} is not Python: line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{script} is not Python: {error}") from error
    for line, problem in sorted(patch.refused):
        cli.say(f"line {line}: {problem}", err=True)
    if patch.refused:
        remedy = "change these lines, or write the loop by hand (docs/guide/doors.md)"
        cli.say(f"{script} is not patched: {remedy}", err=True)
        sys.exit(1)
    old, new = (text.splitlines(keepends=True) for text in (source, patch.text))
    cli.say("".join(difflib.unified_diff(old, new, str(script), str(output or script))))
    if output is not None:
        with output.open("x", encoding="utf-8") as file:
            file.write(patch.text)
    notes = [f"line {line} stands in the way of finer steps: {problem}" for line, problem in patch.in_the_way]
    if notes:
        notes.insert(0, "an epoch is one step, so a kill costs the epoch")
    notes += [
        f"{name} is taken for a module or a scheduler: if it is a function, take it out of the state"
        for name in patch.guessed
    ]
    notes += [
        f"line {line}: this loop stays as it is, and a kill in it costs all of it" for line in patch.outside
    ]
    for package in sorted(TRACKERS.keys() & patch.packages):
        problem = f"after a kill some steps run again, and {package} gets their values twice"
        notes.append(f"{problem}: take the service of docs/recipes/loggers.md in place of its calls")
    cli.note(notes)
    if drill and output is not None:
        cli.leave_in_order()
        # beside the script, whose modules it imports
        with tempfile.NamedTemporaryFile("w", dir=script.parent, suffix=".py", encoding="utf-8") as plain:
            plain.write(patch.plain)
            plain.flush()
            difference = compare(Path(plain.name), output, args)
        if difference is not None:
            cli.say(difference.replace(plain.name, str(script)), err=True)
            sys.exit(1)
        cli.say("the two scripts make equal updates\n")
        drill_command.main([str(output), *args], prog_name="everstep drill", standalone_mode=False)


def compare(script: Path, patched: Path, args: Sequence[str]) -> str | None:
    """Run a script twice and its patched form once; return what differs in their updates, None if nothing."""
    from everstep.drill.any_command import Chain, Reference, Start
    from everstep.drill.processes import last_lines, owned_folder
    from everstep.drill.report import UNSTABLE

    starts = list[Start]()
    with owned_folder("everstep-adopt-") as folder:
        for number, file in enumerate((script, script, patched)):
            place = ["env", f"EVERSTEP_ROOT={folder / 'runs'}", "EVERSTEP_INDEX=off"]
            path = file.resolve()  # in the copy of this folder, where a script may write beside itself
            path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            command = [*place, sys.executable, str(path), *args]
            start = Chain(command, command, folder / str(number), 600.0).start()
            if start.status or not start.updates:
                ending = f"status {start.status} after {start.updates} updates of a torch optimizer"
                return f"{file} cannot be compared, as it ended with {ending}:\n{last_lines(start.log)}"
            starts.append(start)
    first, second, changed = starts
    reference = Reference(first)
    reference.look_for_seeds(second)
    if (difference := reference.first_difference(second, {0: 0})) is not None:
        return f"two runs of {script} differ, so it cannot be compared: {difference}; likely: {UNSTABLE}"
    difference = reference.first_difference(changed, {0: 0})
    problems = [] if difference is None else [f"first in {difference}"]
    if changed.updates != first.updates:
        problems.append(f"it makes {changed.updates} updates, and the script {first.updates}")
    return f"{patched} trains differently: {', and '.join(problems)}" if problems else None


_PAGES = {
    "accelerate": "docs/recipes/huggingface.md#accelerate",
    "lightning": "docs/recipes/lightning.md",
    "pytorch_lightning": "docs/recipes/lightning.md",
    "transformers": "docs/coming-from/lightning-hf.md",
}
"""By package the page that shows its programs under a loop."""


_METHODS_OF_BARS = {"set_postfix", "set_postfix_str", "set_description", "set_description_str", "update"}
_METHODS_OF_BARS |= {"write", "refresh", "close", "clear"}


class _Refused(Exception):
    """Nothing further can be analysed; the reasons are in `Patch.refused`."""


def patched(
    source: str, name: str, seed: int | None = None, folder: Path | None = None, by_epoch: bool = False
) -> Patch:
    """Patch a script: by the steps in its epochs, or by its epochs where this is all that can be done."""
    fine = Patch(source, name, seed, folder)
    if (fine.refused or by_epoch) and fine.is_nested:
        coarse = Patch(source, name, seed, folder, is_coarse=True)
        coarse.in_the_way = sorted(fine.refused)
        if by_epoch or len(coarse.refused) < len(fine.refused):
            return coarse
    return fine


class Patch:
    """A script under a `TrainLoop`, or the reasons why it is not.

    Args:
        source: text of the script.
        name: of the run, below runs/.
        seed: seed to set after the imports; None: the script seeds itself.
        folder: where the modules are whose classes the script imports; they are only parsed, too.
        is_coarse: an epoch is one step.

    Attributes:
        refused: lines that stand in the way, why, and what to write by hand; then `text` is empty.
        text: the patched script.
        plain: the script with the seed alone.
        packages: what the script imports from.
        is_nested: whether there are loops that train in the loop that trains.
        guessed: entries of the state that may be none.
        outside: lines of other loops that train, which stay as they are.
        in_the_way: what a patch with finer steps is refused for.

    Raises:
        SyntaxError: the source is not Python.
    """

    def __init__(
        self,
        source: str,
        name: str,
        seed: int | None = None,
        folder: Path | None = None,
        is_coarse: bool = False,
    ) -> None:
        self._source, self._name, self._seed = source.encode(), name, seed
        self._lines = [0, *accumulate(map(len, self._source.splitlines(keepends=True)))]
        """The place in the source at which each line begins."""
        self._edits: list[tuple[int, int, str]] = []
        self._breaks = list[Any]()
        self._bar: tuple[Any, ...] = ()
        """The variable of a progress bar around the steps' data, and what it shows."""
        self.is_nested, self._is_coarse, self.guessed = False, is_coarse, list[str]()
        self.outside = list[int]()
        self.refused, self.in_the_way = set[tuple[int, str]](), list[tuple[int, str]]()
        self.text, self.plain, self._script = "", source, Script(source, folder)
        self.packages = self._script.packages.keys()
        known = {each.id for each in self._script.names} | self._script.imported
        self._loop, self._kept = (each + "_" * (each in known) for each in ("loop", "kept"))
        try:
            self._find_loops()
            self._check_loops()
            self._find_carried()
            self._write(self._find_state())
        except _Refused:
            return
        pieces, at = list[bytes](), 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            pieces += [self._source[at:start], text.encode()]
            at = end
        if not self.refused:
            self.text = b"".join([*pieces, self._source[at:]]).decode()
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # the script's own
                compile(self.text, name, "exec")

    def _refuse(self, node: Any, problem: str) -> None:
        self.refused.add((node.lineno, problem))

    def _give_up(self, node: Any, problem: str) -> NoReturn:
        self._refuse(node, problem)
        raise _Refused

    # ------------------------------------------------------------------------------- the loops

    def _reached(self, node: ast.AST) -> Iterator[Any]:
        """Yield what is in a node, and in the functions of the script that it names."""
        todo, visited = [node], set[ast.AST]()
        while todo:
            for each in ast.walk(todo.pop()):
                yield each
                function = self._script.functions.get(each.id) if isinstance(each, ast.Name) else None
                if function is not None and function not in visited:
                    visited.add(function)
                    todo.append(function)

    def _inner(self, nodes: list[Any], way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the nearest loops that train, each with the calls of functions on the way to it."""
        for node in nodes:
            if node in self._training:
                yield node, way
                continue
            function = self._script.functions.get(dotted(node)) if isinstance(node, ast.Call) else None
            if function is not None and len(way) < 3:
                yield from self._inner(function.body, (*way, node))
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from self._inner([*ast.iter_child_nodes(node)], way)

    def _find_loops(self) -> None:
        """Find the loop over epochs, that over steps (perhaps the same), and the call between them."""
        script = self._script
        first = next(iter(script.tree.body), ast.Pass(lineno=1))
        loops = [node for node in script.nodes if isinstance(node, LOOPS)]
        self._training = {o for o in loops if any(called(each) == "backward" for each in self._reached(o))}
        below = {inner for loop in self._training for inner, _ in self._inner(loop.body)}
        outer: list[Any] = sorted(self._training - below, key=lambda each: each.lineno)
        for package, page in _PAGES.items() if "everstep" not in script.imported else ():
            if package in script.packages and (package == "accelerate" or not outer):
                reason = f"{package} runs a part of the training: write the loop by hand, as in {page}"
                self._give_up(script.packages[package], reason)
        if "everstep" in script.imported:
            self._give_up(first, "this script uses everstep already: change its loop by hand")
        if not outer:
            self._give_up(first, "no loop here calls backward(): write a TrainLoop or Trainer by hand")
        self.outside = [each.lineno for each in outer[1:]]
        ways: list[tuple[Any, tuple[Any, ...]]] = [*self._inner(outer[0].body)]
        is_range = isinstance(outer[0], ast.For) and called(_iterable(outer[0].iter)) in ("range", "trange")
        self.is_nested = bool(ways and is_range)
        if not self.is_nested or self._is_coarse:
            ways = [(outer[0], ())]  # each of its rounds is a step
        if len(ways) > 1:
            self._give_up(ways[1][0], "a second loop that trains in an epoch: write the TrainLoop by hand")
        self._epochs, (self._steps, calls) = outer[0], ways[0]
        for loop in (self._epochs, self._steps):
            if isinstance(loop, ast.While):
                self._give_up(loop, "`while` trains: write `for i in range(n)`, or use a Supervisor by hand")
            rest = self._source[self._end(loop.iter) : self._at((loop.iter.end_lineno or 0) + 1)]
            reasons = {
                "is in a class: move it into a function": script.nearest(loop, ast.ClassDef),
                "has an `else`: move these lines below the loop": loop.orelse,
                "is two calls away from the loop over epochs: call its function there": len(calls) > 1,
                "has more in its first line than `for x in data:`": rest.partition(b"#")[0].strip() != b":",
            }
            for reason in (reason for reason, holds in reasons.items() if holds):
                self._give_up(loop, f"this loop {reason}")
        self._call = next(iter(calls), None)
        self._home, self._inside = (script.nearest(e, ast.FunctionDef) for e in (self._epochs, self._steps))
        self._head, self._rest = list[ast.stmt](), list[ast.stmt]()
        if self._steps is not self._epochs:
            top = self._inside if self._call else self._epochs
            self._head, self._rest = script.beside(self._steps, top)
        if self._call is not None:
            before, after = script.beside(self._call, self._epochs)
            self._head, self._rest = [*self._head, *before], [ast.Expr(self._call), *self._rest, *after]

    def _is_chosen(self, node: ast.AST) -> bool:
        """Return whether an `if` decides on a line, here or at each call of its function."""
        script = self._script
        choices = [each for each in script.above(node) if isinstance(each, ast.If)]
        calls = script.calls_of(home) if (home := script.nearest(node, ast.FunctionDef)) is not None else []
        is_here = any("__name__" not in ast.unparse(each.test) for each in choices)
        return is_here or (bool(calls) and all(self._is_chosen(each) for each in calls))

    def _check_loops(self) -> None:
        """Refuse what leaves the loops, runs them twice, or reads what no checkpoint has."""
        script = self._script
        loops = [self._epochs, self._steps]
        for node in script.nodes:
            home = script.nearest(node, ast.FunctionDef)
            above = [loop for loop in loops if loop in script.above(node)]
            leaves = isinstance(node, ast.Return | ast.Yield)
            leaves = leaves and any(script.nearest(loop, ast.FunctionDef) is home for loop in above)
            # with a status it is an error, which a start of the plain script meets again, too
            leaves |= called(node) in ("exit", "quit") and bool(above) and not getattr(node, "args", ())
            is_nested = self._steps is not self._epochs or self._is_coarse
            if is_nested and isinstance(node, ast.Break) and script.nearest(node, LOOPS) is self._epochs:
                self._breaks.append(node)
            elif leaves:
                problem = f"call {self._loop}.request_stop() in its place"
                self._refuse(node, f"ends the training early: take it out, adopt the script, and {problem}")
            elif called(node) in ("spawn", "init_process_group") and not self._is_chosen(node):
                self._refuse(node, "this starts several processes: see docs/guide/processes.md")
            elif isinstance(node, ast.Nonlocal):
                self._refuse(node, "`nonlocal` assigns a variable of another function: use a dictionary")
            elif isinstance(node, ast.Global) and script.nearest(node, ast.ClassDef):
                self._refuse(node, "a method assigns a global variable: assign it in the loop")
        inside: ast.AST = self._steps
        while (function := script.nearest(inside, ast.FunctionDef)) is not None:
            calls = script.calls_of(function)
            if not calls:
                break  # of another file
            if len(calls) != 1 or function in script.above(calls[0]):
                times = f"{function.name}() trains, and this file calls it {len(calls)} times"
                problem = f"{times}: call it once, as each call needs a run directory of its own"
                self._give_up(function, problem)
            inside = calls[0]
        for node in self._reached(self._epochs):
            if dotted(node) == "torch.load":
                self._refuse(node, "may read a file newer than a resume's state: keep it in a variable")
            elif called(node) in OPTIMIZERS:
                self._refuse(node, "an optimizer is made anew in the loop: make it once, before the loop")
            elif called(node) == "add_param_group":
                self._refuse(node, "a resume begins with the first groups: make all above the loop")
            elif dotted(node).rpartition(".")[2] in ("lru_cache", "cache") and isinstance(node, ast.expr):
                self._refuse(node, "what it keeps is no state: take it out")

    # ---------------------------------------------------------------------------- the variables

    def _find_carried(self) -> None:
        """Find the variables that go from one round to the next, or out of the loop."""
        script, epochs, steps = self._script, self._epochs, self._steps
        inside = {*ast.walk(epochs), *(ast.walk(self._inside) if self._call else ())}
        outside = {script.variable(each) for each in script.stores if each not in inside}
        step, epoch, tail, after = (Flow(script, outside) for _ in range(4))
        sure = step.round(steps, set())
        epoch.round(epochs, set())
        tail.run(self._rest, set())
        after.run(script.beside(epochs, self._home)[1], set())
        self._used = {each for each in epoch.read if not isinstance(each.scope, ast.Module)}
        self._carried, self._records = set[Variable](), set[Variable]()
        self._made = set[Variable]()
        """The records that a resume makes anew, after the checkpoint was opened."""
        self._losses = dict[Variable, list[Any]]()
        """What is read after the loop alone, with the calls of its `backward()`."""
        index = steps.target if called(_iterable(steps.iter)) == "enumerate" else None
        is_counter = steps is not epochs or called(_iterable(epochs.iter)) in ("range", "trange")
        self._counters = [*[epochs.target] * is_counter, *getattr(index, "elts", [])[:1]]
        in_step, in_epoch = step.assigned | step.changed, epoch.assigned | epoch.changed
        moved = step.read & in_step | tail.read & (in_step - sure) | in_epoch & (epoch.read | after.read)
        moved |= {each for each in epoch.assigned if each.scope is None and self._home is not None}
        read, unseen = script.unseen.read | epoch.read | after.read, script.unseen.assigned
        unseen = unseen | script.unseen.changed
        is_plain = {each: script.kind(each) == "plain" or each.name in script.classes for each in unseen}
        moved |= {each for each in unseen if each.scope is None and is_plain[each]}
        # an engine of another package is taken for one that stays as it is, if only methods use it
        changed = in_epoch | {e for e in unseen if script.kind(e) or not script.is_made_elsewhere(e)}
        changed = changed & read | {each for each in read if script.is_drawn(each)}
        moved |= {each for each in changed if isinstance(each.scope, ast.Module)}
        in_loop = step.read & in_step | tail.read & (in_step - sure)
        for each in sorted(moved, key=lambda each: each.name):
            if each not in in_loop and (calls := self._backward_calls(each)):
                self._losses[each] = calls
            else:
                is_assigned = each in step.assigned | epoch.assigned
                self._carry(each, each in step.changed | epoch.changed, is_assigned)
        for name in (each for each in script.stores if (record := script.variable(each)) in self._records):
            is_choice = isinstance(script.nearest(name, (ast.If, ast.FunctionDef)), ast.If)
            if name in inside or is_choice or record.scope not in (None, self._home):
                self._made.add(record)
            if name in inside and (record in after.read or script.holds_state(record)):
                self._refuse(name, f"`{record.name}` is made in the loop: make it above the loop")
        data = Flow(script)
        data.run([ast.Expr(steps.iter)] if steps is not epochs else [], set())
        self._check_head(step.read | tail.read, data.read)
        for call in (each for top in self._head for each in ast.walk(top) if called(each) == "append"):
            item = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if isinstance(item, ast.Name) and script.variable(item) in self._carried & step.changed:
                self._refuse(call, f"`{item.id}` would come back as two: append it below the steps")

    def _check_head(self, read: set[Variable], data: set[Variable]) -> None:
        """Refuse what the head of an epoch makes of later values, if it is made anew there by a resume."""
        script, kept, flows = self._script, self._carried | self._records, list[tuple[ast.stmt, Flow]]()
        counters = {script.variable(each) for each in self._counters if isinstance(each, ast.Name)}
        for node in self._head:
            flow = Flow(script)
            flow.run([node], set())
            flows.append((node, flow))
        read_here = {each for _, flow in flows for each in flow.read}
        late = {each for each in read_here if each in kept - counters or script.kind(each) == "state"}
        while more := {v for _, f in flows if f.read & late for v in f.assigned | f.changed} - late:
            late |= more
        for node, flow in flows if late else ():
            made = flow.assigned | flow.changed if flow.read & late else set[Variable]()
            used = made & (read | data) - kept
            is_data = {e for e in used if any(called(value) == "DataLoader" for value in script.values(e))}
            used = {e for e in used if script.kind(e) not in ("reporter", "state", "function")} | is_data
            if used:
                name, problem = min(each.name for each in used), "is made of values that steps change"
                remedy = "a resume would find later ones: see docs/guide/exactness.md"
                self._refuse(node, f"`{name}` {problem}; {remedy}")
        state = {each for each in data if script.kind(each) == "state" or each in kept - counters}
        drawn = {e for e in data if any(called(same_object(v)) in GENERATORS for v in script.values(e))}
        for name in sorted(each.name for each in (late & data | state) - drawn):
            problem = "of which a resume would find a later value"
            self._refuse(self._steps, f"the data is made of `{name}`, {problem}")

    def _backward_calls(self, variable: Variable) -> list[Any]:
        """Return the lines `loss.backward()`, if this is the last that the loop does with a loss."""
        script, epochs = self._script, self._epochs
        inside, calls = {*ast.walk(epochs)}, list[Any]()
        for name in (each for each in script.names if script.variable(each) == variable):
            method = script.nearest(name, ast.AST)
            statement = script.nearest(script.nearest(method, ast.AST), ast.AST)
            is_backward = getattr(method, "attr", "") == "backward" and isinstance(statement, ast.Expr)
            if name in inside and is_backward:
                calls.append(statement)
            elif name not in inside and not (name.lineno > epochs.lineno and isinstance(name.ctx, ast.Load)):
                return []
        stores = [each.lineno for each in script.stores if script.variable(each) == variable]
        return calls if calls and max(stores) < min(each.lineno for each in calls) else []

    def _carry(self, variable: Variable, changed: bool, assigned: bool) -> None:
        script, (scope, name) = self._script, variable
        kind, first = script.kind(variable), script.first(variable)
        is_name = isinstance(first, ast.Name)
        targets = [each for loop in (self._epochs, self._steps) for each in ast.walk(loop.target)]
        is_target = any(isinstance(each, ast.Name) and script.variable(each) == variable for each in targets)
        is_left_out = kind == "reporter" or (kind == "function" and not assigned)
        if isinstance(scope, ast.Module) or (scope is None and name in script.symbols):
            file, owner = script.modules[scope].file if scope else None, script.definition(name, ast.AST)
            node = owner[1] if owner and not file else script.packages.get(file.stem if file else name)
            place = f"`{name}` of {file.name}" if file else f"`{name}`"
            problem = "changes in the loop, and no checkpoint has it: make it a variable of this script"
            return None if is_left_out else self._refuse(node or self._epochs, f"{place} {problem}")
        if not isinstance(scope, ast.FunctionDef | None):
            return
        arguments = [] if scope is None else [n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg)]
        stores = [each for each in script.stores if script.variable(each) == variable]
        stores = [each for each in stores if each is not first or name in arguments]
        values = [same_object(script.stored_value(each)) for each in stores]  # of `net = net.train()`
        is_anew = any(not isinstance(e, ast.Name) or script.variable(e) != variable for e in values)
        made = [*map(same_object, script.values(variable))]
        calls = [e for e in made if isinstance(e, ast.Call) and "state_dict" not in ast.unparse(e)]
        calls = [e for e in calls if called(e) in ("deepcopy", "partial", "Path") or called(e)[:1].isupper()]
        objects = [each for each in calls if script.kind_of(each) in ("", "object", "function")]
        is_replaced = assigned or script.is_stored_in(variable)
        items = [] if any(map(script.is_array, made)) else script.items_of(variable)  # an array has copies
        if kind == "reporter" and is_replaced and any(called(each) == "DataLoader" for each in made):
            problem = "changes in the loop, and a resume would begin with the first: make one for all epochs"
        elif is_left_out:
            return
        elif kind == "state" and assigned and is_anew:
            problem = "is made anew in the loop: make it once, before the loop"
        elif kind == "state" or (kind == "record" and name in arguments and scope is not self._home):
            return  # it is the caller's
        elif kind == "record" and name not in {each.name for each in self._carried | self._records}:
            self._records.add(variable)
            return
        elif is_target and not any(getattr(each, "id", "") == name for each in self._counters):
            problem = f"is a batch and is read after the loop: in it, write `last = {name}`; read `last`"
        elif name in {*arguments, *(each.name for each in self._carried | self._records)} or not is_name:
            problem = "changes in the loop, and is an argument or has a namesake: copy it to a new name first"
        elif kind == "function":
            problem = "is a function, and a checkpoint has none: keep a number or a name that chooses it"
        elif any(map(script.is_view_of_weights, [*made, *items])):
            problem = "has weights that change: write copy.deepcopy(net.state_dict()), or w.detach().clone()"
        elif (kind != "plain" and changed) or objects or any(map(script.variable_beside, made)):
            problem = "may change unseen in the loop: assign a module, a number or a list here, on its own"
        else:
            self._carried.add(variable)
            return
        self._refuse(first, f"`{name}` {problem}")

    @property
    def _is_kept(self) -> bool:
        return bool(self._carried | self._made | self._losses.keys())

    def _find_state(self) -> list[str]:
        """Find what the loop uses and a step may change: models, optimizers, schedulers, generators."""
        script = self._script
        used = {each for each in self._used if script.kind(each) == "state"}
        for value in [value for each in used for value in script.values(each)]:
            if isinstance(value, ast.Call) and called(value) in OPTIMIZERS and value.args:
                used |= self._trained(value.args[0])
        if self._is_coarse:
            used |= self._generators()
        for name in (
            each for each in script.stores if called(same_object(script.stored_value(each))) in GENERATORS
        ):
            variable = script.variable(name)
            is_above = name.lineno < self._epochs.lineno and variable.scope is self._home
            used |= {variable} if variable.scope is None or is_above else set()
        for each in used:
            first = script.first(each)
            choice: Any = None if first is each.scope else script.nearest(first, (ast.If, ast.FunctionDef))
            is_choice = isinstance(choice, ast.If) and not choice.orelse
            is_here = each.scope is None or (each.scope is self._home and first.lineno <= self._epochs.lineno)
            if not is_here:
                self._refuse(first, f"`{each.name}` is made out of sight of the loop: make it just above it")
            elif is_choice and "__name__" not in ast.unparse(choice.test):
                self._refuse(first, f"`{each.name}` is made under an `if`: add an `else` that makes it, too")
        if not used:
            self._refuse(self._epochs, "no model or optimizer of this loop was found: write it by hand")
        self.guessed = sorted(each.name for each in used & script.guessed)
        entries = list[str]()
        for each in sorted(used, key=lambda each: (script.first(each).lineno, each.name)):
            values = script.values(each)
            choices = [*values, *(e.orelse for e in values if isinstance(e, ast.IfExp))]
            is_none = any(isinstance(e, ast.Constant) and e.value is None for e in choices)
            entries.append(f'"{each.name}": {each.name}{f" if {each.name} is not None else {{}}" * is_none}')
        return entries

    def _generators(self) -> set[Variable]:
        """Return all generators; refuse data that keeps anything else, as everstep does not open it here."""
        script, variables = self._script, set[Variable]()
        for used in (e for e in self._used if any(map(script.is_iterator, script.values(e)))):
            problem = "goes on from epoch to epoch: make it in the epoch"
            self._refuse(script.first(used), f"`{used.name}` {problem}")
        for call in (node for node in script.nodes if isinstance(node, ast.Call)):
            owner = script.definition(dotted(call))
            if owner is not None and owner[0].is_data_that_changes(owner[1], script.methods_in_use):
                self._refuse(call, f"{called(call)} changes as it is read: shuffle by the DataLoader alone")
            elif any(
                each.arg == "persistent_workers" and ast.unparse(each.value) != "False"
                for each in call.keywords
            ):
                self._refuse(call, "its workers go on from epoch to epoch: take out persistent_workers")
            elif called(call) in GENERATORS and "random_split" not in map(called, script.above(call)):
                homes = [n for n in script.stores if same_object(script.stored_value(n)) is call]
                variables |= {*map(script.variable, homes)}
                if not homes:
                    self._refuse(call, "no name has this generator: assign it to one above the loop")
        return variables

    def _trained(self, parameters: ast.AST) -> set[Variable]:
        """Return the objects whose parameters an optimizer gets, by their names or in a list."""
        variables, script = set[Variable](), self._script
        nodes = [*ast.walk(parameters)]
        groups = [each for each in nodes if isinstance(each, ast.Dict)]
        pairs = [pair for each in groups for pair in zip(each.keys, each.values, strict=True)]
        options = [value for key, value in pairs if getattr(key, "value", "") != "params"]
        nodes = [each for each in nodes if not any(each in ast.walk(option) for option in options)]
        for name in (each for each in nodes if isinstance(each, ast.Name)):
            variable = script.variable(name)
            values = [ast.walk(value) for value in script.values(variable) if value is not None]
            names = [each for nodes in values for each in nodes if isinstance(each, ast.Name)]
            inner = {e for e in (variable, *map(script.variable, names)) if script.kind(e) == "state"}
            if not isinstance(
                variable.scope, ast.FunctionDef | None
            ):  # as `p` of `[p for n in k for p in n]`
                continue
            is_own = name.id not in script.symbols
            if is_own and not inner:
                self._refuse(name, f"the optimizer trains `{name.id}`: put it into a torch.nn.ParameterList")
            variables |= {variable} & inner or inner
        return variables

    # ---------------------------------------------------------------------------------- the edits

    def _at(self, line: int, column: int = 0) -> int:
        return self._lines[min(line, len(self._lines)) - 1] + column

    def _end(self, node: Any) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: Any) -> str:
        return self._source[self._at(node.lineno, node.col_offset) : self._end(node)].decode()

    def _replace(self, first: Any, last: Any, text: str) -> None:
        self._edits.append((self._at(first.lineno, first.col_offset), self._end(last), text))

    def _insert(self, at: int, text: str) -> None:
        self._edits.append((at, at, text))

    def _first_line(self, loop: ast.For, depth: str, text: str) -> None:
        start = self._at(loop.body[0].lineno)
        indent = self._source[start : start + loop.body[0].col_offset].decode()
        self._insert(self._at((loop.iter.end_lineno or 0) + 1), f"{depth}{indent}{text}\n")

    def _write(self, state: list[str]) -> None:
        epochs, loop, kept, script = self._epochs, self._loop, self._kept, self._script
        start, is_one = self._at(epochs.lineno), epochs is self._steps and not self._is_coarse
        indent = self._source[start : start + epochs.col_offset].decode()
        unit = "\t" if self._source[self._at(epochs.body[0].lineno) :].startswith(b"\t") else "    "
        limit, number = ("1", "1") if is_one else self._range()
        entries = [*dict.fromkeys(state)]
        records = sorted(self._records - self._made, key=lambda each: each.name)
        entries += [f'"{each.name}": {self._attributes(each)}' for each in records]
        entries += [f'"{kept}": vars({kept})'] * self._is_kept
        arguments = [f'"runs/{self._name}"', f"{{{', '.join(entries)}}}", f"max_epoch={limit}"]
        lines = [f"with everstep.TrainLoop({', '.join(arguments)}) as {loop}:"]
        if len(indent + lines[0]) > 100:
            lines = ["with everstep.TrainLoop(", *(f"{unit}{each}," for each in arguments), f") as {loop}:"]
        lines += [f"{unit}for _ in {loop}.iter_epochs():"] * is_one
        counters = [
            each for each in self._counters if getattr(each, "id", "") in {v.name for v in self._carried}
        ]
        depth, target = unit * (1 + (epochs is self._steps)), self._text(epochs.target)
        target = f"{kept}.{target}" if epochs.target in counters else target
        self._write_records(depth)
        self._insert(start, "".join(f"{indent}{line}\n" for line in lines))
        for leave in self._breaks:
            before = self._source[self._at(leave.lineno) : self._at(leave.lineno, leave.col_offset)].decode()
            separator = "; " if before.strip() else f"\n{depth}{before}"
            self._replace(leave, leave, f"{loop}.request_stop(){separator}continue")
        if not is_one:
            self._replace(epochs.target, epochs.iter, f"{target} in {loop}.iter_epochs()")
            shift = "-= 1" if number == "0" else f"+= {number} - 1"
            if number != "1" and self._text(epochs.target) in script.read_names:
                self._first_line(epochs, unit, f"{target} {shift}  # iter_epochs() counts from 1")
        if self._is_coarse:
            self._first_line(epochs, unit, f"for _ in {loop}.iter_steps([{target}]):  # an epoch is one step")
        else:
            self._write_steps(depth if self._inside is self._home else "", counters)
        if self._call is not None and self._home is not None and self._home not in script.above(self._inside):
            for position in (self._at(self._inside.lineno), self._end(self._call.func)):
                at = self._source.index(b"(", position) + 1
                self._insert(at, loop if self._source[at:].lstrip().startswith(b")") else f"{loop}, ")
        texts = [node for node in ast.walk(epochs) if isinstance(node, ast.JoinedStr | ast.Constant)]
        inside = {line for each in texts for line in range(each.lineno + 1, (each.end_lineno or 0) + 1)}
        for line in range(epochs.lineno, (epochs.end_lineno or 0) + 1):
            if self._source[self._at(line) : self._at(line + 1)].strip() and line not in inside:
                self._insert(
                    self._at(line), depth if line > (epochs.iter.end_lineno or 0) or is_one else unit
                )
        headers = (epochs.target, self._steps.target, self._steps.iter, *self._bar)
        fixed = [each for node in headers for each in ast.walk(node)]
        fixed += [node.target for node in script.nodes if isinstance(node, ast.NamedExpr)]
        renamed = [each for each in script.names if script.variable(each) in self._carried]
        renamed += [
            n for n in script.names if script.variable(n) in self._losses and n.lineno > epochs.end_lineno
        ]
        for name in (each for each in renamed if each not in counters):
            if self._text(name) != name.id or name in fixed:
                self._refuse(name, f"`{name.id}` cannot be renamed here: copy it to a new variable above")
            elif is_one or name not in {*ast.walk(epochs.iter)}:
                self._replace(name, name, f"{kept}.{name.id}")
        self._write_head()

    def _write_records(self, depth: str) -> None:
        """Keep attributes of objects, which a resume restores in place, and losses without graphs."""
        script, inside = self._script, {*ast.walk(self._epochs)}
        for name in (each for each in script.stores if script.variable(each) in self._made):
            text = f"{self._kept}.{name.id} = {self._attributes(script.variable(name))}"
            self._line_below(script.nearest(name, ast.stmt), depth * (name in inside), text)
        for variable, calls in self._losses.items():
            for call in calls:
                self._line_below(call, depth, f"{self._kept}.{variable.name} = {variable.name}.detach()")

    def _attributes(self, record: Variable) -> str:
        value = next(each for each in self._script.values(record) if each is not None)
        value = self._script.returned(value) or value
        if isinstance(value, ast.Dict | ast.DictComp):
            return f"{{key: vars(value) for key, value in {record.name}.items()}}"
        is_one = isinstance(value, ast.Call | ast.Name)
        return f"vars({record.name})" if is_one else f"[vars(each) for each in {record.name}]"

    def _line_below(self, statement: Any, depth: str, text: str) -> None:
        start = self._at(statement.lineno)
        indent = self._source[start : self._at(statement.lineno, statement.col_offset)].decode()
        rest = self._source[self._end(statement) : self._at((statement.end_lineno or 0) + 1)]
        if indent.strip() or rest.partition(b"#")[0].strip():
            self._refuse(statement, "give each of the statements here a line of its own")
        self._insert(self._at((statement.end_lineno or 0) + 1), f"{depth}{indent}{text}\n")

    def _write_head(self) -> None:
        """Import everstep, and seed, below the imports at the top."""
        script = self._script
        body, seeds, text = script.tree.body, list[str](), ast.unparse(script.tree)
        imports = [each for node in body if isinstance(node, ast.Import) for each in node.names]
        # `import torch.nn` has the name of the package
        plain = {root: root for each in imports if each.asname is None for root in each.name.split(".")[:1]}
        names = plain | {each.name: each.asname for each in imports if each.asname}
        known = {*script.imported, *(each.id for each in script.names)}
        calls = {"random": "seed", "numpy": "random.seed", "torch": "manual_seed"}
        packages = {"torch", "torchvision", "numpy", "tqdm", *sys.stdlib_module_names}
        # modules of the user's own may draw from any generator
        drawn = self.packages | {"torch"} if self.packages <= packages else calls.keys()
        for package, call in calls.items() if self._seed is not None else ():
            if package in drawn:
                name = names.get(package, package + "_" * (package in known))
                new = f"import {package}" if name == package else f"import {package} as {name}"
                seeds += [new] * (package not in names) + [f"{name}.{call}({self._seed})"]
        for draw, seeding in DRAWS.items() if self._seed is None else ():
            if re.search(draw, text) and not re.search(seeding, text):
                self._refuse(self._epochs, "random numbers are drawn, and nothing seeds them: give --seed 0")
        lines = ["import everstep", *seeds]
        if self._is_kept:
            comment = "what goes from one step or epoch to the next"
            lines = ["import types", *lines, "", f"{self._kept} = types.SimpleNamespace()  # {comment}"]
        ends = [isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.If) for node in body]
        kept = [each.lineno for each in script.stores if script.variable(each) in self._carried | self._made]
        ends = [end or node.lineno >= min(kept, default=10**9) for end, node in zip(ends, body, strict=True)]
        top = body[: [*ends, True].index(True)]
        ends_at = [node.end_lineno or 0 for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        at = self._at(max(ends_at, default=0) + 1)
        self._edits.insert(0, (at, at, "".join(f"{line}\n" for line in lines)))  # before the loop's lines
        head, tail = self._source[:at].decode(), self._source[at:].decode()
        self.plain = "".join([head, *(f"{line}\n" for line in seeds), tail])

    def _range(self) -> tuple[str, str]:
        """Return how many epochs there are, and the number of the first, as source."""
        numbers = _iterable(self._epochs.iter).args
        if len(numbers) > 2 or not isinstance(self._epochs.target, ast.Name):
            self._give_up(self._epochs, "count the epochs by one variable and without steps: `in range(n)`")
        first, end = ("0", *map(self._text, numbers))[-2:]
        if isinstance(numbers[0], ast.Name) and len(numbers) > 1:  # a later start may begin with another one
            variable = self._script.variable(numbers[0])
            if not isinstance(self._script.first(variable), ast.Name):
                self._give_up(self._epochs, f"`{first}` is an argument or import: count epochs from 0")
            self._carried.add(variable)
            first, end = (re.sub(rf"\b{first}\b", f"{self._kept}.{first}", each) for each in (first, end))
        if first == "1" and isinstance(numbers[1], ast.BinOp) and ast.unparse(numbers[1]).endswith(" + 1"):
            return self._text(numbers[1].left), first
        return end if first == "0" else f"len(range({first}, {end}))", first

    def _write_steps(self, depth: str, counters: Sequence[Any]) -> None:
        steps, data, batch, index, more = self._steps, self._steps.iter, self._steps.target, "", ""
        while True:
            if called(data) == "enumerate" and isinstance(batch, ast.Tuple) and not index:
                index, batch = self._text(batch.elts[0]), batch.elts[1]
                start = (*data.args[1:], *(each.value for each in data.keywords))
                more, data = "".join(f" + {self._text(each)}" for each in start), data.args[0]
            elif called(data) == "tqdm" and data.args:
                data = data.args[0]
            elif isinstance(data, ast.Name) and not self._bar and (bar := self._bar_of(data)) is not None:
                self._bar, data = (data, bar.args[0]), bar.args[0]
            else:
                break
        values: list[Any] = []
        if isinstance(data, ast.Name):
            values = self._script.values(self._script.variable(data))
        values += [way for each in values if isinstance(each, ast.IfExp) for way in (each.body, each.orelse)]
        for each in (data, *values):
            if called(each) in WRAPPED or self._script.is_iterator(each):
                name = f"{called(each)}()" if called(each) else "this"
                self._refuse(data, f"{name} hides the place in its data: loop over the data itself")
        target = f"{self._kept}." * (batch in counters) + self._text(batch)
        if isinstance(batch, ast.Tuple) and not target.startswith("("):
            target = f"({target})"
        text = self._text(data)
        if any(self._script.is_array(each) for each in (data, *values)):
            text = f"list({text})"
        if called(data) == "trange":
            text = f"range{text.partition('trange')[2]}"
        drawn = f"{self._loop}.iter_steps({text})"
        if self._bar:
            self._replace(self._bar[1], self._bar[1], drawn)
            drawn = self._text(self._bar[0])
        self._replace(steps.target, steps.iter, f"_, {target} in {drawn}")
        if index in self._script.read_names:
            kept = f"{self._kept}." if index in {each.name for each in self._carried} else ""
            self._first_line(steps, depth, f"{kept}{index} = {self._loop}.batch_index{more}")

    def _bar_of(self, name: ast.Name) -> Any:
        """Return `tqdm(E)` of a variable that holds this alone, made in the epoch; None of any other."""
        script, steps = self._script, self._steps
        values: list[Any] = script.values(script.variable(name))
        if steps is self._epochs or len(values) != 1 or called(values[0]) != "tqdm" or not values[0].args:
            return None
        reads = [each for each in script.names if isinstance(each.ctx, ast.Load) and each is not name]
        for read in (each for each in reads if script.variable(each) == script.variable(name)):
            method = script.nearest(read, ast.AST)  # `len(bar)` would be another number after a resume
            if getattr(method, "attr", "") not in _METHODS_OF_BARS:
                return None
        same = all(script.nearest(values[0], k) is script.nearest(steps, k) for k in (LOOPS, ast.FunctionDef))
        return values[0] if same else None


def _iterable(data: Any) -> Any:
    """Return what a progress bar shows: E of `tqdm(E)`."""
    return data.args[0] if called(data) == "tqdm" and data.args else data
