"""A training and a query in a notebook: a real kernel, and what it sends to the notebook."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

TRAIN = """
import numpy as np
import everstep

w = np.zeros(2)
console = everstep.Console(everstep.Every(steps=1))
with everstep.TrainLoop({run!r}, {{"w": w}}, max_epoch=2, services=[console]) as loop:
    for epoch in loop.iter_epochs():
        for step, batch in loop.iter_steps(everstep.data.arrays(np.arange(8.0), batch_size=2)):
            w += batch[0].sum()
            loop.collect_metrics(loss=float(w[0]))
        print("epoch is over:", epoch)
"""


class Kernel:
    """A notebook's kernel; `run` executes a cell and returns its outputs as (kind, content)."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, cell: str) -> list[tuple[str, dict[str, Any]]]:
        outputs: list[tuple[str, dict[str, Any]]] = []
        kept = ("stream", "display_data", "update_display_data", "execute_result", "error")

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] in kept:
                outputs.append((message["msg_type"], message["content"]))

        reply = self._client.execute_interactive(cell, output_hook=keep, timeout=120)
        assert reply["content"]["status"] == "ok", reply["content"]
        return outputs


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    environment = {**os.environ, "EVERSTEP_INDEX": "", "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    # a kernel says on its standard error that nobody else listens on its ports
    manager, client = start_new_kernel(kernel_name="python3", env=environment, stderr=subprocess.DEVNULL)
    yield Kernel(client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.campaign("long")
def test_a_training_has_one_live_line_in_its_cell(kernel: Kernel, tmp_path: Path) -> None:
    outputs = kernel.run(TRAIN.format(run=str(tmp_path / "run")))
    drawn = [content for kind, content in outputs if kind.endswith("display_data")]
    assert [kind for kind, _ in outputs].count("display_data") == 1, "one output, replaced"
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    lines = [content["data"]["text/plain"] for content in drawn]
    assert "Step 1 " in lines[0] and "loss 1" in lines[0]
    assert len(lines) >= 8 and "Step 8 " in lines[-1] and "100%" in lines[-1]
    assert not any("\x1b" in line or "\r" in line for line in lines)
    printed = "".join(content["text"] for kind, content in outputs if kind == "stream")
    assert printed.count("epoch is over") == 2 and "ended: max_epoch 2 is reached" in printed
    assert "\x1b" not in printed and "Step 4" not in printed, "progress is in the live line alone"


def test_a_query_shows_as_a_table(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(TRAIN.format(run=str(tmp_path / "run")))
    (shown,) = [
        content["data"]
        for kind, content in kernel.run(f"everstep.query('metrics', index={str(tmp_path)!r})")
        if kind == "execute_result"
    ]
    assert shown["text/plain"].startswith("[{'run': 'run-")
    assert shown["text/html"].count("<img") == 2 and "<table>" in shown["text/html"]
