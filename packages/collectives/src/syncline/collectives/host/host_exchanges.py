"""Transfers between single ranks over a transport."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..contract.collective import Collective
from ..contract.layout import flat, in_plain_order
from ..contract.running_call import RunningCall
from ..contract.work import Work
from ..errors import TransportError
from .explained_request import ExplainedRequest
from .packing import copy_back, flat_copy
from .serial_group import SerialGroup
from .split_verification import verify_splits
from .transfer import TransferWork
from .transport import Request


class HostExchanges(SerialGroup):
    """All-to-all, which has a place in the total order, and `send` and `recv`, which have none."""

    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool) -> Work:
        call = Collective("all_to_all", detail=f"dtype={inputs[0].dtype}")

        def body(running: RunningCall) -> None:
            counts = [entry.numel() for entry in outputs]
            sent = [entry.numel() for entry in inputs]
            self._verify_splits(counts, sent, running)
            received = torch.empty(sum(counts), dtype=inputs[0].dtype, device=inputs[0].device)
            packed = torch.cat([flat_copy(entry) for entry in inputs])
            self._transport.all_to_all(received, packed, counts, sent, running)
            for output, part in zip(outputs, torch.split(received, counts), strict=True):
                output.copy_(part.view(output.shape))

        return self._issue(call, outputs, inputs, body, async_op)

    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> Work:
        call = Collective("all_to_all_single", detail=f"dtype={tensor.dtype}, row={list(tensor.shape[1:])}")
        row = math.prod(tensor.shape[1:])

        def body(running: RunningCall) -> None:
            wire = in_plain_order(output)
            counts, sent = [rows * row for rows in output_splits], [rows * row for rows in input_splits]
            self._verify_splits(counts, sent, running)
            self._transport.all_to_all(flat(wire), flat_copy(tensor), counts, sent, running)
            copy_back(wire, output)

        return self._issue(call, [output], [tensor], body, async_op)

    def _verify_splits(self, expected: list[int], sent: list[int], running: RunningCall) -> None:
        if self.size > 1:
            verify_splits(self._transport, expected, sent, running)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        call = Collective("send", tensor, detail=f"dst={dst}, tag={tag}")
        self._check_usable(call)
        wire = flat_copy(tensor)
        request = self._explained(self._transport.start_send(wire, dst, tag))
        work = TransferWork(
            request, [tensor], lambda: None, self._transfer_in_words(call), self.timeout_s, self._transfer_interrupt([dst])
        )
        return self._finish_now(work, async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        call = Collective("recv", tensor, detail=f"src={'any' if src is None else src}, tag={tag}")
        self._check_usable(call)
        wire = in_plain_order(tensor)
        request = self._explained(self._transport.start_recv(flat(wire), src, tag))
        senders = [other for other in range(self.size) if other != self.rank] if src is None else [src]
        interrupt = self._transfer_interrupt(senders)
        work = TransferWork(
            request, [tensor], lambda: copy_back(wire, tensor), self._transfer_in_words(call), self.timeout_s, interrupt
        )
        return self._finish_now(work, async_op)

    def _finish_now(self, work: Work, async_op: bool) -> Work:
        if not async_op:
            work.wait(self.timeout_s)
        return work

    def _explained(self, request: Request) -> Request:
        return request if self._liveness is None else ExplainedRequest(request, self._liveness)

    def _transfer_interrupt(self, peers: list[int]) -> Callable[[], TransportError | None] | None:
        sources = [source for source in (self._calls, self._liveness) if source is not None]
        if not (peers and sources):
            return None
        return lambda: next(filter(None, (source.transfer_reason_to_give_up(peers) for source in sources)), None)

    def _transfer_in_words(self, call: Collective) -> Callable[[], str]:
        return lambda: f"{call.signature()} on {self.place()}"
