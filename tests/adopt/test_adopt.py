"""`everstep adopt`: a plain script is put under a loop, trains as before, and survives a kill."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch

import warm
from everstep.cli.adopt_edits import Patch, patched
from everstep.cli.adopting import compare

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["functions", "lines", "meters", "one_loop", "rounds"]
COMMAND = [sys.executable, "-m", "everstep", "adopt"]


BEGIN = """import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(20, 4)
"""
LOOP = """for epoch in range(3):
    for row in x:
        loss = net(row).sum()
        loss.backward()
        optimizer.step()
"""
METER = """class Meter:
    def __init__(self, n=0):
        self.n = n

    def __call__(self, n):
        self.n += n


class Show:
    def show(self, n):
        print(n)


"""
DATA = """class Own(torch.utils.data.Dataset):
    def __init__(self):
        self.n = 0

    def __getitem__(self, i):
        item = [i]
        item[0] = 1
        return item


"""
DECO = """def deco(f):
    h = []
    def g(x):
        h.append(x)
        return f(x)
    return g
@deco
def f(x):
    return x
"""
MAKE = """def make():
    n = 0
    def g(x):
        nonlocal n
        n += x
    return g
f = make()
"""
RNG = "import itertools, random, torch, numpy as np\nrng = np.random.RandomState(0)\n"
COUNT = "def count(x=0):\n    global n\n    n += 1\n    return n\nn = 0\n"
CLASS = """class C:
    n, h = 0, []
    def __init__(self): self.k = 0
    def mean(self, x):
        self.k += x
        return self.k
    def make(x): return C()
"""
STEP, HEAD = " " * 8, " " * 4
TEXTS = {"LOOP": LOOP, "METER": METER, "DATA": DATA, "RNG": RNG, "COUNT": COUNT, "CLASS": CLASS}
TEXTS |= {"DECO": DECO, "MAKE": MAKE}


def rows(table: str) -> list[str]:
    """The rows of a table; a line that is indented goes on with the one above it."""
    return table.strip().replace("\n    ", " ").splitlines()


def plain(row: str) -> tuple[str, str]:
    """The plain loop with what a row puts into it, and the text of a module beside it.

    `n = 0 | step: n += 1 | in x: => in zip(x, x):` has a line above the loop, one in a step, and other data.
    The lines of `top` stand above the script, those of `call` below a loop that the line above it indents, as
    `def fit():` does.  A name of TEXTS that is a line stands for its text.
    """
    places = dict.fromkeys(("top", "before", "head", "step", "tail", "after", "call", "other"), "")
    changes = list[list[str]]()
    for part in row.encode().decode("unicode_escape").split(" | "):
        place, _, lines = part.partition(": ")
        if " => " in part:
            changes.append(part.split(" => "))
        elif place in places:
            places[place] += f"{lines}\n"
        else:
            places["before"] = f"{part}\n"
    for name, text in TEXTS.items():
        places = {
            k: re.sub(rf"^{name}\n", lambda _, text=text: text, v, flags=re.M) for k, v in places.items()
        }
    first, rest = LOOP.split("\n", 1)
    loop = f"{first}\n{indent(places['head'], HEAD)}{rest}{indent(places['step'], STEP)}"
    loop += indent(places["tail"], HEAD) + places["after"]
    loop = indent(loop, HEAD) + places["call"] if places["call"] else loop
    texts = [places["top"] + BEGIN + places["before"] + loop, places["other"]]
    for old, new in changes:
        texts = [text.replace(old, new) for text in texts]
    return texts[0], texts[1]


def expected(row: str) -> tuple[str, str]:
    """The script of a row, and what the row says of its patch after ` -> `."""
    text, _, entry = row.rpartition(" -> ")
    return plain(text)[0], entry.encode().decode("unicode_escape")


def text_of(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def ends(folder: Path, text: str, *hazards: str) -> list[object]:
    """Run a script under one hazard after another, in a folder; return what it saves at its end."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "averages.py", folder)
    (folder / "train.py").write_text(text)
    for hazard in hazards:
        done = warm.run(
            [sys.executable, "train.py"],
            cwd=folder,
            env=os.environ | ({"EVERSTEP_HAZARD": hazard} if hazard else {}),
            capture_output=True,
            text=True,
        )
        expected = {"S": 128 + signal.SIGTERM, "k": -signal.SIGKILL, "": 0}[hazard[:1]]
        assert done.returncode == expected, done.stderr
    return list(torch.load(folder / "end.pt"))


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_script_that_is_killed_ends_as_the_plain_one(tmp_path: Path, name: str) -> None:
    plain, patch = text_of(name), patched(text_of(name), "x", folder=SCRIPTS)
    assert not patch.refused
    # a place in each step at which a hazard can be armed
    armed = patch.text.replace("optimizer.zero_grad()", "optimizer.zero_grad(); hazard.reach('step')")
    armed = armed.replace("import everstep\n", "import everstep\nfrom everstep import hazard\n")
    expected = ends(tmp_path / "plain", plain, "")
    killed = ends(tmp_path / "killed", armed, "SIGTERM:step:9", "kill:step:4", "kill:loop.tail:1", "")
    assert expected[1:] == killed[1:]
    weights, again = expected[0], killed[0]
    assert isinstance(weights, dict) and isinstance(again, dict)
    assert all(torch.equal(value, again[key]) for key, value in weights.items())


