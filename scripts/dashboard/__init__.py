"""deploy/grafana/kvpool.json: `panels` says what is shown, `document` makes Grafana's JSON of it. `make docs` writes the file."""
