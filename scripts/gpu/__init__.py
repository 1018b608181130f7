"""`make gpu`: everything that has to be tried and measured on a GPU, in one command, with its results as JSON."""
