"""`everstep adopt`: a plain script is put under a loop, trains as before, and survives a kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import warm
from everstep.cli.adopting import Patch, compare, patched

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["functions", "lines", "meters", "one_loop", "rounds"]
COMMAND = [sys.executable, "-m", "everstep", "adopt"]


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
    (tmp_path / "logged.py").write_text(around("import mlflow\n", step=STEP + "mlflow.log_metric('a', 1)\n"))
    done = warm.run([*COMMAND, "logged.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "note: after a kill some steps run again, and mlflow gets their values twice: take" in done.stderr


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


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no loop here calls backward()"),
        ("import everstep\n" + LOOP, 1, "by hand"),
        (BEGIN + "import os, accelerate\n" + LOOP, 6, "as in docs/recipes/huggingface.md#accelerate"),
        ("import lightning as L\nL.Trainer().fit(net)\n", 1, "as in docs/recipes/lightning.md"),
        ("print(1)\nfrom transformers import Trainer\n", 2, "as in docs/coming-from/lightning-hf.md"),
        (BEGIN + LOOP + LOOP.partition("\n")[2], 11, "a second loop that trains in an epoch"),
        (BEGIN + "torch.multiprocessing.spawn(f)\n" + LOOP, 6, "this starts several processes"),
        (BEGIN + "def f():\n    n = 0\n    def g():\n        nonlocal n\n" + LOOP, 9, "use a dictionary"),
        (BEGIN + "class C:\n    def f(self):\n        global n\n" + LOOP, 8, "a method assigns a global"),
        ("x = [1]\n" + LOOP.replace("        optimizer.step()\n", ""), 2, "no model or optimizer"),
        (
            "from lib import k\n" + BEGIN + LOOP.replace("range(3)", "range(k, 9)"),
            7,
            "`k` is an argument or import",
        ),
        (
            BEGIN + "f = lambda x: 1\n" + LOOP.replace("sum()", "sum() * f(1)") + "        f = lambda x: x\n",
            6,
            "`f` is a function, and a checkpoint has none",
        ),
        (BEGIN + LOOP.replace("for epoch in range(3)", "while True"), 6, "use a Supervisor"),
        (BEGIN + LOOP.replace("(3)", "(0, 9, 3)"), 6, "without steps: `in range(n)`"),
        (BEGIN + LOOP + "    else:\n        pass\n", 7, "has an `else`: move these lines"),
        (BEGIN + LOOP + "    if loss < 0.1:\n        exit()\n", 12, "call loop.request_stop()"),
        (BEGIN + LOOP.replace("in x:", "in zip(x, x):"), 7, "zip() hides the place in its data"),
        (BEGIN + LOOP + "print(row)\n", 7, "`row` is a batch and is read after the loop"),
        (BEGIN + LOOP + "    net.load_state_dict(torch.load('best.pt'))\n", 11, "may read a file newer"),
        (BEGIN + LOOP + "    optimizer = torch.optim.SGD(net.parameters(), lr=epoch)\n", 4, "made anew"),
        (BEGIN.replace("torch.manual_seed(0)\n", "") + LOOP, 5, "nothing seeds them: give --seed 0"),
        (BEGIN.replace("net.parameters()", "[x]") + LOOP, 4, "the optimizer trains `x`"),
        (
            BEGIN.replace("optim", "if 1: optim", 1) + LOOP,
            4,
            "`optimizer` is made under an `if`: add an `else`",
        ),
        (
            BEGIN + "meter = Meter()\n" + LOOP + "        meter.add(loss)\n",
            6,
            "`meter` may change unseen in the loop",
        ),
        (
            BEGIN
            + LOOP.replace("    for", "    old = [*net.parameters()]\n    for").replace(
                "sum()", "sum() + old[0]"
            ),
            7,
            "`old` is made of values that steps change",
        ),
        (
            BEGIN
            + "def fit(n):\n"
            + "".join(f"    {each}\n" for each in LOOP.splitlines())
            + "fit(1)\nfit(2)\n",
            6,
            "fit() trains, and this file calls it 2 times: call it once",
        ),
        (
            BEGIN + "import random\n" + LOOP.replace("net(row)", "net(row * random.random())"),
            7,
            "nothing seeds them",
        ),
    ],
)
def test_what_no_patch_can_do_is_named_with_its_line(text: str, line: int, words: str) -> None:
    patch = Patch(text, "x")
    assert not patch.text
    assert any(at == line and words in reason for at, reason in patch.refused), patch.refused


LOOP_OF_TABS = BEGIN + LOOP.replace("    ", "\t")
STEP, HEAD, TAIL = "        ", "    ", "    "


METER = """class Meter:
    def __init__(self, n=0):
        self.n = n

    def __call__(self, n):
        self.n += n


class Show:
    def show(self, n):
        print(n)


