"""The ways to move bytes behind `ess.transfer.transport`: in a process, by memory, TCP and NIXL."""
