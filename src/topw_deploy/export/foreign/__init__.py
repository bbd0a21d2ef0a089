"""Decoders that other exporters wrote: loading them and finding their limits."""
