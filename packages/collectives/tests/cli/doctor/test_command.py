"""In which order the doctor does what may take long."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from syncline.collectives import TransportError
from syncline.collectives.cli.doctor import command
from syncline.collectives.transports.cuda_awareness import CudaAwareness


def test_a_transfer_that_hangs_is_not_taken_for_ranks_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is tried before the ranks connect, and for less time than those without a GPU wait."""
    log: list[tuple[str, float]] = []

    def try_it(*, timeout_s: float) -> CudaAwareness:
        log.append(("try", timeout_s))
        return CudaAwareness(False, "no: it hangs")

    def connect(name: str, *, timeout: float) -> Any:
        log.append(("connect", timeout))
        raise TransportError("that is enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "what_is_missing", lambda name: None)
    monkeypatch.setattr(command, "try_cuda_awareness", try_it)
    monkeypatch.setattr(command, "init_process_group", connect)
    monkeypatch.setattr(command, "diagnose", lambda ranks, choice, problem, lack: [])
    monkeypatch.setattr(command, "_observe_alone", lambda: None)
    assert command.run(argparse.Namespace(backend="gloo")) == 0
    assert [what for what, _ in log] == ["try", "connect"]
    assert log[0][1] < log[1][1]
    assert "everything is fine" in capsys.readouterr().out
