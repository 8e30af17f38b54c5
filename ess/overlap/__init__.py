"""Order: the stages of a layer, the schedules none, DA and DBA, and the policy that chooses."""
