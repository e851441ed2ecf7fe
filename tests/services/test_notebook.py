"""A training and a query in a notebook: a real kernel, and what it sends to the notebook."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

TRAIN = """
import numpy as np
import everstep

w = np.zeros(2)
console = everstep.services.Console(everstep.Every(steps=1))
with everstep.TrainLoop({run!r}, {{"w": w}}, max_epoch=2, services=[console]) as loop:
    for epoch in loop.iter_epochs():
        for step, batch in loop.iter_steps(everstep.data.arrays(np.arange(8.0), batch_size=2)):
            w += batch[0].sum()
            loop.collect_metrics(loss=float(w[0]))
        print("epoch is over:", epoch)
"""


def outputs_of(client: Any, cell: str) -> list[tuple[str, dict[str, Any]]]:
    """Execute a cell; its outputs as (kind, content)."""
    outputs: list[tuple[str, dict[str, Any]]] = []
    reply = client.execute_interactive(
        cell, output_hook=lambda m: outputs.append((m["msg_type"], m["content"])), timeout=120
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return outputs


@pytest.mark.campaign("long")
def test_a_training_has_one_live_line_in_its_cell_and_a_query_is_a_table(tmp_path: Path) -> None:
    environment = {**os.environ, "EVERSTEP_INDEX": "", "IPYTHONDIR": str(tmp_path / "ipython")}
    # a kernel says on its standard error that nobody else listens on its ports
    manager, client = start_new_kernel(kernel_name="python3", env=environment, stderr=subprocess.DEVNULL)
    try:
        outputs = outputs_of(client, TRAIN.format(run=str(tmp_path / "run")))
        table = outputs_of(client, f"everstep.query('metrics', index={str(tmp_path)!r})")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    drawn = [content for kind, content in outputs if kind.endswith("display_data")]
    assert [kind for kind, _ in outputs].count("display_data") == 1, "one output, replaced"
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    lines = [content["data"]["text/plain"] for content in drawn]
    assert "Step 1 " in lines[0] and "loss: 1" in lines[0]
    assert len(lines) >= 8 and "Step 8 " in lines[-1] and "100%" in lines[-1]
    assert not any("\x1b" in line or "\r" in line for line in lines)
    printed = "".join(content["text"] for kind, content in outputs if kind == "stream")
    assert printed.count("epoch is over") == 2 and "ended: max_epoch 2 is reached" in printed
    assert "\x1b" not in printed and "Step 4" not in printed, "progress is in the live line alone"
    (shown,) = [content["data"] for kind, content in table if kind == "execute_result"]
    assert shown["text/plain"].startswith("[{'run': 'run-")
    assert shown["text/html"].count("<img") == 2 and "<table>" in shown["text/html"]
