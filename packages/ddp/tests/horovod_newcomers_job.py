"""A process of `test_horovod_newcomers.py`: `horovod_newcomers_job.py NUMBER COUNT FOLDER`.

Process 0 begins a training alone, and lets the others in. It is killed at the moment in the folder's file "moment". Each
process begins with another state. Every process that is left writes the state with which it ends, or the error.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from horovod_joining import begin_or_join

import syncline.horovod as hvd
from syncline.collectives import RankLostError, TransportError, get_default_group
from test_support.waiting import wait_until

BEFORE_RESET, BEFORE_SYNC, IN_TRAINING = "before the reset", "before the sync", "in the training"
RIGHT_STATE = 7


class Number(hvd.elastic.ObjectState):
    """Holds one number. The first sync of the lower newcomer fails at its end, if process 0 dies in the training."""

    has_failed = False

    def sync(self) -> None:
        mine = self.number
        super().sync()
        if moment == IN_TRAINING and not self.has_failed and (hvd.rank(), hvd.size()) == (1, count):
            self.number, self.has_failed = mine, True
            self.save()
            raise TransportError("the last message did not come")


@hvd.elastic.run
def train(state: Number) -> int:
    # At first, process 0 is alone here.
    if hvd.size() == 1 and number == 0:
        wait_until(lambda: get_default_group().newcomers() == count - 1)
        state.commit()
    die_at(IN_TRAINING)
    # Gloo would end this process if it waited for a rank that runs and has left the group.
    if moment == IN_TRAINING and hvd.size() == count:
        raise TransportError("process 0 is lost")
    hvd.allreduce(torch.ones(1))
    return int(state.number)


def die_at(its: str) -> None:
    if number == 0 and moment == its:
        os.kill(os.getpid(), signal.SIGKILL)


number, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
moment = (folder / "moment").read_text()
met = folder / "met"
begin_or_join(number, folder, met)
met.touch()
if moment == BEFORE_RESET and number == 0:
    group: Any = get_default_group()
    admit = group.admit
    group.admit = lambda **options: (admit(**options), die_at(BEFORE_RESET))
state = Number(number=RIGHT_STATE if number == 0 else 100 + number)
state.register_reset_callbacks([lambda: die_at(BEFORE_SYNC)])
try:
    found = str(train(state))
except RankLostError as error:
    found = str(error)
(folder / f"result-{number}").write_text(found)
hvd.shutdown()
