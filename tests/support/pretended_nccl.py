"""NCCL beside the pretended device: over gloo, which sees its tensors as the host's.

A collective is work of the device: it is captured, and a replay does it again. It is done at once
and so it waits for its peers, who do the same ones in the same order.
"""

from __future__ import annotations

from ess.comm.processes import meeting, tensors
from tests.support.pretended import PRETENCE

GLOO_S = 300.0


class Done:
    def wait(self):
        return True


class PretendedNccl:
    def __init__(self, group):
        self._group = group

    def alltoall_base(self, came, content, due, given):
        return self._queued(self._group.alltoall_base, came, content, due, given)

    def _allgather_base(self, came, content):
        return self._queued(self._group._allgather_base, came, content)

    def abort(self):
        tensors.break_waits(self._group)

    def _queued(self, act, came, content, *sizes):
        PRETENCE.launch(lambda: act(came, content, *sizes).wait(), came, content)
        return Done()


def nccl_group(store, rank, size, *, device):
    return PretendedNccl(tensors.gloo_group(store, rank, size, host="127.0.0.1", timeout_s=GLOO_S))


meeting.nccl_group = nccl_group
