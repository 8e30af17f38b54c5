"""`ess-bench --ctx 128k --mtp 2`: decode measured on this machine, predicted for a GPU."""
