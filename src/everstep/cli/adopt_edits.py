"""How a script is put under a `TrainLoop`: by edits of its text, which leave all else as it is."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from itertools import takewhile
from pathlib import Path
from typing import Any

from everstep.cli.adopt_kinds import WRAPPED
from everstep.cli.adopt_loops import Refused, Training, shown
from everstep.cli.adopt_names import Variable, called, inside
from everstep.first_use import LOOPS

_DRAWS = {
    "torch": "manual_seed|set_seed|seed_everything",
    r"(?<!torch\.)(?<!self\.)\brandom\.(?!seed|[gs]et_?state|default_rng|[A-Z])\w+\(": r"random\.seed\(",
}
"""What draws random numbers, and what seeds it: regular expressions."""
_METHODS_OF_BARS = {"set_postfix", "set_postfix_str", "set_description", "set_description_str", "update"}
_METHODS_OF_BARS |= {"write", "refresh", "close", "clear"}


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


class Patch(Training):
    """A script under a `TrainLoop`, or the reasons why it is not.

    Args:
        text: of the script.
        name: of the run, below runs/.
        seed: seed to set after the imports; None: the script seeds itself.
        folder: where the modules are whose classes the script imports; they are only parsed, too.
        is_coarse: an epoch is one step.

    Attributes:
        text: the patched script; empty if lines are refused.
        plain: the script with the seed alone.
        in_the_way: what a patch with finer steps is refused for.
    """

    def __init__(
        self,
        text: str,
        name: str,
        seed: int | None = None,
        folder: Path | None = None,
        is_coarse: bool = False,
    ) -> None:
        super().__init__(text, folder, is_coarse)
        self._name, self._seed, self._edits = name, seed, list[tuple[int, int, str]]()
        self._bar: tuple[Any, ...] = ()
        """The variable of a progress bar around the steps' data, and what it shows."""
        self.text, self.plain, self.in_the_way = "", text, list[tuple[int, str]]()
        try:
            self.find_loops()
            self.check_loops()
            self.find_carried()
            self._write(self.find_state())
        except Refused:
            return
        source, pieces, at = self.script.source, b"", 0
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            pieces, at = pieces + source[at:start] + new.encode(), end
        if not self.refused:
            self.text = (pieces + source[at:]).decode()
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # the script's own
                compile(self.text, name, "exec")

    def _replace(self, first: Any, last: Any, text: str) -> None:
        self._edits.append((self.script.start(first), self.script.end(last), text))

    def _insert(self, at: int, text: str) -> None:
        self._edits.append((at, at, text))

    def _indent(self, node: Any) -> str:
        """Return what is in the first line of a node before it."""
        return self.script.source[self.script.at(node.lineno) : self.script.start(node)].decode()

    def _first_line(self, loop: ast.For, depth: str, text: str) -> None:
        self._insert(self.script.below(loop.iter), f"{depth}{self._indent(loop.body[0])}{text}\n")

    def _line_below(self, statement: Any, depth: str, text: str) -> None:
        script, indent = self.script, self._indent(statement)
        rest = script.source[script.end(statement) : script.below(statement)]
        if indent.strip() or rest.partition(b"#")[0].strip():
            self.refuse(statement, "give each of the statements here a line of its own")
        self._insert(script.below(statement), f"{depth}{indent}{text}\n")

    def _write(self, state: list[str]) -> None:
        epochs, loop, kept, script = self.epochs, self.loop, self.kept, self.script
        start, is_one = script.at(epochs.lineno), epochs is self.steps and not self.is_coarse
        indent, first_line = self._indent(epochs), script.at(epochs.body[0].lineno)
        unit = "\t" if script.source[first_line:].startswith(b"\t") else "    "
        limit, number = ("1", "1") if is_one else self._range()
        entries = [*dict.fromkeys(state)]
        records = sorted(self.records - self.made, key=lambda each: each.name)
        entries += [f'"{each.name}": {self._attributes(each)}' for each in records]
        entries += [f'"{kept}": vars({kept})'] * self.is_kept
        arguments = [f'"runs/{self._name}"', f"{{{', '.join(entries)}}}", f"max_epoch={limit}"]
        lines = [f"with everstep.TrainLoop({', '.join(arguments)}) as {loop}:"]
        if len(indent + lines[0]) > 100:
            lines = ["with everstep.TrainLoop(", *(f"{unit}{each}," for each in arguments), f") as {loop}:"]
        lines += [f"{unit}for _ in {loop}.iter_epochs():"] * is_one
        depth, target = unit * (1 + (epochs is self.steps)), script.text(epochs.target)
        target = f"{kept}.{target}" if epochs.target in self.counters else target
        self._write_records(depth)
        self._insert(start, "".join(f"{indent}{line}\n" for line in lines))
        for leave in self.breaks:
            before = self._indent(leave)
            separator = "; " if before.strip() else f"\n{depth}{before}"
            self._replace(leave, leave, f"{loop}.request_stop(){separator}continue")
        if not is_one:
            self._replace(epochs.target, epochs.iter, f"{target} in {loop}.iter_epochs()")
            shift = "-= 1" if number == "0" else f"+= {number} - 1"
            if number != "1" and script.text(epochs.target) in script.read_names:
                self._first_line(epochs, unit, f"{target} {shift}  # iter_epochs() counts from 1")
        if self.is_coarse:
            self._first_line(epochs, unit, f"for _ in {loop}.iter_steps([{target}]):  # an epoch is one step")
        else:
            self._write_steps(depth if self.inside is self.home else "")
        if self.call is not None and self.home is not None and self.home not in script.above(self.inside):
            for position in (script.at(self.inside.lineno), script.end(self.call.func)):
                at = script.source.index(b"(", position) + 1
                is_only = script.source[at:].lstrip().startswith(b")")
                self._insert(at, loop if is_only else f"{loop}, ")
        texts = inside(epochs, kind=ast.JoinedStr | ast.Constant)
        fixed = {line for each in texts for line in range(each.lineno + 1, each.end_lineno + 1)}
        for line in {*range(epochs.lineno, epochs.end_lineno + 1)} - fixed:
            if script.source[script.at(line) : script.at(line + 1)].strip():
                is_in = line > (epochs.iter.end_lineno or 0) or is_one
                self._insert(script.at(line), depth if is_in else unit)
        self._rename(is_one)
        self._write_head()

    def _rename(self, is_one: bool) -> None:
        """Make the variables that go on attributes of `kept`."""
        script, epochs = self.script, self.epochs
        fixed = inside(epochs.target, self.steps.target, self.steps.iter, *self._bar)
        fixed += [node.target for node in script.all(ast.NamedExpr)]
        after = [each for each in script.names if each.lineno > epochs.end_lineno]
        renamed = [each for each in script.names if script.is_of(each, *self.carried)]
        renamed += [each for each in after if script.is_of(each, *self.losses)]
        for name in (each for each in renamed if each not in self.counters):
            if script.text(name) != name.id or name in fixed:
                self.refuse(name, f"`{name.id}` cannot be renamed here: copy it to a new variable above")
            elif is_one or name not in {*ast.walk(epochs.iter)}:
                self._replace(name, name, f"{self.kept}.{name.id}")

    def _write_records(self, depth: str) -> None:
        """Keep attributes of objects, which a resume restores in place, and losses without graphs."""
        script, within = self.script, {*ast.walk(self.epochs)}
        for name in (each for each in script.stores if script.variable(each) in self.made):
            text = f"{self.kept}.{name.id} = {self._attributes(script.variable(name))}"
            self._line_below(script.nearest(name, ast.stmt), depth * (name in within), text)
        for variable, calls in self.losses.items():
            for call in calls:
                self._line_below(call, depth, f"{self.kept}.{variable.name} = {variable.name}.detach()")

    def _attributes(self, record: Variable) -> str:
        value = next(each for each in self.script.values(record) if each is not None)
        value = self.script.returned(value) or value
        if isinstance(value, ast.Dict | ast.DictComp):
            return f"{{key: vars(value) for key, value in {record.name}.items()}}"
        is_one = isinstance(value, ast.Call | ast.Name)
        return f"vars({record.name})" if is_one else f"[vars(each) for each in {record.name}]"

    def _write_head(self) -> None:
        """Import everstep, and seed, below the imports at the top."""
        script = self.script
        body, seeds, text = script.tree.body, list[str](), ast.unparse(script.tree)
        imports = [each for node in body if isinstance(node, ast.Import) for each in node.names]
        # `import torch.nn` has the name of the package
        plain = {root: root for each in imports if each.asname is None for root in each.name.split(".")[:1]}
        names = plain | {each.name: each.asname for each in imports if each.asname}
        known = {*script.imported, *(each.id for each in script.names)}
        calls = {"random": "seed", "numpy": "random.seed", "torch": "manual_seed"}
        known_packages = {"torch", "torchvision", "numpy", "tqdm", *sys.stdlib_module_names}
        # modules of the user's own may draw from any generator
        drawn = {*script.packages, "torch"} if script.packages.keys() <= known_packages else calls.keys()
        for package, call in calls.items() if self._seed is not None else ():
            if package in drawn:
                name = names.get(package, package + "_" * (package in known))
                new = f"import {package}" if name == package else f"import {package} as {name}"
                seeds += [new] * (package not in names) + [f"{name}.{call}({self._seed})"]
        for draw, seeding in _DRAWS.items() if self._seed is None else ():
            if re.search(draw, text) and not re.search(seeding, text):
                self.refuse(self.epochs, "random numbers are drawn, and nothing seeds them: give --seed 0")
        lines = ["import everstep", *seeds]
        if self.is_kept:
            comment = "what goes from one step or epoch to the next"
            lines = ["import types", *lines, "", f"{self.kept} = types.SimpleNamespace()  # {comment}"]
        kept = [each.lineno for each in script.stores if script.variable(each) in self.carried | self.made]
        ends = (ast.FunctionDef, ast.ClassDef, ast.For, ast.If)
        above_all = takewhile(lambda e: not isinstance(e, ends) and e.lineno < min(kept, default=10**9), body)
        at = max(
            (script.below(e) for e in above_all if isinstance(e, ast.Import | ast.ImportFrom)), default=0
        )
        self._edits.insert(0, (at, at, "".join(f"{line}\n" for line in lines)))  # before the loop's lines
        head, tail = script.source[:at].decode(), script.source[at:].decode()
        self.plain = "".join([head, *(f"{line}\n" for line in seeds), tail])

    def _range(self) -> tuple[str, str]:
        """Return how many epochs there are, and the number of the first, as source."""
        numbers, script = shown(self.epochs.iter).args, self.script
        if len(numbers) > 2 or not isinstance(self.epochs.target, ast.Name):
            self.give_up(self.epochs, "count the epochs by one variable and without steps: `in range(n)`")
        first, end = ("0", *map(script.text, numbers))[-2:]
        if isinstance(numbers[0], ast.Name) and len(numbers) > 1:  # a later start may begin with another one
            variable = script.variable(numbers[0])
            if not isinstance(script.first(variable), ast.Name):
                self.give_up(self.epochs, f"`{first}` is an argument or import: count epochs from 0")
            self.carried.add(variable)
            first, end = (re.sub(rf"\b{first}\b", f"{self.kept}.{first}", each) for each in (first, end))
        if first == "1" and isinstance(numbers[1], ast.BinOp) and ast.unparse(numbers[1]).endswith(" + 1"):
            return script.text(numbers[1].left), first
        return end if first == "0" else f"len(range({first}, {end}))", first

    def _write_steps(self, depth: str) -> None:
        script, steps, index, more = self.script, self.steps, "", ""
        data, batch = steps.iter, steps.target
        while True:
            if called(data) == "enumerate" and isinstance(batch, ast.Tuple) and not index:
                index, batch = script.text(batch.elts[0]), batch.elts[1]
                start = (*data.args[1:], *(each.value for each in data.keywords))
                more, data = "".join(f" + {script.text(each)}" for each in start), data.args[0]
            elif shown(data) is not data:
                data = shown(data)
            elif isinstance(data, ast.Name) and not self._bar and (bar := self._bar_of(data)) is not None:
                self._bar, data = (data, bar.args[0]), bar.args[0]
            else:
                break
        values: list[Any] = script.values(script.variable(data)) if isinstance(data, ast.Name) else []
        values += [way for each in values if isinstance(each, ast.IfExp) for way in (each.body, each.orelse)]
        for each in (data, *values):
            if called(each) in WRAPPED or script.is_iterator(each):
                name = f"{called(each)}()" if called(each) else "this"
                self.refuse(data, f"{name} hides the place in its data: loop over the data itself")
        target = f"{self.kept}." * (batch in self.counters) + script.text(batch)
        if isinstance(batch, ast.Tuple) and not target.startswith("("):
            target = f"({target})"
        text = script.text(data)
        if any(map(script.is_array, (data, *values))):
            text = f"list({text})"
        if called(data) == "trange":
            text = f"range{text.partition('trange')[2]}"
        drawn = f"{self.loop}.iter_steps({text})"
        if self._bar:
            self._replace(self._bar[1], self._bar[1], drawn)
            drawn = script.text(self._bar[0])
        self._replace(steps.target, steps.iter, f"_, {target} in {drawn}")
        if index in script.read_names:
            kept = f"{self.kept}." if index in {each.name for each in self.carried} else ""
            self._first_line(steps, depth, f"{kept}{index} = {self.loop}.batch_index{more}")

    def _bar_of(self, name: ast.Name) -> Any:
        """Return `tqdm(E)` of a variable that holds this alone, made in the epoch; None of any other."""
        script, steps, variable = self.script, self.steps, self.script.variable(name)
        values: list[Any] = script.values(variable)
        if steps is self.epochs or len(values) != 1 or called(values[0]) != "tqdm" or not values[0].args:
            return None
        reads = [e for e in script.names if isinstance(e.ctx, ast.Load) and script.is_of(e, variable)]
        methods = {getattr(script.parents[read], "attr", "") for read in reads if read is not name}
        # `len(bar)` would be another number after a resume
        same = all(script.nearest(values[0], k) is script.nearest(steps, k) for k in (LOOPS, ast.FunctionDef))
        return values[0] if same and methods <= _METHODS_OF_BARS else None
