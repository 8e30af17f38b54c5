"""NCCL beside the pretended device: over gloo, which sees its tensors as the host's.

A collective is work of the device, on a stream of its own, which follows the caller's; `wait` makes
the caller's stream follow it, and a capture cannot end before that. A replay does it again. It is
done at once and so it waits for its peers, who do the same ones in the same order. With a peer gone
it waits until it is aborted; then the device goes on with bytes that mean nothing.
"""

from __future__ import annotations

import threading

import torch

from ess.comm.processes import meeting, tensors
from tests.support.pretended import PRETENCE

GLOO_S = 300.0


class Begun:
    def __init__(self, event):
        self._event = event

    def wait(self):
        torch.cuda.current_stream().wait_event(self._event)
        return True


class PretendedNccl:
    def __init__(self, group):
        self._group = group
        self._stream = torch.cuda.Stream()
        self._aborted = threading.Event()

    def alltoall_base(self, came, content, due, given):
        return self._queued(self._group.alltoall_base, came, content, due, given)

    def _allgather_base(self, came, content):
        return self._queued(self._group._allgather_base, came, content)

    def abort(self):
        tensors.break_waits(self._group)
        self._aborted.set()

    def _queued(self, act, came, content, *sizes):
        def exchange():
            try:
                act(came, content, *sizes).wait()
            except RuntimeError:
                assert self._aborted.wait(GLOO_S), "a peer is gone, and nothing ends the exchange"
                came.view(torch.uint8).fill_(0xFF)

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            PRETENCE.launch(exchange, came, content)
        return Begun(self._stream.record_event())


def nccl_group(store, rank, size, *, device):
    return PretendedNccl(
        tensors.gloo_group(store, rank, size, host="127.0.0.1", timeout_s=GLOO_S, patience_s=GLOO_S)
    )


meeting.nccl_group = nccl_group
