"""Going on with an interrupted export: the journal and the stamps of finished stages."""
