"""`python -m everstep`: the command `everstep`."""

from everstep.cli import main

main()
