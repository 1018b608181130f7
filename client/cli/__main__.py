"""`python -m kvpool.client.cli`, the same as `kvpool`."""

from . import main

main()
