"""Our process groups under stock torch.distributed. Importing this registers them; see `torch_bridge.registration`.

::

    import syncline.collectives.torch_backend

    torch.distributed.init_process_group("syncline-mpi", init_method="mpi://")
"""

from .torch_bridge.monitored_barrier import monitored_barrier
from .torch_bridge.registration import register
from .torch_bridge.torch_process_group import TorchProcessGroup

__all__ = ["TorchProcessGroup", "monitored_barrier", "register"]
