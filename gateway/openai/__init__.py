"""OpenAI's API: a file for each route, and what they share."""
