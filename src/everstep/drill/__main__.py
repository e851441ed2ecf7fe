"""`python -m everstep.drill SCRIPT [ARGS]`: the command `everstep drill`."""

import runpy

runpy.run_module("everstep.cli.drill", run_name="__main__")
