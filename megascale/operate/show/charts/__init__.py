"""SVG charts of a report: text alone, with no script, font or file beside them."""