def test_the_patch_is_small_and_keeps_the_text(tmp_path: Path) -> None:
    done = warm.run([*COMMAND, str(SCRIPTS / "functions.py")], cwd=tmp_path, capture_output=True, text=True)
    changed = [line for line in done.stdout.splitlines()[2:] if line.startswith(("+", "-"))]
    assert done.returncode == 0 and changed == (SCRIPTS / "functions.diff").read_text().splitlines()
    assert not done.stderr and "     # from 0" in done.stdout.splitlines()
    done = warm.run(
        [*COMMAND, "--by-epoch", str(SCRIPTS / "functions.py")], cwd=tmp_path, capture_output=True, text=True
    )
    assert "for _ in loop.iter_steps([epoch]):  # an epoch is one step" in done.stdout
    (tmp_path / "logged.py").write_text(plain("import mlflow | step: mlflow.log_metric('a', 1)")[0])
    done = warm.run([*COMMAND, "logged.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "note: after a kill some steps run again, and mlflow gets their values twice: take" in done.stderr


REFUSED = r"""
top: import everstep -> 1 this script uses everstep already: change its loop by hand
import os, accelerate -> 6 as in docs/recipes/huggingface.md#accelerate
tail: for row in x: net(row).sum().backward() -> 11 a second loop that trains in an epoch
torch.multiprocessing.spawn(f) -> 6 this starts several processes
def f():\n    n = 0\n    def g():\n        nonlocal n -> 9 use a dictionary
class C:\n    def f(self):\n        global n -> 8 a method assigns a global
top: from lib import k | range(3) => range(k, 9) -> 7 `k` is an argument or import
f = lambda x: 1 | step: f = lambda x: x | sum() => sum() * f(1)
    -> 6 `f` is a function, and a checkpoint has none
for epoch in range(3) => while True -> 6 use a Supervisor
(3) => (0, 9, 3) -> 6 without steps: `in range(n)`
tail: else:\n    pass -> 7 has an `else`: move these lines
tail: if loss < 0.1:\n    exit() -> 12 call loop.request_stop()
in x: => in zip(x, x): -> 7 zip() hides the place in its data
after: print(row) -> 7 `row` is a batch and is read after the loop
tail: net.load_state_dict(torch.load('best.pt')) -> 11 may read a file newer
tail: optimizer = torch.optim.SGD(net.parameters(), lr=epoch) -> 4 made anew
torch.manual_seed(0)\n => import os\n -> 6 nothing seeds them: give --seed 0
net.parameters() => [x] -> 4 the optimizer trains `x`
optimizer = torch => if 1: optimizer = torch -> 4 `optimizer` is made under an `if`: add an `else`
meter = Meter() | step: meter.add(loss) -> 6 `meter` may change unseen in the loop
head: old = [*net.parameters()] | sum() => sum() + old[0] -> 7 `old` is made of values that steps change
def fit(n): | call: fit(1)\nfit(2) -> 6 fit() trains, and this file calls it 2 times: call it once
import random | net(row) => net(row * random.random()) -> 7 nothing seeds them
torch.manual_seed(0) => # torch.manual_seed(0) -> 6 give --seed 0
import numpy as np | step: np.random.beta(1.0, 1.0) -> 7 give --seed 0
"""


@pytest.mark.parametrize("row", rows(REFUSED))
def test_what_no_patch_can_do_is_named_with_its_line(row: str) -> None:
    text, entry = expected(row)
    line, _, words = entry.partition(" ")
    patch = Patch(text, "x")
    assert not patch.text
    assert any(at == int(line) and words in reason for at, reason in patch.refused), patch.refused


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no loop here calls backward()"),
        ("import lightning as L\nL.Trainer().fit(net)\n", 1, "as in docs/recipes/lightning.md"),
        ("print(1)\nfrom transformers import Trainer\n", 2, "as in docs/coming-from/lightning-hf.md"),
        ("x = [1]\n" + LOOP.replace("        optimizer.step()\n", ""), 2, "no model or optimizer"),
    ],
)
def test_a_script_without_a_loop_or_a_model_is_refused(text: str, line: int, words: str) -> None:
    assert any(at == line and words in reason for at, reason in Patch(text, "x").refused)


