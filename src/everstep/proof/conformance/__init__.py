"""Resume conformance: any program that trains is killed, resumed and scored.

The program needs nothing of everstep.  It follows a protocol of three lines (see `witness`):

- `PROGRAM FOLDER` trains in FOLDER, or resumes what is there, and ends with status 0 when all is trained;
- it appends a line for each step to the file that EVERSTEP_CONFORMANCE names;
- at its end it appends a digest of each tensor.

`python -m everstep.proof.conformance -- PROGRAM ...` judges it; docs/conformance.md tells how.
"""

from everstep.proof.conformance.witness import Witness

__all__ = ["Witness"]
