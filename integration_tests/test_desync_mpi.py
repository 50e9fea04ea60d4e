"""The desync catalogue: whatever the ranks disagree on, all of them are told, over every transport.

Each program runs in a group of its own, for a failed group cannot be used again. What is made for a program that timed out stays
until the process ends, as it does in a job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from desync_programs import Program, catalogue, same_signature_swapped

from syncline.collectives import DisagreementError, ProcessGroup, SynclineError
from syncline.collectives.backends import gloo
from syncline.collectives.host.host_group import HostGroup
from syncline.collectives.host.transport import Transport
from syncline.collectives.testing.ranks_of_job import world_size

pytestmark = pytest.mark.mpi

PROGRAMS = catalogue()
SIZES = {"small": 3, "large": 40_000}
TIMEOUT_S = 1.0
