"""What every process of kvpool needs and none is about: settings, log lines, addresses. Knows none of the components."""
