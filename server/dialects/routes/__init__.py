"""The handlers of the generating routes, and the Doors that declare each route and its body."""
