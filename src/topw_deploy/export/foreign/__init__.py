"""Decoders that another exporter wrote: how they are read, and what they leave out."""
