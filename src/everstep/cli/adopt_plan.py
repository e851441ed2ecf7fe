"""Where a training script is changed so that it runs under a `TrainLoop` or a `Supervisor`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from everstep.cli.adopt_script import (
    Function,
    Loop,
    Script,
    calls,
    counted,
    dotted,
    last_name,
    parameters,
    within,
    without_bar,
)
from everstep.errors import ConfigError

Place = tuple[int, int]
"""Line from 1, column from 0."""
Steps = list[tuple[Loop, tuple[ast.Call, ...]]]
"""Loops whose rounds are steps, each with the calls on the way from the outer loop."""


def place(node: ast.stmt | ast.expr) -> Place:
    return node.lineno, node.col_offset


def key(scope: Function | None) -> Place | None:
    return None if scope is None else place(scope)


def _lists() -> defaultdict[Place, list[str]]:
    return defaultdict(list)


@dataclass
class Plan:
    """Edits of a script by place; statements are source text.

    Attributes:
        before, after: statements beside a statement; first, last: statements in the body of a loop.
        headers: the new first line of a loop.
        around: blocks that a statement goes into, at the place of their `...`.
        instead: a statement in place of another.
        parameters, arguments: names that a function gets, and a call gives.
        renamed: function (None: the module) -> local name -> line from which it is an entry of `carried`.
        by_hand: line and words of what is left to a person.
    """

    before: defaultdict[Place, list[str]] = field(default_factory=_lists)
    after: defaultdict[Place, list[str]] = field(default_factory=_lists)
    first: defaultdict[Place, list[str]] = field(default_factory=_lists)
    last: defaultdict[Place, list[str]] = field(default_factory=_lists)
    headers: dict[Place, str] = field(default_factory=dict)
    around: dict[Place, str] = field(default_factory=dict)
    instead: dict[Place, str] = field(default_factory=dict)
    parameters: dict[Place, list[str]] = field(default_factory=dict)
    arguments: dict[Place, list[str]] = field(default_factory=dict)
    renamed: dict[Place | None, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    by_hand: list[tuple[int, str]] = field(default_factory=list)


class Planner:
    """Plans the edits of a script, of which nothing is executed.

    Raises:
        ConfigError: no loop was found that can be put under everstep, or several were.
    """

    def __init__(self, text: str, stem: str) -> None:
        self.script = script = Script(ast.parse(text))
        if "everstep" in script.names:
            raise ConfigError("the script uses everstep already; try it: everstep drill SCRIPT")
        if "carried" in script.names:
            raise ConfigError("the script has a variable `carried`, which adopt needs; rename it")
        if len(script.outermost) != 1:
            lines = ", ".join(str(loop.lineno) for loop in script.outermost)
            what = f"the loops in lines {lines} train one by one" if lines else "no loop calls backward()"
            raise ConfigError(f"{what}; wrap yours by hand, as in docs/guide/doors.md")
        self.root = root = script.outermost[0]
        self.scope, self.plan, numbers = script.scope(root), Plan(), counted(root)
        steps = [each for each in script.inner(root) if script.updates(each[0]) or not script.updates(root)]
        if isinstance(root, ast.For) and numbers is None:
            if steps:
                raise ConfigError(
                    f"line {root.lineno}: the loop over {ast.unparse(root.iter)} trains in loops inside it; "
                    "wrap one of these by hand"
                )
            steps = [(root, ())]  # a single pass over data
        elif numbers is None or not all(isinstance(loop, ast.For) for loop, _ in steps):
            steps = []
        self.loop = "loop" if steps else "sv"
        while self.loop in script.names:
            self.loop += "_"
        for loop in [root, *(loop for loop, _ in steps)]:
            self._carry(loop)
        if numbers and steps:
            self._epochs(root, numbers[0])
        elif not steps:
            self._rounds(root, numbers)
        for number, (loop, way) in enumerate(steps):
            if place(loop) not in self.plan.headers:
                self._steps(loop, number)
            else:
                self._hand(
                    way[0].lineno, "a second loop over these lines in an epoch; it reads the same stream"
                )
            self._hand_on(way)
        if steps:
            self._evaluations(steps)
        self._open(numbers, bool(steps), stem)
        self._unmoved()

    def _hand(self, line: int, words: str) -> None:
        self.plan.by_hand.append((line, words))

    def _epochs(self, root: Loop, start: str) -> None:
        name = ast.unparse(root.target) if isinstance(root, ast.For) else "_"
        self.plan.headers[place(root)] = f"for {name} in {self.loop}.iter_epochs():"
        if start != "1" and name != "_":
            shift = "-= 1" if start == "0" else f"+= {start} - 1"
            self.plan.first[place(root)].append(f"{name} {shift}  # iter_epochs() counts from 1")
        for node in _own(root.body):
            if isinstance(node, ast.Break):
                self.plan.before[place(node)].append(
                    f'{self.loop}.request_stop("break in line {node.lineno}")'
                )
                self.plan.instead[place(node)] = "continue"
            elif isinstance(node, ast.Return):
                self._hand(
                    node.lineno, f"`return` leaves the loop; call {self.loop}.request_stop() before it"
                )

    def _rounds(self, root: Loop, numbers: tuple[str, str | None] | None) -> None:
        """Make each round of the loop a step of a Supervisor."""
        name = ast.unparse(root.target) if isinstance(root, ast.For) else "_"
        test = (
            ""
            if isinstance(root, ast.For) or ast.unparse(root.test) in ("True", "1")
            else ast.unparse(root.test)
        )
        for carried in self.plan.renamed[key(self.scope)]:
            test = re.sub(rf"(?<![.\w]){carried}\b", f'carried["{carried}"]', test)
        more = f" and ({test})" if test else ""
        self.plan.headers[place(root)] = f"while not {self.loop}.should_stop(){more}:"
        if numbers and name != "_":
            plus = "" if numbers[0] == "0" else f" + {numbers[0]}"
            self.plan.first[place(root)].append(f"{name} = {self.loop}.step{plus}")
        losses = ", ".join(f"{each}={each}" for each, _ in self._losses(root, defined_after=True))
        self.plan.last[place(root)].append(f"{self.loop}.advance({losses})")
        for node in _own(root.body):
            if isinstance(node, ast.Break | ast.Continue):
                self.plan.before[place(node)].append(f"{self.loop}.advance()")
            if isinstance(node, ast.Break):
                self.plan.before[place(node)].append(
                    f'{self.loop}.request_stop("break in line {node.lineno}")'
                )
        if drawn := [each for each in calls(root.body) if last_name(each) == "next"]:
            self._hand(
                drawn[0].lineno, f"the place in this data is not saved; draw from {self.loop}.stream(data)"
            )

    def _steps(self, loop: Loop, number: int) -> None:
        assert isinstance(loop, ast.For)
        target, data, index = loop.target, without_bar(loop.iter), ""
        if last_name(data) == "enumerate" and isinstance(data, ast.Call) and isinstance(target, ast.Tuple):
            index, target = ast.unparse(target.elts[0]), target.elts[1]
            start = ast.unparse(data.args[1]) if len(data.args) > 1 else "0"
            if index != "_":
                self.plan.first[place(loop)].append(
                    f"{index} = {self.loop}.batch_index" + f" + {start}" * (start != "0")
                )
            data = without_bar(data.args[0])
        step = "step" if "step" not in self.script.names else "_"
        name = f', name="train{number + 1}"' if number else ""
        batch = (
            f"({ast.unparse(target).strip('()')})" if isinstance(target, ast.Tuple) else ast.unparse(target)
        )
        self.plan.headers[place(loop)] = (
            f"for {step}, {batch} in {self.loop}.iter_steps({ast.unparse(data)}{name}):"
        )
        for loss, statement in self._losses(loop):
            self.plan.after[place(statement)].append(f"{self.loop}.collect_metrics({loss}={loss})")

    def _hand_on(self, way: tuple[ast.Call, ...]) -> None:
        """Give the loop, and what it carries, to the functions on the way to the steps."""
        for call in way:
            function = self.script.called(call)
            assert function is not None
            names = [self.loop] + ["carried"] * (place(function) in self.plan.renamed)
            self.plan.parameters[place(function)] = names
            self.plan.arguments[place(call)] = [f"{each}={each}" for each in names]
            for other in self.script.calls_of(function):
                if place(other) not in self.plan.arguments:
                    self._hand(
                        other.lineno, f"{function.name}() is called here, too, and now needs {self.loop}="
                    )

    def _losses(self, loop: Loop, defined_after: bool = False) -> Iterator[tuple[str, ast.stmt]]:
        """Yield names whose `backward()` is called in a loop, and the statement that calls it."""
        for node in loop.body if defined_after else within(loop.body):
            for call in calls([node]) if isinstance(node, ast.Expr) else ():
                name, _, method = dotted(call.func).rpartition(".")
                if method == "backward" and name.isidentifier() and isinstance(node, ast.stmt):
                    yield name, node

    def _carry(self, loop: Loop) -> None:
        """Make the variables that go from one round of a loop to the next entries of `carried`."""
        scope, end = self.script.scope(loop), loop.end_lineno or loop.lineno
        values = {name: each for (home, name), each in self.script.values.items() if home is scope}
        names = _carried(loop) | {
            dotted(call.func.value)
            for call in calls(loop.body)
            if isinstance(call.func, ast.Attribute)
            and last_name(call) in ("append", "extend", "add", "update")
        }
        for name in sorted(names & {*values}):
            outside = [(line, value) for line, value in values[name] if not loop.lineno <= line <= end]
            made = [last_name(value) for _, value in outside if isinstance(value, ast.Call)]
            is_clock = any(each in ("time", "perf_counter", "now") for each in made)
            if is_clock or self.script.kind(name, scope) or not outside:
                continue
            is_object = any(each[:1].isupper() or each in ("iter", "tqdm") for each in made)
            if is_object or name in self.script.shared or name in {each.arg for each in parameters(scope)}:
                self._hand(
                    outside[0][0],
                    f"`{name}` changes with each round; put it into state= if training reads it",
                )
            else:
                start = self.root.lineno if scope is self.scope else 1
                self.plan.renamed[key(scope)].setdefault(name, start)
                for function in self.script.functions:
                    if scope is not None and scope not in self.script.above(function):
                        continue
                    bound = {each.arg for each in parameters(function)}
                    read = {each.id for each in within(function.body) if isinstance(each, ast.Name)}
                    if name in read - bound and (function, name) not in self.script.values:
                        self.plan.renamed[key(function)][name] = 1  # it reads that of the scope around it

    def _evaluations(self, steps: Steps) -> None:
        loops = [loop for loop, _ in steps]
        bodies = [self.root.body]
        bodies += [f.body for _, way in steps for call in way if (f := self.script.called(call)) is not None]
        for node in (node for body in bodies for node in within(body)):
            in_steps = any(each in loops for each in self.script.above(node))
            evaluates = isinstance(node, ast.Expr | ast.Assign) and any(
                self.script.evaluates(call, in_steps) for call in calls([node])
            )
            if evaluates or (isinstance(node, ast.With) and not in_steps and _only_computes(node)):
                assert isinstance(node, ast.stmt)
                self.plan.around[place(node)] = f"with {self.loop}.evaluation():\n    ...\n"

    def _unmoved(self) -> None:
        """Name what stays as it is, and what a resume does not bring back."""
        end = self.root.end_lineno or 0
        inside = {
            n.id for n in within([self.root]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        for node in within(self.script.body(self.scope)):
            if isinstance(node, ast.Name) and node.lineno > end and node.id in inside:
                values = self.script.values.get((self.scope, node.id), [(0, None)])
                if (
                    node.id not in self.plan.renamed[key(self.scope)]
                    and not 0 < values[0][0] < self.root.lineno
                ):
                    words = f"`{node.id}` has no value here when a finished run is started again"
                    self._hand(node.lineno, words)
        for call in (each for each in ast.walk(self.script.tree) if isinstance(each, ast.Call)):
            if dotted(call.func) == "torch.save":
                self._hand(
                    call.lineno, "torch.save(...) stays; the run's own checkpoints are in its directory"
                )
            elif last_name(call) in ("spawn", "init_process_group"):
                self._hand(
                    call.lineno, "several processes: everstep joins torchrun's; see docs/guide/processes.md"
                )

    def _open(self, numbers: tuple[str, str | None] | None, has_steps: bool, stem: str) -> None:
        """Open the loop: the state, the limit, the seed and the configuration."""
        script, root, scope = self.script, self.root, self.scope
        homes = {scope, None, script.class_of(scope)}
        before = {
            name: (home, values)
            for (home, name), values in script.values.items()
            if name and home in homes and (home is not scope or values[0][0] < root.lineno)
        }
        visible = [*before, *(each.arg for each in parameters(scope))]
        kinds = {name: script.kind(name, scope) for name in visible}
        alias = {name for name, (_, values) in before.items() if dotted(values[0][1]) in kinds}
        order = ("model", "optimizer", "scheduler", "scaler")
        state = [name for kind in order for name in kinds if kinds[name] == kind and name not in alias]
        if not any(kinds[name] == "model" for name in state):
            raise ConfigError(
                f"line {root.lineno}: the model that this loop trains was not found; wrap it by hand"
            )
        entries = [f'"{name.rpartition(".")[2]}": {name}' for name in state]
        if any(self.plan.renamed.values()):
            entries.append('"carried": carried')
            kept = [name for name in self.plan.renamed[key(scope)] if name in before]
            first = ", ".join(f'"{name}": {name}' for name in kept)
            self.plan.before[place(root)].append(f"carried = {{{first}}}")
        arguments = [f'"runs/{stem}"', f"{{{', '.join(entries)}}}"]
        if has_steps:
            end = _limit(*numbers) if numbers else "1"
            arguments += [f"max_epoch={end}"] * (end is not None)
        elif numbers and (end := _limit(*numbers)):
            arguments.append(f"max_step={end}")
        seeds = [each for each in ast.walk(script.tree) if last_name(each) in ("manual_seed", "set_seed")]
        seed = ast.unparse(seeds[0].args[0]) if seeds and isinstance(seeds[0], ast.Call) else ""
        if seed.isdigit() or seed.partition(".")[0] in visible:
            arguments.append(f"seed={seed}")
        elif not seed:
            self._hand(1, "nothing is seeded; call torch.manual_seed(...) before the model is made")
        parsed = {n for (_, n), values in script.values.items() if last_name(values[0][1]) == "parse_args"}
        parsed &= {*visible}
        if parsed:
            arguments.append(f"config=vars({min(parsed)})")
        kind = "TrainLoop" if has_steps else "Supervisor"
        header = f"with everstep.{kind}({', '.join(arguments)}) as {self.loop}:"
        if len(header) + root.col_offset > 99:
            lines = "".join(f"    {argument},\n" for argument in arguments)
            header = f"with everstep.{kind}(\n{lines}) as {self.loop}:"
        inside = (
            f"    for _ in {self.loop}.iter_epochs():\n        ...\n"
            if has_steps and not numbers
            else "    ...\n"
        )
        if not has_steps:
            inside = f"    {self.loop}.stream(None)\n" + inside
        self.plan.around[place(root)] = f"{header}\n{inside}"


def _limit(start: str, end: str | None) -> str | None:
    """Return how many numbers range(start, end) has, as source."""
    if end is None or start == "0":
        return end
    return end.removesuffix(" + 1") if start == "1" and end.endswith(" + 1") else f"{end} - {start}"


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield what is in a loop's body, but not in loops and functions inside it."""
    for node in body:
        yield node
        if not isinstance(node, Loop | Function):
            yield from _own(ast.iter_child_nodes(node))


