"""The report as one HTML page without scripts or links: `html` writes the page, `chart` draws one plot as SVG."""
