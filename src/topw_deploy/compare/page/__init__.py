"""The report as one HTML page without scripts or links: `html` writes it, `chart` draws one plot as SVG."""
