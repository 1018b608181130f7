"""`make gpu`: all tests and measurements that need a GPU, in one command, with results as JSON."""
