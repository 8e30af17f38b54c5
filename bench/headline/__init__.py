"""`ess-bench --ctx 128k --mtp 2`: the measured half and the predicted half."""
