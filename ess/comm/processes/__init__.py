"""A group whose ranks are processes.

meeting  how they find one another
joined   the group that each then holds
wired    a link: heads over a socket, tensors over torch.distributed
control  sealed messages over that socket
tensors  tensors between two ranks
staged   tensors of a device by way of the host
members  a team: collectives of torch.distributed
pulse    heartbeats to the peers, and theirs
"""
