"""Order: the stages of a layer, the schedules none, DA and DBA, and who chooses among them."""
