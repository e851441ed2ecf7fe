"""Several processes that train one run: who they are, what they tell each other, where they stop together.

`find_group` makes a `Group`: `Single` in one process, else a `StoreGroup` over a framework's key-value store.
`Agreement` finds the step at which all ranks stop for a wish of one.  `Peers` notices a rank that is gone.
"""

from everstep.group.agreement import Agreement
from everstep.group.environment import find_group
from everstep.group.peers import Peers
from everstep.group.single import Single
from everstep.group.store_group import StoreGroup

__all__ = ["Agreement", "Peers", "Single", "StoreGroup", "find_group"]
