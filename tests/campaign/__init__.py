"""Deterministic simulation: whole workers in one thread, over one clock, with faults from a seed.

    python -m tests.campaign --seeds 500

Engines, pipelines of stages, pools, disk tiers, ports and transports are those that serve. The
clock, the copy lanes, the disks, the networks and the order in which workers and stages go on are
drawn from the seed, so that a seed plays the same way again. What fails prints its seed and is cut
down to the fewest requests, faults and features that fail.
"""