"""


def around(before: str = "", head: str = "", step: str = "", tail: str = "", after: str = "") -> str:
    """The plain loop with lines before it, in an epoch's head, in a step, in a tail, and after it."""
    first, rest = LOOP.split("\n", 1)
    return f"{BEGIN}{before}{first}\n{head}{rest}{step}{tail}{after}"


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        (around(), '{"net": net, "optimizer": optimizer}'),
        (around("n = 0\n", step=STEP + "n += 1\n"), "kept.n = 0"),
        (around("n = 0\ndef count():\n    global n\n    n += 1\n", step=STEP + "count()\n"), "kept.n += 1"),
        (
            around(
                head=HEAD + "last = 0\n", step=STEP + "if loss > 3: last = 1\n", tail=TAIL + "print(last)\n"
            ),
            "kept.last",
        ),
        (around(tail=TAIL + "value = float(loss)\n", after="print(value)\n"), "print(kept.value)"),
        (around(after="print(loss)\n"), "loss.backward()\n            kept.loss = loss.detach()\n"),
        (around(after="print(loss)\n"), "\nprint(kept.loss)\n"),
        (
            around(after="print(epoch)\n").replace("range(3)", "range(1, 4)"),
            "for kept.epoch in loop.iter_epochs():\n",
        ),
        (
            around(after="print(i)\n").replace("row in x:", "i, row in enumerate(x, 1):"),
            "            kept.i = loop.batch_index + 1\n",
        ),
        (around(tail=TAIL + "if loss > 9: break\n"), "if loss > 9: loop.request_stop(); continue\n"),
        (METER + around("m = [Meter() for _ in x]\n", step=STEP + "m[0](1)\n"), "[vars(each) for each in m]"),
        (METER + around("m = Meter()\n", step=STEP + "m(now() - 1)\n"), '"optimizer": optimizer}'),
        (
            METER.replace("= n", "= open(n)") + around("m = Meter()\n", step=STEP + "m.write(1)\n"),
            '"optimizer": optimizer}',
        ),
        (
            around("def note(m):\n    m.write(1)\nm = Own()\n", step=STEP + "note(m)\n").replace(
                "import torch\n", "import torch\n" + METER.replace("= n", "= open(n)").replace("Meter", "Own")
            ),
            '"optimizer": optimizer}',
        ),
        (around("w = MyLogger()\n", step=STEP + "w.write(1)\n"), '"optimizer": optimizer}'),
        (
            around("def make():\n    return [], Own()\nh, o = make()\n", step=STEP + "h.append(1)\n"),
            "kept.h, o = make()",
        ),
        (around("def make():\n    return 0\nn = make()\n", step=STEP + "n += 1\n"), "kept.n = make()"),
        (around("h = {k: 1 for k in x}\n", step=STEP + "h[0] += 1\n"), "kept.h[0] += 1"),
        (
            around("a = parse()\n", step=STEP + "u = lib.grad(a, 1)[0]\n" + STEP + "u[0] = 1\n"),
            '"optimizer": optimizer}',
        ),
        (
            around("from lib import cal\ncriterion = cal\n", step=STEP + "criterion(loss)\n"),
            '{"net": net, "optimizer": optimizer}',
        ),
        (
            around("h = []\n", step=STEP + "h.append(1)\n", tail=TAIL + "h = np.concatenate(h)\n"),
            "kept.h = np.concatenate(kept.h)",
        ),
        (BEGIN + LOOP + LOOP, "max_epoch=3) as loop:\n    for epoch in loop.iter_epochs():"),
        (
            around("e = [p.clone() for p in net.parameters()]\n", step=STEP + "for a in e: a *= 0.9\n"),
            "in kept.e:",
        ),
        (around("w = torch.zeros(9)\n", step=STEP + "f = w.view(-1)\n" + STEP + "f[0] = 1\n"), "kept.w.view"),
        (around("h = {}\n", step=STEP + "r = h.get(1) or h[0]\n" + STEP + "r.append(1)\n"), "kept.h.get"),
        (around("h = {}\ndef f(k):\n    k.append(1)\n", step=STEP + "f(h['a'])\n"), "f(kept.h['a'])"),
        (around("h = []\ndef f(*k):\n    k[0].append(1)\n", step=STEP + "f(h)\n"), "f(h)"),
        (around("n = [0]\nnp.add.at(n, 0)\n", step=STEP + "np.add.at(n, 1)\n"), "np.add.at(kept.n, 1)"),
        (
            around("h = []\ndef hook(*a):\n    h.append(1)\nnet.register_forward_hook(hook)\n"),
            "    kept.h.append(1)",
        ),
        (
            around("h = []\n").replace("net =", "class Net:\n    def f(self):\n        h.append(1)\nnet ="),
            "        kept.h.append(1)",
        ),
        (around("n = None\ntry:\n    pass\nfinally:\n    print(n)\n"), "print(n)"),
        (
            "try:\n"
            + "".join(f"    {e}\n" for e in around("n = 0\n", tail=TAIL + "n = 1\n").splitlines())
            + "finally:\n    print(n)\n",
            "print(kept.n)",
        ),
        (
            METER
            + around(
                "m = {'a': Meter(), 't': Meter()}\n", step=STEP + "m['a'](1)\n" + STEP + "m['t'](now())\n"
            ),
            '"m": {key: vars(value)',
        ),
        (
            "class DINOLoss(torch.nn.Module):\n    pass\n"
            + around("crit = DINOLoss()\n", step=STEP + "crit(loss)\n"),
            '"crit": crit',
        ),
        (around("k = {}\nh = torch.load('a')\n", step=STEP + "k[0] = h[0]\n"), "kept.k[0] = h[0]"),
        (
            """class Data:
    def __init__(self):
        self.split()

    def split(self):
        self.n = 1

    def batches(self):
        return [self.n]


"""
            + around("d = Data()\n", step=STEP + "d.batches()\n"),
            '"optimizer": optimizer}',
        ),
        (
            around("nets = [net]\n").replace(
                "net.parameters()", "[p for n in [net] for p in n.parameters()]"
            ),
            '{"net": net, "optimizer": optimizer}',
        ),
        (
            around(
                "best = {}\n", tail=TAIL + "best = copy.deepcopy(net.state_dict())\n", after="print(best)\n"
            ),
            "kept.best",
        ),
        (
            around(
                "w = torch.FloatTensor(1).normal_()\n",
                step=STEP + "w += 1\n" + STEP + "w = Variable(w.cpu())\n",
            ),
            "kept.w = Variable(kept.w.cpu())",
        ),
        (
            around("c = torch.nn.HuberLoss()\n", step=STEP + "c(loss)\n", tail=TAIL + "c.delta *= 2\n"),
            '"c": c',
        ),
        (
            around(
                "s = torch.optim.lr_scheduler.StepLR(optimizer, 1) if len(x) else None\n",
                tail=TAIL + "if s: s.step()\n",
            ),
            '"s": s if s is not None else {}',
        ),
        (
            around("h = []\ndef f(k):\n    for a, n in k: a.append(n)\n", step=STEP + "f([(h, 1)])\n"),
            "f([(kept.h, 1)])",
        ),
        (around("h = []\ndef f(k):\n    k.append(1)\n", step=STEP + "f(*[h])\n"), "f(*[kept.h])"),
        (
            METER.replace("print(n)", "n.append(1)")
            + around("h, m = [], Show()\n", step=STEP + "m.show(h)\n"),
            "m.show(kept.h)",
        ),
        (
            around("w = []\nw.append(SummaryWriter())\n", step=STEP + "w[0].add_scalar(loss)\n"),
            '{"net": net, "optimizer": optimizer}',
        ),
        (
            around("c = {'a': lambda x: x}\n", step=STEP + "c['a'](1)\n"),
            '{"net": net, "optimizer": optimizer}',
        ),
        (around("t = lib.load()\n", step=STEP + "print(t.norm(), t.view(1))\n"), '"optimizer": optimizer}'),
        (
            around("lr_sched = lib.get(optimizer)\n", tail=TAIL + "lib.update(lr_sched)\n"),
            '"lr_sched": lr_sched',
        ),
        (around("a = parse()\n", step=STEP + "print(a.name.startswith('b'))\n"), '"optimizer": optimizer}'),
        (around("s = lib.Sampler()\n", head=HEAD + "s.set_epoch(epoch)\n"), '"optimizer": optimizer}'),
        (around("def say(str):\n    print(str)\n", step=STEP + "say(str(1))\n"), '"optimizer": optimizer}'),
        (around(step=STEP + "input = row.clone()\n" + STEP + "input[0] = 1\n"), '"optimizer": optimizer}'),
        (
            "class Own(torch.utils.data.Dataset):\n    def get(self):\n        return 1\n"
            + around("h = {}\nh['a'] = Own()\n", step=STEP + "h['a'].get()\n"),
            '"optimizer": optimizer}',
        ),
        (around(step=STEP + "if len(row) is not 9: print(1)\n"), '"optimizer": optimizer}'),
        (around("h = []\nif x.dim() > 9: h = lib.load()\n", step=STEP + "h.append(1)\n"), "kept.h.append(1)"),
        (around("s = SimpleNamespace(n=0)\n", step=STEP + "s.n += 1\n"), '"s": vars(s)'),
        (
            METER + around("m = {k: Meter() for k in 'ab'}\n", step=STEP + "m['a'](1)\n"),
            '"m": {key: vars(value)',
        ),
        (
            around("g = torch.Generator()\nl = DataLoader(x, generator=g)\n", tail=TAIL + "print(l)\n"),
            '"g": g',
        ),
        (around("r = np.random.RandomState(1)\n").replace("in x:", "in r.permutation(9):"), '"r": r'),
        (
            around("n = 0\nimport os\n", step=STEP + "n += 1\n"),
            "SimpleNamespace()  # what goes from one step or epoch to the next\ntorch.manual",
        ),
        (
            around("np.random.seed(1)\n").replace("in x:", "in np.random.permutation(9):"),
            "iter_steps(list(np.random.permutation(9)))",
        ),
        (
            around(
                "b = {}\n",
                tail=TAIL + "b = {k: v.clone() for k, v in net.state_dict().items()}\n",
                after="print(b)\n",
            ),
            "print(kept.b)",
        ),
        (
            METER
            + around("m = Meter()\ndef fit():\n    n = Meter()\n").partition("for epoch")[0]
            + "".join(f"    {each}\n" for each in (LOOP + STEP + "m(n(1))\n").splitlines())
            + "fit()\n",
            '"m": vars(m), "n": vars(n)}',
        ),
        (around("criterion = lib.get()\n", step=STEP + "criterion(loss)\n"), '"criterion": criterion'),
        (METER + around("m = Meter(net)\n", step=STEP + "m(1)\n"), '"m": vars(m)}'),
        (METER + around("if x.any():\n    m = Meter()\n", step=STEP + "m(1)\n"), "    kept.m = vars(m)\n"),
        (METER + around(head=HEAD + "m = Meter()\n", step=STEP + "m(1)\n"), "        kept.m = vars(m)\n"),
        (METER + around("m = Show()\n", step=STEP + "m.show(1)\n"), '"optimizer": optimizer}'),
        (around(head=HEAD + "net = net.train().to('cpu')\n"), '"optimizer": optimizer}'),
        (around("y = x.clone()\n", step=STEP + "loss.view_as(y)\n"), '"optimizer": optimizer}'),
        (
            around("a = parse()\n").replace("net.parameters()", "[{'params': net.parameters(), 'lr': a.lr}]"),
            '"optimizer": optimizer}',
        ),
        (around("h = OrderedDict()\n", step=STEP + "h['n'] = 1\n"), "kept.h['n'] = 1"),
        (around("b, t = box(), torch.zeros(1)\n", step=STEP + "t.copy_(b)\n"), "kept.t.copy_(b)"),
        (around("h = []\ndef note(a, b):\n    a.append(b)\n", step=STEP + "note(h, 1)\n"), "note(kept.h, 1)"),
        (around("h = {'l': []}\n", step=STEP + "l = h['l']\n" + STEP + "l.append(1)\n"), "l = kept.h['l']"),
        (
            around("e = [p.clone() for p in net.parameters()]\n", step=STEP + "for a in e: a.mul_(0.9)\n"),
            "in kept.e:",
        ),
        (around("w = torch.zeros(20)\n", step=STEP + "w[0] = 1\n"), "kept.w[0]"),
        (around("k = 2\n").replace("range(3)", "range(k, 9)"), "max_epoch=len(range(kept.k, 9))"),
        (around("k = 2\n").replace("range(3)", "range(1, k + 1)"), "max_epoch=k)"),
        (around().replace("row in x", "row, y in x"), "for _, (row, y) in"),
        (
            around("n = 0\n", step=STEP + "try: n = 1\n" + STEP + "except ValueError: print(n)\n"),
            "kept.n = 1",
        ),
        (around("n = [0]\ndef f(k):\n    n.append(k) or f(k)\n", step=STEP + "f(2)\n"), "kept.n.append"),
        (around("a = b = 0\n", step=STEP + "a = b\n" + STEP + "b = a\n"), "kept.b = a"),
        (
            around("o = list(range(9))\n", head=HEAD + "torch.shuffle(o)\n", step=STEP + "print(o)\n"),
            "shuffle(kept.o)",
        ),
        (around("r = 1\n", head=HEAD + "print(r)\n", tail=TAIL + "r *= 0.5\n"), "kept.r *= 0.5"),
        (
            around("g = torch.Generator().manual_seed(1)\n", step=STEP + "torch.rand(1, generator=g)\n"),
            '"g": g',
        ),
        (
            around("T = torch.DoubleTensor if len(x) > 9 else torch.Tensor\n", step=STEP + "z = T(3)\n"),
            "z = T(3)",
        ),
        (
            around("s = SummaryWriter() if len(x) > 9 else None\n", step=STEP + "s.add_scalar(loss)\n"),
            " s.add_scalar(loss)",
        ),
        (around("plan = make(optimizer)\n", tail=TAIL + "plan.step()\n"), '"plan": plan'),
        (around("h, n = [], 0\n", step=STEP + "h.append(n)\n" + STEP + "n += 1\n"), "kept.h, kept.n = [], 0"),
        (around("a, (n, h) = 0, (0, [])\n", step=STEP + "h.append(n)\n"), "a, (n, kept.h) = 0, (0, [])"),
        (around("h = []\n", step=STEP + "a, n = h, 0\n" + STEP + "a.append(n)\n"), "a, n = kept.h, 0"),
        (
            around("a = parse()\n", head=HEAD + "for g in optimizer.param_groups: g['lr'] = a.lr\n"),
            '{"net": net, "optimizer": optimizer}',
        ),
        (
            around(head=HEAD + "b = tqdm(x, ncols=9)\n", step=STEP + "b.set_postfix(a=1)\n").replace(
                "in x:", "in b:"
            ),
            "b = tqdm(loop.iter_steps(list(x)), ncols=9)\n        for _, row in b:\n",
        ),
        (
            around(head=HEAD + "b = tqdm(enumerate(x))\n", step=STEP + "print(i)\n").replace(
                "row in x:", "i, row in b:"
            ),
            "(loop.iter_steps(list(x)))\n        for _, row in b:\n            i = loop.batch_index\n",
        ),
        (around("h, b = {}, []\n", step=STEP + "h['b'] = b\n" + STEP + "h.get('b').append(1)\n"), "kept.b"),
        (
            around(
                "r = wandb.config.get('r')\n",
                head=HEAD + "for g in optimizer.param_groups: g['lr'] = r\n",
                tail=TAIL + "r *= 0.5\n",
            ),
            "kept.r *= 0.5",
        ),
        (
            around("def start():\n    lib.spawn(f)\nif x.dim() > 9:\n    start()\n"),
            '{"net": net, "optimizer": optimizer}',
        ),
        (around("import os\n"), "import os\nimport everstep\nwith everstep.TrainLoop("),
        (around("r = wandb.init()\n", step=STEP + "r.log(loss)\n"), "            r.log(loss)\n"),
        (LOOP_OF_TABS, "\n\t\tfor _, row in loop.iter_steps(list(x)):\n\t\t\tloss ="),
        (
            BEGIN.replace("net =", "net, more =").replace("1)\n", "1), torch.nn.Linear(4, 1)\n", 1)
            + LOOP.replace("net(row)", "(net(row) + more(row))"),
            '"more": more',
        ),
    ],
)
def test_what_goes_from_round_to_round_becomes_state(text: str, entry: str) -> None:
    patch = Patch(text, "x")
    assert entry in patch.text and not patch.refused, patch.refused


