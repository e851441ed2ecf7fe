"""DistributedDataParallel, exact; `everstep.torch.parallel`, and a Task on several ranks: real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import lines_by_rank, outputs
from torch import nn

import everstep
from everstep.errors import ConfigError

IMPORTS = """
import hashlib
from collections import Counter
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.profiler import ProfilerActivity, profile
import everstep
from everstep import backends
from everstep.contracts.group import DataRanks
from everstep.errors import ConfigError
from everstep.state import capture, decode, digest, encode, make_entry

torch.set_num_threads(1)
backend = backends.get("torch")
"""
HEAD = (
    IMPORTS
    + """
dist.init_process_group("gloo")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(50, 70), nn.BatchNorm1d(70)
        self.second, self.third = nn.Linear(70, 90), nn.Linear(90, 8)
        self.words = nn.Embedding(40, 8)
        self.spare = nn.Linear(8, 8)  # not always used
    def forward(self, x, use_spare=True):
        found = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        found = self.third(found) + self.words((x[:, 0].abs() * 10).long() % 40)
        return self.spare(found) if use_spare else found

def bits(tensors):
    return hashlib.md5(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:8]

def inputs(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 50, generator=generator)
"""
)

EXACT = """
def hooked(ddp):
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp

def with_builtin_hook(ddp):
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return ddp

MAKE = {
    "plain": lambda net: DDP(net, bucket_cap_mb=0.01),
    "one bucket": lambda net: DDP(net),
    "views": lambda net: DDP(net, bucket_cap_mb=0.01, gradient_as_bucket_view=True),
    "static": lambda net: DDP(net, bucket_cap_mb=0.01, static_graph=True),
    "unused": lambda net: DDP(net, bucket_cap_mb=0.01, find_unused_parameters=True),
    "both": lambda net: DDP(net, bucket_cap_mb=0.01, find_unused_parameters=True, static_graph=True),
    "windows": lambda net: DDP(net, bucket_cap_mb=0.01),
    "sparse": lambda net: DDP(net, bucket_cap_mb=0.01),
    "hook": lambda net: hooked(DDP(net, bucket_cap_mb=0.01)),
    "builtin hook": lambda net: with_builtin_hook(DDP(net, bucket_cap_mb=0.01)),
    "compiled": lambda net: torch.compile(DDP(net, bucket_cap_mb=1), backend="eager"),  # less is refused
    "of compiled": lambda net: DDP(torch.compile(net, backend="eager"), bucket_cap_mb=1),
}

if size != 3:  # compiling takes seconds
    MAKE = {kind: make for kind, make in MAKE.items() if "compiled" not in kind}

def made(kind):
    torch.manual_seed(3)
    net = Net()
    net.words.sparse = kind == "sparse"
    model = MAKE[kind](net)
    optimizer = torch.optim.SGD if kind == "sparse" else torch.optim.AdamW
    return model, optimizer(model.parameters(), 0.01)

def step_of(kind, model, optimizer, step):
    optimizer.zero_grad()
    spare = kind != "unused" or step % 3 == 0
    for part in range(3 if kind == "windows" else 1):
        ddp = getattr(model, "_orig_mod", model)
        ddp.require_backward_grad_sync = kind != "windows" or part == 2  # as no_sync does
        model(inputs(10 * step + part), spare).square().mean().backward()
    optimizer.step()

folder, phase = sys.argv[1:] if len(sys.argv) > 1 else (os.environ["FOLDER"], os.environ["PHASE"])
for kind in MAKE:
    model, optimizer = made(kind)
    path = os.path.join(folder, kind.replace(" ", "-"))
    entries = {"model": make_entry("model", model), "optimizer": make_entry("optimizer", optimizer)}
    begin = 0
    if phase == "resumed":
        for name, tree in torch.load(path, weights_only=False).items():
            entries[name].load(tree)
        begin = 3
    backend.prepare_ranks({"model": model, "optimizer": optimizer}, DataRanks(range(size)))
    for step in range(begin, 6):
        if step == 3 and phase == "whole" and rank == 0:
            torch.save({name: entry.save() for name, entry in entries.items()}, path)
        step_of(kind, model, optimizer, step)
    dist.barrier()
    say(kind, bits([*model.parameters(), *model.buffers()]))
