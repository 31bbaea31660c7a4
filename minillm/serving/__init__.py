"""OpenAI-compatible HTTP server and the router above it. They come after the core chapters."""
