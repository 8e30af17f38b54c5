"""A step through the library door.

step          what an engine of one's own calls, in order
beginning     whose turn it is, and pages for the new rows
arrays        what a step knows of each query
direct        from selections to rows in native code, for layers that run in one call
placement     what stands between a step and the memory that attention reads
step_answers  what a placement answered, and what of it another step may replay
"""
