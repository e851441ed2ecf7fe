"""Observer of a training program that knows nothing of everstep: a `sitecustomize.py` on its PYTHONPATH.

It imports nothing but the standard library until the program imports torch, so it runs in any environment.
By torch's own hooks, and by a wrapper of Keras' optimizers, it writes a line of JSON at each step of an
optimizer (an *update*), with digests of what the update has read and left, and it passes a *point* at which a
strike can be armed:

| line | when | what it has |
|---|---|---|
| enter | before an optimizer's first update in this process | weights, moments |
| update | after each update | batches drawn since the last, random state, weights, moments, settings ... |
| evaluation | a DataLoader hands out a batch while gradients are off | |
| file | a file in the watched folders is about to be opened for writing, saved, renamed, removed | path |
| whole | `torch.save` has saved all weights and moments | its entries, its path (of a buffer: its size) |
| part | it, or safetensors, has saved some of them | `tensors`: their numbers, `of` all |

`EVERSTEP_STRIKE=ACTION:POINT:N:RANK` strikes at the Nth time that a rank (-1: each) passes a point (update,
evaluation, file): ACTION is `kill`, a signal, or `tear`, which leaves the file empty or half written and
kills.  A renamed file is torn as by a power cut: it has its new name, and lacks what nobody has synced.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

TRACE, STRIKE, FOLDERS = "EVERSTEP_OBSERVED", "EVERSTEP_STRIKE", "EVERSTEP_OBSERVED_FOLDERS"
DEPTH = 8
"""Nesting down to which a batch is digested."""


class Observer:
    """What is known of this process; it does nothing in processes that are forked from it."""

    def __init__(self, trace: str, strike: str, folders: str) -> None:
        self.trace = os.path.realpath(trace)
        self.folders = tuple(os.path.realpath(each) + os.sep for each in folders.split(os.pathsep))
        self.pid, self.rank = os.getpid(), 0
        self.action, point, count, rank = strike.split(":") if strike else ("", "", "0", "-1")
        self.strike_at = (point, int(count), int(rank))
        self.counts: dict[str, int] = {}
        self.optimizers: list[Any] = []
        self.draws: list[str] = []
        self.synced: dict[tuple[int, int], tuple[int, int]] = {}
        """Device and number of a file -> what `_version` told of it when it was synced."""
        self.tears = False

    @property
    def here(self) -> bool:
        """Whether this is the process that is observed, and no file is torn."""
        return os.getpid() == self.pid and not self.tears

    def write(self, at: str, **facts: Any) -> None:
        """Append a line by one write, which survives SIGKILL; "beside": not by the thread that trains."""
        if threading.current_thread() is not threading.main_thread():
            facts["beside"] = True
        line = json.dumps({"at": at, "rank": self.rank, "pid": self.pid, **facts}).encode() + b"\n"
        descriptor = os.open(self.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(descriptor, line)
        os.close(descriptor)

    def reach(self, point: str, tear: Callable[[], None] | None = None) -> None:
        """Pass a point; strike if it is armed. `tear()` leaves what a kill in the middle would leave."""
        self.counts[point] = self.counts.get(point, 0) + 1
        if self.strike_at not in [(point, self.counts[point], rank) for rank in (self.rank, -1)]:
            return
        if self.action == "tear" and tear is not None:
            self.tears = True
            tear()
        self.write("strike", point=point, n=self.counts[point], action=self.action)
        os.kill(self.pid, getattr(signal, self.action, signal.SIGKILL))

    def before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        known = any(each is optimizer for each in self.optimizers)
        if not self.here or known or makes_state(optimizer):
            return
        if not self.optimizers:  # nothing is written before; a spawned process is given its rank late
            self.rank = rank_here()
        self.optimizers.append(optimizer)
        self.write("enter", number=len(self.optimizers) - 1, **state_of(optimizer))

    def after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        number = next((i for i, known in enumerate(self.optimizers) if known is optimizer), None)
        if not self.here or number is None:
            return
        draws, self.draws = self.draws, []
        parameters, _, settings = parts_of(optimizer)
        digests = {"settings": digest(settings), "buffers": digest(buffers_of(parameters))}
        digests |= state_of(optimizer)
        self.write("update", number=number, draws=draws, random=random_state(), **digests)
        self.reach("update")

    def drawn(self, batch: Any) -> None:
        if not self.here:
            return
        import torch

        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self.draws.append(digest(batch))
        elif self.optimizers:
            self.write("evaluation")
            self.reach("evaluation")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                tear = None if flags & os.O_APPEND else lambda: open(path, "wb").close()
                self.file("open", path, tear)
        elif event == "os.rename":
            source, target = map(os.fsdecode, args[:2])
            size = os.path.isfile(source) and os.path.getsize(source)
            facts = {"source": os.path.realpath(source), "size": size}
            self.file("rename", target, lambda: self._rename_unsynced(source, target), **facts)
        elif event in ("os.remove", "os.truncate"):
            self.file(event[3:], args[0])

    def syncing(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap `os.fsync` or `os.fdatasync`, to know what a power cut would leave."""

        def observed(fd: Any) -> None:
            sync(fd)
            status = os.stat(fd if isinstance(fd, int) else fd.fileno())
            self.synced[status.st_dev, status.st_ino] = _version(status)

        return observed

    def _rename_unsynced(self, source: str, target: str) -> None:
        walked = [] if os.path.islink(source) else os.walk(source)
        inside = [os.path.join(parent, each) for parent, _, names in walked for each in names]
        for file in inside or [source]:
            # what a link leads to, or what comes from elsewhere, may be somebody's data
            if os.path.islink(file) or not os.path.realpath(file).startswith(self.folders):
                continue
            status = os.stat(file)
            if os.path.isfile(file) and self.synced.get((status.st_dev, status.st_ino)) != _version(status):
                os.truncate(file, 0)
        os.replace(source, target)

    def file(self, kind: str, path: Any, tear: Callable[[], None] | None = None, **facts: Any) -> None:
        """Pass the point of a file that is about to change, once the program has begun to train."""
        if not self.here or not self.optimizers or not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(path))
        if path.startswith(self.folders) and "__pycache__" not in path and path != self.trace:
            self.write("file", kind=kind, path=path, **facts)
            self.reach("file", tear)

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that writes a whole file beneath Python, such as `torch.save`."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            named = (kwargs[name] for name in ("f", "filename", "filepath") if name in kwargs)
            path: Any = args[1] if len(args) > 1 else next(named)

            def tear() -> None:
                save(*args, **kwargs)
                os.truncate(path, os.path.getsize(path) // 2)

            self.file("save", path, tear)
            result = save(*args, **kwargs)
            self.saved(args[0] if args else kwargs.get("obj"), path)
            return result

        return observed

    def saved(self, state: Any, file: Any) -> None:
        """Write down where weights and moments of the optimizers were saved, and which."""
        parts = addresses([parts_of(each)[:2] for each in self.optimizers]) if self.here else []
        saved = {*addresses(state)} if parts else ()
        tensors = [number for number, each in enumerate(parts) if each in saved]
        if tensors:
            path = file if isinstance(file, str | os.PathLike) else str(getattr(file, "name", ""))
            place = len(file.getbuffer()) if hasattr(file, "getbuffer") else os.path.realpath(path)
            keys = sorted(map(str, state)) if isinstance(state, dict) else []
            at = "whole" if keys and len(tensors) == len(parts) else "part"
            self.write(at, keys=keys, path=place, tensors=tensors, of=len(parts))


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def addresses(value: Any, depth: int = 0) -> list[int]:
    """List the addresses of all tensors with values, in whatever dictionaries and lists."""
    if hasattr(value, "data_ptr"):
        return [value.data_ptr()] if value.data_ptr() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [address for each in items for address in addresses(each, depth + 1)] if depth < DEPTH else []


def rank_here() -> int:
    """Return this process's rank: of its process group, else by the launcher's variables; 0 without any."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def makes_state(optimizer: Any) -> bool:
    """Whether a step with gradients of zero only makes the state into which a checkpoint is loaded."""
    if getattr(optimizer, "state", True):
        return False
    gradients = [each.grad for each in parts_of(optimizer)[0] if each.grad is not None]
    return bool(gradients) and all(digest(each) == digest(each * 0) for each in gradients)


def digest(value: Any) -> str:
    """Digest tensors, arrays, numbers and strings, in whatever containers; 16 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=8)
    _add(hashed, value, 0)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any, depth: int) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        value = getattr(value, "_local_tensor", value).detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hashed.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        hashed.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        hashed.update(repr(value).encode())
    elif depth < DEPTH:
        if hasattr(value, "items"):
            value = sorted(((str(key), each) for key, each in value.items()), key=lambda item: item[0])
        elif isinstance(value, set | frozenset):
            value = sorted(map(repr, value))
        elif not isinstance(value, list | tuple):
            value = [type(value).__qualname__, *sorted(getattr(value, "__dict__", {}).items())]
        hashed.update(f"({len(value)}".encode())
        for each in value:
            _add(hashed, each, depth + 1)


