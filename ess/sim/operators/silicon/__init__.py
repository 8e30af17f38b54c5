"""Operators of one GPU as they were measured, with costs around them that are argued one by one."""
