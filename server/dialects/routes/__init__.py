"""Handlers of the routes that generate, with the doors that name each route and its body."""
