"""What the live page asks the gateway for: JSON and event streams below /api."""