STATE = r"""
head: pass -> {"net": net, "optimizer": optimizer}
n = 0 | step: n += 1 -> kept.n = 0
n = 0\ndef count():\n    global n\n    n += 1 | step: count() -> kept.n += 1
head: last = 0 | step: if loss > 3: last = 1 | tail: print(last) -> kept.last
tail: value = float(loss) | after: print(value) -> print(kept.value)
after: print(loss) -> loss.backward()\n            kept.loss = loss.detach()\n
after: print(loss) -> \nprint(kept.loss)\n
after: print(epoch) | range(3) => range(1, 4) -> for kept.epoch in loop.iter_epochs():\n
after: print(i) | row in x: => i, row in enumerate(x, 1): ->             kept.i = loop.batch_index + 1\n
tail: if loss > 9: break -> if loss > 9: loop.request_stop(); continue\n
top: METER | m = [Meter() for _ in x] | step: m[0](1) -> [vars(each) for each in m]
top: METER | m = Meter() | step: m(now() - 1) -> "optimizer": optimizer}
top: METER | def note(m):\n    m.write(1)\nm = Meter() | step: note(m) | self.n = n => self.n = open(n)
    | += n => += open(n) -> "optimizer": optimizer}
w = MyLogger() | step: w.write(1) -> "optimizer": optimizer}
def make():\n    return [], Own()\nh, o = make() | step: h.append(1) -> kept.h, o = make()
def make():\n    return 0\nn = make() | step: n += 1 -> kept.n = make()
h = {k: 1 for k in x} | step: h[0] += 1 -> kept.h[0] += 1
a = parse() | step: u = lib.grad(a, 1)[0]\nu[0] = 1 -> "optimizer": optimizer}
from lib import cal\ncriterion = cal | step: criterion(loss) -> {"net": net, "optimizer": optimizer}
h = [] | step: h.append(1) | tail: h = np.concatenate(h) -> kept.h = np.concatenate(kept.h)
e = [p.clone() for p in net.parameters()] | step: for a in e: a *= 0.9 -> in kept.e:
w = torch.zeros(9) | step: f = w.view(-1)\nf[0] = 1 -> kept.w.view
h = {} | step: r = h.get(1) or h[0]\nr.append(1) -> kept.h.get
h = {}\ndef f(k):\n    k.append(1) | step: f(h['a']) -> f(kept.h['a'])
h = []\ndef f(*k):\n    k[0].append(1) | step: f(h) -> f(h)
n = [0]\nnp.add.at(n, 0) | step: np.add.at(n, 1) -> np.add.at(kept.n, 1)
h = []\ndef hook(*a):\n    h.append(1)\nnet.register_forward_hook(hook) ->     kept.h.append(1)
h = [] | net = => class Net:\n    def f(self):\n        h.append(1)\nnet = ->         kept.h.append(1)
n = None\ntry:\n    pass\nfinally:\n    print(n) -> print(n)
top: METER | m = {'a': Meter(), 't': Meter()} | step: m['a'](1)\nm['t'](now()) -> "m": {key: vars(value)
top: class DINOLoss(torch.nn.Module):\n    pass | crit = DINOLoss() | step: crit(loss) -> "crit": crit
k = {}\nh = torch.load('a') | step: k[0] = h[0] -> kept.k[0] = h[0]
top: class D:\n  def __init__(self): self.a()\n  def a(self): self.n = 1\n  def get(self): return self.n
    | d = D() | step: d.get() -> "optimizer": optimizer}
nets = [net] | net.parameters() => [p for n in [net] for p in n.parameters()]
    -> {"net": net, "optimizer": optimizer}
best = {} | tail: best = copy.deepcopy(net.state_dict()) | after: print(best) -> kept.best
w = torch.FloatTensor(1).normal_() | step: w += 1\nw = Variable(w.cpu()) -> kept.w = Variable(kept.w.cpu())
c = torch.nn.HuberLoss() | step: c(loss) | tail: c.delta *= 2 -> "c": c
s = torch.optim.lr_scheduler.StepLR(optimizer, 1) if len(x) else None | tail: if s: s.step()
    -> "s": s if s is not None else {}
h = []\ndef f(k):\n    for a, n in k: a.append(n) | step: f([(h, 1)]) -> f([(kept.h, 1)])
h = []\ndef f(k):\n    k.append(1) | step: f(*[h]) -> f(*[kept.h])
top: METER | h, m = [], Show() | step: m.show(h) | print(n) => n.append(1) -> m.show(kept.h)
w = []\nw.append(SummaryWriter()) | step: w[0].add_scalar(loss) -> {"net": net, "optimizer": optimizer}
c = {'a': lambda x: x} | step: c['a'](1) -> {"net": net, "optimizer": optimizer}
t = lib.load() | step: print(t.norm(), t.view(1)) -> "optimizer": optimizer}
lr_sched = lib.get(optimizer) | tail: lib.update(lr_sched) -> "lr_sched": lr_sched
a = parse() | step: print(a.name.startswith('b')) -> "optimizer": optimizer}
s = lib.Sampler() | head: s.set_epoch(epoch) -> "optimizer": optimizer}
def say(str):\n    print(str) | step: say(str(1)) -> "optimizer": optimizer}
step: input = row.clone()\ninput[0] = 1 -> "optimizer": optimizer}
top: class Own(torch.utils.data.Dataset):\n    def get(self):\n        return 1 | h = {}\nh['a'] = Own()
    | step: h['a'].get() -> "optimizer": optimizer}
step: if len(row) is not 9: print(1) -> "optimizer": optimizer}
h = []\nif x.dim() > 9: h = lib.load() | step: h.append(1) -> kept.h.append(1)
s = SimpleNamespace(n=0) | step: s.n += 1 -> "s": vars(s)
top: METER | m = {k: Meter() for k in 'ab'} | step: m['a'](1) -> "m": {key: vars(value)
g = torch.Generator()\nl = DataLoader(x, generator=g) | tail: print(l) -> "g": g
r = np.random.RandomState(1) | in x: => in r.permutation(9): -> "r": r
n = 0\nimport os | step: n += 1
    -> SimpleNamespace()  # what goes from one step or epoch to the next\ntorch.manual
np.random.seed(1) | in x: => in np.random.permutation(9): -> iter_steps(list(np.random.permutation(9)))
b = {} | tail: b = {k: v.clone() for k, v in net.state_dict().items()} | after: print(b) -> print(kept.b)
criterion = lib.get() | step: criterion(loss) -> "criterion": criterion
top: METER | m = Meter(net) | step: m(1) -> "m": vars(m)}
top: METER | if x.any():\n    m = Meter() | step: m(1) ->     kept.m = vars(m)\n
top: METER | head: m = Meter() | step: m(1) ->         kept.m = vars(m)\n
top: METER | m = Show() | step: m.show(1) -> "optimizer": optimizer}
head: net = net.train().to('cpu') -> "optimizer": optimizer}
y = x.clone() | step: loss.view_as(y) -> "optimizer": optimizer}
a = parse() | net.parameters() => [{'params': net.parameters(), 'lr': a.lr}] -> "optimizer": optimizer}
h = OrderedDict() | step: h['n'] = 1 -> kept.h['n'] = 1
b, t = box(), torch.zeros(1) | step: t.copy_(b) -> kept.t.copy_(b)
h = []\ndef note(a, b):\n    a.append(b) | step: note(h, 1) -> note(kept.h, 1)
h = {'l': []} | step: l = h['l']\nl.append(1) -> l = kept.h['l']
e = [p.clone() for p in net.parameters()] | step: for a in e: a.mul_(0.9) -> in kept.e:
w = torch.zeros(20) | step: w[0] = 1 -> kept.w[0]
k = 2 | range(3) => range(k, 9) -> max_epoch=len(range(kept.k, 9))
k = 2 | range(3) => range(1, k + 1) -> max_epoch=k)
row in x => row, y in x -> for _, (row, y) in
n = 0 | step: try: n = 1\nexcept ValueError: print(n) -> kept.n = 1
n = [0]\ndef f(k):\n    n.append(k) or f(k) | step: f(2) -> kept.n.append
a = b = 0 | step: a = b\nb = a -> kept.b = a
o = list(range(9)) | head: torch.shuffle(o) | step: print(o) -> shuffle(kept.o)
r = 1 | head: print(r) | tail: r *= 0.5 -> kept.r *= 0.5
g = torch.Generator().manual_seed(1) | step: torch.rand(1, generator=g) -> "g": g
T = torch.DoubleTensor if len(x) > 9 else torch.Tensor | step: z = T(3) -> z = T(3)
s = SummaryWriter() if len(x) > 9 else None | step: s.add_scalar(loss) ->  s.add_scalar(loss)
plan = make(optimizer) | tail: plan.step() -> "plan": plan
h, n = [], 0 | step: h.append(n)\nn += 1 -> kept.h, kept.n = [], 0
a, (n, h) = 0, (0, []) | step: h.append(n) -> a, (n, kept.h) = 0, (0, [])
h = [] | step: a, n = h, 0\na.append(n) -> a, n = kept.h, 0
a = parse() | head: for g in optimizer.param_groups: g['lr'] = a.lr -> {"net": net, "optimizer": optimizer}
head: b = tqdm(x, ncols=9) | step: b.set_postfix(a=1) | in x: => in b:
    -> b = tqdm(loop.iter_steps(list(x)), ncols=9)\n        for _, row in b:\n
head: b = tqdm(enumerate(x)) | step: print(i) | row in x: => i, row in b:
    -> (loop.iter_steps(list(x)))\n        for _, row in b:\n            i = loop.batch_index\n
h, b = {}, [] | step: h['b'] = b\nh.get('b').append(1) -> kept.b
r = wandb.config.get('r') | head: for g in optimizer.param_groups: g['lr'] = r | tail: r *= 0.5
    -> kept.r *= 0.5
def start():\n    lib.spawn(f)\nif x.dim() > 9:\n    start() -> {"net": net, "optimizer": optimizer}
import os -> import os\nimport everstep\nwith everstep.TrainLoop(
r = wandb.init() | step: r.log(loss) ->             r.log(loss)\n
top: METER | m = Meter() | step: m.write(1) | self.n = n => self.n = open(n) | += n => += open(n)
    -> "optimizer": optimizer}
after: LOOP -> max_epoch=3) as loop:\n    for epoch in loop.iter_epochs():
n = 0\ntry: | tail: n = 1 | call: finally:\n    print(n) -> print(kept.n)
top: METER | m = Meter()\ndef fit():\n    n = Meter() | step: m(n(1)) | call: fit()
    -> "m": vars(m), "n": vars(n)}
head: pass | \x20\x20\x20\x20 => \t -> \n\t\tfor _, row in loop.iter_steps(list(x)):\n\t\t\tloss =
net = torch.nn.Linear(4, 1) => net, more = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    | net(row) => (net(row) + more(row)) -> "more": more
torch.manual_seed(0) => torch.random.manual_seed(0) -> "optimizer": optimizer}
import numpy as np | step: np.random.default_rng(np.random.SeedSequence(5)) -> "optimizer": optimizer}
import random | step: random.Random(5) -> "optimizer": optimizer}
top: class D:\n  a = 2\n  @property\n  def g(self): return self.a\n  def f(self, x, y=1): return self.g
    | d = D() | sum() => sum() * d.f(1) -> "optimizer": optimizer}
"""


