"""The command line `kvpool`. It imports nothing here: processes that need a part of it, as on Ray, start faster."""
