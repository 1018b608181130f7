"""Serves the live page: its files, and JSON and event streams below /api."""