def _only_computes(node: ast.With) -> bool:
    """Whether a block without gradients computes something, and changes nothing in place."""
    if not any(last_name(item.context_expr) in ("no_grad", "inference_mode") for item in node.items):
        return False
    names = [last_name(call) for call in calls(node.body)]
    return bool(names) and not any(name.endswith("_") or name == "step" for name in names)


def _carried(loop: Loop) -> set[str]:
    """Return names that a round of a loop may read before it assigns them, and that it assigns."""
    early: set[str] = set()

    def note(nodes: Iterable[ast.AST | None], sure: set[str]) -> None:
        names = [each for each in within(node for node in nodes if node) if isinstance(each, ast.Name)]
        early.update({each.id for each in names if isinstance(each.ctx, ast.Load)} - sure)

    def flow(body: list[ast.stmt], sure: set[str]) -> set[str]:
        for node in body:
            if isinstance(node, ast.If):
                note([node.test], sure)
                sure = flow(node.body, {*sure}) & flow(node.orelse, {*sure})
            elif isinstance(node, ast.For | ast.While):
                note([node.iter if isinstance(node, ast.For) else node.test], sure)
                inside = (
                    {each.id for each in within([node.target]) if isinstance(each, ast.Name)}
                    if isinstance(node, ast.For)
                    else set()
                )
                flow(node.body, sure | inside)
            elif isinstance(node, ast.With):
                note([item.context_expr for item in node.items], sure)
                sure = flow(node.body, sure)
            elif isinstance(node, ast.Try):
                sure = flow(node.body, sure)
                for handler in node.handlers:
                    flow(handler.body, {*sure})
                sure = flow(node.finalbody, sure)
            elif isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Raise):
                note([node], sure)
                return sure | assigned
            elif not isinstance(node, Function):
                if isinstance(node, ast.AugAssign):
                    early.update({dotted(node.target)} - sure)
                note([node], sure)
                sure = sure | stored([node])
        return sure

    def stored(nodes: Iterable[ast.AST]) -> set[str]:
        names = (each for each in within(nodes) if isinstance(each, ast.Name))
        return {each.id for each in names if isinstance(each.ctx, ast.Store)}

    assigned = stored(loop.body)
    flow(loop.body, stored([loop.target]) if isinstance(loop, ast.For) else set())
    return early & assigned