"""


@pytest.mark.campaign("long", gate=1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_new_processes_that_load_a_state_go_on_exactly(size: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    said = []
    for phase in ("whole", "resumed"):
        monkeypatch.setenv("PHASE", phase)
        said.append(lines_by_rank("".join(outputs(HEAD + EXACT, size))))
    whole, resumed = said
    assert whole == resumed
    assert all(lines == whole[0] for lines in whole.values()), "ranks differ"
    assert len(whole) == size and len(whole[0]) == (12 if size == 3 else 10)


UNTOUCHED = """
torch.manual_seed(rank)
net = Net()
fired = []
net.first.weight.register_hook(lambda grad: fired.append("hook"))
net.first.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("post"))
model = DDP(net, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with model.no_sync():
    model(inputs(0)).sum().backward()  # an open window
assert len(fired) == 2
def state():
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    saved = make_entry("model", model).save(), make_entry("optimizer", optimizer).save()
    return digest(encode([saved[0] if rank == 0 else 0, saved[1], grads, capture()]))
before = state()
for _ in range(2):  # as two loops of one process do
    backend.prepare_ranks({"optimizer": optimizer, "model": net}, DataRanks(range(size)))
assert state() == before and len(fired) == 2 and len(model._forward_hooks) == 1
model(inputs(1)).sum().backward()
assert len(fired) == 4
assert len(model.reducer.get_backward_stats()) == len(list(net.parameters()))
say("gradients", bits(parameter.grad for parameter in net.parameters()))
"""


@pytest.mark.campaign("long")
def test_nothing_of_the_state_is_touched() -> None:
    first, second = outputs(HEAD + UNTOUCHED, 2)
    assert first.partition(": ")[2] == second.partition(": ")[2]


BUFFERS = """
def trained(prepared, kind, steps=4):
    torch.manual_seed(3)
    net = Net()
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if prepared:
        backend.prepare_ranks({"model": model, "optimizer": optimizer}, DataRanks(range(size)))
    seen = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            optimizer.zero_grad()
            if kind == "adversaries":
                with torch.no_grad():
                    model(inputs(50 + step))
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            seen.append(bits(net.buffers()))
            if kind == "evaluated":
                model.eval()
                with torch.no_grad():
                    for _ in range(1 + rank if prepared else 1):  # unequal numbers of passes are no matter
                        net(inputs(0)), model(inputs(0))
                model.train()
    events = Counter(event.name for event in profiler.events())
    count = {name: n for name, n in events.items() if name.startswith("gloo:")}
    return bits(net.parameters()), seen, count

for kind in ("plain", "evaluated", "adversaries"):
    theirs, before, before_count = trained(False, kind)
    ours, after, count = trained(True, kind)
    assert ours == theirs, kind
    if rank == 0:
        assert before == after, kind
    say(kind, after)
    if rank == 1:
        assert before != after, "torch's own differ between ranks"
    if kind == "plain":
        assert sum(count.values()) <= sum(before_count.values()) > 0, (count, before_count)
    say("counts", sum(count.values()) > 0)

# an average of the model, and one process that loads the weights of the writer
average = torch.optim.swa_utils.AveragedModel(net := Net())
model = DDP(net)
sgd = torch.optim.SGD(net.parameters(), 0.1)
backend.prepare_ranks({"model": net, "optimizer": sgd}, DataRanks(range(size)))
for step in range(2):
    model(inputs(step)).square().mean().backward()
    for ours, theirs in zip(average.module.buffers(), net.buffers()):
        ours.copy_(theirs)
say("average", bits(average.module.buffers()))
"""


@pytest.mark.campaign("long")
def test_buffers_are_equal_on_all_ranks_after_each_step() -> None:
    said = lines_by_rank("".join(outputs(HEAD + BUFFERS, 2)))
    assert said[0] == said[1] and len(said[0]) == 7


REFUSED = """
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
def refused(**objects):
    try:
        backend.require_synchronised(objects, DataRanks(range(size)))
    except ConfigError as error:
        return str(error)
    return "taken"

def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)

