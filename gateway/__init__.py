"""The gateway: OpenAI's API and a live page in front of a cluster. It holds no state worth keeping."""