@pytest.mark.parametrize(
    "text",
    [
        around("stop = Early()\n", tail=TAIL + "stop(loss)\n"),
        around("args = parse()\n", tail=TAIL + "args.lr = args.lr / 2\n"),
        around("batches = iter(x)\n", step=STEP + "next(batches)\n"),
        around("stop, n = Early(), 0\n", tail=TAIL + "stop(loss)\n"),
        around("a, *h = 0, Early()\n", step=STEP + "h[0](loss)\n"),
        around(step=STEP + "net = Net().train()\n"),
        METER + around(head=HEAD + "m = Meter(net)\n", step=STEP + "m(1)\n"),
        METER + around("m = Meter() or 1\n", step=STEP + "m(1)\n"),
        METER + around(head=HEAD + "m = Meter(); n = 0\n", step=STEP + "m(1)\n"),
        METER + around(head=HEAD + "m = Meter()\n", step=STEP + "m(1)\n", after="print(m.n)\n"),
        METER + around("m = Meter()\n", head=HEAD + "k = m.n\n", step=STEP + "m(k)\n"),
        METER.replace("n=0", "n=print") + around("m = Meter()\n", step=STEP + "m(1)\n"),
        METER.replace("= n", "= open(n)") + around("m = Meter()\n", step=STEP + "if m.n: m(1)\n"),
        METER.replace("self.n += n", "HISTORY.append(n)")
        + around("HISTORY, m = [], Meter()\n", step=STEP + "m(1)\n"),
        METER.replace("Meter:", "Meter(Base):") + around("m = Meter()\n", step=STEP + "m(1)\n"),
        METER.replace("    def __init__", "    h = []\n\n    def __init__")
        + around("m = Meter()\n", step=STEP + "m(1)\n"),
        around("from elsewhere import Meter\nm = Meter()\n", step=STEP + "m(1)\n"),
        around("m = {'a': Early()}\n", step=STEP + "m['a'](1)\n"),
        around(step=STEP + "loss *= 2\n", after="print(loss)\n"),
        around("b, h = Box(), {}\n", head=HEAD + "h['b'] = b\n", step=STEP + "h['b'].add(1)\n"),
        around("b = Box()\n", step=STEP + "h = {}\n" + STEP + "h['b'] = b\n" + STEP + "h['b'] += 1\n"),
        around("def f(k, h=[]):\n    h.append(k)\n", step=STEP + "f(1)\n"),
        around("h = []\n", head=HEAD + "r = []\n" + HEAD + "h.append(r)\n", step=STEP + "r.append(1)\n"),
        METER + around("h = []\nh.append(Meter())\n", step=STEP + "h[0](1)\n"),
        (
            "class Data:\n    def get(self):\n        yield 1\n"
            + around("d = Data()\ndef f(d):\n").partition("for epoch")[0]
            + "".join(f"    {each}\n" for each in LOOP.replace("in x:", "in d.get():").splitlines())
            + "f(d)\n"
        ),
        around(head=HEAD + "l = DataLoader(net(x))\n").replace("in x:", "in l:"),
        around("def make(n):\n    return n(x)\n").replace("in x:", "in make(net):"),
        around("h = [1]\ndef order():\n    return [each for each in h]\n", step=STEP + "h[0] = 2\n").replace(
            "in x:", "in order():"
        ),
        around("b = None\n", tail=TAIL + "b = net.state_dict().copy()\n", after="print(b)\n"),
        around("b = {}\n", tail=TAIL + "b['a'] = net.state_dict()\n", after="print(b)\n"),
        around("b = {}\n", tail=TAIL + "b = {'a': net.state_dict()}\n", after="print(b)\n"),
        around("b = []\n", tail=TAIL + "b.append(net.weight.data)\n", after="print(b)\n"),
        around("b = {}\n", tail=TAIL + "b = {'a': float(1), 'w': net.state_dict()}\n", after="print(b)\n"),
        METER.replace("+= n", "= net.state_dict()") + around("m = Meter()\n", step=STEP + "m(1)\n"),
        METER + around("m = defaultdict(Meter)\n", step=STEP + "m[0](1)\n"),
        METER + around("m = {'a': {'b': Meter()}}\n", step=STEP + "m['a']['b'](1)\n"),
        METER + around("m = dict(a=Meter())\n", step=STEP + "m['a'](1)\n"),
        around(head=HEAD + "o = make(torch.optim.SGD(net.parameters(), lr=1))\n"),
        around("x = zip(x, x)\n"),
        around("def batches():\n    yield x\n").replace("in x:", "in batches():"),
        around(
            head=HEAD + "t = []\n" + HEAD + "for row in x: t.append(net(row))\n", step=STEP + "print(t)\n"
        ),
        around("n = 0\n", head=HEAD + "if n < 9: k = 1\n" + HEAD + "else: k = 2\n", step=STEP + "n += k\n"),
        around("best = None\n", tail=TAIL + "best = net.state_dict()\n", after="print(best)\n"),
        around("best = None\n", tail=TAIL + "best = copy.deepcopy(net)\n", after="print(best)\n"),
        around("best = None\n", tail=TAIL + "best = Path('a')\n", after="print(best)\n"),
        around("l = DataLoader(x)\n", tail=TAIL + "l.dataset.level += 1\n").replace("in x:", "in l:"),
        around("l = DataLoader(x)\n", tail=TAIL + "l = DataLoader(x, 2)\n").replace("in x:", "in l:"),
        around(tail=TAIL + "optimizer.add_param_group({'params': []})\n"),
        around("@lru_cache\ndef f(n):\n    return net(n)\n", step=STEP + "f(1)\n"),
        around("h = defaultdict(lambda: 0)\n", step=STEP + "h[0] += 1\n"),
        around("import queue\nq = queue.Queue()\n", step=STEP + "print(q.get())\n"),
        METER + "class Log:\n    losses = []\n\n\n" + around(step=STEP + "Log.losses.append(1)\n"),
        METER.replace("__call__", "get")
        + around("import numpy as np\nm = [Meter(np.mean)]\n", step=STEP + "print(m[0].get(1))\n"),
        around(
            "class Stop:\n    def step(self, net):\n        self.best = copy.deepcopy(net)\ns = Stop()\n",
            tail=TAIL + "s.step(net)\n",
        ),
        around("b = RunningMean()\n", step=STEP + "loss = b.norm(loss)\n"),
        around("b = Box()\n", step=STEP + "h = {}\n" + STEP + "h['b'] = b\n" + STEP + "h['b'].n[0] = 1\n"),
        around("b = tqdm(x)\n").replace("in x:", "in b:"),
        around(head=HEAD + "b = tqdm(x)\n", tail=TAIL + "print(len(b))\n").replace("in x:", "in b:"),
        around(head=HEAD + "b = tqdm(x)\n", step=STEP + "print(b.n)\n").replace("in x:", "in b:"),
        around(head=HEAD + "b = tqdm(x) if epoch else x\n").replace("in x:", "in b:"),
        around("t = wandb.Table()\n", step=STEP + "t.add_data(1)\n"),
        around("h, n = both()\n", step=STEP + "h.append(1)\n"),
        around("o = {'a': optimizer}\n", step=STEP + "o['a'].step()\n"),
        around("class C:\n    n = 0\n", step=STEP + "C.n += 1\n"),
        around("import lib\n", step=STEP + "lib.n += 1\n"),
        around("def f():\n    pass\ndef f():\n    pass\n", step=STEP + "f()\n"),
        around("n = 0\n", step=STEP + "print(n := n + 1)\n"),
        BEGIN
        + "def fit(best=None):\n"
        + "".join(f"    {each}\n" for each in LOOP.splitlines())
        + "            best = best or loss\n    return best\nfit()\n",
    ],
)
def test_what_may_be_kept_out_of_sight_is_refused(text: str) -> None:
    assert Patch(text, "x").refused