net, frozen = Net(), Net().requires_grad_(False)
say(refused(model=net, optimizer=sgd(net)))
say(refused(nets={"a": net}, optimizer=everstep.torch.ClipOptimizer(sgd(net))))
say(refused(optimizer=sgd(net)))
assert refused(model=net, teacher=frozen) == "taken"  # nothing is stepped
model = everstep.torch.parallel(net)
copy = torch.optim.swa_utils.AveragedModel(net)
assert refused(model=model, optimizer=sgd(model), teacher=frozen, ema=copy) == "taken"
assert refused(model=net, optimizer=sgd(net)) == "taken"  # the wrapper is not in the state
assert refused(model=torch.compile(model, backend="eager"), optimizer=sgd(net)) == "taken"
head = nn.Linear(2, 2)
say(refused(model=model, head=head, optimizer=sgd(net, head)))
left_out = Net()
DDP._set_params_and_buffers_to_ignore_for_model(left_out, ["third.bias"])
part = DDP(left_out)
say(refused(model=part, optimizer=sgd(part)))
alone = [dist.new_group([each]) for each in range(size)][rank]
say(refused(model=(inner := DDP(Net(), process_group=alone)), optimizer=sgd(inner)))
power = DDP(Net())
power.register_comm_hook(PowerSGDState(None), powerSGD_hook)
say(refused(model=power, optimizer=sgd(power)))
half = DDP(Net())
half.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
assert refused(model=half, optimizer=sgd(half)) == "taken"
from torch.distributed.fsdp import FullyShardedDataParallel
whole = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
say(refused(model=whole, optimizer=sgd(whole)))
"""


@pytest.mark.campaign("long")
def test_what_ranks_would_train_by_themselves_is_refused_by_name() -> None:
    said = lines_by_rank("".join(outputs(HEAD + REFUSED, 2)))
    assert said[0] == said[1]
    wanted = [
        "model/first.weight, model/first.bias, model/norm.weight and 8 more on its own",
        "nets/a/first.weight",
        "parameter 0 of 'optimizer'",
        "head/weight, head/bias on its own",
        "model/third.bias on its own",
        "averages over 1 of 2 ranks: leave out its process_group=",
        "powerSGD_hook keeps a PowerSGDState",
        "FullyShardedDataParallel, which keeps its weights in flat parameters; use torch.distributed.fsdp",
    ]
    for line, text in zip(said[0], wanted, strict=True):
        assert text in line
    assert "model = everstep.torch.parallel(model)" in said[0][0] and "parallel=True" in said[0][0]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_gets_its_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    assert everstep.torch.parallel(model) is model
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert everstep.torch.parallel(model, bucket_cap_mb=1) is model and not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"no option 'bucket_cap'.*did you mean 'bucket_cap_mb'"):
        everstep.torch.parallel(model, bucket_cap=1)
    with pytest.raises(ConfigError, match=r"give a torch.nn.Module"):
        everstep.torch.parallel([model])


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_gets_its_model_back() -> None:
    model = nn.Linear(1, 1)
    assert everstep.torch.parallel(model) is model


@pytest.mark.campaign("long")
def test_two_processes_wrap_and_leave_and_a_forked_child_leaves_their_group_alone() -> None:
    program = """
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 1)))
wrapped = everstep.torch.parallel(model, bucket_cap_mb=2)
assert type(wrapped) is DDP and wrapped.module is model and dist.get_backend() == "gloo"
assert wrapped.bucket_bytes_cap == 2 << 20
assert everstep.torch.parallel(wrapped) is wrapped
say("weights", model[0].weight.double().sum().item().hex())
wrapped(torch.full((2, 3), float(rank + 1))).sum().backward()
say("gradients", model[2][0].bias.grad.item())
if (child := os.fork()) == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
wrapped(torch.ones(2, 3)).sum().backward()
say("trained")
for wrong, text in [
    (lambda: everstep.torch.parallel(wrapped, bucket_cap_mb=1), "already"),
    (lambda: everstep.torch.parallel(nn.Linear(1, 1).requires_grad_(False)), "leave out"),
    (lambda: everstep.torch.parallel(nn.ModuleDict({"a": model})), "give each part"),
]:
    try:
        wrong()
    except ConfigError as error:
        assert text in str(error), error
        say("refused")
names = list(make_entry("model", model).save())
compiled = torch.compile(wrapped, backend="eager"), DDP(torch.compile(model, backend="eager"))
for each in (wrapped, *compiled):
    entry = make_entry("model", each)
    assert list(entry.save()) == names and "0.weight" in names
    entry.load(make_entry("model", model).save())
"""
    first, second = (text.splitlines() for text in outputs(IMPORTS + program, 2))
    assert [line[3:] for line in first] == [line[3:] for line in second]
    assert len(first) == 6 and first[1:3] == ["0: gradients 2.0", "0: trained"]


def test_on_one_process_parallel_changes_nothing() -> None:
    class Line(everstep.torch.Task):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), 0.1)

    task = Line(parallel={"bucket_cap_mb": 1}, accumulate=2)
    task.build()
    assert type(task.model) is torch.nn.Linear and task.batch_weight == 1.0
    with task.accumulating():
        task.backward(task.model(torch.ones(1, 1)).sum(), 1)
    wrong = Line(parallel={"bucket_cap": 1})
    with pytest.raises(ConfigError, match=r"did you mean 'bucket_cap_mb'"):
        wrong.build()
