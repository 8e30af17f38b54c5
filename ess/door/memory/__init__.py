"""The memory behind the door.

pools        all pools of a worker and the accounts that admit into them
common_host  the host pool of an engine of several processes
mapped       the memory of the pools as those processes read and write it
shelf        the disk behind the host pool
inflight     copies under way, and what becomes true when each has landed
"""
