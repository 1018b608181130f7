"""OpenAI's API: a file for each route, and shared parts."""
