"""The HTTP application: routes, limits, and the server's reports about itself."""
