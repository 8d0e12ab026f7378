"""The web page of runs (`megascale dashboard`), with Dash and Plotly: read-only, on loopback, behind a token."""
