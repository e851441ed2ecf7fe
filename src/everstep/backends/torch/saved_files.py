"""Files of torch: those of torch.save are read without running anything in them; others are written.

Also what the services Export, Profile and System ask of torch.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import length_hint
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile

from everstep.backends.torch.backend import BACKEND
from everstep.backends.torch.backend import dtype_name as _name
from everstep.backends.torch.model_wrappers import bare
from everstep.contracts.state import HostArray, Unread
from everstep.errors import CheckpointError, ConfigError


def read_saved(file: Path | BinaryIO, where: str) -> Any:
    """Return the tree of a torch.save file, with an `Unread` in place of each tensor.

    Args:
        file: path of the file, whose tensors stay on disk until they are read; or the file's content.
        where: place of the file, for messages.
    """
    size = file.stat().st_size if isinstance(file, Path) else file.seek(0, 2)
    is_zip = zipfile.is_zipfile(file)
    if is_zip:
        _require_whole(file, size, where)
    if not isinstance(file, Path):
        file.seek(0)
    try:
        with warnings.catch_warnings():  # about typed storages and the like: nothing that a reader could mend
            warnings.simplefilter("ignore")
            mapped = isinstance(file, Path) and is_zip
            tree = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # bytes of anybody: torch's reader raises whatever they lead to
        code = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, UnpicklingError) else None
        if code is not None:
            raise CheckpointError(
                f"{where} has objects that only code can make ({code[1]}), and nothing of a file may run "
                "here: load it in the program that wrote it, and save model.state_dict() alone"
            ) from None
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{where} is damaged, or is not a file of torch.save ({first:.200}); give another copy"
        ) from error
    try:
        return _unread(tree, where, iter(range(size)))
    except RecursionError:
        raise CheckpointError(f"{where} has a value that contains itself; save model.state_dict()") from None


def _require_whole(file: Path | BinaryIO, size: int, where: str) -> None:
    """Refuse an archive that would grow when it is read, or a file in it that has another checksum."""
    fault = ""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            stored = all(each.compress_type == zipfile.ZIP_STORED for each in members)
            if not stored or sum(each.file_size for each in members) > size:
                fault = "is an archive with compressed files, which torch.save does not write"
            # all are 0 after torch.serialization.set_crc32_options(False)
            elif any(each.CRC for each in members) and (damaged := archive.testzip()):
                fault = f"is damaged: the checksum of {damaged!r:.200} in it does not fit"
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        fault = f"is damaged: {error}"
    if fault:
        raise CheckpointError(f"{where} {fault}; give another copy of it")


def _unread(value: Any, where: str, room: Iterator[int]) -> Any:
    """Return a tree with an `Unread` in place of each tensor.

    `room` has the bytes of the file, of which each value and each element takes one: a small file may show
    the same ones a great many times.
    """
    if next(room, None) is None:
        raise CheckpointError(f"{where} has a value that is there too often; save model.state_dict()")
    if isinstance(value, Tensor):
        if value.is_nested:
            raise CheckpointError(f"{where} has a nested tensor; save its parts")
        if value.numel() > length_hint(room):
            raise CheckpointError(
                f"{where} has a tensor of {tuple(value.shape)}, larger than the file; save a contiguous one"
            )
        host = lambda: BACKEND.to_host(value.detach(), None)  # noqa: E731
        return Unread(_name(value.dtype), tuple(value.shape), host)
    if isinstance(value, Mapping):
        return type(value)((key, _unread(each, where, room)) for key, each in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_unread(each, where, room) for each in value)
    return value


def dtype_name(name: str) -> str:
    """Return the name of an element type for `Unread`, by torch's own name ("torch.float32")."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no element type {name!r:.100}")
    return _name(dtype)


def write_distributed(folder: Path, arrays: Mapping[str, HostArray]) -> None:
    """Write arrays by name into a folder for `torch.distributed.checkpoint.load`, and sync the files."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def late(array: HostArray) -> Tensor:
        return BACKEND.late(Unread(array.extra.get("dtype", array.dtype), array.shape, lambda: array))

    state: dict[str, Any] = {name: late(array) for name, array in arrays.items()}
    with warnings.catch_warnings():  # torch warns that one process saves, which is meant here
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def unwrapped(obj: Any) -> Any:
    """Return the model inside an average, a compiled or a parallel model."""
    if isinstance(obj, torch.nn.Module):
        obj = bare(obj)
    return unwrapped(obj.module) if isinstance(obj, AveragedModel) else obj


def require_module(entry: str, obj: Any) -> None:
    """Refuse an object that torch.export cannot take."""
    if not isinstance(obj, torch.nn.Module):
        raise ConfigError(
            f"state entry {entry!r} is a {type(obj).__name__}, which torch.export cannot take; give that of "
            "a torch.nn.Module"
        )


def program(model: torch.nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any) -> bytes:
    """Return a file's bytes for `torch.export.load`: the model in evaluation mode, with its weights."""
    file = io.BytesIO()
    with BACKEND.evaluation_mode({"model": model}):
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes), file)
    return file.getvalue()


def gpu_load() -> dict[str, float]:
    """Return how full and how busy this process's GPU is, from 0 to 1; nothing before torch has used one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info()
    load = {"gpu_memory_share": 1 - free / total}
    with suppress(ImportError, RuntimeError):  # without nvidia-ml-py, or its driver
        load["gpu_share"] = torch.cuda.utilization() / 100
    return load


def start_profile() -> profile:
    """Begin to record what the processor, and a GPU in use, do."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    name = "KINETO_LOG_LEVEL"
    level = os.environ.get(name)
    os.environ[name] = level or "6"  # nothing on standard error; read when the profiler is first used
    try:
        recording = profile(activities=activities)
        recording.start()
    finally:
        if level is None:
            del os.environ[name]
    return recording