def parts_of(optimizer: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the parameters, moments and settings of an optimizer of torch or Keras."""
    if not hasattr(optimizer, "param_groups"):
        parameters = [each.value for each in optimizer._trainable_variables]
        moments = [each.value for each in optimizer.variables if each is not optimizer._learning_rate]
        return parameters, moments, [float(optimizer.learning_rate)]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    moments = [optimizer.state[each] for each in parameters if each in optimizer.state]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return parameters, moments, settings


def state_of(optimizer: Any) -> dict[str, str]:
    """Digest an optimizer's weights, and its moments: what neither a forward pass nor a schedule changes."""
    parameters, moments, _ = parts_of(optimizer)
    return {"weights": digest(parameters), "moments": digest(moments)}


def random_state() -> dict[str, str]:
    """Digest the state of each global generator."""
    import torch

    digests = {"python": digest(random.getstate()), "torch": digest(torch.get_rng_state())}
    if "numpy" in sys.modules:
        digests["numpy"] = digest(sys.modules["numpy"].random.get_state())
    if torch.cuda.is_available():
        digests["cuda"] = digest(torch.cuda.get_rng_state_all())
    return digests


_holders: dict[tuple[int, ...], list[Any]] = {}


def buffers_of(parameters: list[Any]) -> list[tuple[int, str]]:
    """List digests of the buffers of the modules that hold these parameters, by a search made once.

    Each stands behind the place of the module's first parameter; of one place, in the order of the digests:
    the garbage collector has modules in another order in each process.
    """
    import gc

    import torch

    key = tuple(map(id, parameters))
    places = {number: place for place, number in enumerate(key)}
    if key not in _holders:
        # isinstance() would ask each object for its __class__, which runs code of proxies
        modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        _holders[key] = [m for m in modules if any(id(own) in places for own in m._parameters.values())]
    buffers = list[tuple[int, str]]()
    for each in _holders[key]:
        parameters = [*each._parameters.items()]
        content = [each._buffers]
        if type(each) is torch.nn.ParameterDict:
            # Keras keeps running means beside the weights, as parameters
            content.append({name: own for name, own in parameters if id(own) not in places})
        place = min(places[id(own)] for _, own in parameters if id(own) in places)
        buffers.append((place, digest(content)))
    return sorted(buffers)


class Patches(importlib.abc.MetaPathFinder):
    """Finder that lets a function change a module right after it was executed, before anybody uses it."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if (patch := self.patches.pop(name, None)) is None:
            return None
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def begin(observer: Observer) -> None:
    """Install all hooks in this process."""

    def on_optimizers(module: Any) -> None:
        module.register_optimizer_step_pre_hook(observer.before_update)
        module.register_optimizer_step_post_hook(observer.after_update)

    def on_keras(module: Any) -> None:
        if module.backend.backend() != "torch":
            return
        apply = module.BaseOptimizer.apply

        def observed(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            # as `apply` does: its weights are known then
            if not self.built and trainable_variables is not None:
                trainable_variables = list(trainable_variables)
                with module.backend.name_scope(self.name, caller=self):
                    self.build(trainable_variables)
                self.built = True
            observer.before_update(self, (), {})
            result = apply(self, grads, trainable_variables)
            observer.after_update(self, (), {})
            return result

        module.BaseOptimizer.apply = observed

    def on_loaders(module: Any) -> None:
        following = module._BaseDataLoaderIter.__next__

        def __next__(self: Any) -> Any:
            batch = following(self)
            observer.drawn(batch)
            return batch

        module._BaseDataLoaderIter.__next__ = __next__

    def wrapped(*names: str) -> Callable[[Any], None]:
        def on_saving(module: Any) -> None:
            for name in names:
                setattr(module, name, observer.saving(getattr(module, name)))

        return on_saving

    patches: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": on_optimizers,
        "keras.src.optimizers.base_optimizer": on_keras,
        "keras.src.saving.saving_api": wrapped("save_model", "save_weights"),
        "torch.utils.data.dataloader": on_loaders,
        "torch.serialization": wrapped("save"),
        "safetensors.torch": wrapped("save_file"),
    }
    sys.meta_path.insert(0, Patches(patches))
    sys.addaudithook(observer.audit)
    for name in {"fsync", "fdatasync"} & {*dir(os)}:
        setattr(os, name, observer.syncing(getattr(os, name)))


def _next_sitecustomize() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    others = [each for each in sys.path if os.path.abspath(each) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    _next_sitecustomize()
    if os.environ.get(TRACE):
        begin(Observer(os.environ[TRACE], os.environ.get(STRIKE, ""), os.environ.get(FOLDERS, os.getcwd())))
