"""Names for users of PyTorch.  The import of this module imports no torch; the use of a name does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.lazy import exports

if TYPE_CHECKING:
    from everstep.backends.torch.optimizers import Clip as Clip
    from everstep.backends.torch.optimizers import ClipOptimizer as ClipOptimizer
    from everstep.backends.torch.optimizers import MinibatchOptimizer as MinibatchOptimizer
    from everstep.backends.torch.parallel import parallel as parallel
    from everstep.backends.torch.task import Task as Task
    from everstep.backends.torch.trained_part import trainable as trainable
    from everstep.backends.torch.virtual_shards import VirtualShards as VirtualShards

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = exports(__name__)
