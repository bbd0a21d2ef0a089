"""Decoders from other exporters."""
