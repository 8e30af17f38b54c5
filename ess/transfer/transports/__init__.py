"""The implementations of `ess.transfer.transport`: in a process, shared memory, TCP and NIXL."""
