"""The stages of one layer, as the schedules of `ess.overlap` call them."""