@pytest.mark.parametrize("row", rows(STATE))
def test_what_goes_from_round_to_round_becomes_state(row: str) -> None:
    text, entry = expected(row)
    patch = Patch(text, "x")
    assert entry in patch.text and not patch.refused, patch.refused


HIDDEN = r"""
stop = Early() | tail: stop(loss)
args = parse() | tail: args.lr = args.lr / 2
batches = iter(x) | step: next(batches)
stop, n = Early(), 0 | tail: stop(loss)
a, *h = 0, Early() | step: h[0](loss)
step: net = Net().train()
top: METER | head: m = Meter(net) | step: m(1)
top: METER | m = Meter() or 1 | step: m(1)
top: METER | head: m = Meter(); n = 0 | step: m(1)
top: METER | head: m = Meter() | step: m(1) | after: print(m.n)
top: METER | m = Meter() | head: k = m.n | step: m(k)
top: METER | m = Meter() | step: m(1) | n=0 => n=print
top: METER | HISTORY, m = [], Meter() | step: m(1) | self.n += n => HISTORY.append(n)
top: METER | m = Meter() | step: m(1) | Meter: => Meter(Base):
top: METER | m = Meter() | step: m(1) |     def __init__ =>     h = []\n\n    def __init__
from elsewhere import Meter\nm = Meter() | step: m(1)
m = {'a': Early()} | step: m['a'](1)
step: loss *= 2 | after: print(loss)
b, h = Box(), {} | head: h['b'] = b | step: h['b'].add(1)
b = Box() | step: h = {}\nh['b'] = b\nh['b'] += 1
def f(k, h=[]):\n    h.append(k) | step: f(1)
h = [] | head: r = []\nh.append(r) | step: r.append(1)
top: METER | h = []\nh.append(Meter()) | step: h[0](1)
head: l = DataLoader(net(x)) | in x: => in l:
def make(n):\n    return n(x) | in x: => in make(net):
h = [1]\ndef order():\n    return [each for each in h] | step: h[0] = 2 | in x: => in order():
b = None | tail: b = net.state_dict().copy() | after: print(b)
b = {} | tail: b['a'] = net.state_dict() | after: print(b)
b = {} | tail: b = {'a': net.state_dict()} | after: print(b)
b = [] | tail: b.append(net.weight.data) | after: print(b)
b = {} | tail: b = {'a': float(1), 'w': net.state_dict()} | after: print(b)
top: METER | m = Meter() | step: m(1) | += n => = net.state_dict()
top: METER | m = defaultdict(Meter) | step: m[0](1)
top: METER | m = {'a': {'b': Meter()}} | step: m['a']['b'](1)
top: METER | m = dict(a=Meter()) | step: m['a'](1)
head: o = make(torch.optim.SGD(net.parameters(), lr=1))
x = zip(x, x)
def batches():\n    yield x | in x: => in batches():
head: t = []\nfor row in x: t.append(net(row)) | step: print(t)
n = 0 | head: if n < 9: k = 1\nelse: k = 2 | step: n += k
best = None | tail: best = net.state_dict() | after: print(best)
best = None | tail: best = copy.deepcopy(net) | after: print(best)
best = None | tail: best = Path('a') | after: print(best)
l = DataLoader(x) | tail: l.dataset.level += 1 | in x: => in l:
l = DataLoader(x) | tail: l = DataLoader(x, 2) | in x: => in l:
tail: optimizer.add_param_group({'params': []})
@lru_cache\ndef f(n):\n    return net(n) | step: f(1)
h = defaultdict(lambda: 0) | step: h[0] += 1
import queue\nq = queue.Queue() | step: print(q.get())
top: METER\nclass Log:\n    losses = [] | step: Log.losses.append(1)
top: METER | import numpy as np\nm = [Meter(np.mean)] | step: print(m[0].get(1)) | __call__ => get
class Stop:\n    def step(self, net):\n        self.best = copy.deepcopy(net)\ns = Stop()
    | tail: s.step(net)
b = RunningMean() | step: loss = b.norm(loss)
b = Box() | step: h = {}\nh['b'] = b\nh['b'].n[0] = 1
b = tqdm(x) | in x: => in b:
head: b = tqdm(x) | tail: print(len(b)) | in x: => in b:
head: b = tqdm(x) | step: print(b.n) | in x: => in b:
head: b = tqdm(x) if epoch else x | in x: => in b:
t = wandb.Table() | step: t.add_data(1)
h, n = both() | step: h.append(1)
o = {'a': optimizer} | step: o['a'].step()
class C:\n    n = 0 | step: C.n += 1
import lib | step: lib.n += 1
def f():\n    pass\ndef f():\n    pass | step: f()
n = 0 | step: print(n := n + 1)
top: METER | m = Meter() | step: if m.n: m(1) | self.n = n => self.n = open(n) | += n => += open(n)
top: class Data:\n    def get(self):\n        yield 1 | d = Data()\ndef f(d):
    | in x: => in d.get(): | call: f(d)
def fit(best=None): | step: best = best or loss | after: return best | call: fit()
top: class D:\n  def f(self, x, h=[]):\n    h.append(x)\n    return 1 / len(h)
    | d = D() | sum() => sum() * d.f(1)
top: class D:\n  @staticmethod\n  def f(x, h={}):\n    h['n'] = x\n    return 1.0
    | d = D() | sum() => sum() * d.f(1)
top: def deco(f): return f\nclass D:\n  @deco\n  def f(self, x): return 1.0
    | d = D() | sum() => sum() * d.f(1)
top: class D:\n  def __init__(self): self.c = iter(range(99))\n  def f(self, x): return max(self.c)
    | d = D() | sum() => sum() * d.f(1)
top: class D:\n  def __init__(self): self.c = itertools.count()\n  def f(self, x): return max(self.c)
    | d = D() | sum() => sum() * d.f(1)
top: CLASS\nclass D:\n  def __init__(self): self.c = [C()]\n  def f(self, x): return self.c[0].mean(x)
    | d = D() | sum() => sum() * d.f(1)
"""


