"""Doors by the names and arguments of older systems, translated into everstep's own."""

from everstep.compat import tfutils as tfutils
