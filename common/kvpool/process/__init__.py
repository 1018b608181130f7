"""Parts that every process of kvpool needs: settings, log lines, addresses. Knows none of the components."""
