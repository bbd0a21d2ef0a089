"""Decoders that another exporter wrote."""
