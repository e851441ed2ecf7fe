"""Which backends there are, and that nobody imports a framework for us."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from everstep import backends
from everstep.errors import ConfigError


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.campaign("long")
def test_torch_is_active_only_once_the_program_imported_it() -> None:
    code = (
        "import sys, everstep.state, everstep.backends.torch; from everstep import backends;"
        "names = lambda: [b.name for b in backends.active()];"
        "state = everstep.state.capture(); everstep.state.restore(state);"
        "print(names(), sorted(state), 'torch' in sys.modules);"
        "import everstep.backends.torch.backend; print(names(), sorted(everstep.state.capture()))"
    )
    assert run(code).splitlines() == [
        "['numpy'] ['numpy', 'python'] False",
        "['numpy', 'torch'] ['numpy', 'python', 'torch']",
    ]


@pytest.mark.campaign("long")
def test_a_checkpoint_with_tensors_imports_torch_for_them() -> None:
    code = (
        "import sys; from everstep.state import decode, Encoded;"
        "from everstep.contracts.state import HostArray;"
        "import numpy as np; host = HostArray('BF16', (2,), np.zeros(4, np.uint8), 'torch');"
        "print(decode(Encoded({'$array': 'a'}, {'a': host})))"
    )
    assert run(code) == "tensor([0., 0.], dtype=torch.bfloat16)"


def test_a_missing_framework_is_named_with_the_remedy() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from everstep import backends\n"
        "try: backends.get('torch')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert run(code) == (
        "ConfigError the torch backend needs torch, which is not installed: pip install 'everstep[torch]'"
    )


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        backends.get("torhc")


def test_of_knows_arrays_and_their_subclasses() -> None:
    class Marked(torch.Tensor):
        pass

    for value in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Marked)):
        assert backends.of(value) is backends.get("torch")
    for value in (np.ones(1), np.float32(1), np.ma.array([1])):
        assert backends.of(value) is backends.get("numpy")
    for value in (1.0, [np.ones(1)], None, torch.float32):
        assert backends.of(value) is None
