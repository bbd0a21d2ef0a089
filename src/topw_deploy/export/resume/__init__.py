"""Continuing an interrupted export: its journal and the stages that it finished."""
