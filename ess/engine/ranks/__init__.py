"""Engines that divide the experts: what they agree on at the head of a step."""
