"""Files beside the run: by Python, by a child of another kind, and one that is gone at the end."""

import subprocess
from pathlib import Path

from tiny import Model, data, loop

model, train = Model(), data()
with loop(model.state()) as run:
    for _ in run.iter_epochs():
        for _step, (x, y) in run.iter_steps(train):
            run.collect_metrics(loss=model.update(x, y))
Path("tables").mkdir(exist_ok=True)
Path("tables/weights.txt").write_text(str(model.w))
Path("scratch.txt").write_text("gone at once")
Path("scratch.txt").unlink()
subprocess.run(["sh", "-c", "echo done > by_a_child.txt"], check=True)