OF_A_CLASS = """import itertools
import torch
%s
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(12, 4)
d = D()
for epoch in range(3):
    for row in x.split(3):
        loss = net(row).square().sum() * d.f(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (
            "a = 2\n    @property\n    def g(self): return self.a\n    def f(self, x, y=1): return self.g",
            False,
        ),
        ("def f(self, x, h=[]):\n        h.append(x)\n        return 1 / len(h)", True),
        ("@staticmethod\n    def f(x, h={}):\n        h['n'] = x\n        return 1.0", True),
        ("@deco\n    def f(self, x): return 1.0", True),
        ("def __init__(self): self.c = iter(range(99))\n    def f(self, x): return max(self.c)", True),
        ("def __init__(self): self.c = itertools.count()\n    def f(self, x): return max(self.c)", True),
        ("def __init__(self): self.c = [C()]\n    def f(self, x): return self.c[0].mean()", True),
    ],
)
def test_an_object_with_state_that_its_attributes_do_not_show_is_refused(body: str, is_refused: bool) -> None:
    """After a kill such a program ended with other weights, and nothing was said."""
    deco = "def deco(f): return f\nclass C:\n    def mean(self):\n        self.n = 1\n        return 1.0\n"
    assert bool(Patch(OF_A_CLASS % f"{deco}class D:\n    {body}", "x").refused) == is_refused


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
    script = before + around().replace("import torch\ntorch.manual_seed(0)\n", "").replace("torch.", "nn.")
    assert f"import everstep\n{seeds}" in Patch(script, "x", 7).text
    assert seeds in Patch(script, "x", 7).plain


@pytest.mark.parametrize(
    "text",
    [
        around().replace("torch.manual_seed(0)", "# torch.manual_seed(0)"),
        around("import numpy as np\n", step=STEP + "np.random.beta(1.0, 1.0)\n"),
    ],
)
def test_what_draws_without_a_seed_is_found(text: str) -> None:
    assert any("give --seed 0" in reason for _, reason in Patch(text, "x").refused)


@pytest.mark.parametrize(
    "text",
    [
        around().replace("torch.manual_seed(0)", "torch.random.manual_seed(0)"),
        around("import numpy as np\n", step=STEP + "np.random.default_rng(np.random.SeedSequence(5))\n"),
        around("import random\n", step=STEP + "random.Random(5)\n"),
    ],
)
def test_what_draws_nothing_unseeded_needs_no_seed(text: str) -> None:
    assert Patch(text, "x").text


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
        text = around(f"{line}\nm = {made}\n", step=STEP + "m(1)\n")
        assert '"m": vars(m)}' in Patch(text, "x", folder=tmp_path).text, line
        assert Patch(text, "x").refused


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


@pytest.mark.parametrize(
    ("line", "step", "other"),
    [
        ("import other", "other.rng.random()", RNG),
        ("from other import rng as r", "r.random()", RNG),
        ("from more import rng", "rng.random()", "print(1)\n"),
        ("import more.sub as s", "s.draw()", RNG),
        (
            "import other",
            "torch.rand(1, generator=other.rng)",
            RNG.replace("np.random.RandomState(0)", "torch.Generator()"),
        ),
        ("from other import *", "next(rng)", RNG.replace("np.random.RandomState(0)", "itertools.count()")),
        ("from other import draw", "draw()", RNG + "def draw():\n    return rng.random()\n"),
        ("from other import draw", "draw()", "from more import rng\ndef draw():\n    return rng.random()\n"),
        ("from other import draw", "draw()", "import more\ndef draw():\n    return more.sub.rng.random()\n"),
        ("from other import count", "count()", COUNT),
        ("import other", "other.count()", COUNT),
        ("import other", "other.n += 1", COUNT),
        ("import other", "other.h.append(1)", "h = []\n"),
        ("from other import h", "a = h\n        a.append(1)", "h = deque()\n"),
        ("import other", "other.f(1)", "def f(x, h=[]):\n    h.append(x)\n"),
        ("import other", "other.f(1)", "def f(x, *, h=dict()):\n    h[x] = x\n"),
        ("import other", "other.f()", "def f():\n    f.n += 1\nf.n = 0\n"),
        ("import other", "other.f(1)", "@lru_cache\ndef f(x):\n    return torch.rand(x)\n"),
        ("import other", "other.f(1)", DECO),
        ("import other", "other.f(1)", MAKE),
        ("import other", "other.f()", RNG + "f = rng.random\n"),
        ("import other\nf = other.rng.random", "f()", RNG),
        ("import other\na = other.h", "a.append(1)", "h = []\n"),
        ("import other", "other.f()", RNG + "f = lambda: rng.random()\n"),
        ("import other", "other.f()", RNG + "def f(x=rng):\n    return x.random()\n"),
        (
            "import other",
            "torch.rand(1, generator=other.g)",
            "def make():\n    return Generator()\ng = make()\n",
        ),
        ("import other", "for a in other.g: break", "g = (a for a in range(9))\n"),
        ("import other", "other.f(1)", "class deco:\n    pass\n@deco\ndef f(x):\n    return x\n"),
        ("import other", "other.f(1)", DECO.replace("@deco", "") + "f = deco(f)\n"),
        ("import other\nother.net.train()", "other.net(row)", "net = torch.nn.Linear(4, 1)\n"),
        ("import other\nnet.register_forward_hook(other.count)", "pass", COUNT),
        (
            "from other import Net\nmore = Net()",
            "more(row)",
            COUNT + "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x * count()\n",
        ),
        ("from other import C", "C.n += 1", CLASS),
        ("import other", "other.C.h.append(1)", CLASS),
        (
            "from other import C",
            "C.mean(1)",
            "class C:\n    @staticmethod\n    def mean(x):\n        C.n += x\n",
        ),
        (
            "from other import C",
            "C.mean(1)",
            CLASS.replace("def mean(self", "@classmethod\n    def mean(cls").replace("self.k +", "cls.k +"),
        ),
        ("from other import C\nc = C()", "c.mean(1)", CLASS.replace("self.k +", "self.__class__.n +")),
        ("from other import C\nc = C()", "c.mean(1)", CLASS.replace("self.k +", "type(self).n +")),
        ("from other import c", "c.mean(1)", CLASS + "c = C()\n"),
        ("from other import C\nc = []\nc.append(C())", "c[0].mean(1)", CLASS),
        ("from other import C\nc = C.make(1)", "c.mean(1)", CLASS),
        (
            "from other import D\nd = D()",
            "d.c.mean(1)",
            CLASS + "class D:\n    def __init__(self): self.c = C()\n",
        ),
        (
            "from other import D\nd = D()",
            "d.get(1)",
            CLASS
            + "class D:\n    def __init__(self): self.c = C()\n    def get(self, x): return self.c.mean(x)\n",
        ),
    ],
)
def test_what_a_module_beside_a_script_keeps_is_refused(
    tmp_path: Path, line: str, step: str, other: str
) -> None:
    """After a kill such programs ended with other weights, and nothing was said."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more/__init__.py").write_text("from .sub import rng\nfrom . import sub\n")
    (tmp_path / "more/sub.py").write_text(f"{RNG}def draw():\n    return rng.random()\n")
    (tmp_path / "other.py").write_text(other)
    assert Patch(around(f"{line}\n", step=f"{STEP}{step}\n"), "x", folder=tmp_path).refused


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
    made = "from other import *\nimport notes\nmore, d, h = Net(), Data(), []\n"
    step = "more(row)\n        accuracy(row, row)\n        bar(1)\n        d[0]\n        notes.note(h, 1)"
    patch = Patch(around(made, step=f"{STEP}{step}\n"), "x", folder=tmp_path)
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
    made = "h = []\ndef add(w):\n    h.append(w)\n"
    patch = Patch(around(made, tail=f"{TAIL}{tail}\n", after="print(h)\n"), "x")
    assert any("has weights that change" in problem for _, problem in patch.refused) == is_refused, (
        patch.refused
    )


