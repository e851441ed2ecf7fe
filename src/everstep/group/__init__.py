"""Several processes that train one run: who they are, what they send each other, where they stop together.

No other room knows how processes communicate: one process is a group of one, and tests simulate any number.

`find_group` makes a `Group`: of one process, or a `StoreGroup` over a framework's key-value store.
`Agreement` finds the step at which all ranks stop for a wish of one.  `Peers` notices a rank that is gone.
`report` finds out whether an error follows from another rank's failure.  `launched`, `exit_status` and
`write_error_file` are for torchrun.
"""

from everstep.group.agreement import Agreement
from everstep.group.environment import exit_status, find_group, group_size, launched, write_error_file
from everstep.group.peers import Peers
from everstep.group.store_group import StoreGroup, failure_of_another, report
