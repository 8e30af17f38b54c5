"""What a configuration says of a checkpoint, without its weights.

shapes      every tensor that there must be
split       which part of each one rank holds
dry_run     tensors, bytes and memory of a model
kept_bytes  how many bytes a model on a device keeps
host_bytes  how many bytes of weights an engine on a CPU holds
verify      whether a checkpoint holds exactly these tensors
"""
