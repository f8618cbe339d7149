"""A gallery over HTTP: the API, the page, and a client for both sides of it."""
