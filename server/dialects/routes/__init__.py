"""What answers: a handler per form of request, and the doors at which it stands."""
