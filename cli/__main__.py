"""`python -m kvpool.cli`, the same as `kvpool`."""

from kvpool.process.signals import exit_in_order

from .app import main

exit_in_order()
main()