@pytest.mark.parametrize(
    ("before", "seeds"),
    [
        (
            "import torch.nn as nn\nimport random as rnd\n",
            "rnd.seed(7)\nimport torch\ntorch.manual_seed(7)\n",
        ),
        ("from torch import nn, optim\n", "import torch\ntorch.manual_seed(7)\n"),
        ("import torch.nn\nfrom random import random\n", "import random as random_\nrandom_.seed(7)\ntorch."),
        ("import torch, mine\n", "import random\nrandom.seed(7)\nimport numpy\nnumpy.random.seed(7)\ntorch."),
    ],
)
def test_a_seed_is_set_whatever_the_script_has_imported(before: str, seeds: str) -> None:
    script = before + (BEGIN + LOOP).replace("import torch\ntorch.manual_seed(0)\n", "").replace(
        "torch.", "nn."
    )
    assert f"import everstep\n{seeds}" in Patch(script, "x", 7).text
    assert seeds in Patch(script, "x", 7).plain


def test_a_class_is_found_in_the_modules_beside_a_script(tmp_path: Path) -> None:
    for name, text in (
        ("tools/__init__.py", "from .meters import *\nfrom .old import *\n"),
        ("tools/meters.py", "from . import more\n" + METER),
        ("tools/old.py", "print 1\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for line, made in (
        ("from tools import *", "Meter()"),
        ("from tools import Meter as M", "M()"),
        ("from tools import meters as t", "t.Meter()"),
        ("import tools.meters", "tools.meters.Meter()"),
    ):
        text, _ = plain(f"{line}\\nm = {made} | step: m(1)")
        assert '"m": vars(m)}' in Patch(text, "x", folder=tmp_path).text, line
        assert Patch(text, "x").refused


BESIDE = r"""
import other | step: other.rng.random() | other: RNG
from other import rng as r | step: r.random() | other: RNG
from more import rng | step: rng.random() | other: print(1)
import more.sub as s | step: s.draw() | other: RNG
import other | step: torch.rand(1, generator=other.rng) | other: RNG | np.random.RandomState(0)
    => torch.Generator()
from other import * | step: next(rng) | other: RNG | np.random.RandomState(0) => itertools.count()
from other import draw | step: draw() | other: RNG\ndef draw():\n    return rng.random()
from other import draw | step: draw() | other: from more import rng\ndef draw():\n    return rng.random()
from other import draw | step: draw() | other: import more\ndef draw():\n    return more.sub.rng.random()
from other import count | step: count() | other: COUNT
import other | step: other.count() | other: COUNT
import other | step: other.n += 1 | other: COUNT
import other | step: other.h.append(1) | other: h = []
from other import h | step: a = h\na.append(1) | other: h = deque()
import other | step: other.f(1) | other: def f(x, h=[]):\n    h.append(x)
import other | step: other.f(1) | other: def f(x, *, h=dict()):\n    h[x] = x
import other | step: other.f() | other: def f():\n    f.n += 1\nf.n = 0
import other | step: other.f(1) | other: @lru_cache\ndef f(x):\n    return torch.rand(x)
import other | step: other.f(1) | other: DECO
import other | step: other.f(1) | other: MAKE
import other | step: other.f() | other: RNG\nf = rng.random
import other\nf = other.rng.random | step: f() | other: RNG
import other\na = other.h | step: a.append(1) | other: h = []
import other | step: other.f() | other: RNG\nf = lambda: rng.random()
import other | step: other.f() | other: RNG\ndef f(x=rng):\n    return x.random()
import other | step: torch.rand(1, generator=other.g)
    | other: def make():\n    return Generator()\ng = make()
import other | step: for a in other.g: break | other: g = (a for a in range(9))
import other | step: other.f(1) | other: class deco:\n    pass\n@deco\ndef f(x):\n    return x
import other | step: other.f(1) | other: DECO\nf = deco(f) | @deco\ndef f => def f
import other\nother.net.train() | step: other.net(row) | other: net = torch.nn.Linear(4, 1)
import other\nnet.register_forward_hook(other.count) | step: pass | other: COUNT
from other import Net\nmore = Net() | step: more(row)
    | other: COUNT\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x * count()
from other import C | step: C.n += 1 | other: CLASS
import other | step: other.C.h.append(1) | other: CLASS
from other import C | step: C.mean(1)
    | other: class C:\n    @staticmethod\n    def mean(x):\n        C.n += x
from other import C | step: C.mean(1) | other: CLASS | def mean(self => @classmethod\n    def mean(cls
    | self.k + => cls.k +
from other import C\nc = C() | step: c.mean(1) | other: CLASS | self.k + => self.__class__.n +
from other import C\nc = C() | step: c.mean(1) | other: CLASS | self.k + => type(self).n +
from other import c | step: c.mean(1) | other: CLASS\nc = C()
from other import C\nc = []\nc.append(C()) | step: c[0].mean(1) | other: CLASS
from other import C\nc = C.make(1) | step: c.mean(1) | other: CLASS
from other import D\nd = D() | step: d.c.mean(1)
    | other: CLASS\nclass D:\n    def __init__(self): self.c = C()
from other import D\nd = D() | step: d.get(1)
    | other: CLASS\nclass D:\n  def __init__(self): self.c = C()\n  def get(self, x): return self.c.mean(x)
"""


@pytest.mark.parametrize("row", rows(HIDDEN) + rows(BESIDE))
def test_what_may_be_kept_out_of_sight_or_in_a_module_beside_a_script_is_refused(
    tmp_path: Path, row: str
) -> None:
    """After a kill such programs ended with other weights, and nothing was said."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more/__init__.py").write_text("from .sub import rng\nfrom . import sub\n")
    (tmp_path / "more/sub.py").write_text(f"{RNG}def draw():\n    return rng.random()\n")
    text, other = plain(row)
    (tmp_path / "other.py").write_text(other)
    assert Patch(text, "x", folder=tmp_path).refused


HARMLESS = """import logging, random, re, time, torch, inflect
from torch import nn
logger, words = logging.getLogger(), re.compile("a")
engine, device, last = inflect.engine(), torch.device("cpu"), time.time()
COLORS, MODELS, MEAN = [1, 2], {"a": nn.Linear}, torch.zeros(3)
DEFAULT = [64, "M"]
def accuracy(output, target, topk=(1,)):
    rows = []
    for k in topk: rows.append(output.topk(k)[1].mean() - MEAN.to(device))
    return rows
def deco(f):
    def g(*a):
        return f(*a)
    return g
@deco
def bar(x):
    global last
    last = time.time()
    logger.info(x, COLORS.index(1), random.random())
class Data(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return words.match(engine.plural(i))
class Net(nn.Module):
    def __init__(self, layers=DEFAULT):
        super().__init__()
        layers.append(1)
        self.made = MODELS["a"](1, 1)
    def forward(self, x):
        return self.made(x)
"""


def test_a_module_beside_a_script_that_keeps_nothing_stands_in_no_way(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(HARMLESS)
    (tmp_path / "notes.py").write_text("def note(h, x):\n    h.append(x)\n")
    made = "from other import *\nimport notes\nmore, d, h = Net(), Data(), []"
    step = "more(row)\naccuracy(row, row)\nbar(1)\nd[0]\nnotes.note(h, 1)"
    patch = Patch(plain(f"{made} | step: {step}")[0], "x", folder=tmp_path)
    assert "notes.note(kept.h, 1)" in patch.text and not patch.refused, patch.refused


@pytest.mark.parametrize(
    ("tail", "is_refused"),
    [
        ("w = net.weight.detach(); h.append(w)", True),
        ("w = net.weight.data; h = w", True),
        ("h = net.weight.data, epoch", True),
        ("h.append((epoch, {'w': net.weight.data[0]}))", True),
        ("h.extend([net.weight.detach().view(-1).numpy()])", True),
        ("h += [p.data for p in net.parameters()]", True),
        ("for p in net.parameters(): h.insert(0, p)", True),
        ("for k, v in net.state_dict().items(): h.append(v)", True),
        ("s = net.state_dict(); h.append(s['weight'])", True),
        ("add(net.weight.data)", True),
        ("h[0].append(list(net.parameters()))", True),
        ("layer = net.fc; h.append(layer.weight.data)", True),
        ("h.append(net.get_input_embeddings().weight.data)", True),
        ("h = dict(w=net.state_dict(), o=copy.deepcopy(optimizer.state_dict()))", True),
        ("w = net.weight.detach().clone(); h.append((epoch, w))", False),
        ("h.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))", False),
        ("h.append(net(x).detach().numpy())", False),
        ("h += [float(p.norm()) for p in net.parameters()]", False),
        ("for p in net.parameters(): h.append(p.norm())", False),
        ("for g in optimizer.param_groups: h.append(g['lr'])", False),
    ],
)
def test_weights_are_known_by_other_names(tail: str, is_refused: bool) -> None:
    made = "h = []\ndef add(w):\n    h.append(w)"
    patch = Patch(plain(f"{made} | tail: {tail} | after: print(h)")[0], "x")
    assert any("has weights that change" in problem for _, problem in patch.refused) == is_refused, (
        patch.refused
    )


def test_parameters_whose_gradients_are_clipped_stay_as_they_are() -> None:
    made = "weights = [p for p in net.parameters() if p.requires_grad]"
    patch = Patch(plain(f"{made} | step: torch.nn.utils.clip_grad_norm_(weights, 0.1)")[0], "x")
    assert not patch.refused and "kept" not in patch.text


EPOCHS = r"""
top: DATA | d = Own() | in x: => in zip(x, x):
    -> for _ in loop.iter_steps([epoch]):  # an epoch is one step\n            for row in zip(x, x):\n
in x: => in zip(x, x): | range(3) => trange(3) -> max_epoch=3) as loop:\n    for epoch in loop.iter_epochs():
in x: => in zip(x, x): | range(3) => range(1, 4) | after: print(epoch)
    -> for kept.epoch in loop.iter_epochs():\n        for _ in loop.iter_steps([kept.epoch]):
g = torch.Generator() | in x: => in zip(x): -> "g": g
in x: => in zip(x, x): | tail: if epoch: break -> \x20           if epoch: loop.request_stop(); continue\n
top: METER | head: m = Meter() | step: m(1) | in x: => in zip(x, x): -> \x20           m = Meter()\n
"""


@pytest.mark.parametrize("row", rows(EPOCHS))
def test_an_epoch_is_a_step_if_its_steps_cannot_be(row: str) -> None:
    text, entry = expected(row)
    assert Patch(text, "x").refused and Patch(text, "x").is_nested
    patch = patched(text, "x")
    assert entry in patch.text and patch.in_the_way and "  # an epoch is one step\n" in patch.text


UNSAVED = r"""
top: DATA | d = Own() | item[0] => self.n -> Own changes as it is read
top: DATA | d = Own() | item[0] => self.n | (torch.utils.data.Dataset) => () -> Own changes
top: DATA | d = Own() | self.n = 0 => self.g = torch.Generator() -> Own changes as it is read
d = Load(persistent_workers=True) -> take out persistent_workers
d = Own(torch.Generator()) -> no name has this generator
top: def f():\n    g = torch.Generator() -> `g` is made out of sight of the loop
tail: optimizer = torch.optim.SGD(net.parameters(), lr=epoch) -> made anew
"""


@pytest.mark.parametrize("row", rows(UNSAVED))
def test_data_that_a_step_of_an_epoch_would_not_save_is_refused(row: str) -> None:
    text, problem = expected(f"in x: => in zip(x, x): | {row}")
    patch = Patch(text, "x", is_coarse=True)
    assert any(problem in reason for _, reason in patch.refused), patch.refused


def test_a_refused_script_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "odd.py").write_text("x = (\n")
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    for line, status, said in (
        ("train.py -o new.py", 1, "line 1: no loop here calls backward()"),
        ("train.py", 1, "train.py is not patched"),
        ("train.py --drill", 2, "give it a place: -o FILE"),
        ("train.py -o train.py", 2, "-o train.py: give a file that does not exist, in a folder"),
        ("train.py -o none/new.py", 2, "in a folder that exists"),
        ("odd.py", 2, "odd.py is not Python: line 1: '(' was never closed"),
        ("bytes.py", 2, "bytes.py is not Python: 'utf-8' codec"),
    ):
        done = warm.run([*COMMAND, *line.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status and said in done.stderr, done.stderr
    assert not (tmp_path / "new.py").exists()


def compared(folder: Path, now: str) -> str | None:
    """Compare `lines` with another form of it, in a folder; None if their updates are equal."""
    (folder / "plain.py").write_text(text_of("lines"))
    (folder / "now.py").write_text(now)
    with contextlib.chdir(folder):
        return compare(Path("plain.py"), Path("now.py"), [])


@pytest.mark.campaign("long")  # four starts that train: 31 s
def test_a_script_that_trains_differently_is_named(tmp_path: Path) -> None:
    now = text_of("lines").replace("0.99", "0.98").replace("range(1, 4)", "range(1, 3)")
    problem = "now.py trains differently: first in weights (weights) step 2"
    assert compared(tmp_path, now) == f"{problem}, and it makes 11 updates, and the script 17"


@pytest.mark.campaign("long")
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", None),
        ("0.99", "0.98", "now.py trains differently: first in weights (weights) step 2"),
        ("max_epoch=", "max_epoch=1 or ", "now.py trains differently: it makes 6 updates, and the script 17"),
        ("import torch\n", "import torch\nexit(3)\n", "now.py cannot be compared, as it ended with status 3"),
    ],
)
def test_a_patch_is_compared_with_its_script(old: str, new: str, problem: str | None, tmp_path: Path) -> None:
    text = Patch(text_of("lines"), "x").text
    assert old in text
    found = compared(tmp_path, text.replace(old, new) if old else text)
    assert found == problem or (problem and found and found.startswith(problem)), found


@pytest.mark.campaign("long")
def test_a_script_that_seeds_nothing_cannot_be_compared(tmp_path: Path) -> None:
    unseeded = text_of("lines").replace("torch.manual_seed(0)\n", "")
    (tmp_path / "plain.py").write_text(unseeded)
    with contextlib.chdir(tmp_path):
        problem = compare(Path("plain.py"), Path("plain.py"), [])
    assert problem is not None and problem.startswith("two runs of plain.py differ, so it cannot be compared")
    assert "a generator that is not seeded, the order of a set (of strings by PYTHONHASHSEED)" in problem
