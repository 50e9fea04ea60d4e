"""Our process groups under stock torch.distributed. Importing this registers them; see `registration`.

::

    import syncline.collectives.torch_bridge

    torch.distributed.init_process_group("syncline-mpi", init_method="mpi://")
"""

from .monitored_barrier import monitored_barrier
from .registration import register
from .torch_process_group import TorchProcessGroup

__all__ = ["TorchProcessGroup", "monitored_barrier", "register"]