def test_parameters_whose_gradients_are_clipped_stay_as_they_are() -> None:
    made = "weights = [p for p in net.parameters() if p.requires_grad]\n"
    step = f"{STEP}torch.nn.utils.clip_grad_norm_(weights, 0.1)\n"
    patch = Patch(around(made, step=step), "x")
    assert not patch.refused and "kept" not in patch.text


DATA = """class Own(torch.utils.data.Dataset):
    def __init__(self):
        self.n = 0

    def __getitem__(self, i):
        item = [i]
        item[0] = 1
        return item


"""
ROUNDS = around("d = Own()\n").replace("in x:", "in zip(x, x):")


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        (
            DATA + ROUNDS,
            "for _ in loop.iter_steps([epoch]):  # an epoch is one step\n            for row in zip(x, x):\n",
        ),
        (
            ROUNDS.replace("range(3)", "trange(3)"),
            "max_epoch=3) as loop:\n    for epoch in loop.iter_epochs():",
        ),
        (
            ROUNDS.replace("range(3)", "range(1, 4)") + "print(epoch)\n",
            "for kept.epoch in loop.iter_epochs():\n        for _ in loop.iter_steps([kept.epoch]):",
        ),
        (around("g = torch.Generator()\n").replace("in x:", "in zip(x):"), '"g": g'),
        (ROUNDS + "    if epoch: break\n", "            if epoch: loop.request_stop(); continue\n"),
        (
            METER + ROUNDS.replace("    for", "    m = Meter()\n    for") + STEP + "m(1)\n",
            "            m = Meter()\n",
        ),
    ],
)
def test_an_epoch_is_a_step_if_its_steps_cannot_be(text: str, entry: str) -> None:
    assert Patch(text, "x").refused and Patch(text, "x").is_nested
    patch = patched(text, "x")
    assert entry in patch.text and patch.in_the_way and "  # an epoch is one step\n" in patch.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (DATA.replace("item[0]", "self.n") + ROUNDS, "Own changes as it is read"),
        (DATA.replace("(torch.utils.data.Dataset)", "").replace("item[0]", "self.n") + ROUNDS, "Own changes"),
        (DATA.replace("self.n = 0", "self.g = torch.Generator()") + ROUNDS, "Own changes as it is read"),
        (ROUNDS.replace("d = Own()", "d = Load(persistent_workers=True)"), "take out persistent_workers"),
        (ROUNDS.replace("d = Own()", "d = Own(torch.Generator())"), "no name has this generator"),
        ("def f():\n    g = torch.Generator()\n" + ROUNDS, "`g` is made out of sight of the loop"),
        (ROUNDS + "    optimizer = torch.optim.SGD(net.parameters(), lr=epoch)\n", "made anew"),
    ],
)
def test_data_that_a_step_of_an_epoch_would_not_save_is_refused(text: str, problem: str) -> None:
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
